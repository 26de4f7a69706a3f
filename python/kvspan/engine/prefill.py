"""From a laid-out prompt to KV in the pool: find, prepare, move, and compute what is left."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from kvspan.engine import Reuse, Timings
from kvspan.engine.answers import CHUNK_TOKENS as CHUNK_TOKENS
from kvspan.engine.answers import batches, copy_answer
from kvspan.engine.attention import Row
from kvspan.engine.pool import BlockPool, PoolFullError
from kvspan.engine.runner import ModelRunner
from kvspan.engine.sequence import CacheDomain, Sequence, SpanRef


@dataclass
class Prefill:
    """Takes one sequence from admission to the logits of its first new token.

    `admit` reserves every block the request will ever need, or raises PoolFullError and reserves
    nothing. `run` does the work in steps; iterate it to the end. `release` gives all blocks back,
    whatever state the request is in.
    """

    seq: Sequence
    pool: BlockPool
    runner: ModelRunner
    reuse: Reuse = field(default_factory=Reuse)
    timings: Timings = field(default_factory=Timings)
    logits: torch.Tensor | None = None
    done_tokens: int = 0
    total_tokens: int = 0
    _held: list[int] = field(default_factory=list)  # referenced blocks outside the table
    _shared: list[tuple[SpanRef, int]] = field(default_factory=list)  # in place, blocks cached
    _moved: list[SpanRef] = field(default_factory=list)  # to be moved into the table
    _text: list[tuple[int, int]] = field(default_factory=list)  # token ranges to compute
    _anchor_from: int = 0
    _inner: Prefill | None = None  # of the answer that is being computed again

    def admit(self) -> None:
        seq, pool = self.seq, self.pool
        try:
            self._find_text()
            self._find_spans()
            missing = [i for i, block in enumerate(seq.table) if block < 0]
            self._make_room(len(missing))
            for i, block in zip(missing, pool.allocate(len(missing)), strict=True):
                seq.table[i] = block
            self._share_repeated_spans()
        except PoolFullError:
            self.release()
            raise
        seq.set_slots()
        spans = sum(span.count - cached for span, cached in self._shared)
        spans += sum(span.count - len(span.found) for span in self._moved)
        text = sum(end - start for start, end in self._text)
        self.total_tokens = spans * seq.block_size + text
        if seq.spans:
            self.total_tokens += seq.layout.anchor_len - self._anchor_from

    def _find_text(self) -> None:
        """Cached blocks of the anchor and of the text between and after spans.

        In each stretch of text what follows the first missing block is computed anew. The last
        token is always computed: its logits are what the request is after.
        """
        seq, size = self.seq, self.seq.block_size
        for kind, start, end in seq.layout.segments():
            if kind == "span":
                continue
            at = start // size
            last = (end - 1 if end == seq.num_prompt_tokens else end) // size
            while at < last:
                block = self.pool.lookup(seq.text_key(at))
                if block is None:
                    break
                self.pool.acquire([block])
                seq.table[at] = block
                at += 1
            if kind == "anchor" and seq.spans:
                self._anchor_from = at * size
            elif at * size < end:
                self._text.append((at * size, end))

    def _find_spans(self) -> None:
        seq, pool, reuse = self.seq, self.pool, self.reuse
        for span in seq.spans:
            tokens = span.count * seq.block_size
            reuse.spans += 1
            reuse.span_tokens += tokens
            found = self._lookup_leading(span.table_keys())
            if (span.delta or span.answer) and len(found) < span.count:
                pool.release(reversed(found))
                span.found = self._lookup_leading(span.canonical_keys())
                self._moved.append(span)
                cached = len(span.found)
            else:
                seq.table[span.first : span.first + len(found)] = found
                cached = len(found)
                if cached < span.count:
                    self._shared.append((span, cached))
                elif span.delta:  # keep the source as recently used as its copy
                    pool.release(reversed(self._lookup_leading(span.canonical_keys())))
            if span.answer is not None:
                generated = len(span.answer.token_ids)
                reuse.answers += 1
                reuse.answer_tokens += generated
                reuse.answer_reused_tokens += min(cached * seq.block_size, generated)
            reuse.reused_tokens += cached * seq.block_size
            reuse.span_hits += cached == span.count

    def _make_room(self, count: int) -> None:
        """Let sources go, the last spans' first, until so many blocks can be had.

        Their spans are computed again: what is cached must not keep a prompt out that fits without.
        """
        for span in reversed(self._moved):
            if count <= self.pool.num_available:
                break
            cached, size = len(span.found), self.seq.block_size
            self.pool.release(reversed(span.found))
            span.found = []
            self.reuse.reused_tokens -= cached * size
            self.reuse.span_hits -= cached == span.count
            if span.answer is not None:
                self.reuse.answer_reused_tokens -= min(cached * size, len(span.answer.token_ids))
        # Those whose sources are here come first: once moved, they make room for the others.
        self._moved.sort(key=lambda span: span.count - len(span.found))

    def _lookup_leading(self, keys: list[object]) -> list[int]:
        """The leading blocks that are cached, referenced."""
        found = []
        for key in keys:
            block = self.pool.lookup(key)
            if block is None:
                break
            found.append(block)
        self.pool.acquire(found)
        return found

    def _share_repeated_spans(self) -> None:
        """A span that stands twice in the prompt at one position (parallel) is computed once."""
        first: dict[bytes, SpanRef] = {}
        once = []
        for span, cached in self._shared:
            twin = first.setdefault(span.identity, span)
            if twin is span:
                once.append((span, cached))
                continue
            table = self.seq.table
            self.pool.release(reversed(table[span.first : span.first + span.count]))
            blocks = table[twin.first : twin.first + twin.count]
            self.pool.acquire(blocks)
            table[span.first : span.first + span.count] = blocks
            self._count_repeat(span, cached)
        self._shared = once

    def _count_repeat(self, span: SpanRef, cached: int) -> None:
        self.reuse.reused_tokens += (span.count - cached) * self.seq.block_size
        self.reuse.span_hits += 1

    def run(self) -> Iterator[None]:
        seq, size = self.seq, self.seq.block_size
        start = time.perf_counter()
        rows = []
        if seq.spans and self._anchor_from < seq.layout.anchor_len:
            rows.append(seq.text_row(self._anchor_from, seq.layout.anchor_len))
        for span, cached in self._shared:
            blocks = seq.table[span.first : span.first + span.count]
            rows.append(seq.span_row(span, blocks, cached))
            self.reuse.prepared_tokens += (span.count - cached) * size
        yield from self._forward(rows)
        if seq.spans:
            for i in range(self._anchor_from // size, seq.layout.anchor_len // size):
                self.pool.register(seq.table[i], seq.text_key(i))
        for span, _ in self._shared:
            self._register(seq.table[span.first : span.first + span.count], span.table_keys())
        self.timings.prepare += time.perf_counter() - start
        while self._moved:
            yield from self._prepare_and_move()
        start = time.perf_counter()
        rows = [seq.text_row(lo, hi, hi == seq.num_prompt_tokens) for lo, hi in self._text]
        yield from self._forward(rows)
        for lo, hi in self._text:
            for i in range(lo // size, hi // size):
                self.pool.register(seq.table[i], seq.text_key(i))
        self.timings.prefill += time.perf_counter() - start

    def _prepare_and_move(self) -> Iterator[None]:
        """Spans at their canonical position, then copies at their placement, as many as fit."""
        seq, size = self.seq, self.seq.block_size
        start = time.perf_counter()
        canonical: dict[bytes, list[int]] = {}
        group: list[SpanRef] = []
        again: list[tuple[SpanRef, list[int]]] = []  # answers to compute again, and where to
        rows = []
        while self._moved:
            span = self._moved[0]
            cached = len(span.found)
            if span.identity not in canonical:
                try:
                    fresh = self.pool.allocate(span.count - cached)
                except PoolFullError:
                    if not group:
                        raise
                    break
                self._held += fresh
                canonical[span.identity] = span.found + fresh
                if fresh and span.answer is not None:
                    again.append((span, canonical[span.identity][cached:]))
                elif fresh:
                    rows.append(seq.span_row(span, canonical[span.identity], cached))
                self.reuse.prepared_tokens += len(fresh) * size
            elif cached < span.count:
                self._count_repeat(span, cached)
            self._held += span.found
            span.found = []
            group.append(self._moved.pop(0))
        yield from self._forward(rows)
        for span, blocks in again:
            yield from self._compute_answer(span, blocks)
        for span in group:
            self._register(canonical[span.identity], span.canonical_keys())
        prepared = time.perf_counter()
        src = [block for span in group for block in canonical[span.identity]]
        dst = [b for span in group for b in seq.table[span.first : span.first + span.count]]
        self.runner.cache.move(src, dst, [s.delta for s in group for _ in range(s.count)])
        for span in group:
            self._register(seq.table[span.first : span.first + span.count], span.table_keys())
        self.reuse.moved_tokens += len(src) * size
        self._release_held()
        self.timings.prepare += prepared - start
        self.timings.move += time.perf_counter() - prepared
        yield

    def _compute_answer(self, span: SpanRef, blocks: list[int]) -> Iterator[None]:
        """An answer after its own prompt, then a copy of its last blocks in ``blocks``."""
        answer, size = span.answer, self.seq.block_size
        assert answer is not None and isinstance(answer.domain, CacheDomain)
        first, last = span.first * size, (span.first + span.count) * size
        layout = answer.prompt.continued(self.seq.layout.token_ids[first:last])
        seq = Sequence(layout, answer.placement, answer.domain, 0, self.seq.device)
        inner = self._inner = Prefill(seq, self.pool, self.runner)
        inner.admit()
        yield from inner.run()
        copy_answer(seq, layout.num_tokens - len(blocks) * size, blocks, self.runner)
        inner.release()
        self._inner = None
        self.done_tokens += inner.done_tokens
        self.reuse.computed_tokens += inner.reuse.computed_tokens

    def _register(self, blocks: list[int], keys: list[object]) -> None:
        for block, key in zip(blocks, keys, strict=True):
            self.pool.register(block, key)

    def _forward(self, rows: list[Row]) -> Iterator[None]:
        """Run rows in order, a pass at a time."""
        for batch in batches(rows):
            logits = self.runner.forward(batch)
            tokens = sum(row.num_tokens for row in batch)
            self.done_tokens += tokens
            self.reuse.computed_tokens += tokens
            if len(logits):
                self.logits = logits[-1]
            yield

    def release(self) -> None:
        """Give every block back; the end of the prompt becomes evictable first."""
        if self._inner is not None:
            self._inner.release()
            self._inner = None
        for span in self._moved:
            self._held += span.found
            span.found = []
        self._release_held()
        table = [block for block in self.seq.table if block >= 0]
        self.pool.release(reversed(table))
        self.seq.table = [-1] * self.seq.num_blocks

    def _release_held(self) -> None:
        self.pool.release(reversed(self._held))
        self._held = []
