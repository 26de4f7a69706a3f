"""Copies of spans to and from the host while others compute, and what may not overtake them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from served import BLOCK, Served, scheduler_of
from span_hosted import (
    flood,
    host_of,
    piece_tokens,
    pinned,
    seen_as,
    settle,
    steps,
    tier_of,
)
from test_spans import TOLERANCE, make
from traffic import Ask, Verdict, free_blocks, judge, run
from vllm.distributed.kv_transfer import get_kv_transfer_group

from kvspan.host import CopyQueue
from kvspan.layout import layout_from_tokens
from kvspan.vllm.span_host import SpanHost
from kvspan.vllm.span_steps import StepMetadata
from kvspan.vllm.span_tier import HostReport, HostStep, SpanTier, Transfer
from kvspan.vllm.stats import SpanStats


@pytest.fixture
def slow(hosted: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Makes copies from or to the host slow: a piece takes seconds."""
    queues = []

    def slow_down(name: str) -> None:
        queues.append(CopyQueue("cpu", chunk_bytes=1 << 12, bytes_per_second=5e5))
        monkeypatch.setattr(tier_of(), name, queues[-1])

    settle(hosted)
    yield slow_down
    settle(hosted)
    for queue in queues:
        queue.close()


def test_copies_hide_behind_the_computation_of_others(
    hosted: Served, slow: Callable[[str], None]
) -> None:
    layout = make([5, 3], seed=209)
    hosted.ask([layout])
    settle(hosted)
    flood(hosted)
    slow("_load_queue")
    engine, host = hosted.llm.llm_engine, host_of(hosted)
    asks = [Ask(layout, prepare=False, timeout_s=60.0)]
    asks += [Ask(layout_from_tokens(np.arange(3, 60 + i), (), BLOCK), max_tokens=5) for i in (0, 1)]
    seen = []
    step = engine.step

    def watching() -> Any:
        outputs = step()
        seen.extend((output.request_id, host.is_busy) for output in outputs if output.finished)
        return outputs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "step", watching)
        outputs = run(hosted, asks)
    assert [busy for _, busy in seen] == [True, True, False]  # the ordinary ones were first
    for ask, output in zip(asks, outputs, strict=True):
        verdict = Verdict()
        assert output is not None
        judge(hosted, ask, output, verdict)
        assert not verdict.wrong and verdict.max_error <= TOLERANCE


def test_aborts_while_loading_leave_nothing_behind(
    hosted: Served, slow: Callable[[str], None]
) -> None:
    layout = make([5, 2, 3], seed=210)
    hosted.ask([layout])
    settle(hosted)
    flood(hosted)
    free = free_blocks(hosted)
    with pytest.MonkeyPatch.context() as patch:
        fast = tier_of()._load_queue
        slow("_load_queue")
        asks = [Ask(layout, prepare=False, timeout_s=60.0) for _ in range(2)]
        outputs = run(hosted, asks, abort=lambda step, i: step == 3 + i)
        assert outputs == [None, None]
        steps(hosted, 1)
        assert free_blocks(hosted) == free and pinned(hosted) == 0
        assert not host_of(hosted).is_busy and not host_of(hosted)._waits
        # One that does not wait as long computes them itself.
        (output,) = hosted.ask([layout], prepare=False, timeout_s=0.05)
        assert hosted.audit(output)["computed_tokens"] > 0
        assert hosted.error(layout, output) <= TOLERANCE
        patch.setattr(tier_of(), "_load_queue", fast)
    flood(hosted)
    (output,) = hosted.ask([layout], prepare=False)
    assert hosted.audit(output)["host_tokens"] == piece_tokens(layout)
    assert hosted.error(layout, output) <= TOLERANCE and pinned(hosted) == 0


