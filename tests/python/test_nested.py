"""Nested generation: answers are spans with the KV they were generated with, found or not."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvspan import KvspanError, cross, g, map_, ops, plus, reduce, repeat, run, seq, system
from kvspan.engine import GenerateRequest
from kvspan.engine.local import LocalEngine
from kvspan.engine.sequence import Sequence
from kvspan.layout import Answer
from kvspan.query.nodes import Node
from kvspan.query.prompt import Message, Prompt, Span
from nested_queries import (
    check_hit_is_miss,
    judge,
    opened,
    recorded,
    uneven_drafts,
    words,
)
from test_local_engine import TOLERANCE

NAMES = ("llama", "yarn-rope", "qwen3", "gemma3", "cohere-interleaved", "glm-partial-interleaved")


@pytest.mark.parametrize("block_size", [16, 64], ids=lambda n: f"block{n}")
@pytest.mark.parametrize("name", NAMES)
def test_a_judge_reuses_what_its_drafts_generated(name: str, block_size: int) -> None:
    with opened(name, block_size) as engine:
        result, requests = recorded(engine, judge(uneven_drafts()))
        inner, outer = result.calls[:-1], result.calls[-1].result
        generated = sum(call.result.usage.completion_tokens for call in inner)
        assert generated == sum(3 + 17 * n for n in range(5))
        assert outer.reuse.answers == outer.reuse.spans == outer.reuse.span_hits == 5
        assert outer.reuse.answer_reused_tokens == outer.reuse.answer_tokens == generated
        assert outer.reuse.prepared_tokens == 0
        assert outer.usage.cached_tokens >= generated
        assert [c.result.reuse.kept_tokens for c in inner] == [
            c.result.usage.completion_tokens for c in inner
        ]
        check_hit_is_miss(engine, requests[-1], name)
        check_hit_is_miss(engine, replace(requests[-1], placement="parallel"), name)


@pytest.mark.parametrize("block_size", [16, 64], ids=lambda n: f"block{n}")
def test_24_drafts_for_one_judge(block_size: int) -> None:
    """The target: at least 90% of the inner tokens are read from the cache."""
    records: list[dict[str, Any]] = []
    drafts = repeat(24, g("M", cross(system(words(3, 4)), words(9, 12)), max_tokens=40))
    with opened("llama", block_size, 1500) as engine:
        result = run(judge(drafts), engine=engine, temperature=0.8, on_audit=records.append)
    generated = sum(call.result.usage.completion_tokens for call in result.calls[:-1])
    (record,) = [record for record in records if record["path"] == "$"]
    assert record["answers"] == record["spans"] == 24
    assert record["answer_tokens"] == generated == 24 * 40
    assert record["answer_reused_tokens"] >= 0.9 * generated
    assert record["usage"]["cached_tokens"] >= 0.9 * generated
    assert "inner answers are read as they were generated" in record["approximated"]
    assert len({call.result.text for call in result.calls[:-1]}) == 24


def without_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvspan.engine.pool.BlockPool.register", lambda self, block, key: None)


def three_deep() -> Node:
    """Repeat, map, text beside an answer, and answers over answers over answers."""
    samples = repeat(3, g("M", words(11, 7), max_tokens=9, temperature=1.0))
    inner = g("M", cross(plus(samples, words(70, 20)), words(3, 4)), max_tokens=21)
    middle = g(
        "M", plus(cross(words(40, 6), inner), map_("M", [words(1, 3), words(2, 30)], 18)), 13
    )
    return judge([middle, g("M", seq(words(5, 5), words(6, 6)), max_tokens=33)])


@pytest.mark.parametrize(("name", "block_size"), [("llama", 16), ("gemma3", 16), ("qwen3", 64)])
def test_three_deep(name: str, block_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(name, block_size) as engine:
        result, requests = recorded(engine, three_deep(), temperature=0)
        assert max(r.answer.depth for r in (c.result for c in result.calls[:-1]) if r.answer) == 3
        readers = [call.result for call in result.calls if call.result.reuse.answers]
        assert [reader.reuse.answers for reader in readers] == [3, 3, 2]
        assert all(r.reuse.answer_reused_tokens == r.reuse.answer_tokens for r in readers)
        for request in requests:
            if any(engine.layout(request).answers):
                check_hit_is_miss(engine, request, name)
    without_cache(monkeypatch)
    with opened(name, block_size) as engine:
        uncached = run(three_deep(), engine=engine, temperature=0)
        assert engine.pool.num_cached == 0
    assert [c.result.text for c in uncached.calls] == [c.result.text for c in result.calls]


def test_a_model_that_ends_its_answer_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token that ends an answer is not in the span; the last word's KV is."""
    with opened() as engine:
        free = run(judge(uneven_drafts()), engine=engine)
        third = free.calls[3].result.token_ids
        engine.worker.stop_ids = {third[10]}
        result, requests = recorded(engine, judge(uneven_drafts()))
        ended = result.calls[3].result
        assert ended.finish_reason == "stop"
        assert ended.token_ids == third[: third.index(third[10])]
        assert isinstance(ended.answer, Answer)
        assert ended.answer.token_ids.tolist() == ended.token_ids
        final = result.calls[-1].result.reuse
        assert final.answer_reused_tokens == final.answer_tokens
        check_hit_is_miss(engine, requests[-1], "llama")


