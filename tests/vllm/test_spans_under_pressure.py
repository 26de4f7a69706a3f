"""A directed test for each hazard of serving spans on vLLM, and controls that show they can tell.

A control removes a guard and must find wrong answers.

hazard -> tests (test_... is left out), then its control

1. Block hashes appear before the data -> same_step_requests_wait_for_each_other,
   recomputed_span_is_no_source_while_it_is_computed,
   a_span_that_is_being_computed_again_is_no_source; control_unwritten_sources,
   control_recomputed_source
2. A source is evicted and becomes the request's own destination ->
   sources_that_become_destinations; control_moves_one_after_the_other
3. Repeated rotation in place drifts -> only_what_was_computed_is_a_source
4. Chunked prefill splits a span -> span_cut_by_a_chunk; control_row_from_the_chunk_on
5. Attention rows carry no request id -> rows_of_several_requests_in_one_step;
   control_rows_of_another_request
6. Full CUDA graphs bypass Python metadata -> decode_steps_are_vllms_own,
   graphs_and_gpus_are_refused_rows
7. Frequencies from rounded tables, or of another layer -> all of test_span_frequencies.py
8. Blocks are zeroed before the moves -> zeroed_blocks_are_refused

Beyond vLLM's: keys that are not rotated -> control_moves_without_rotation; ordinary requests that
read span KV -> test_spans.py, control_merged_domains; the anchor of the same step, seen at another
distance -> control_anchor_is_not_moved.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from served import BLOCK, Served, scheduler_of
from test_spans import TOLERANCE, make
from traffic import Ask, Verdict, judge, run
from vllm.v1.attention.backends import registry
from vllm.v1.core.block_pool import BlockPool

from kvspan.layout import SpanLayout, layout_from_tokens
from kvspan.vllm import attention, span_worker
from kvspan.vllm.connector import KvspanConnector
from kvspan.vllm.moving import BlockMover
from kvspan.vllm.prepare import prepare_stages
from kvspan.vllm.scheduling import Row, SpanRequest, SpanScheduler
from kvspan.vllm.support import missing_hook, no_rows, refusal, version_note


def test_control_moves_without_rotation(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    move = BlockMover.move
    monkeypatch.setattr(
        BlockMover,
        "move",
        lambda self, moves, *layer: move(self, [(s, d, 0) for s, d, _ in moves], *layer),
    )
    layout = make([3, 0, 1], seed=51)
    (output,) = served.ask([layout])
    assert served.error(layout, output) > 100 * TOLERANCE


def test_control_unwritten_sources(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the guard, a request in the same step takes blocks that nobody has written yet."""
    monkeypatch.setattr(SpanScheduler, "begin", lambda *args: None)
    scheduler = _connector(served)._scheduler
    monkeypatch.setattr(scheduler, "_written", _Everything())
    errors = _same_step(served, seed=61)
    assert max(errors) > 100 * TOLERANCE


def test_same_step_requests_wait_for_each_other(served: Served) -> None:
    """Hazard: block hashes appear before the data. The guarded twin of the control above."""
    assert max(_same_step(served, seed=62)) <= TOLERANCE


def test_recomputed_span_is_no_source_while_it_is_computed(served: Served) -> None:
    """The same hazard when the span had been cached, was evicted and is now computed again."""
    layout = make([2, 1], seed=63)
    served.ask([layout])
    assert served.llm.llm_engine.reset_prefix_cache()
    assert max(_same_step(served, seed=63)) <= TOLERANCE


