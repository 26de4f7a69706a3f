"""Requests through the embedded engine: decoding, streaming, sharing, limits, and clean endings."""

from __future__ import annotations

import asyncio
import copy
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvspan.engine import GenerateRequest
from kvspan.engine.local import LocalEngine
from kvspan.errors import KvspanError, UsageError
from kvspan.layout import layout_from_tokens
from kvspan.query.prompt import Message, Span
from span_oracle import span_logprobs
from test_local_engine import GREEDY, difference, make_layout, open_tiny
from tiny_models import VOCAB, tiny_model, word_tokenizer

TOLERANCE = 1e-4


def rag(order: list[int], question: str = "w77 w78", **options: object) -> GenerateRequest:
    docs = [Span((Message("user", " ".join(f"w{(7 * d + i) % 150}" for i in range(30))),))
            for d in order]  # fmt: skip
    prompt = (Message("system", "w1 w2 w3"), *docs, Message("user", question))
    values = {"max_tokens": 8, "temperature": 0.0, **options}
    return GenerateRequest(prompt=prompt, **values)  # type: ignore[arg-type]


def blocks_in_use(engine: LocalEngine) -> int:
    return engine.pool.num_blocks - engine.pool.num_available


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_greedy_answer_equals_transformers(name: str) -> None:
    ids = np.random.default_rng(3).integers(3, VOCAB, 70)
    reference = tiny_model(name, "sdpa").generate(
        torch.from_numpy(ids)[None], max_new_tokens=40, do_sample=False, pad_token_id=0
    )
    with open_tiny(name, 16) as engine:
        layout = layout_from_tokens(ids, (), 16)
        result = engine.run_layout(layout, replace(GREEDY, max_tokens=40))
        assert result.token_ids == reference[0, 70:].tolist()
        assert result.usage.completion_tokens == 40 and result.finish_reason == "length"
        # The conversation goes on: prompt and answer are cached, but for the last block.
        longer = layout_from_tokens([*ids, *result.token_ids, 5, 6], (), 16)
        again = engine.run_layout(longer, GREEDY)
        assert again.usage.cached_tokens == 70 + 40 - (70 + 39) % 16 - 1
        model = tiny_model(name)
        assert difference(again, span_logprobs(model, longer, "sequential")) <= TOLERANCE


def test_requests_side_by_side_give_the_same_answers() -> None:
    requests = [rag([i % 5, (i + 2) % 5, 9], f"w{i} w{i + 1}", seed=i) for i in range(12)]
    requests += [replace(r, temperature=0.8) for r in requests]
    with open_tiny("qwen3", 16) as engine:
        alone = [engine.run(r).token_ids for r in requests]
        engine.clear_cache()

        async def together() -> list[list[int]]:
            results = await asyncio.gather(*(engine.generate(r) for r in requests))
            return [r.token_ids for r in results]

        assert asyncio.run(together()) == alone
        assert blocks_in_use(engine) == 0


def test_sampling_depends_on_the_seed_alone() -> None:
    with open_tiny("llama", 16) as engine:
        hot = replace(rag([1, 2]), temperature=1.5, max_tokens=16)
        first = engine.run(replace(hot, seed=1)).token_ids
        assert engine.run(replace(hot, seed=1)).token_ids == first
        assert engine.run(replace(hot, seed=2)).token_ids != first


def test_sampling_follows_the_distribution() -> None:
    with open_tiny("llama", 16) as engine:
        request = replace(rag([1]), max_tokens=1, temperature=2.0, return_logprobs=True)
        results = [engine.run(replace(request, seed=s)) for s in range(600)]
    logits = results[0].first_logprobs
    assert logits is not None
    p = np.exp(logits / 2.0) / np.exp(logits / 2.0).sum()
    counts = np.bincount([r.token_ids[0] for r in results], minlength=VOCAB)
    top = int(p.argmax())
    sigma = (600 * p[top] * (1 - p[top])) ** 0.5
    assert abs(counts[top] - 600 * p[top]) < 5 * sigma


def test_streamed_pieces_make_the_answer() -> None:
    with open_tiny("llama", 16) as engine:
        pieces: list[str] = []

        async def run() -> str:
            result = await engine.generate(rag([1, 2], max_tokens=12), pieces.append)
            return result.text

        text = asyncio.run(run())
    assert "".join(pieces) == text and len(pieces) > 3


def test_a_stream_that_breaks_takes_no_other_request_with_it() -> None:
    with open_tiny("llama", 16) as engine:
        expected = engine.run(rag([1, 2], max_tokens=40)).token_ids
        taken: list[str] = []

        def breaks(text: str) -> None:
            taken.append(text)
            if len(taken) == 5:
                raise RuntimeError("nobody reads any more")

        request = rag([1, 2], max_tokens=40)
        broken = engine._submit(request, engine.layout(request), breaks).future
        sound = engine._submit(request, engine.layout(request), None).future
        assert sound.result().token_ids == expected
        with pytest.raises(KvspanError, match="nobody reads any more"):
            broken.result()
        assert blocks_in_use(engine) == 0


