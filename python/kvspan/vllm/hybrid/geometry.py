"""What pages and states of the host tier hold, and where in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvspan.host import View
from kvspan.host.pages import Bytes, Spans
from kvspan.vllm.hybrid.decay import Cells
from kvspan.vllm.hybrid.entries import Tokens


@dataclass(frozen=True)
class Geometry:
    """What a page holds, and how long a state is.

    size: positions. layers, block_bytes: attention layers and one's block on one rank. streams,
    row_bytes: groups of linear-attention layers but the first, and what enters one at one position.
    state_bytes: the recurrent state of all layers on one rank. ranks: workers that share the heads
    (tensor parallelism), each with a part of its own of KV and states; hidden vectors are the same
    on all. cells: of what the gates of linear-attention layers did; None where it is not kept.
    groups: how many linear-attention layers each group has; all have states of one size.
    """

    size: int
    layers: int
    block_bytes: int
    streams: int
    row_bytes: int
    state_bytes: int = 0
    ranks: int = 1
    cells: Cells | None = None
    groups: tuple[int, ...] = ()

    def part_bytes(self, group: int) -> int:
        """The states of one group's layers on all ranks."""
        return self.ranks * self.state_bytes * self.groups[group] // sum(self.groups)

    def parts(self, groups: Sequence[int], spans: Spans) -> dict[int, Spans]:
        """By group, where its states are in an entry of these groups' that lies at `spans`."""
        found, at = {}, 0
        for group in groups:
            found[group] = cut(spans, at, at + self.part_bytes(group))
            at += self.part_bytes(group)
        return found

    @cached_property
    def page_bytes(self) -> int:
        """One entry: the number of tokens and the tokens (int64), KV by rank, hidden vectors, and
        what `cells` describes."""
        return self._gates_start + (self.cells.nbytes if self.cells else 0)

    @cached_property
    def kv_bytes(self) -> int:
        """A page's KV on one rank."""
        return self.layers * self.block_bytes

    @cached_property
    def _kv_start(self) -> int:
        return 8 * (1 + self.size)

    @cached_property
    def _hidden_start(self) -> int:
        return self._kv_start + self.ranks * self.kv_bytes

    @cached_property
    def _gates_start(self) -> int:
        return self._hidden_start + self.streams * self.size * self.row_bytes

    def tokens(self, page: Bytes) -> Tokens:
        """int64 [1 + size]: the number of tokens, then the tokens. A view."""
        return page[: self._kv_start].view(np.int64)

    def kv(self, page: Bytes, rank: int = 0) -> Bytes:
        """[layers, block_bytes], a rank's blocks in vLLM's own layout. A view."""
        start = self._kv_start + rank * self.kv_bytes
        return page[start : start + self.kv_bytes].reshape(self.layers, -1)

    def hidden(self, page: Bytes) -> Bytes:
        """[streams, size, row_bytes]. A view."""
        held = page[self._hidden_start : self._gates_start]
        return held.reshape(self.streams, self.size, self.row_bytes)

    def gates(self, page: Bytes) -> Bytes:
        """What `cells` describes. A view."""
        return page[self._gates_start :]


def cut(spans: Spans, start: int, end: int) -> Spans:
    """Where bytes [start, end) of what lies at `spans` are.

    >>> cut(((100, 10), (300, 10)), 8, 12)
    ((108, 2), (300, 2))
    """
    found, base = [], 0
    for at, count in spans:
        low, high = max(start - base, 0), min(end - base, count)
        if low < high:
            found.append((at + low, high - low))
        base += count
    return tuple(found)


def page_of(view: View) -> Bytes:
    """A stored page; in one piece, since the tier's pages have its size."""
    (piece,) = view.pages
    return piece
