"""Entries of the memory level, and what callers hold of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from kvspan.host.pages import Bytes


@dataclass(eq=False)
class Entry:
    """An entry in memory, or one that is being written.

    Attributes:
        key: its key.
        kind: for the statistics.
        nbytes: its length.
        cost: FLOPs that a hit saves.
        pages: its pages, in order.
        pins: who uses it; it is evicted only at 0.
        uses: its store, and hits since.
        removed: not found any more; its pages are freed with its last pin.
    """

    key: bytes
    kind: str
    nbytes: int
    cost: float
    pages: list[int]
    pins: int = 0
    uses: int = 1
    removed: bool = False


class View:
    """An entry in place, pinned until :meth:`release` or the end of ``with``.

    Attributes:
        pages: read-only arrays of bytes; together they are the entry, in order.
    """

    def __init__(self, pages: list[Bytes], unpin: Callable[[], None]) -> None:
        self.pages = pages
        self._unpin: Callable[[], None] | None = unpin
        for page in pages:
            page.flags.writeable = False

    @property
    def nbytes(self) -> int:
        """The entry's length."""
        return sum(map(len, self.pages))

    def release(self) -> None:
        """Takes the pin off, once; ``pages`` must not be used afterwards."""
        unpin, self._unpin = self._unpin, None
        if unpin:
            unpin()

    def __enter__(self) -> View:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Reservation:
    """Memory of an entry to be. As a context manager it commits, or aborts on an exception.

    Attributes:
        pages: writable arrays of bytes, together as long as was asked for.
    """

    def __init__(self, pages: list[Bytes], settle: Callable[[bool], None]) -> None:
        self.pages = pages
        self._settle: Callable[[bool], None] | None = settle

    def commit(self) -> None:
        """The pages are written: the entry can be found. Only the first call counts."""
        self._end(True)

    def abort(self) -> None:
        """Gives the pages back; the entry never was. Only the first call counts."""
        self._end(False)

    def _end(self, committed: bool) -> None:
        settle, self._settle = self._settle, None
        if settle:
            settle(committed)

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end(kind is None)