def _stored_while_overwritten(hosted: Served, slow: Callable[[str], None], seed: int) -> float:
    """Error of spans whose blocks were handed out again while they were being stored."""
    layout = make([3, 5], seed=seed)
    fast = tier_of()._store_queue
    slow("_store_queue")
    hosted.ask([layout])
    assert host_of(hosted)._storing
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tier_of(), "_store_queue", fast)
        flood(hosted)
    settle(hosted)
    (output,) = hosted.ask([layout], prepare=False)
    assert hosted.audit(output)["host_tokens"] == piece_tokens(layout)
    return hosted.error(layout, output)


def test_blocks_are_stored_before_they_are_written_again(
    hosted: Served, slow: Callable[[str], None]
) -> None:
    assert _stored_while_overwritten(hosted, slow, seed=211) <= TOLERANCE


def test_control_blocks_that_are_written_again(
    hosted: Served, slow: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = SpanTier.begin

    def careless(self: SpanTier, step: HostStep) -> None:
        step.settle = []
        begin(self, step)

    monkeypatch.setattr(SpanTier, "begin", careless)
    assert _stored_while_overwritten(hosted, slow, seed=212) > 100 * TOLERANCE
    assert hosted.llm.llm_engine.reset_prefix_cache(reset_connector=True)


def test_blocks_are_moved_before_they_are_loaded_into(hosted: Served) -> None:
    """vLLM may hand out a span's block for a load in the step that moves the span from there."""
    layout = make([2, 5], seed=217)
    hosted.ask([layout])
    settle(hosted)
    piece, tier = seen_as(hosted, layout).pieces[1], tier_of()
    pool, worker = scheduler_of(hosted).kv_cache_manager.block_pool, get_kv_transfer_group()._worker
    count = len(piece.hashes)
    taken = pool.get_new_blocks(2 * count)
    src, dst = ([block.block_id for block in part] for part in (taken[:count], taken[count:]))
    for cache in tier._caches:
        cache[src] = torch.rand_like(cache[src])
    before = [cache[src].clone() for cache in tier._caches]
    step = StepMetadata(
        moves=[(a, b, 0) for a, b in zip(src, dst, strict=True)],
        host=HostStep(loads=[[Transfer(10**9, piece.key, tuple(src))]]),
    )
    for part in (worker.begin, worker.move):
        part(step)
        while any(load.state == "pending" for load in tier._loads):
            time.sleep(0.001)
    kept = [block.block_id for block in host_of(hosted)._blocks_of(piece) or ()]
    for cache, was in zip(tier._caches, before, strict=True):
        assert torch.equal(cache[dst], was) and torch.equal(cache[src], cache[kept])
    pool.free_blocks(taken)


def test_two_workers_have_to_confirm(hosted: Served) -> None:
    """What one of them has lost is lost, and its blocks are given back."""
    real = host_of(hosted)
    came: list[str] = []
    host = SpanHost(
        real._scheduler, BLOCK, 2, lambda at, n: 1.0, lambda name, pieces: came.extend(pieces),
        SpanStats, fresh=False,
    )  # fmt: skip
    host.pool = real.pool
    assert hosted.llm.llm_engine.reset_prefix_cache(reset_connector=True)
    spans = seen_as(hosted, make([2, 3], seed=215))
    keys = [piece.key for piece in spans.pieces]

    def wants() -> bool:
        return host.must_wait("a", spans, 0, 10, 30.0)

    assert wants() and not host.take_step().loads  # nobody has said yet what is there
    host.take_report(HostReport(known=[frozenset(keys)]))
    assert wants() and not host.take_step().loads
    host.take_report(HostReport(known=[frozenset(keys[:2])]))
    free = free_blocks(hosted)
    assert wants()
    ((first, second),) = host.take_step().loads
    assert [first.key, second.key] == keys[:2]
    host.take_report(HostReport(done=[first.id, second.id]))
    assert wants() and not came and free_blocks(hosted) < free
    host.take_report(HostReport(done=[first.id], failed=[second.id]))
    assert came == spans.pieces[:1] and free_blocks(hosted) == free
    assert not wants() and not host.is_busy
    host.finished("a")
    assert hosted.llm.llm_engine.reset_prefix_cache()