def test_equal_requests_side_by_side() -> None:
    """The same request several times at once, one of them cancelled: each is its own."""
    with open_tiny("llama", 16) as engine:
        expected = engine.run(rag([1, 2], max_tokens=60)).token_ids

        async def together() -> list[list[int]]:
            tasks = [
                asyncio.ensure_future(engine.generate(rag([1, 2], max_tokens=60))) for _ in range(4)
            ]
            while not engine.worker._running:
                await asyncio.sleep(0.001)
            tasks[2].cancel()
            return [(await task).token_ids for i, task in enumerate(tasks) if i != 2]

        assert asyncio.run(together()) == [expected] * 3


def test_stop_token_ends_the_answer() -> None:
    model = tiny_model("llama")
    with LocalEngine(copy.deepcopy(model), word_tokenizer(), name="llama") as engine:
        engine.worker.stop_ids = set()
        ids = engine.run(rag([1, 2], max_tokens=6)).token_ids
    model.generation_config.eos_token_id = [ids[3]]
    with LocalEngine(model, word_tokenizer(), name="llama") as engine:
        result = engine.run(rag([1, 2], max_tokens=6))
    stop = ids.index(ids[3])
    assert result.token_ids == ids[:stop] and result.finish_reason == "stop"
    assert result.usage.completion_tokens == stop + 1


def test_tenants_share_nothing() -> None:
    with open_tiny("llama", 16) as engine:
        engine.run(rag([1, 2], salt="a"))
        other = engine.run(rag([1, 2], salt="b"))
        assert other.usage.cached_tokens == 0 and other.reuse.span_hits == 0
        assert engine.run(rag([2, 1], salt="a")).reuse.span_hits == 2


def test_another_anchor_is_another_span() -> None:
    with open_tiny("llama", 16) as engine:
        first = rag([1, 2])
        engine.run(first)
        moved = (Message("system", "w1 w2 w4"), *first.prompt[1:])
        assert engine.run(replace(first, prompt=moved)).reuse.span_hits == 0
        isolated = replace(first, scope="isolated")
        assert engine.run(isolated).reuse.span_hits == 0
        assert engine.run(replace(isolated, prompt=moved)).reuse.span_hits == 2


def test_prepare_makes_the_next_request_a_hit() -> None:
    with open_tiny("llama", 16) as engine:
        asyncio.run(engine.prepare(rag([1, 2, 3])))
        result = engine.run(rag([3, 1, 2], "w99"))
        assert result.reuse.prepared_tokens == 0 and result.reuse.span_hits == 3


def test_many_orders_of_few_documents_need_few_keys() -> None:
    """Field case: fresh shuffles of 14 documents keep hitting, and sources do not multiply."""
    rng = np.random.default_rng(0)
    with open_tiny("llama", 16, num_blocks=2000) as engine:
        for shuffle in range(30):
            result = engine.run(rag([int(d) for d in rng.permutation(14)], max_tokens=1))
            if shuffle:
                assert result.reuse.span_hits == 14
        sources = [k for k in engine.pool._block_of if k[0] == "span"]  # type: ignore[index]
        assert len(sources) == 14 * 2


