"""Memory in pages of one size."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
_MADV_POPULATE_WRITE = 23  # Linux's; Python has no name for it
_STEP = 1 << 28
Spans = tuple[tuple[int, int], ...]  # (offset, length) in a piece of memory, in bytes


def as_bytes(buffer: Any, name: str, *, writable: bool = False) -> Bytes:
    """A view of a buffer's bytes (anything with the buffer protocol, C-contiguous).

    Raises:
        TypeError: if it is no such buffer.
        ValueError: if it should be writable and is not.
    """
    try:
        view = memoryview(buffer)
        if view.nbytes == 0:
            return np.empty(0, np.uint8)
        view = view.cast("B")
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name}: expected a contiguous buffer of bytes: {error}") from None
    if writable and view.readonly:
        raise ValueError(f"{name}: expected a writable buffer, got a read-only one")
    return np.frombuffer(view, np.uint8)


def anonymous_memory(nbytes: int, *, provided: bool = False) -> Bytes:
    """Memory of this process, in huge pages where the system has them.

    provided: as for :func:`provide`; otherwise the first write of each page waits for the system.
    """
    memory = mmap.mmap(-1, nbytes)
    if provided:
        provide(memory)
    else:
        ask_huge_pages(memory)
    return np.frombuffer(memory, np.uint8)


def ask_huge_pages(memory: mmap.mmap) -> None:
    """Without them the first write of each 4 KiB costs more than what is written."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)


def provide(memory: mmap.mmap) -> None:
    """Have the system provide all of the memory now, its content unchanged: 0.1 to 0.6 s per GiB.

    Later writes then cost what they copy, no more. Linux before 5.14 goes on without.
    """
    ask_huge_pages(memory)
    with contextlib.suppress(OSError):
        for start in range(0, len(memory), _STEP):  # a signal comes through between steps
            memory.madvise(_MADV_POPULATE_WRITE, start, min(_STEP, len(memory) - start))


def copy_bytes(src: Sequence[Bytes], dst: Sequence[Bytes]) -> None:
    """Copies bytes between two lists of pieces, together of one length, cut anywhere."""
    targets = iter(dst)
    target = np.empty(0, np.uint8)
    for piece in src:
        while len(piece):
            while not len(target):
                target = next(targets)
            count = min(len(piece), len(target))
            np.copyto(target[:count], piece[:count])
            piece, target = piece[count:], target[count:]


class PagePool:
    """Pages of one piece of memory. Not thread-safe but for the pages' content.

    Args:
        memory: bytes; what is left behind the last whole page is not used.
        page_bytes: 1 or more.
    """

    def __init__(self, memory: Bytes, page_bytes: int) -> None:
        self._memory = memory
        self.page_bytes = page_bytes
        self.num_pages = len(memory) // page_bytes
        self._free = list(range(self.num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Pages that are free."""
        return len(self._free)

    def pages_for(self, nbytes: int) -> int:
        """How many pages hold ``nbytes``."""
        return -(-nbytes // self.page_bytes)

    def take(self, count: int) -> list[int]:
        """Takes ``count`` pages, in rising order; there must be as many free ones."""
        pages = sorted(self._free[len(self._free) - count :])
        del self._free[len(self._free) - count :]
        return pages

    def give_back(self, pages: list[int]) -> None:
        """Frees pages."""
        self._free.extend(reversed(pages))

    def spans(self, pages: list[int], nbytes: int) -> Spans:
        """Where the first ``nbytes`` of the pages lie; those side by side are one span."""
        spans: list[tuple[int, int]] = []
        at = 0
        while at < len(pages):
            end = at + 1
            while end < len(pages) and pages[end] == pages[end - 1] + 1:
                end += 1
            count = min((end - at) * self.page_bytes, nbytes)
            spans.append((pages[at] * self.page_bytes, count))
            nbytes -= count
            at = end
        return tuple(spans)

    def pieces(self, spans: Spans) -> list[Bytes]:
        """The memory there."""
        return [self._memory[start : start + count] for start, count in spans]
