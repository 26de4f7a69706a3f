"""The scheduler's side of spans: block keys, legal sources, and what each request has to move.

Knows nothing of vLLM but a function that looks a block up by its key, so that it can be tested
without one. Block keys are 32 bytes, like vLLM's own SHA-256 block hashes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvspan.layout import SpanLayout
from kvspan.ops import BlockChain, digest_fields
from kvspan.vllm.params import SpanAudit

Lookup = Callable[[bytes], int | None]


@dataclass(frozen=True)
class PlacedSpan:
    """Blocks [first, first + count) of a request. keys: of its blocks at the canonical position.

    delta: tokens from the canonical position to this one. With 0 the span's blocks here are the
    canonical ones, and computing them in place is right.
    """

    start: int
    end: int
    delta: int
    keys: tuple[bytes, ...]

    @property
    def identity(self) -> bytes:
        return self.keys[-1]

    def block_hash(self, index: int) -> bytes:
        if self.delta == 0:
            return self.keys[index]
        return digest_fields("kvspan/vllm/placed/v1", self.keys[index], self.delta)


class SpanRequest:
    """One request with spans. hashes: of its full blocks, as vLLM's prefix cache is to see them.

    Blocks of the anchor keep the hashes vLLM gave them: their KV is that of any prompt that starts
    so. Span blocks and everything after the first span have keys that no ordinary block has.
    """

    def __init__(
        self, layout: SpanLayout, anchor_hashes: Sequence[bytes], *, salt: str | None, lora: str
    ) -> None:
        self.layout = layout
        self.audit = SpanAudit(span_tokens=sum(end - start for start, end in layout.spans))
        size = layout.block_size
        self._anchor = list(anchor_hashes[: layout.anchor_len // size])
        if len(self._anchor) * size != layout.anchor_len:
            raise ValueError(
                f"anchor_hashes: expected {layout.anchor_len // size}, got {len(self._anchor)}"
            )
        fields = (salt, lora, size)
        self._chain = BlockChain(
            size,
            root=digest_fields("kvspan/vllm/prefix/v1", *fields),
            span_root=digest_fields("kvspan/vllm/span/v1", *fields, layout.scope),
            anchored=layout.scope == "anchored",
        )
        keys = self._chain.extend(layout.token_ids, layout.spans)
        self._keys = [row.tobytes() for row in keys]
        base = layout.canonical_start
        self.spans = [
            PlacedSpan(start, end, start - base, tuple(self._keys[start // size : end // size]))
            for start, end in layout.spans
        ]
        self.hashes = self._anchor + self._keys[len(self._anchor) :]
        for span in self.spans:
            first = span.start // size
            for i in range(len(span.keys)):
                self.hashes[first + i] = span.block_hash(i)

    def extend(self, token_ids: Sequence[int]) -> list[bytes]:
        """Hashes of all full blocks once the request has grown to token_ids."""
        new = token_ids[self._chain.num_tokens :]
        if len(new):
            keys = self._chain.extend(np.asarray(new, dtype=np.int64))
            self.hashes += [row.tobytes() for row in keys]
        return self.hashes


@dataclass
class Move:
    """KV of block src belongs into block number `index` of the request, rotated by delta tokens."""

    src: int
    index: int
    delta: int


@dataclass
class SpanScheduler:
    """Which spans are legal sources, and what a request may take from them.

    lookup: block id cached under a key, or None. vLLM caches a block under its hash when it is
    allocated, before its KV exists; so a span is a source only from `mark_written` on, and no
    longer once it is about to be computed again (`forget_unwritten`).
    """

    lookup: Lookup
    _written: set[bytes] = field(default_factory=set)

    def match(self, request: SpanRequest, num_computed: int, num_tokens: int) -> list[Move] | None:
        """Moves that extend a local hit of num_computed tokens; None: something is missing yet.

        With [] the rest is computed as ordinary text: it holds no span, or only one that stands
        at its canonical position.
        """
        size = request.layout.block_size
        ahead = [span for span in request.spans if span.end > num_computed]
        if not ahead:
            return []
        if len(ahead) == 1 and ahead[0].delta == 0:
            return []
        moves: list[Move] = []
        at = num_computed
        for span in ahead:
            # Text in front of a span, and a span that is to be computed in front of others, would
            # have to be computed first: requests of `kvspan.vllm.prepare` do that.
            if span.start > at or span.delta == 0 or span.identity not in self._written:
                return None
            for i in range((at - span.start) // size, len(span.keys)):
                src = self.lookup(span.keys[i])
                if src is None:
                    self._written.discard(span.identity)
                    return None
                moves.append(Move(src, span.start // size + i, span.delta))
            at = span.end
        if at > (num_tokens - 1) // size * size:
            raise AssertionError("a span reaches the last token")
        return moves

    def forget_unwritten(self, request: SpanRequest, num_computed: int) -> None:
        """The request was given blocks to compute from num_computed on: not yet sources."""
        for span in request.spans:
            if span.delta == 0 and span.end > num_computed:
                self._written.discard(span.identity)

    def mark_written(self, request: SpanRequest, num_computed: int) -> None:
        """All KV up to num_computed will have been written before the next step's moves."""
        for span in request.spans:
            if span.delta == 0 and span.end <= num_computed:
                self._written.add(span.identity)