@pytest.mark.parametrize("placement", ["sequential", "parallel"])
def test_small_pools_answer_alike(placement: str) -> None:
    """From a pool that barely holds the prompt up, the answer is the same; below, an error."""
    layout = make_layout(16, [3, 1, 0, 2, 0, 1])
    expected = span_logprobs(tiny_model("llama"), layout, placement)
    need = -(-(layout.num_tokens + 1) // 16)
    request = replace(GREEDY, placement=placement)  # type: ignore[arg-type]
    answered = []
    for num_blocks in range(need - 2, need + 14):
        with open_tiny("llama", 16, num_blocks=num_blocks) as engine:
            try:
                for _ in range(2):
                    result = engine.run_layout(layout, request)
                    assert difference(result, expected) <= TOLERANCE
                answered.append(num_blocks)
            except KvspanError as e:
                assert "the KV pool is too small" in str(e)
                assert f"the pool has {num_blocks}" in str(e)
            assert blocks_in_use(engine) == 0
    assert need + 13 in answered and need - 1 not in answered
    assert answered == list(range(answered[0], need + 14))
    assert answered[0] <= need + 4  # the prompt and its largest span


def test_requests_wait_for_a_small_pool() -> None:
    with open_tiny("llama", 16, num_blocks=24) as engine:
        requests = [rag([i, i + 1], f"w{i}", max_tokens=30) for i in range(8)]
        alone = [engine.run(r).token_ids for r in requests]

        async def together() -> list[list[int]]:
            return [r.token_ids for r in await asyncio.gather(*map(engine.generate, requests))]

        assert asyncio.run(together()) == alone
        assert blocks_in_use(engine) == 0


def test_random_traffic_with_cancellations_leaks_nothing() -> None:
    rng = np.random.default_rng(5)
    with open_tiny("llama", 16, num_blocks=60) as engine:
        expected: dict[tuple[int, ...], list[int]] = {}

        async def one(order: list[int], patience: float) -> None:
            task = asyncio.ensure_future(engine.generate(rag(order, max_tokens=6)))
            done, _ = await asyncio.wait([task], timeout=patience)
            if not done:
                task.cancel()
                return
            tokens = task.result().token_ids
            assert expected.setdefault(tuple(order), tokens) == tokens

        async def traffic() -> None:
            orders = [[int(d) for d in rng.integers(0, 6, 3)] for _ in range(120)]
            patience = rng.choice([0.001, 0.02, 0.3, 60.0], 120)
            await asyncio.gather(*(one(o, float(p)) for o, p in zip(orders, patience, strict=True)))

        asyncio.run(traffic())
        deadline = time.monotonic() + 30
        while blocks_in_use(engine) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert blocks_in_use(engine) == 0 and len(expected) > 20
        # What is cached now was written whole: it still gives the right answers.
        for order, tokens in list(expected.items())[:10]:
            assert engine.run(rag(list(order), max_tokens=6)).token_ids == tokens


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_cached_text_serves_prompts_that_go_on_with_longer_spans(name: str) -> None:
    """Parallel placement: text between spans keeps its position whatever follows it."""
    with open_tiny(name, 16) as engine:
        for order in ([0, 1], [0, 1, 3], [0, 1, 2, 3]):
            layout = make_layout(16, order)
            cut = layout.spans[0][1]
            between = np.arange(3, 19)
            ids = np.concatenate([layout.token_ids[:cut], between, layout.token_ids[cut:]])
            spans = [layout.spans[0], *((s + 16, e + 16) for s, e in layout.spans[1:])]
            moved = layout_from_tokens(ids, spans, 16)
            result = engine.run_layout(moved, replace(GREEDY, placement="parallel"))
            expected = span_logprobs(tiny_model(name), moved, "parallel")
            assert difference(result, expected) <= TOLERANCE, order
        assert result.usage.cached_tokens > cut + 16


@pytest.mark.parametrize("temperature", [1e-300, 5e-324, 1e-6, 1e6])
def test_extreme_temperatures(temperature: float) -> None:
    with open_tiny("llama", 16) as engine:
        greedy = engine.run(rag([1, 2]))
        result = engine.run(rag([1, 2], temperature=temperature))
        assert len(result.token_ids) == 8
        if temperature < 1e-3:
            assert result.token_ids == greedy.token_ids


@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_logits_that_are_no_numbers_fail_their_request_only(temperature: float) -> None:
    with open_tiny("llama", 16) as engine:
        head = engine.runner.model.lm_head
        whole = head.weight.data.clone()
        head.weight.data[7] = float("nan")
        with pytest.raises(KvspanError, match="logits are not finite"):
            engine.run(rag([1, 2], temperature=temperature))
        head.weight.data.copy_(whole)
        assert len(engine.run(rag([1, 2])).token_ids) == 8
        assert blocks_in_use(engine) == 0


def test_a_broken_engine_answers_everybody_and_takes_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("threading.excepthook", lambda args: None)
    with open_tiny("llama", 16) as engine:
        monkeypatch.setattr(engine.worker, "_admit", lambda job: 1 / 0)
        with pytest.raises(KvspanError, match="the engine broke down: ZeroDivisionError"):
            engine.run(rag([1, 2]))
        with pytest.raises(KvspanError, match="closed"):
            engine.run(rag([1, 2]))


def test_token_ids_beyond_the_vocabulary() -> None:
    with open_tiny("llama", 16) as engine:
        layout = layout_from_tokens([3, VOCAB, 4], (), 16)
        with pytest.raises(UsageError, match=f"expected 0 to {VOCAB - 1}; found {VOCAB}$"):
            engine.run_layout(layout, GREEDY)


def test_prompt_longer_than_the_context() -> None:
    with open_tiny("llama", 16) as engine:
        request = replace(rag([1]), path="$.g", prompt=(Message("user", "w1 " * 5000),))
        with pytest.raises(UsageError, match=r"\$\.g: prompt of 5\d+ tokens .* 4096"):
            engine.run(request)
        with pytest.raises(UsageError, match=r"^\$: bad max_tokens; .*; found 0$"):
            engine.run(rag([1], max_tokens=0))
        with pytest.raises(UsageError, match=r"bad temperature; .*; found -1\.0$"):
            engine.run(rag([1], temperature=-1.0))


def test_open_ended_request_stops_at_the_pool() -> None:
    with open_tiny("llama", 16, num_blocks=20) as engine:
        result = engine.run(rag([1, 2], max_tokens=None))
        assert result.finish_reason == "length" and result.usage.completion_tokens > 100


def test_closed_engine() -> None:
    engine = open_tiny("llama", 16)
    engine.close()
    with pytest.raises(KvspanError, match="closed"):
        engine.run(rag([1]))
