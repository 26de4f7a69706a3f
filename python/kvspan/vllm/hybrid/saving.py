"""The worker's writes to the host tier's memory: what passes, and requests at their end, leave.

Needs torch, not vLLM.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvspan.host import CopyJob, CopyQueue
from kvspan.host.pages import Bytes, Spans, copy_bytes
from kvspan.vllm.fence import Fence
from kvspan.vllm.hybrid.geometry import Geometry
from kvspan.vllm.hybrid.orders import Work
from kvspan.vllm.hybrid.raw import in_memory_order, to_bytes, to_host

_ALIGN = 256  # bytes, of what is staged
_REMEMBERED = 4096  # steps for which it is known that they failed


@dataclass
class Places:
    """Where things are in the host tier's memory.

    page: gives the bytes of the page at an offset. pieces: those of this worker's part of a state
    that all ranks write together.
    """

    geometry: Geometry
    rank: int
    page: Callable[[int], Bytes]
    pieces: Callable[[Spans], list[Bytes]]


def _there(numbers: Sequence[int] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """int64, on the device; the host does not wait for what runs there."""
    return torch.as_tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)


@dataclass(frozen=True)
class Rows:
    """Where the tokens of works are among the rows of a pass; those of one follow each other.

    slots: [rows], of the tokens in the attention's cache, on the device. first_of: the first row of
    each request, where vLLM tells the order of its batch; nothing is looked up on the device then.
    """

    slots: torch.Tensor | None = None
    first_of: Mapping[str, int] | None = None

    def firsts(self, works: Sequence[Work]) -> list[int]:
        """Each work's first row."""
        if self.first_of is not None:
            return [self.first_of[work.request] for work in works]
        assert self.slots is not None
        row_of = {slot: row for row, slot in enumerate(self.slots.tolist())}
        return [row_of[work.slot] for work in works]

    def firsts_on(self, device: torch.device, works: Sequence[Work]) -> torch.Tensor:
        """The same on the device, for which the host does not wait."""
        if self.slots is None:
            return _there(self.firsts(works), device)
        wanted = _there([work.slot for work in works], device)
        return (self.slots == wanted[:, None]).int().argmax(1)


class Saved(NamedTuple):
    """All writes of the steps up to `step` have ended, those of `failed` not as they should."""

    step: int = 0
    failed: tuple[int, ...] = ()

    def then(self, step: int, failed: bool) -> Saved:
        """Once another step is over; nothing is known of those between."""
        lost = [*self.failed, *range(self.step + 1, step), *([step] if failed else ())]
        return Saved(step, tuple(one for one in lost if one > step - _REMEMBERED))


