"""Entries of the memory level, and what callers hold of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from kvspan.host.pages import Bytes, Spans


@dataclass(eq=False)
class Entry:
    """An entry in memory, or one that is being written.

    Attributes:
        key: its key.
        kind: for the statistics.
        nbytes: its length.
        cost: FLOPs that a hit saves.
        pages: its pages, in order.
        spans: where its bytes lie in the level's memory.
        pins: who uses it; it is evicted only at 0.
        uses: its store, and hits since.
        removed: not found, any more or yet; its pages are freed with its last pin.
        reserved: its key is kept for it.
    """

    key: bytes
    kind: str
    nbytes: int
    cost: float
    pages: list[int]
    spans: Spans
    pins: int = 0
    uses: int = 1
    removed: bool = False
    reserved: bool = False


class View:
    """An entry in place, pinned until :meth:`release` or the end of ``with``.

    Attributes:
        pages: read-only arrays of bytes; together they are the entry, in order.
        spans: where these lie in the tier's memory.
    """

    def __init__(self, pages: list[Bytes], spans: Spans, unpin: Callable[[], None]) -> None:
        self.pages = pages
        self.spans = spans
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
        spans: where these lie in the tier's memory, for a writer in another process.
    """

    def __init__(
        self,
        pages: list[Bytes],
        spans: Spans,
        name: Callable[[bytes, float], bool],
        settle: Callable[[bool], None],
    ) -> None:
        self.pages = pages
        self.spans = spans
        self._name = name
        self._settle: Callable[[bool], None] | None = settle

    def publish(self, key: bytes, cost: float) -> bool:
        """Lets the entry be found under a key while its writer holds it, and writes on.

        It is found under the latest key only. What readers rely on must not be written again but
        with the same bytes; the disk level gets a copy at :meth:`commit`.

        Returns:
            False if the key is another entry's: this one is found under none then.

        Raises:
            ValueError: for arguments that cannot be used, a tier that is closed, or after the end.
        """
        if self._settle is None:
            raise ValueError("this reservation has ended")
        return self._name(key, cost)

    def commit(self) -> None:
        """The pages are written: the entry can be found, under the key that it was reserved for or
        published under last. Without one it is given back. Only the first call counts."""
        self._end(True)

    def abort(self) -> None:
        """Gives the pages back; the entry is not found. Only the first call counts."""
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
