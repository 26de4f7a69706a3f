"""Requests that compute their spans themselves: rows of attention, rotated copies of anchors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvspan.vllm.scheduling import PlacedSpan, SpanRequest
from kvspan.vllm.span_steps import StepMetadata, Tracked

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool


class RowPlanner:
    """chunk: tokens that a step computes at the most."""

    def __init__(self, block_size: int, chunk: int) -> None:
        self.pool: BlockPool | None = None
        self.holding: list[Tracked] = []
        self._block_size = block_size
        self._chunk = chunk

    def scratch_blocks(self, spans: SpanRequest) -> int:
        """Blocks for the anchor as the spans of one step must see it."""
        moved = [span for span in spans.spans if span.delta and not span.in_place]
        if spans.layout.scope != "anchored" or not moved:
            return 0
        shortest = min(span.end - span.start for span in moved)
        sets: int = min(len(moved), self._chunk // shortest + 2)
        return sets * (spans.layout.anchor_len // spans.layout.block_size)

    def hold(self, tracked: Tracked) -> None:
        """Takes the scratch blocks of a request; that there are as many was checked before."""
        assert self.pool is not None
        if count := self.scratch_blocks(tracked.spans):
            tracked.scratch = self.pool.get_new_blocks(count)
            self.holding.append(tracked)

    def release(self, tracked: Tracked) -> None:
        if tracked.scratch:
            assert self.pool is not None
            self.pool.free_blocks(tracked.scratch)
            tracked.scratch = []
            self.holding.remove(tracked)

    def release_done(self, scheduled: dict[str, int]) -> None:
        """Scratch that this step uses last: later steps come after it in the worker too."""
        for tracked in list(self.holding):
            done = tracked.request.num_computed_tokens
            done += scheduled.get(tracked.request.request_id, 0)
            if done >= tracked.spans.end_of_spans or not done:
                self.release(tracked)

    def plan(
        self, tracked: Tracked, lo: int, hi: int, table: Sequence[int], step: StepMetadata
    ) -> None:
        """Adds what is special about tokens [lo, hi) of a request. table: its blocks."""
        spans = tracked.spans
        apart = spans.apart(lo, hi)
        shifts = spans.shifts(lo, hi)
        if not apart and not shifts:
            return
        first = table[lo // self._block_size]
        if shifts:
            step.plan.shifts[first] = shifts
        if apart:
            prefix = partial(self._anchor, tracked, table, apart, step)
            step.plan.rows[first] = spans.rows(lo, hi, prefix)
            spans.audit.computed_tokens += sum(min(s.end, hi) - max(s.start, lo) for s in apart)

    def _anchor(
        self,
        tracked: Tracked,
        table: Sequence[int],
        apart: list[PlacedSpan],
        step: StepMetadata,
        span: PlacedSpan,
    ) -> tuple[int, ...]:
        """Blocks with the anchor's KV at the distance from the span that its scope asks for."""
        if tracked.spans.layout.scope != "anchored":
            return ()
        count = tracked.spans.layout.anchor_len // self._block_size
        anchor = list(table[:count])
        if span.delta:
            at = apart.index(span) * count
            copies = [block.block_id for block in tracked.scratch[at : at + count]]
            step.late += [(a, b, span.delta) for a, b in zip(anchor, copies, strict=True)]
            anchor = copies
        return tuple(anchor)
