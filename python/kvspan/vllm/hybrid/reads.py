"""What a restore reads of the host tier's memory besides KV, and in which order.

Knows nothing of vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvspan.host.pages import Bytes, Spans
from kvspan.hybrid.groups import Group
from kvspan.vllm.hybrid.geometry import Geometry, cut
from kvspan.vllm.hybrid.loading import Pieces
from kvspan.vllm.hybrid.orders import Restore


@dataclass(frozen=True)
class Reads:
    """groups: of linear-attention layers. streams: by the layer that they come from, as pages have
    them. most: tokens that a group is run over at a time. edge: positions before a token that its
    convolution reaches. page: gives the bytes of a page. at: those at places of the memory.
    """

    geometry: Geometry
    rank: int
    groups: Sequence[Group]
    streams: Sequence[int]
    most: Mapping[Group, int]
    edge: int
    page: Callable[[int], Bytes]
    at: Callable[[Spans], Pieces]

    def of(self, plan: Restore) -> Iterator[Pieces]:
        """All, as `Replayer.restore` comes to them."""
        for number, group in enumerate(self.groups):
            start, state = self.begins(plan, number)
            if state is not None:
                yield state
            if plan.zero or start == plan.length or group.source is None:
                continue
            if state is None and start > 0:
                yield self.rows(plan, group, self.before(start), start)
            for begin, end in self.runs(group, start, plan.length):
                yield self.rows(plan, group, begin, end)

    def begins(self, plan: Restore, number: int) -> tuple[int, Pieces | None]:
        """Where the replay of a group begins, and what is kept of its states there; None: zero."""
        if plan.bounds is None:
            return plan.start, self.kept(plan, number)
        part = plan.bounds.groups[number]
        if part.source == "part":
            return part.start, self.own(plan.parts[number])
        return part.start, self.kept(plan, number) if part.source == "checkpoint" else None

    def kept(self, plan: Restore, number: int) -> Pieces | None:
        """A group's part of the kept state; None if there is none."""
        if plan.state is None:
            return None
        counts = [len(group.layers) for group in self.groups]
        each = self.geometry.state_bytes // sum(counts)
        start = self.rank * self.geometry.state_bytes + sum(counts[:number]) * each
        return self.at(cut(plan.state, start, start + counts[number] * each))

    def own(self, spans: Spans) -> Pieces:
        """This rank's part of what all ranks have there, one after the other and alike."""
        count = sum(n for _, n in spans) // self.geometry.ranks
        return self.at(cut(spans, self.rank * count, (self.rank + 1) * count))

    def rows(self, plan: Restore, group: Group, start: int, end: int) -> Pieces:
        """What enters a group, but the first, at these positions."""
        assert group.source is not None, "the first one takes embeddings"
        size, stream = self.geometry.size, self.streams.index(group.source)
        pieces = []
        for index in range(start // size, (end - 1) // size + 1):
            hidden = self.geometry.hidden(self.page(plan.pages[index]))[stream]
            base = index * size
            pieces.append(hidden[max(start - base, 0) : min(end - base, size)].reshape(-1))
        return pieces

    def before(self, start: int) -> int:
        """The first of the positions before `start` that a convolution there reaches."""
        return max(start - self.edge, 0)

    def runs(self, group: Group, begin: int, length: int) -> Iterator[tuple[int, int]]:
        """The parts in which a group is replayed from a position on."""
        for start in range(begin, length, self.most[group]):
            yield start, min(start + self.most[group], length)

    @property
    def largest(self) -> int:
        """Bytes of the largest one."""
        layers = sum(len(group.layers) for group in self.groups)
        each = self.geometry.state_bytes // layers
        return max(
            max(self.most[group] * self.geometry.row_bytes, len(group.layers) * each)
            for group in self.groups
        )
