"""The command: what goes where, and which options reach what."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import kvspan
from cli_queries import QUERY, TWO, echo
from fakes import FakeEngine
from kvspan import cli, cli_options
from kvspan.query.read import from_obj
from kvspan.query.write import to_json, to_yaml
from query_strategies import deep_query, wide_query
from tiny_models import tiny_model, word_tokenizer


def kvspan_process(*words: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvspan", *words],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **env},
    )


def test_answer_on_stdout_and_summary_on_stderr(engine, query_file, capsys) -> None:
    assert cli.main(["run", query_file]) == 0
    out, err = capsys.readouterr()
    assert out == "<s:s [u:a]>\n"
    assert err == (
        "kvspan: 1 call, 2 prompt tokens (1 from the cache, 2 moved, 1 prepared), 11 new tokens, "
        f"first token after 0.25 s, {err.split()[-4]} s in all\n"
    )
    assert cli.main(["run", query_file, "--quiet"]) == 0
    assert capsys.readouterr() == ("<s:s [u:a]>\n", "")


def test_several_answers_are_told_apart(engine, tmp_path, capsys) -> None:
    file = tmp_path / "two.yaml"
    file.write_text(to_yaml(from_obj(TWO)))
    assert cli.main(["run", str(file), "--quiet"]) == 0
    assert capsys.readouterr().out == "--- $.plus[0]\n<u:a>\n--- $.plus[1]\n<u:b>\n"


@pytest.mark.parametrize(
    "text", [json.dumps(QUERY), to_yaml(from_obj(QUERY)), json.dumps(QUERY, indent=1)]
)
def test_query_from_stdin(engine, capsys, monkeypatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert cli.main(["run", "-", "--quiet"]) == 0
    assert capsys.readouterr().out == "<s:s [u:a]>\n"


def test_options_reach_the_engine(engine, tmp_path, capsys) -> None:
    file = tmp_path / "two.json"
    file.write_text(json.dumps(TWO))
    words = "--model X --seed 7 --scope full --placement parallel --temperature 0.25"
    more = "--max-tokens 9 --salt tenant --concurrency 1"
    assert cli.main(["run", str(file), *words.split(), *more.split()]) == 0
    assert engine.most == 1
    request = engine.requests[0]
    assert (request.model, request.scope, request.placement) == ("X", "full", "parallel")
    assert (request.temperature, request.max_tokens, request.salt) == (0.25, 9, "tenant")
    assert request.seed == kvspan.executor.derive_seed(7, "$.plus[0]")


def test_engine_options_reach_open_engine(monkeypatch, query_file, capsys) -> None:
    seen = {}

    def open_engine(model: str, **options):
        seen.update(options, model=model)
        return FakeEngine(answer=echo)

    monkeypatch.setattr(kvspan.engine, "open_engine", open_engine)
    words = "--block-size 64 --kv-cache-gib 0.5 --dtype float32 --device cpu --threads 1"
    assert cli.main(["run", query_file, *words.split()]) == 0
    seen.pop("progress")
    assert seen == {
        "model": "M", "block_size": 64, "kv_cache_gib": 0.5, "dtype": "float32", "device": "cpu",
        "replay": "exact",
    }  # fmt: skip


def test_json_is_one_object_on_stdout(engine, tmp_path, capsys) -> None:
    file = tmp_path / "q.json"
    file.write_text(json.dumps({**QUERY, "note": 1}))
    assert cli.main(["run", str(file), "--json", "--lenient"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    obj = json.loads(out)
    assert obj["answers"] == ["<s:s [u:a]>"]
    assert obj["result"] == {"assistant": "<s:s [u:a]>"}
    (call,) = obj["calls"]
    assert set(call) >= {"path", "text", "usage", "timings", "reuse", "seed", "finish_reason"}
    assert "all but 'g' ignored" in obj["warnings"][0]


def test_lenient_warns_on_stderr(engine, tmp_path, capsys) -> None:
    file = tmp_path / "q.json"
    file.write_text('{"g": {"model": "M", "input": "a"}}')
    assert cli.main(["run", str(file)]) == 2
    assert cli.main(["run", str(file), "--lenient"]) == 0
    err = capsys.readouterr().err.splitlines()
    assert err[1].startswith(f"kvspan: warning: {file}: $.g.input: a string where one node belongs")


@pytest.mark.parametrize("flag", [[], ["--stream"]])
def test_streaming_prints_the_answer_once(engine, query_file, capsys, flag: list[str]) -> None:
    assert cli.main(["run", query_file, "--quiet", *flag]) == 0
    assert capsys.readouterr().out == "<s:s [u:a]>\n"


def test_streaming_prints_pieces_as_they_come(query_file, monkeypatch, capsys) -> None:
    seen: list[str] = []

    class Looking(FakeEngine):
        async def generate(self, request, on_text=None):
            on_text("first ")
            seen.append(capsys.readouterr().out)
            on_text("second")
            return await super().generate(request)

    monkeypatch.setattr(cli_options, "open_engine_with", lambda *_: Looking(answer=echo))
    assert cli.main(["run", query_file, "--stream", "--quiet"]) == 0
    assert seen == ["first "]
    assert capsys.readouterr().out == "second\n"


def test_only_the_answer_of_the_root_is_streamed(engine, tmp_path, capsys) -> None:
    file = tmp_path / "q.json"
    inner = {"g": {"model": "M", "input": {"user": "a"}}}
    file.write_text(json.dumps({"g": {"model": "M", "input": inner}}))
    assert cli.main(["run", str(file), "--stream", "--quiet"]) == 0
    assert capsys.readouterr().out == "<a:<u:a>>\n"
    file.write_text(json.dumps(TWO))
    assert cli.main(["run", str(file), "--stream", "--quiet"]) == 0
    assert capsys.readouterr().out.startswith("--- $.plus[0]\n")


def test_notes_of_the_engine_are_shown_once(query_file, monkeypatch, capsys) -> None:
    class Noting(FakeEngine):
        async def generate(self, request, on_text=None):
            result = await super().generate(request, on_text)
            result.reuse.notes += ["spans not reused: ALiBi", "spans not reused: ALiBi"]
            return result

    monkeypatch.setattr(cli_options, "open_engine_with", lambda *_: Noting())
    assert cli.main(["run", query_file]) == 0
    err = capsys.readouterr().err.splitlines()
    assert err[0] == "kvspan: note: $: spans not reused: ALiBi"
    assert len(err) == 2


def test_help_and_version(capsys) -> None:
    for words, expected in [
        (["--version"], f"kvspan {kvspan.__version__}\n"),
        (["-h"], "examples:"),
        (["run", "-h"], '"kind": "usage"'),
        (["explain", "-h"], "no weights are loaded"),
    ]:
        with pytest.raises(SystemExit) as caught:
            cli.main(words)
        assert caught.value.code == 0
        assert expected in capsys.readouterr().out
    assert cli.main([]) == 2
    assert "usage: kvspan" in capsys.readouterr().err


def test_as_a_process() -> None:
    done = kvspan_process("--version")
    assert (done.returncode, done.stdout) == (0, f"kvspan {kvspan.__version__}\n")
    done = kvspan_process("run", "-", stdin='{"usr": "a"}')
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("kvspan: error: <stdin>: $.usr: unknown node")
    assert done.stderr.count("\n") == 1


def test_reading_a_query_loads_no_torch(tmp_path: Path) -> None:
    # torch cannot even be imported here, and nobody notices before a model is needed.
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    done = kvspan_process("run", "-", stdin="user: [", PYTHONPATH=str(tmp_path))
    assert done.returncode == 2 and "malformed YAML" in done.stderr
    done = kvspan_process("run", "-h", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0


def test_without_torch_explain_still_shows_the_parts(query_file, monkeypatch, capsys) -> None:
    for name in [name for name in sys.modules if name.startswith("kvspan.engine.loading")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert cli.main(["explain", query_file]) == 0
    out = capsys.readouterr().out
    assert "no token counts: torch is not installed (pip install 'kvspan[local]')" in out
    assert 'span 1  user "a"' in out


def test_very_deep_and_very_wide_queries(engine, tmp_path, capsys) -> None:
    file = tmp_path / "q.json"
    for query in (deep_query(2000), wide_query(10_000)):
        file.write_text(to_json(query))
        assert cli.main(["run", str(file), "--json"]) == 0
        assert len(json.loads(capsys.readouterr().out)["answers"]) == 1
        assert cli.main(["explain", str(file), "--quiet"]) == 0
        assert len(capsys.readouterr().out.splitlines()) < 400


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A saved random model with a word tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model("llama").save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return str(folder)


WORDS = {
    "g": {
        "model": "M",
        "input": {
            "cross": [
                {"system": "w1 w2 w3"},
                {"plus": [{"user": "w4 w5 w6"}, {"user": " ".join(["w7"] * 20)}]},
                {"user": "w8 w9"},
            ]
        },
        "max_tokens": 4,
        "temperature": 0.0,
    }
}


def test_a_real_engine_end_to_end(tiny, tmp_path, capsys) -> None:
    file = tmp_path / "q.json"
    file.write_text(json.dumps(WORDS))
    started = time.perf_counter()
    words = ["run", str(file), "--model", tiny, "--kv-cache-gib", "0.01", "--threads", "1"]
    assert cli.main([*words, "--json"]) == 0
    out, err = capsys.readouterr()
    obj = json.loads(out)
    (call,) = obj["calls"]
    assert err == ""
    assert call["reuse"]["spans"] == 2 and call["reuse"]["prepared_tokens"] == 48
    assert call["usage"]["completion_tokens"] == 4 and call["finish_reason"] == "length"
    assert 0 < call["timings"]["ttft"] <= call["timings"]["total"] <= obj["seconds"]
    assert obj["seconds"] < time.perf_counter() - started
    assert cli.main([*words, "--stream", "--quiet"]) == 0
    assert capsys.readouterr().out == obj["answers"][0] + "\n"


def test_explain_with_a_tokenizer(tiny, tmp_path, capsys) -> None:
    file = tmp_path / "q.json"
    file.write_text(json.dumps(WORDS))
    assert cli.main(["explain", str(file), "--model", tiny]) == 0
    out = capsys.readouterr().out
    rows = [
        line.split()[:5] for line in out.splitlines() if line.startswith(("  anchor", "  span"))
    ]
    assert rows == [
        ["anchor", "0-15", "16", "0", "0-15"],
        ["span", "1", "16-31", "16", "1"],
        ["span", "2", "32-63", "32", "2-3"],
    ]
    assert "48 of them in 2 movable spans" in out
    assert cli.main(["explain", str(file), "--model", tiny, "--json", "--block-size", "4"]) == 0
    obj = json.loads(capsys.readouterr().out)
    assert obj["rewritten"] == WORDS and obj["rules"] == []
    (layout,) = obj["layouts"]
    assert [part["kind"] for part in layout["parts"]] == ["anchor", "span", "span", "text"]
    assert all(part["tokens"][0] % 4 == 0 for part in layout["parts"])
    assert layout["parts"][-1]["tokens"][1] == layout["num_tokens"]