def test_an_empty_answer_is_left_out() -> None:
    with opened() as engine:
        first = engine.run(GenerateRequest((Message("user", "w1"),), max_tokens=1)).token_ids
        engine.worker.stop_ids = set(first)
        query = judge([g("M", "w1", temperature=0), g("M", "w2 w3", max_tokens=5, temperature=0)])
        result = run(query, engine=engine)
        assert result.calls[0].result.text == "" and result.calls[0].result.answer is None
        assert result.calls[-1].result.reuse.answers <= 1


def copy_only(monkeypatch: pytest.MonkeyPatch) -> None:
    run_plan = ops.run_plan

    def unrotated(plan: Any, keys: Any, values: Any, inv_freq: Any, **options: Any) -> None:
        run_plan(plan, keys, values, [torch.empty(0) for _ in inv_freq], **options)

    monkeypatch.setattr("kvspan.engine.runner.ops.run_plan", unrotated)


def test_moving_without_rotation_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    copy_only(monkeypatch)
    with opened() as engine:
        _, requests = recorded(engine, judge(uneven_drafts()))
        with pytest.raises(AssertionError):
            check_hit_is_miss(engine, requests[-1], "llama")


def same_words_after_other_prompts(engine: LocalEngine) -> tuple[GenerateRequest, GenerateRequest]:
    """Two requests that read the same answer, generated after two prompts."""
    engine.runner.model.lm_head.register_forward_hook(
        lambda module, args, logits: logits.index_fill(-1, torch.tensor([9]), 1e9)
    )
    requests = []
    for text in (words(1, 20), words(60, 20)):
        asked = GenerateRequest((Message("user", text),), max_tokens=30, keep_answer=True)
        answer = engine.run(asked)
        assert set(answer.token_ids) == {9}
        prompt: Prompt = (
            Message("system", "w5 w6"),
            Span((Message("assistant", answer.text, answer.answer),)),
            Message("user", words(90, 3)),
        )
        requests.append(GenerateRequest(prompt, max_tokens=1, temperature=0))
    return requests[0], requests[1]


def kv_of_the_span(engine: LocalEngine, request: GenerateRequest) -> torch.Tensor:
    """Keys of the last layer, in the blocks that the request's span is copied from."""
    layout = engine.layout(request)
    seq = Sequence(
        layout, request.placement, layout.answers[0].domain, 1, torch.device("cpu")  # type: ignore
    )  # fmt: skip
    blocks = [engine.pool.lookup(key) for key in seq.spans[0].canonical_keys()]
    return engine.runner.cache.values[-1][blocks]


