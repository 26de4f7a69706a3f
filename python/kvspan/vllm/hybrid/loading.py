"""What a restore reads of the host tier's memory besides KV: rows of hidden vectors, and states.

Needs torch, not vLLM.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from kvspan.host import CopyJob, CopyQueue
from kvspan.host.pages import Bytes
from kvspan.ops import Stream
from kvspan.vllm.fence import Fence

AHEAD, AT_ONCE = -1, -2  # priorities in a queue whose other copies have 0
_ALIGN = 256  # bytes, of what is staged

Pieces = list[Bytes]  # that belong together, one after the other


class Loading:
    """Where the device is the CPU: read in place."""

    def start(self, after: Stream) -> None:
        """A step's restores follow. after: a stream with what may still use what others read."""

    def begin(self, queue: CopyQueue, reads: Iterable[Pieces]) -> None:
        """A restore will read these, in this order. queue: which copies its KV, submitted later."""

    def read(self, pieces: Pieces, *, private: bool = False) -> torch.Tensor:
        """uint8, on the device: these bytes, until the next call. private: it may be written."""
        joined = len(pieces) > 1 or private
        return torch.from_numpy(np.concatenate(pieces) if joined else pieces[0])

    def end(self) -> None:
        """No more is read for the restore."""


@dataclass(eq=False)
class _Staged:
    """A read that is queued. start, end: its place in the ring; both 0 if it has one elsewhere."""

    key: tuple[int, ...]
    place: torch.Tensor
    job: CopyJob
    start: int = 0
    end: int = 0


class StagedLoading(Loading):
    """Where the device is a GPU: copied there ahead of KV, by the same queue.

    What a restore will read is queued first, as far as there is room, so that its replay starts
    while KV is still arriving; each read waits for its own copy alone, on the device. What has been
    used makes room for what comes later, which goes before the KV that is left. A read that nobody
    has announced goes before everything. Copies to places that were used in the same step wait for
    that use, and those behind them in the queue with them.

    staging: uint8, on the device: a ring. Two of the largest reads should fit.
    """

    def __init__(self, staging: torch.Tensor) -> None:
        self._staging = staging
        self._fence = Fence(staging.device)
        self._queue: CopyQueue | None = None
        self._planned: deque[Pieces] = deque()
        self._queued: deque[_Staged] = deque()
        self._used: _Staged | None = None  # by the last call
        self._after: Stream = 0
        self._head = self._high = 0  # ends of the last place given, and of those of this step

    def start(self, after: Stream) -> None:
        self._after = after
        self._head = self._high = 0

    def begin(self, queue: CopyQueue, reads: Iterable[Pieces]) -> None:
        self._queue = queue
        self._planned = deque(reads)
        self._fill()

    def read(self, pieces: Pieces, *, private: bool = False) -> torch.Tensor:
        self._used = None
        self._fill()
        key = _key(pieces)
        if self._queued and self._queued[0].key == key:
            found = self._queued.popleft()
        else:
            if not self._queued and self._planned and _key(self._planned[0]) == key:
                self._planned.popleft()  # larger than the ring
            nbytes = sum(map(len, pieces))
            place = torch.empty(nbytes, dtype=torch.uint8, device=self._staging.device)
            found = self._submit(pieces, place, AT_ONCE, self._fence.behind())
        self._used = found
        if not found.job.wait_on_stream(self._fence.current()):
            raise RuntimeError("what a restore reads was cancelled")
        return found.place

    def end(self) -> None:
        for one in self._queued:
            one.job.cancel()
        self._planned.clear()
        self._queued.clear()
        self._used = self._queue = None

    def _fill(self) -> None:
        """Queue what has room."""
        while self._planned:
            nbytes = sum(map(len, self._planned[0]))
            start = self._room(nbytes)
            if start is None:
                return
            after = self._after if start >= self._high else self._fence.behind()
            place = self._staging[start:][:nbytes]
            one = self._submit(self._planned.popleft(), place, AHEAD, after)
            one.start, one.end = start, start + -(-nbytes // _ALIGN) * _ALIGN
            self._head, self._high = one.end, max(self._high, one.end)
            self._queued.append(one)

    def _room(self, nbytes: int) -> int | None:
        """Where so many bytes are free behind the last read; None: nowhere yet."""
        live = [one for one in (self._used, *self._queued) if one is not None and one.end]
        size = len(self._staging)
        tail = live[0].start if live else size
        if live and live[-1].start < tail:  # it has come round
            return self._head if self._head + nbytes <= tail else None
        if self._head + nbytes <= size:
            return self._head
        return 0 if nbytes <= tail else None

    def _submit(self, pieces: Pieces, place: torch.Tensor, priority: int, after: Stream) -> _Staged:
        """after: what the place held may still be in use on the device."""
        assert self._queue is not None, "not begun"
        job = self._queue.submit(pieces, [place], priority=priority, after=after)
        return _Staged(_key(pieces), place, job)


def _key(pieces: Pieces) -> tuple[int, ...]:
    return tuple(number for piece in pieces for number in (piece.ctypes.data, piece.nbytes))
