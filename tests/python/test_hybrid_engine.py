"""Hybrid models on the embedded engine: answers, prefixes reused to the token, isolation."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from hybrid_models import FAMILIES, ask, open_hybrid, random_tokens, tiny_hybrid
from kvspan import cli
from kvspan.engine import GenerateRequest, GenerateResult
from kvspan.errors import KvspanError, UsageError
from kvspan.hybrid.engine import NO_SPANS
from kvspan.query.prompt import Message, Span
from serving import TEMPLATE
from tiny_models import word_tokenizer


def expected_answer(name: str, tokens: list[int], count: int) -> list[int]:
    """What transformers alone generates."""
    out = tiny_hybrid(name).generate(
        torch.tensor([tokens]), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return [int(t) for t in out[0, len(tokens) :]]


def same_bits(a: GenerateResult, b: GenerateResult) -> bool:
    assert a.first_logprobs is not None and b.first_logprobs is not None
    return a.token_ids == b.token_ids and bool(np.array_equal(a.first_logprobs, b.first_logprobs))


def cold(name: str, tokens: list[int], count: int = 4) -> GenerateResult:
    with open_hybrid(tiny_hybrid(name)) as engine:
        return ask(engine, tokens, count)


def error_of(result: GenerateResult, expected: GenerateResult) -> float:
    assert result.first_logprobs is not None and expected.first_logprobs is not None
    return float(np.abs(result.first_logprobs - expected.first_logprobs).max())


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_of_transformers(name: str) -> None:
    tokens = random_tokens(300)
    with open_hybrid(tiny_hybrid(name)) as engine:
        assert ask(engine, tokens[:17], 6).token_ids == expected_answer(name, tokens[:17], 6)
        assert ask(engine, tokens, 6).token_ids == expected_answer(name, tokens, 6)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_hit_is_a_miss_bit_for_bit(name: str) -> None:
    base = random_tokens(560)
    with open_hybrid(tiny_hybrid(name), checkpoint_interval=256) as engine:
        ask(engine, base)
        for shared in (1, 70, 100, 300, 333, 559):
            tokens = base[:shared] + random_tokens(20, seed=shared)
            hit = ask(engine, tokens)
            assert hit.usage.cached_tokens >= shared
            assert hit.reuse.replay is not None and hit.reuse.replay["exact"]
            assert same_bits(hit, cold(name, tokens)), shared


def test_the_same_prompt_again() -> None:
    tokens = random_tokens(200)
    with open_hybrid(tiny_hybrid("qwen3_5")) as engine:
        first, again = ask(engine, tokens), ask(engine, tokens)
        assert again.usage.cached_tokens == 199
        assert same_bits(first, again)


def test_going_on_after_an_answer() -> None:
    name, tokens = "qwen3_5", random_tokens(150)
    with open_hybrid(tiny_hybrid(name)) as engine:
        turn = ask(engine, tokens, 8)
        # The last token was not yet read by the model.
        longer = tokens + turn.token_ids + random_tokens(9, seed=1)
        result = ask(engine, longer)
        assert result.usage.cached_tokens == 150 + 7
        assert result.reuse.replay is not None
        assert [g["replayed_tokens"] for g in result.reuse.replay["groups"]] == [0, 0]
    expected = cold(name, longer)
    assert result.token_ids == expected.token_ids
    assert error_of(result, expected) < 1e-4  # decoding rounds differently


@pytest.mark.parametrize("policy", ["ratio:0.05", "zero", "bounded:0.5"])
def test_approximate_state_is_no_source_for_exact_hits(policy: str) -> None:
    name, base = "olmo_hybrid", random_tokens(1400)
    donor = base[:1300] + random_tokens(60, seed=2)
    with open_hybrid(tiny_hybrid(name), checkpoint_interval=256) as engine:
        ask(engine, base)
        engine.cache.checkpoints.clear()  # one within the tail would make it exact
        engine.set_replay(policy)
        approximate = ask(engine, donor, 20)
        record = approximate.reuse.replay
        assert record is not None and record["policy"] == policy
        assert not record["exact"] and not len(engine.cache.checkpoints)
        assert any("approximately" in note for note in approximate.reuse.notes)
        longer = donor + approximate.token_ids[:-1] + random_tokens(5, seed=3)
        engine.set_replay("exact")
        exact = ask(engine, longer)
        assert exact.usage.cached_tokens == 1300  # of the donor nothing, of its own donor all
        assert exact.reuse.replay is not None and exact.reuse.replay["exact"]
        assert same_bits(exact, cold(name, longer))
        engine.set_replay(policy)
        again = ask(engine, [*longer[:-1], 5])
        assert again.usage.cached_tokens > 1300
        assert again.reuse.replay is not None


def test_exact_answers_in_a_mix_of_policies() -> None:
    """Prompts that branch off one another, in a pool that evicts; every exact one as if alone."""
    name, rng = "qwen3_next", np.random.default_rng(5)
    asked, seen = [random_tokens(700)], 0
    alone = open_hybrid(tiny_hybrid(name))
    with open_hybrid(tiny_hybrid(name), kv_cache_gib=0.004, checkpoint_interval=256) as engine:
        assert engine.pool.num_blocks * 16 < 4000
        for turn in range(24):
            source = asked[int(rng.integers(len(asked)))]
            cut = int(rng.integers(1, len(source)))
            tokens = source[:cut] + random_tokens(int(rng.integers(1, 300)), seed=turn)
            asked.append(tokens)
            policy = ("exact", "ratio:0.1", "zero", "bounded:0.1")[int(rng.integers(4))]
            engine.set_replay(policy)
            result = ask(engine, tokens, 1)
            replay = result.reuse.replay
            if policy == "exact" or replay is None or replay["exact"]:
                alone.clear_cache()
                assert same_bits(result, ask(alone, tokens, 1)), (turn, policy)
                seen += replay is not None
    alone.close()
    assert seen > 4


def test_zero_and_ratio_are_approximate_and_ordered() -> None:
    name, base = "qwen3_5", random_tokens(1024)
    tokens = base[:1000] + random_tokens(8, seed=1)
    expected = cold(name, tokens)
    errors = {}
    for policy in ("zero", "ratio:0.1", "ratio:0.5", "ratio:1"):
        with open_hybrid(tiny_hybrid(name), checkpoint_interval=0) as engine:
            ask(engine, base)
            engine.set_replay(policy)
            result = ask(engine, tokens)
            assert result.usage.cached_tokens == 1000
            assert result.reuse.replay is not None
            replayed = [g["replayed_tokens"] for g in result.reuse.replay["groups"]]
            errors[policy] = error_of(result, expected)
            if policy == "ratio:0.1":
                assert replayed == [100, 100]
    assert errors["zero"] > 0.1 and errors["zero"] > errors["ratio:0.1"] > errors["ratio:0.5"] > 0
    assert errors["ratio:1"] == 0


def test_a_checkpoint_within_the_tail_is_used() -> None:
    base = random_tokens(1100)
    with open_hybrid(tiny_hybrid("qwen3_5"), replay="ratio:0.5") as engine:
        ask(engine, base)
        result = ask(engine, [*base[:1060], 7])
        assert result.reuse.replay is not None and result.reuse.replay["exact"]
        assert result.reuse.replay["groups"][0]["start"] == "checkpoint"
        assert same_bits(result, cold("qwen3_5", [*base[:1060], 7]))


def test_tenants_do_not_share() -> None:
    tokens = random_tokens(100)
    with open_hybrid(tiny_hybrid("qwen3_5")) as engine:
        ask(engine, tokens, salt="a")
        assert ask(engine, tokens, salt="b").usage.cached_tokens == 0
        assert ask(engine, tokens, salt="a").usage.cached_tokens == 99


@pytest.mark.parametrize("block_size", [1, 16, 48])
def test_small_pools_and_odd_blocks(block_size: int) -> None:
    """Prompts that share prefixes, in a pool that holds two of them at a time."""
    name, base = "qwen3_5", random_tokens(200)
    model = tiny_hybrid(name)
    rng = np.random.default_rng(block_size)
    with open_hybrid(model, block_size=block_size, kv_cache_gib=0.0009) as engine:
        assert 400 < engine.pool.num_blocks * block_size < 1000
        for turn in range(10):
            tokens = base[: int(rng.integers(1, 200))] + random_tokens(30, seed=turn)
            result = ask(engine, tokens)
            assert same_bits(result, cold(name, tokens)), turn
        assert engine.stats().blocks_in_use == 0


def test_side_by_side() -> None:
    """Requests that decode together answer as alone."""
    base = random_tokens(120)
    prompts = [base[: 100 + i] + random_tokens(6, seed=i) for i in range(4)]
    alone = [expected_answer("qwen3_next", tokens, 12) for tokens in prompts]
    with open_hybrid(tiny_hybrid("qwen3_next")) as engine, ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda tokens: ask(engine, tokens, 12).token_ids, prompts))
    assert together == alone


@pytest.mark.parametrize("hidden", ["sum", "pair", "int8"])
def test_formats_of_hidden_vectors(hidden: str) -> None:
    name, base = "qwen3_5", random_tokens(400)
    tokens = [*base[:390], 5, 6]
    with open_hybrid(
        tiny_hybrid(name), hidden=hidden, replay="ratio:0.5", checkpoint_interval=0
    ) as engine:
        vector = {"sum": 64 * 4, "pair": 2 * 64 * 4, "int8": 64 + 4}[hidden]
        assert engine.runner.bytes_per_token == 2 * 2 * 2 * 16 * 4 + vector
        ask(engine, base)
        half = ask(engine, tokens)
        engine.set_replay("ratio:1")
        engine.clear_cache()
        ask(engine, base)
        whole = ask(engine, tokens)
    assert half.reuse.replay is not None and not half.reuse.replay["exact"]
    assert whole.reuse.replay is not None
    assert whole.reuse.replay["exact"] == (hidden != "int8")
    error = error_of(whole, cold(name, tokens))
    assert error == 0 if hidden != "int8" else 0 < error < 0.1


def test_models_whose_layers_stand_otherwise() -> None:
    """Ends in linear layers; starts with attention; two attention layers in a row."""
    kinds = {"L": "linear_attention", "F": "full_attention"}
    for pattern in ("LLFLL", "FLFL", "LFFL", "LF"):
        types = [kinds[c] for c in pattern]
        model = tiny_hybrid("qwen3_5", num_hidden_layers=len(types), layer_types=types)
        base = random_tokens(330)
        with open_hybrid(model) as engine:
            first = ask(engine, base)
            engine.clear_cache()
            ask(engine, base[:310])
            again = ask(engine, base)
            assert again.usage.cached_tokens == 310
            assert same_bits(first, again), pattern


def test_spans_are_plain_text() -> None:
    prompt = (Message("user", "w1 w2"), Span((Message("user", "w3 w4"),)))
    with open_hybrid(tiny_hybrid("qwen3_5")) as engine:
        assert not engine.capabilities().spans
        request = GenerateRequest(prompt=prompt, max_tokens=2, chat=False)
        result = engine.run(request)
    assert result.reuse.spans == 0
    assert f"spans not reused: {NO_SPANS}" in result.reuse.notes


def test_refusals() -> None:
    model = tiny_hybrid("qwen3_5")
    with pytest.raises(UsageError, match=r"expected exact, bounded:EPS .* found 'half'"):
        open_hybrid(model, replay="half")
    with pytest.raises(UsageError, match="exact needs hidden vectors in format sum or pair"):
        open_hybrid(model, hidden="int8")
    with pytest.raises(UsageError, match="checkpoint_interval: expected a multiple of 256"):
        open_hybrid(model, checkpoint_interval=100)
    with pytest.raises(UsageError, match="hidden: expected sum, pair, int8, got 'fp4'"):
        open_hybrid(model, hidden="fp4")
    with pytest.raises(UsageError, match=r"kv_cache_gib: expected .* got 1e-06"):
        open_hybrid(model, kv_cache_gib=1e-6)
    model.config.model_type = "other_hybrid"
    with pytest.raises(KvspanError, match=r"model tiny: .* hybrid models of type other_hybrid"):
        open_hybrid(model)


def test_rope_that_depends_on_the_length_is_not_reused() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    tokens = random_tokens(80)
    with open_hybrid(tiny_hybrid("qwen3_next", rope_parameters=rope)) as engine:
        ask(engine, tokens)
        again = ask(engine, tokens)
    assert again.usage.cached_tokens == 0
    assert any(note.startswith("cached prefixes not reused: ") for note in again.reuse.notes)


def test_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny_folder: Path
) -> None:
    tiny_hybrid("qwen3_5").save_pretrained(tmp_path)
    word_tokenizer(TEMPLATE).save_pretrained(tmp_path)
    long = " ".join(f"w{i}" for i in range(180))
    ask_for = [
        {"g": {"model": "m", "max_tokens": 2, "input": {"user": f"{long} w{i}"}}} for i in range(2)
    ]
    query = tmp_path / "query.json"
    query.write_text(json.dumps({"seq": ask_for}))
    common = ["run", str(query), "--json", "--kv-cache-gib", "0.02", "--concurrency", "1"]
    assert cli.main([*common, "--model", str(tmp_path), "--replay", "ratio:0.4"]) == 0
    calls = json.loads(capsys.readouterr().out)["calls"]
    record = calls[1]["reuse"]["replay"]
    assert record["policy"] == "ratio:0.4" and not record["exact"]
    assert record["matched_tokens"] == calls[1]["usage"]["cached_tokens"] > 180
    k = math.ceil(0.4 * record["matched_tokens"])
    assert [g["replayed_tokens"] for g in record["groups"]] == [k, k]
    assert cli.main([*common, "--model", str(tiny_folder), "--replay", "ratio:0.4"]) == 2
    assert "has no recurrent state, got 'ratio:0.4'" in capsys.readouterr().err
    assert cli.main([*common, "--model", str(tmp_path), "--replay", "some"]) == 2
    assert "--replay: expected exact, bounded:EPS" in capsys.readouterr().err


def test_an_own_forward_pass_that_differs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvspan.hybrid.families import Family

    monkeypatch.setattr(Family, "beta_factor", 2.0)  # not what Qwen3.5 does
    with pytest.raises(KvspanError, match=r"log-probabilities differ by .* from transformers"):
        open_hybrid(tiny_hybrid("qwen3_5"))