def test_equal_answers_of_different_prompts_are_different_spans() -> None:
    with opened() as engine:
        first, second = same_words_after_other_prompts(engine)
        one, other = kv_of_the_span(engine, first), kv_of_the_span(engine, second)
        assert (one - other).abs().max() > 100 * TOLERANCE
        layouts = [engine.layout(request) for request in (first, second)]
        assert layouts[0].token_ids.tolist() == layouts[1].token_ids.tolist()
        keys = [
            Sequence(x, "sequential", x.answers[0].domain, 1, torch.device("cpu")).hashes
            for x in layouts
        ]
        spans = {i for start, end in layouts[0].spans for i in range(start // 16, end // 16)}
        for i, (a, b) in enumerate(zip(*keys, strict=True)):
            # What comes after an answer depends on the prompt that the answer comes from.
            assert (a == b) == (i < min(spans)), i


def test_keys_without_the_prompt_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: were an answer's key its tokens alone, one would be taken for the other."""
    monkeypatch.setattr(Sequence, "answer_digest", lambda self: bytes(32))
    with opened() as engine:
        first, second = same_words_after_other_prompts(engine)
        assert torch.equal(kv_of_the_span(engine, first), kv_of_the_span(engine, second))


def test_a_small_pool_gives_the_same_answers() -> None:
    """Answers are evicted and computed again, next to requests that are still running."""
    drafts = [g("M", plus(repeat(3, g("M", words(n, 9), max_tokens=30)), words(n, 5)), 25)
              for n in range(6)]  # fmt: skip
    with opened(num_blocks=1500) as engine:
        expected = run(judge(drafts), engine=engine, temperature=0)
    with opened(num_blocks=44) as engine:
        result, requests = recorded(engine, judge(drafts), temperature=0)
        assert result.answers == expected.answers
        assert [c.result.text for c in result.calls] == [c.result.text for c in expected.calls]
        readers = [c.result.reuse for c in result.calls if c.result.reuse.answers]
        assert any(reuse.answer_reused_tokens < reuse.answer_tokens for reuse in readers)
        assert engine.pool.num_available == engine.pool.num_blocks
        check_hit_is_miss(engine, requests[-1], "llama")


def test_a_pool_that_cannot_hold_the_answers_prompt() -> None:
    with opened(num_blocks=400) as engine:
        long = GenerateRequest((Message("user", words(0, 400)),), max_tokens=20)
        answer = engine.run(long)
    prompt = (Span((Message("assistant", answer.text, answer.answer),)), Message("user", "w1"))
    with opened(num_blocks=20) as engine:
        with pytest.raises(KvspanError, match=r"the KV pool is too small.* need \d+ blocks"):
            engine.run(GenerateRequest(prompt, max_tokens=1))
        assert engine.pool.num_available == engine.pool.num_blocks
        assert engine.run(GenerateRequest((Message("user", "w1"),), max_tokens=1)).text


def test_where_an_answer_is_read_as_text() -> None:
    with opened() as engine:
        request = GenerateRequest((Message("user", words(0, 9)),), max_tokens=20, keep_answer=True)
        answer = engine.run(request)
        span = Span((Message("assistant", answer.text, answer.answer),))
        prompt: Prompt = (span, Message("user", "w1"))
        reads = GenerateRequest(prompt, max_tokens=1)
        assert any(engine.layout(reads).answers)
        as_text = engine.layout(
            replace(
                reads, prompt=(Span((Message("assistant", answer.text),)), Message("user", "w1"))
            )
        )
        for other in (replace(reads, salt="x"), replace(reads, scope="isolated")):
            layout = engine.layout(other)
            assert not layout.answers
            assert layout.token_ids.tolist() == as_text.token_ids.tolist()
            (note,) = engine.run(other).reuse.notes
            assert note.startswith("1 of 1 inner answers read as text")
        assert not engine.layout(replace(reads, scope="full")).spans
        stopped = engine.run(replace(request, stop=(answer.text.split()[4],)))
        assert stopped.answer is None  # its text is shorter than what was generated


def test_an_answer_with_a_token_of_the_template_is_text() -> None:
    with opened() as engine:
        engine.runner.model.lm_head.register_forward_hook(
            lambda module, args, logits: logits.index_fill(-1, torch.tensor([4]), 1e9)  # <turn>
        )
        asked = GenerateRequest((Message("user", "w1"),), max_tokens=3, keep_answer=True)
        result = engine.run(asked)
        assert result.token_ids == [4, 4, 4] and result.answer is None
        (note,) = result.reuse.notes
        assert note.endswith("read as text, not with its KV: it holds a token of the chat template")


def test_answers_deeper_than_can_be_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvspan.layout.MAX_ANSWER_DEPTH", 2)
    with opened() as engine:
        result = run(three_deep(), engine=engine, temperature=0)
        readers = [c.result.reuse for c in result.calls if c.result.reuse.spans]
        assert [reuse.answers for reuse in readers] == [3, 3, 1]
        assert readers[-1].spans == 2


def test_a_deep_chain_of_answers() -> None:
    """Deeper than answers can be computed again: in between, one is read as text."""
    query: Node = g("M", "w1", max_tokens=3)
    for n in range(60):
        query = g("M", cross(plus(query), f"w{n}"), max_tokens=3)
    with opened() as engine:
        result = run(query, engine=engine, temperature=0)
        reuse = [call.result.reuse for call in result.calls]
        assert [r.answers for r in reuse] == [0] + 3 * ([1] * 16 + [0]) + [1] * 9
        engine.clear_cache()
        assert run(query, engine=engine, temperature=0).answers == result.answers


def test_cancelled_while_an_answer_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvspan.engine.answers.CHUNK_TOKENS", 16)
    with opened() as engine:
        answer = engine.run(GenerateRequest((Message("user", words(0, 300)),), max_tokens=20))
        engine.clear_cache()
        prompt = (Span((Message("assistant", answer.text, answer.answer),)), Message("user", "w1"))

        async def cancelled() -> None:
            task = asyncio.ensure_future(engine.generate(GenerateRequest(prompt, max_tokens=9)))
            while engine.pool.num_available == engine.pool.num_blocks:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            # It is told before the worker has given the blocks back.
            for _ in range(5000):
                if engine.pool.num_available == engine.pool.num_blocks:
                    return
                await asyncio.sleep(0.001)

        asyncio.run(cancelled())
        assert engine.pool.num_available == engine.pool.num_blocks


def test_judges_of_a_reduction_read_each_other() -> None:
    drafts = repeat(8, g("M", words(4, 9), max_tokens=20))
    query = reduce(g("M", cross(system(words(1, 8)), plus(drafts), words(9, 3)), max_tokens=12), 2)
    with opened() as engine:
        result = run(query, engine=engine, temperature=0.7)
    judges = [call.result for call in result.calls if call.result.reuse.answers]
    assert len(judges) == 7
    assert all(j.reuse.answer_reused_tokens == j.reuse.answer_tokens > 0 for j in judges)


def test_whole_exchanges_keep_their_answers_too() -> None:
    with opened() as engine:
        result, requests = recorded(engine, judge(uneven_drafts(3)), nested="whole")
        final = result.calls[-1].result.reuse
        assert (final.answers, final.spans) == (3, 6)
        assert final.answer_reused_tokens == final.answer_tokens
        check_hit_is_miss(engine, requests[-1], "llama")


def test_answers_as_text_on_request() -> None:
    with opened() as engine:
        result = run(judge(uneven_drafts(3)), engine=engine, nested="text")
        final = result.calls[-1].result.reuse
        assert (final.spans, final.answers, final.reused_tokens) == (3, 0, 0)