def test_control_merged_domains(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were placed spans keyed by ordinary hashes of their tokens, an ordinary prompt would err."""
    layout = make([3, 2, 1], seed=71)
    ordinary = layout_from_tokens(layout.token_ids, (), BLOCK)
    on_new_request = KvspanConnector.on_new_request

    second = layout.spans[1][0] // BLOCK  # the first span is at its canonical position

    def keep_ordinary_hashes(self, request) -> None:
        hashes = list(request.block_hashes)
        on_new_request(self, request)
        if len(request.prompt_token_ids) == layout.num_tokens:
            request.block_hashes[second:] = hashes[second:]

    monkeypatch.setattr(KvspanConnector, "on_new_request", keep_ordinary_hashes)
    served.ask([layout_from_tokens(layout.token_ids[: second * BLOCK + 1], (), BLOCK), layout])
    (output,) = served.ask([ordinary])
    assert served.error(ordinary, output) > 100 * TOLERANCE
    assert served.llm.llm_engine.reset_prefix_cache()


def test_a_span_that_is_being_computed_again_is_no_source() -> None:
    """The same hazard over several steps: a later chunk is registered before others look.

    One request has computed a span and its blocks may be evicted at any time; another is at
    computing it again, and vLLM has just registered its next chunk.
    """
    layout = make([2], seed=67)
    anchor = [bytes(32)] * (layout.anchor_len // BLOCK)
    first, again = (SpanRequest(layout, anchor, salt=None, lora="") for _ in range(2))
    user = SpanRequest(make([1, 2], seed=67), anchor, salt=None, lora="")
    scheduler = SpanScheduler(lambda key: 1)
    start, end = layout.spans[0]
    at, total = user.spans[1].start, user.layout.num_tokens

    def has_it() -> bool:
        return scheduler.match(user, at, total).complete

    scheduler.begin(first, start)
    assert not has_it()
    scheduler.mark_written(first, end)
    assert has_it()
    scheduler.begin(again, start)
    scheduler.mark_written(again, end - BLOCK)
    scheduler.mark_written(first, end)  # the first is still running
    assert not has_it()
    scheduler.end(again)  # aborted: what vLLM has registered of it is written
    assert has_it()
    scheduler.begin(again, start)
    scheduler.mark_written(again, end)
    assert has_it() and not scheduler._computing


def test_control_recomputed_source(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guarded twin is above: a span that was once written, and is about to be again."""
    served.ask([make([2, 1], seed=64)])
    assert served.llm.llm_engine.reset_prefix_cache()
    monkeypatch.setattr(SpanScheduler, "begin", lambda *args: None)
    assert max(_same_step(served, seed=64)) > 100 * TOLERANCE
    assert served.llm.llm_engine.reset_prefix_cache()


def _moved_into_each_other(served: Served, seed: int) -> float:
    """Error of a request whose sources vLLM hands out as its destinations, one place further on."""
    moves = []
    move = BlockMover.move

    def record(self: BlockMover, batch: list[tuple[int, int, int]], *layer: str) -> None:
        moves.append(batch)
        move(self, batch, *layer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockMover, "move", record)
        served.ask([make([2, 0, 3], seed=seed)])
        sources = [src for src, _, _ in moves.pop()]
        sources = sources[1:] + sources[:1]  # of document 3, then of document 0
        pool = scheduler_of(served).kv_cache_manager.block_pool
        blocks = [pool.blocks[block_id] for block_id in sources]
        for block in blocks:
            pool.free_block_queue.remove(block)
        pool.free_block_queue.prepend_n([*blocks[1:], blocks[0]])
        layout = make([2, 3, 0], seed=seed)
        (output,) = served.ask([layout], prepare=False)
        (batch,) = moves
        assert len({src for src, _, _ in batch} & {dst for _, dst, _ in batch}) == len(blocks)
    return served.error(layout, output)


def test_sources_that_become_destinations(served: Served) -> None:
    assert _moved_into_each_other(served, seed=52) <= TOLERANCE


def test_control_moves_one_after_the_other(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    move = BlockMover.move
    monkeypatch.setattr(
        BlockMover, "move", lambda self, moves, *layer: [move(self, [m], *layer) for m in moves]
    )
    assert _moved_into_each_other(served, seed=53) > 100 * TOLERANCE


def test_only_what_was_computed_is_a_source(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every key is rotated once from where it was computed, however often its span moves on."""
    assert served.llm.llm_engine.reset_prefix_cache()
    moves: list[tuple[int, int, int]] = []
    move = BlockMover.move

    def record(self: BlockMover, batch: list[tuple[int, int, int]], *layer: str) -> None:
        moves.extend(batch)
        move(self, batch, *layer)

    monkeypatch.setattr(BlockMover, "move", record)
    for i in range(6):
        order = [(i + j) % 4 for j in range(4)]
        (output,) = served.ask([make(order, seed=54, question=i)])
        assert served.error(make(order, seed=54, question=i), output) <= TOLERANCE
    # The pool has room for all of it, so no block has been two things.
    assert not {src for src, _, _ in moves} & {dst for _, dst, _ in moves}
    assert len({src for src, _, _ in moves}) < len(moves) / 2


def test_sources_that_are_used_are_evicted_last(served: Served) -> None:
    assert served.llm.llm_engine.reset_prefix_cache()
    served.ask([make([2, 1], seed=66)])
    layout = make([1, 2], seed=66)
    served.ask([layout], prepare=False)
    pool = scheduler_of(served).kv_cache_manager.block_pool
    for question in range(30):  # 30 times 18 blocks of other things, and the same document
        ids = make([3, 5, 0, 3], seed=100 + question).token_ids
        served.ask([layout_from_tokens(ids, (), BLOCK)])
        asked = make([1, 2], seed=66, question=question)
        (output,) = served.ask([asked], prepare=False, timeout_s=0.05)
        # What was placed is hit where it lies until it is evicted; its source must still be there.
        pool.evict_blocks({block.block_id for block in _placed(served, layout)})
        assert served.audit(output)["computed_tokens"] == 0


def _placed(served: Served, layout: SpanLayout) -> list[Any]:
    """The blocks that hold the second span of layout at its place."""
    anchor = [bytes(32)] * (layout.anchor_len // BLOCK)
    span = SpanRequest(layout, anchor, salt=None, lora="").spans[1]
    lookup = scheduler_of(served).kv_cache_manager.block_pool.get_cached_block
    found = [lookup(span.block_hash(i), [0]) for i in range(len(span.keys))]
    return [blocks[0] for blocks in found if blocks]


def _cut_span(served: Served, monkeypatch: pytest.MonkeyPatch, seed: int) -> float:
    """Error of a request that computes its spans itself, in chunks that cut them."""
    monkeypatch.setattr(scheduler_of(served), "max_num_scheduled_tokens", 90)
    layout = make([1, 3, 2], seed=seed)
    (output,) = served.ask([layout], prepare=False, timeout_s=0)
    assert served.audit(output)["computed_tokens"] == 6 * BLOCK
    return served.error(layout, output)


def test_span_cut_by_a_chunk(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _cut_span(served, monkeypatch, seed=55) <= TOLERANCE


def test_control_row_from_the_chunk_on(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that does not begin at its span's first block sees too little."""
    rows = SpanRequest.rows

    def from_the_chunk_on(self: SpanRequest, *args) -> list[Row]:
        out = []
        for row in rows(self, *args):
            before = row.seq_len // BLOCK - len(row.prefix) - -(-row.num_tokens // BLOCK)
            cut = before if row.first_block else 0
            out.append(
                Row(row.num_tokens, row.seq_len - cut * BLOCK, row.prefix, row.first_block + cut)
            )
        return out

    monkeypatch.setattr(SpanRequest, "rows", from_the_chunk_on)
    assert _cut_span(served, monkeypatch, seed=56) > 100 * TOLERANCE
    assert served.llm.llm_engine.reset_prefix_cache()


def _several_at_once(served: Served, seed: int) -> tuple[Verdict, int]:
    """What becomes of requests that compute spans in one step with others; most plans of a step."""
    asks = [
        Ask(make([1, 2], seed=seed), prepare=False, timeout_s=0, max_tokens=3),
        Ask(make([2, 1], seed=100 + seed), prepare=False, timeout_s=0, max_tokens=5),
        Ask(layout_from_tokens(make([2, 0], seed=seed).token_ids, (), BLOCK), max_tokens=4),
        Ask(make([3, 0], "isolated", seed=seed), prepare=False, timeout_s=0),
        Ask(make([0, 3], seed=seed), prepare=False, timeout_s=0, placement="parallel"),
    ]
    most, verdict = 0, Verdict()
    apply = span_worker.apply

    def record(plan: attention.StepPlan, *args) -> None:
        nonlocal most
        most = max(most, len(plan.rows))
        apply(plan, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(span_worker, "apply", record)
        for ask, output in zip(asks, run(served, asks), strict=True):
            assert output is not None
            judge(served, ask, output, verdict)
    return verdict, most


def test_rows_of_several_requests_in_one_step(served: Served) -> None:
    verdict, most = _several_at_once(served, seed=57)
    assert most >= 4 and not verdict.wrong and verdict.max_error <= TOLERANCE


def test_control_rows_of_another_request(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    split = attention._split

    def exchanged(rows, *args):
        alike = [block for block, own in rows.items() if sum(r.num_tokens for r in own) == 265]
        if len(alike) == 2:
            a, b = alike
            rows = {**rows, a: rows[b], b: rows[a]}
        return split(rows, *args)

    monkeypatch.setattr(attention, "_split", exchanged)
    verdict, _ = _several_at_once(served, seed=58)
    assert verdict.max_error > 100 * TOLERANCE
    assert served.llm.llm_engine.reset_prefix_cache()


def test_control_anchor_is_not_moved(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A span that is computed where it stands must see the anchor as near as where it belongs."""
    move = BlockMover.move

    def still(self: BlockMover, moves: list[tuple[int, int, int]], *layer: str) -> None:
        move(self, [(src, dst, 0 if layer else delta) for src, dst, delta in moves], *layer)

    layout = make([3, 2, 0], seed=59)
    (output,) = served.ask([layout], prepare=False, timeout_s=0)
    assert served.error(layout, output) <= TOLERANCE
    assert served.llm.llm_engine.reset_prefix_cache()
    monkeypatch.setattr(BlockMover, "move", still)
    (output,) = served.ask([layout], prepare=False, timeout_s=0)
    assert served.error(layout, output) > 10 * TOLERANCE
    assert served.llm.llm_engine.reset_prefix_cache()


def test_decode_steps_are_vllms_own(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full CUDA graph would not see the metadata; it must be able to serve these steps."""
    planned = []
    apply = span_worker.apply

    def record(plan: attention.StepPlan, *args) -> None:
        planned.append(plan)
        apply(plan, *args)

    monkeypatch.setattr(span_worker, "apply", record)
    ask = Ask(make([0, 1, 2], seed=65), max_tokens=8)
    (output,) = run(served, [ask])
    assert output is not None and not planned  # prepared: no step at all
    ask = Ask(make([2, 1, 3], seed=65), max_tokens=8, prepare=False, timeout_s=0)
    (output,) = run(served, [ask])
    assert output is not None and len(planned) == 1  # the prefill


def test_graphs_and_gpus_are_refused_rows(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    config = served.llm.llm_engine.vllm_config
    assert no_rows(config) == ""
    monkeypatch.setattr(config.parallel_config, "enable_dbo", True)
    assert "overlap" in no_rows(config)
    monkeypatch.setattr("vllm.platforms.current_platform.is_cpu", lambda: False)
    assert "GPU" in no_rows(config)


def test_a_missing_hook_is_named(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    config, cache_config = served.llm.llm_engine.vllm_config, _connector(served)._kv_cache_config
    assert missing_hook() == ""
    with monkeypatch.context() as patch:
        patch.delattr(BlockPool, "touch")
        missing = "no vllm.v1.core.block_pool:BlockPool.touch"
        assert missing in refusal(config, cache_config, "")
    monkeypatch.delattr(registry, "register_backend")
    assert no_rows(config).endswith("registry:register_backend")
    assert version_note("0.31.9+cpu") and not version_note("0.32.0+cpu")


def test_zeroed_blocks_are_refused(served: Served) -> None:
    cache_config = _connector(served)._kv_cache_config
    fake = SimpleNamespace(
        kv_cache_groups=cache_config.kv_cache_groups, needs_kv_cache_zeroing=True
    )
    config = served.llm.llm_engine.vllm_config
    assert refusal(config, cache_config, "") == ""
    assert "zeroed" in refusal(config, fake, "")  # type: ignore[arg-type]


def test_other_pairs_are_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    config = served.llm.llm_engine.vllm_config
    monkeypatch.setattr(config.model_config, "quantization", "gguf")
    assert "GGUF" in refusal(config, _connector(served)._kv_cache_config, "")


class _Everything(set):
    """A set that claims to hold whatever it is asked for."""

    def __contains__(self, item: object) -> bool:
        return True


def _connector(served: Served) -> KvspanConnector:
    scheduler = served.llm.llm_engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
    return scheduler.connector


def _same_step(served: Served, seed: int) -> list[float]:
    """Errors of two requests that arrive together with the preparations they depend on."""
    layouts = [make([2, 1], seed=seed), make([1, 2], seed=seed, question=3)]
    stage = [part for layout in layouts for s in prepare_stages(layout) for part in s]
    outputs = served.ask([*stage, *layouts], prepare=False)[len(stage) :]
    return [served.error(layout, out) for layout, out in zip(layouts, outputs, strict=True)]