class Saving:
    """Where the device is the CPU: what is written is there at once."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self._saved = Saved()

    def rows(self, streams: Sequence[torch.Tensor], rows: Rows, works: Sequence[Work]) -> None:
        """Hidden vectors of a pass. streams: [rows or more, width] each."""
        held = [to_bytes(one) for one in streams]  # views; numpy copies single rows in no time
        places = self.places
        for row, work in zip(rows.firsts(works), works, strict=True):
            for fill in work.fills:
                kept = places.geometry.hidden(places.page(fill.page))
                for into, one in zip(kept, held, strict=True):
                    into[fill.first : fill.first + fill.count] = one[row : row + fill.count]
                row += fill.count

    def blocks(self, pools: Sequence[torch.Tensor], copies: Sequence[tuple[int, int]]) -> None:
        """KV of pages. pools: by layer, [blocks, ...]. copies: pages and their blocks."""
        places = self.places
        ordered = [in_memory_order(pool) for pool in pools]
        for page, block in copies:
            kept = places.geometry.kv(places.page(page), places.rank)
            for into, pool in zip(kept, ordered, strict=True):
                to_host(into, pool[block])

    def state(self, spans: Spans, tensors: Sequence[torch.Tensor]) -> None:
        """A state, or a part of one, which is at these places with those of all ranks."""
        copy_bytes([to_bytes(one).reshape(-1) for one in tensors], self.places.pieces(spans))

    def wait_for(self, job: CopyJob) -> None:
        """The step is not over before this copy is, which reads from the host; here it is."""

    def end(self, step: int, failed: bool) -> None:
        """No more of a step is written. failed: nobody may read what was."""
        self._saved = self._saved.then(step, failed)

    def saved(self) -> Saved:
        """Which steps are over, to the last of their writes."""
        return self._saved

    def close(self) -> None:
        """What is under way is given up."""


class StagedSaving(Saving):
    """Where the device is a GPU: neither the host nor the next pass waits for copies.

    Nor does the host for the pass: what it tells the device goes there without blocking.

    What is to be written is copied on the device first, in the order of its stream, since the next
    pass writes over it; from there a queue takes it, while the next step runs. A step ends with its
    copies, in the order of steps.

    staging: uint8, on the device, with room for the largest row, block and tensor of a state. Room
    for what one step writes spares the device waiting within it.
    queue: for these copies alone.
    """

    def __init__(self, places: Places, staging: torch.Tensor, queue: CopyQueue) -> None:
        super().__init__(places)
        self._staging = staging
        self._fence = Fence(staging.device)
        self._queue = queue
        self._at = 0
        self._src: list[torch.Tensor] = []
        self._dst: list[Bytes] = []
        self._jobs: list[CopyJob] = []  # of this step
        self._before: CopyJob | None = None  # which reads what is to be written over
        self._steps: deque[tuple[int, bool, list[CopyJob]]] = deque()

    def rows(self, streams: Sequence[torch.Tensor], rows: Rows, works: Sequence[Work]) -> None:
        device = self._staging.device
        counts = torch.tensor([sum(fill.count for fill in work.fills) for work in works])
        firsts = rows.firsts_on(device, works)
        starts = (counts.cumsum(0) - counts).repeat_interleave(counts)
        offsets = torch.arange(len(starts)) - starts
        which = torch.arange(len(works)).repeat_interleave(counts)
        wanted = firsts[_there(which, device)] + _there(offsets, device)
        places = self.places
        into = [
            places.geometry.hidden(places.page(fill.page))[:, fill.first : fill.first + fill.count]
            for work in works
            for fill in work.fills
        ]
        for stream, held in enumerate(streams):
            self._put_rows(held, wanted, [rows_of[stream] for rows_of in into])

    def blocks(self, pools: Sequence[torch.Tensor], copies: Sequence[tuple[int, int]]) -> None:
        places = self.places
        pages = [places.geometry.kv(places.page(page), places.rank) for page, _ in copies]
        wanted = _there([block for _, block in copies], pools[0].device)
        for layer, pool in enumerate(map(in_memory_order, pools)):
            self._put_rows(pool, wanted, [page[layer][: pool[0].nbytes] for page in pages])

    def state(self, spans: Spans, tensors: Sequence[torch.Tensor]) -> None:
        into = self.places.pieces(spans)
        for tensor in tensors:
            place = self._reserve(tensor.nbytes)
            place.view(tensor.dtype).view(tensor.shape).copy_(tensor)
            into = self._put(place, into)

    def wait_for(self, job: CopyJob) -> None:
        self._jobs.append(job)

    def end(self, step: int, failed: bool) -> None:
        if failed:
            self._src, self._dst = [], []
        self._submit()
        self._steps.append((step, failed, self._jobs))
        self._jobs, self._at = [], 0

    def saved(self) -> Saved:
        while self._steps:
            step, failed, jobs = self._steps[0]
            states = [job.state for job in jobs]
            if "pending" in states:
                break
            self._steps.popleft()
            self._saved = self._saved.then(step, failed or any(s != "done" for s in states))
        return self._saved

    def close(self) -> None:
        self._queue.close()

    def _put_rows(self, held: torch.Tensor, wanted: torch.Tensor, into: list[Bytes]) -> None:
        """Write held[wanted] to these places, one after the other."""
        each = held[0].nbytes
        for part in wanted.split(max(len(self._staging) // each, 1)):
            place = self._reserve(len(part) * each)
            shaped = place.view(held.dtype).view(len(part), *held.shape[1:])
            torch.index_select(held, 0, part, out=shaped)
            into = self._put(place, into)

    def _reserve(self, nbytes: int) -> torch.Tensor:
        """A part of what is staged, uint8 [nbytes]."""
        if self._at + nbytes > len(self._staging):
            self._submit()
            self._at = 0
        if self._at == 0 and self._before is not None:
            # Where that copy has failed its step is told so.
            with contextlib.suppress(RuntimeError):
                self._before.wait_on_stream(self._fence.current())
            self._before = None
        place = self._staging[self._at : self._at + nbytes]
        self._at += -(-nbytes // _ALIGN) * _ALIGN
        return place

    def _put(self, place: torch.Tensor, into: list[Bytes]) -> list[Bytes]:
        """Write what is staged there to as many of these bytes; returns those that are left."""
        self._src.append(place)
        left = place.nbytes
        for number, piece in enumerate(into):
            flat = piece.reshape(-1)
            self._dst.append(flat[:left])
            if len(flat) > left:
                return [flat[left:], *into[number + 1 :]]
            left -= len(flat)
            if left == 0:
                return into[number + 1 :]
        raise AssertionError("less room than there are bytes")

    def _submit(self) -> None:
        if self._src:
            job = self._queue.submit(self._src, self._dst, after=self._fence.behind())
            self._jobs.append(job)
            self._before = job
            self._src, self._dst = [], []
