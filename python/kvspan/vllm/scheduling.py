"""The scheduler's side of spans: block keys, legal sources, and what each request has to move.

Knows nothing of vLLM but a function that looks a block up by its key, so that it can be tested
without one. Block keys are 32 bytes, like vLLM's own SHA-256 block hashes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np

from kvspan.engine import Placement
from kvspan.layout import SpanLayout
from kvspan.ops import BlockChain, digest_fields
from kvspan.vllm.params import SpanAudit

Lookup = Callable[[bytes], int | None]


@dataclass(frozen=True)
class PlacedSpan:
    """Tokens [start, end) of a request. keys: of its blocks at the canonical position.

    delta: tokens from the canonical position to this one. With 0 the span's blocks here are the
    canonical ones.
    in_place: whether it stands right behind what it may see, so that ordinary causal attention
    gives its KV.
    """

    start: int
    end: int
    delta: int
    keys: tuple[bytes, ...]
    in_place: bool

    @property
    def identity(self) -> bytes:
        return self.keys[-1]

    def block_hash(self, index: int) -> bytes:
        if self.delta == 0:
            return self.keys[index]
        return digest_fields("kvspan/vllm/placed/v1", self.keys[index], self.delta)


@dataclass(frozen=True)
class Piece:
    """What the host tier keeps of a request as one: its anchor, or a span at its canonical place.

    key: of its content, 32 bytes. hashes: of its blocks in vLLM's pool, as they are found there.
    [start, end): its tokens in the request. position: of its first token where it is computed.
    is_here: whether the request's own blocks hold it as it is kept, not a rotated copy.
    """

    key: bytes
    hashes: tuple[bytes, ...]
    start: int
    end: int
    position: int
    is_span: bool
    is_here: bool

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Row:
    """Attention of num_tokens consecutive tokens of a request.

    Their keys are seq_len tokens of the blocks `prefix`, and then of the request's own blocks from
    first_block on; the tokens are the last of them, under causal attention.
    """

    num_tokens: int
    seq_len: int
    prefix: tuple[int, ...] = ()
    first_block: int = 0


class SpanRequest:
    """One request with spans. hashes: of its full blocks, as vLLM's prefix cache is to see them.

    Blocks of the anchor keep the hashes vLLM gave them: their KV is that of any prompt that starts
    so. Span blocks and everything after the first span have keys that no ordinary block has.
    """

    def __init__(
        self,
        layout: SpanLayout,
        anchor_hashes: Sequence[bytes],
        *,
        salt: str | None,
        lora: str,
        placement: Placement = "sequential",
    ) -> None:
        self.layout = layout
        self.placement = placement
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
            PlacedSpan(
                start,
                end,
                0 if placement == "parallel" else start - base,
                tuple(self._keys[start // size : end // size]),
                start == base,
            )
            for start, end in layout.spans
        ]
        self._shifts: list[tuple[int, int]] | None = None
        self.hashes = self._anchor + [
            self._text_hash(key) for key in self._keys[len(self._anchor) :]
        ]
        for span in self.spans:
            first = span.start // size
            for i in range(len(span.keys)):
                self.hashes[first + i] = span.block_hash(i)

    @cached_property
    def pieces(self) -> list[Piece]:
        """The anchor, if there is one, and every distinct span."""
        layout, out = self.layout, []
        if count := len(self._anchor):
            key, hashes = self._keys[count - 1], tuple(self._anchor)
            out.append(Piece(key, hashes, 0, layout.anchor_len, 0, is_span=False, is_here=True))
        spans: dict[bytes, PlacedSpan] = {}
        for span in self.spans:
            known = spans.setdefault(span.identity, span)
            if known.delta and not span.delta:
                spans[span.identity] = span
        base = layout.canonical_start
        for key, span in spans.items():
            here = span.delta == 0
            out.append(Piece(key, span.keys, span.start, span.end, base, True, here))
        return out

    def extend(self, token_ids: Sequence[int]) -> list[bytes]:
        """Hashes of all full blocks once the request has grown to token_ids."""
        new = token_ids[self._chain.num_tokens :]
        if len(new):
            keys = self._chain.extend(np.asarray(new, dtype=np.int64))
            self.hashes += [self._text_hash(row.tobytes()) for row in keys]
        return self.hashes

    def _text_hash(self, key: bytes) -> bytes:
        """Text behind spans is at other positions in each placement: a domain of its own."""
        if self.placement == "sequential":
            return key
        return digest_fields("kvspan/vllm/parallel/v1", key)

    @property
    def end_of_spans(self) -> int:
        return self.layout.spans[-1][1]

    def span_tokens(self, lo: int, hi: int) -> int:
        """How many of the tokens [lo, hi) belong to spans."""
        return sum(max(0, min(s.end, hi) - max(s.start, lo)) for s in self.spans)

    def apart(self, lo: int, hi: int) -> list[PlacedSpan]:
        """Spans with tokens in [lo, hi) that ordinary causal attention would compute wrongly."""
        return [s for s in self.spans if s.start < hi and s.end > lo and not s.in_place]

    def rows(self, lo: int, hi: int, prefix: Callable[[PlacedSpan], tuple[int, ...]]) -> list[Row]:
        """Attention rows of the request's tokens [lo, hi); [] where one ordinary row is right.

        prefix: the blocks with the anchor's KV as a span must see it, () in isolated scope. A span
        that is cut by lo or hi keeps its whole beginning in view.
        """
        apart = self.apart(lo, hi)
        if not apart:
            return []
        size, out, at = self.layout.block_size, [], lo
        for span in apart:
            if span.start > at:
                out.append(Row(span.start - at, span.start))
                at = span.start
            end, blocks = min(span.end, hi), prefix(span)
            seq_len = len(blocks) * size + end - span.start
            out.append(Row(end - at, seq_len, blocks, span.start // size))
            at = end
        if at < hi:
            out.append(Row(hi - at, hi))
        return out

    def shifts(self, lo: int, hi: int) -> list[tuple[int, int]]:
        """(num_tokens, tokens to subtract from their positions) of [lo, hi); [] where all is 0."""
        if self.placement != "parallel":
            return []
        if self._shifts is None:
            layout = self.layout
            places = layout.positions("parallel")
            bounds = [start for _, start, _ in layout.segments()]
            self._shifts = [(start, start - int(places[start])) for start in bounds]
        out = []
        for (start, shift), (end, _) in pairwise([*self._shifts, (hi, 0)]):
            count = min(end, hi) - max(start, lo)
            if count > 0:
                out.append((count, shift))
        return out if any(shift for _, shift in out) else []


@dataclass
class Move:
    """KV of block src belongs into block number `index` of the request, rotated by delta tokens."""

    src: int
    index: int
    delta: int


@dataclass
class Match:
    """moves: those that extend the local hit without a gap. complete: nothing is missing."""

    moves: list[Move]
    complete: bool


@dataclass
class SpanScheduler:
    """Which spans are legal sources, and what a request may take from them.

    lookup: block id cached under a key, or None. vLLM caches a block under its hash when it is
    allocated, before its KV exists; so a span is a source only from `mark_written` on, and not
    while a request is at computing it again (`begin` to `mark_written` or `end`): its next chunk
    is registered in the very step that others look for sources.
    limit: how many spans are remembered before those that the pool has lost are dropped.
    """

    lookup: Lookup
    limit: int = 1 << 16
    _written: set[bytes] = field(default_factory=set)
    _computing: dict[bytes, set[SpanRequest]] = field(default_factory=dict)

    def match(self, request: SpanRequest, num_computed: int, num_tokens: int) -> Match:
        """What moves add to a local hit of num_computed tokens.

        With no moves and nothing missing the rest is computed as ordinary text: it holds no span,
        or only one that stands where it is computed.
        """
        size = request.layout.block_size
        ahead = [span for span in request.spans if span.end > num_computed]
        if not ahead or (len(ahead) == 1 and ahead[0].in_place):
            return Match([], complete=True)
        moves: list[Move] = []
        at = num_computed
        for span in ahead:
            # Text in front of a span, and a span that is to be computed in front of others, would
            # have to be computed first: requests of `kvspan.vllm.prepare` do that. A span with
            # delta 0 that is cached is a local hit already.
            if span.start > at or span.delta == 0 or not self._is_source(span):
                return Match(moves, complete=False)
            for i in range((at - span.start) // size, len(span.keys)):
                src = self.lookup(span.keys[i])
                if src is None:
                    self._written.discard(span.identity)
                    return Match(moves, complete=False)
                moves.append(Move(src, span.start // size + i, span.delta))
            at = span.end
        if at > (num_tokens - 1) // size * size:
            raise AssertionError("a span reaches the last token")
        return Match(moves, complete=True)

    def _is_source(self, span: PlacedSpan) -> bool:
        return span.identity in self._written and span.identity not in self._computing

    def is_computing(self, identity: bytes) -> bool:
        """Whether a request is at computing this span where it belongs."""
        return identity in self._computing

    def mark_loaded(self, identity: bytes) -> None:
        """All blocks of a span are in the pool, and hold what was computed before."""
        self._written.add(identity)

    def begin(self, request: SpanRequest, num_computed: int) -> None:
        """The request was given blocks to compute from num_computed on: not yet sources."""
        for span in request.spans:
            if span.delta == 0 and span.end > num_computed:
                self._written.discard(span.identity)
                self._computing.setdefault(span.identity, set()).add(request)

    def end(self, request: SpanRequest) -> None:
        """The request is finished, given up or preempted: all that it has begun is written."""
        for span in request.spans:
            self._computed(span, request)

    def _computed(self, span: PlacedSpan, request: SpanRequest) -> None:
        if others := self._computing.get(span.identity):
            others.discard(request)
            if not others:
                del self._computing[span.identity]

    def mark_written(self, request: SpanRequest, num_computed: int) -> None:
        """All KV up to num_computed will have been written before the next step's moves."""
        for span in request.spans:
            if span.delta == 0 and span.end <= num_computed:
                self._written.add(span.identity)
                self._computed(span, request)
        if len(self._written) > self.limit:
            self._written = {key for key in self._written if self.lookup(key) is not None}
