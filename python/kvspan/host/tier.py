"""The store itself; :mod:`kvspan.host` tells how it is used."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kvspan import _core
from kvspan.host.disk import DiskLevel
from kvspan.host.entries import Entry, Reservation, View
from kvspan.host.memory import MemoryLevel
from kvspan.host.pages import Bytes, anonymous_memory, as_bytes, copy_bytes
from kvspan.host.reading import DiskReader, Fetch
from kvspan.host.stats import HostStats
from kvspan.host.writing import DiskWriter

_CLEAR_S = 5.0  # that clear waits for a disk
_MAX_KEY_BYTES = 96  # twice as many letters must fit a file's name

_log = logging.getLogger("kvspan.host")


class HostTier:
    """Bytes by key, in memory and perhaps on disk; see :mod:`kvspan.host`.

    Args:
        memory_bytes: the memory to use; of the given one, if any, the first part.
        page_bytes: an entry takes whole pages.
        memory: a writable buffer of at least ``memory_bytes``, which must outlive the tier. Else
            the tier allocates its own, which the system provides page by page as it is first
            written.
        page_locked: lock the memory as long as the tier lives, for a :class:`CopyQueue` of a CUDA
            device.
        disk: the disk level; the tier closes it.
        max_pending_bytes: entries that wait to be written to disk hold their memory; beyond this
            many bytes new ones stay in memory only. None: a quarter of the memory.

    Raises:
        ValueError: for sizes that cannot be used.
        TypeError: if ``memory`` is no contiguous buffer.
        RuntimeError: if it cannot be page-locked: there is no CUDA device, or a limit.
    """

    def __init__(
        self,
        memory_bytes: int,
        *,
        page_bytes: int = 1 << 16,
        memory: Any = None,
        page_locked: bool = False,
        disk: DiskLevel | None = None,
        max_pending_bytes: int | None = None,
    ) -> None:
        if page_bytes < 1:
            raise ValueError(f"page_bytes: expected 1 or more, got {page_bytes}")
        if memory_bytes < page_bytes:
            raise ValueError(
                f"memory_bytes: expected at least one page of {page_bytes}, got {memory_bytes}"
            )
        if memory is None:
            arena = anonymous_memory(memory_bytes)
        else:
            arena = as_bytes(memory, "memory", writable=True)
            if len(arena) < memory_bytes:
                raise ValueError(
                    f"memory: expected at least {memory_bytes} bytes, got {len(arena)}"
                )
        self._page_lock = _core.PageLock(arena[:memory_bytes]) if page_locked else None
        self._memory = MemoryLevel(arena[:memory_bytes], page_bytes)
        self._disk = disk
        self._reader = DiskReader(self._memory, disk)
        self._writer: DiskWriter | None = None
        if disk and not disk.read_only:
            if max_pending_bytes is None:
                max_pending_bytes = memory_bytes // 4
            self._writer = DiskWriter(self._memory, disk, max_pending_bytes)
        self._misses = 0
        self._closed = False

    def put(self, key: bytes, parts: Any, *, cost: float, kind: str = "span") -> bool:
        """Stores a copy of the parts, one after the other, under a key.

        Args:
            key: 1 to 96 bytes. What is stored under it already stays.
            parts: a buffer or a sequence of buffers (C-contiguous), not empty.
            cost: FLOPs that a hit saves, >= 0.
            kind: what it is, for the statistics.

        Returns:
            Whether it can be found now; False if it was refused.

        Raises:
            ValueError, TypeError: for arguments that cannot be used, or a tier that is closed.
        """
        pieces = _pieces(parts, "parts")
        if self.in_memory(key):
            return True
        reservation = self.reserve(key, sum(map(len, pieces)), cost=cost, kind=kind)
        if reservation is None:
            return False
        with reservation:
            copy_bytes(pieces, reservation.pages)
        return True

    def reserve(
        self, key: bytes | None, nbytes: int, *, cost: float = 0.0, kind: str = "span"
    ) -> Reservation | None:
        """Memory for an entry that the caller writes; evicts what it must.

        Args:
            key: as for :meth:`put`; None: it is told later, by :meth:`Reservation.publish`.
            nbytes: the entry's length, 1 or more.
            cost: as for :meth:`put`.
            kind: as for :meth:`put`.

        Returns:
            None if it is refused: ``exists`` (stored already, or reserved by another), ``too
            large`` for the memory, or ``pinned``: what could be evicted does not suffice.

        Raises:
            ValueError: for arguments that cannot be used, or a tier that is closed.
        """
        if key is not None:
            _check_key(key)
        if nbytes < 1:
            raise ValueError(f"nbytes: expected 1 or more, got {nbytes}")
        _check_cost(cost)
        self._check_open()
        entry = self._memory.reserve(key, nbytes, cost, kind)
        if entry is None:
            return None
        return Reservation(
            self._memory.pieces(entry),
            entry.spans,
            partial(self._publish, entry),
            partial(self._settle, entry),
        )

    def get(self, key: bytes, out: Any) -> bool:
        """Copies an entry into buffers.

        Args:
            key: an entry's.
            out: a writable buffer or a sequence of them (C-contiguous), together as long as the
                entry; undefined afterwards if the answer is False.

        Returns:
            Whether it was there.

        Raises:
            ValueError: if ``out`` has another length, or the tier is closed.
            TypeError: if it is no contiguous buffer.
        """
        pieces = _pieces(out, "out", writable=True)
        size = sum(map(len, pieces))
        nbytes = self.nbytes(key)
        if nbytes not in (None, size):
            raise ValueError(f"out: expected {nbytes} bytes, got {size}")
        entry = self._reader.find(key)
        if entry:
            with self._view(entry) as view:
                copy_bytes(view.pages, pieces)
            return True
        # Of what memory has no room for.
        found = nbytes is not None and self._disk is not None and self._disk.read(key, pieces)
        if not found:
            self._miss()
        return found

    def view(self, key: bytes, *, from_disk: bool = True) -> View | None:
        """An entry in place, brought into memory from the disk if that is where it is.

        Args:
            key: an entry's.
            from_disk: False: only if it is in memory; this never waits for the disk then.

        Returns:
            None if it is not there, or on disk and there is no memory for it.

        Raises:
            ValueError: if the tier is closed.
        """
        self._check_open()
        entry = self._reader.find(key) if from_disk else self._memory.find(key)
        if entry is None:
            self._miss()
            return None
        return self._view(entry)

    def fetch(self, keys: Sequence[bytes], then: Callable[[Fetch], None] | None = None) -> Fetch:
        """Begins to bring entries into memory; the disk is read in the background, a few files at a
        time, in this order and after what others have asked for.

        Args:
            keys: entries'; those that are nowhere are passed over.
            then: called once all of them are in memory or cannot be had (:attr:`Fetch.done`): by
                the thread that has read the last one, or by this one if there is nothing to read.
                Not after :meth:`Fetch.release`, and not once the tier is closed.

        Returns:
            What pins those that are there, and later those that come, until its ``release()``.

        Raises:
            ValueError: if the tier is closed.
        """
        self._check_open()
        return self._reader.fetch(keys, then)

    def stalled(self, seconds: float) -> bool:
        """Whether the disk is slow to answer: a file is being read for longer than that."""
        return self._reader.stalled(seconds)

    def contains(self, key: bytes) -> bool:
        """Whether an entry is in memory or on disk."""
        return self.nbytes(key) is not None

    def in_memory(self, key: bytes) -> bool:
        """Whether an entry is in memory."""
        self._check_open()
        return self._memory.peek(key) is not None

    def nbytes(self, key: bytes) -> int | None:
        """An entry's length; None if it is not there."""
        self._check_open()
        entry = self._memory.peek(key)
        if entry:
            return entry.nbytes
        return self._disk.nbytes(key) if self._disk else None

    def stored_keys(self) -> list[bytes]:
        """What is stored in memory or on disk, each key once."""
        self._check_open()
        found = dict.fromkeys(self._memory.stored_keys())
        if self._disk:
            found.update(dict.fromkeys(self._disk.stored_keys()))
        return list(found)

    def pin(self, key: bytes) -> bool:
        """Keeps an entry in memory (brings it there first) until as many :meth:`unpin`.

        Returns:
            False if it is not there.
        """
        self._check_open()
        found = self._reader.find(key) is not None
        if not found:
            self._miss()
        return found

    def unpin(self, key: bytes) -> None:
        """Takes one pin off.

        Raises:
            ValueError: if the entry is not there or not pinned.
        """
        with self._memory.lock:
            entry = self._memory.peek(key)
            if entry is None or entry.pins == 0:
                raise ValueError(f"key: expected a pinned entry, got {key.hex()}")
            self._memory.unpin(entry)

    def remove(self, key: bytes) -> None:
        """Removes an entry from every level, if it is there, also one that is being read.

        It cannot be found from now on; its file goes in the background."""
        self._check_open()
        self._reader.remove(key)
        if self._disk and self._disk.discard(key) and self._writer:
            self._writer.sweep()

    def clear(self) -> None:
        """Removes all entries that can be found, or are being read.

        Their files are gone as well when this returns, unless the disk does not answer for some
        seconds: they go later then.
        """
        for key in {*self.stored_keys(), *self._reader.keys()}:
            self.remove(key)
        if self._writer:
            self._writer.sweep()  # also after what is being written just now
            if not self._writer.swept(_CLEAR_S):
                _log.warning("host tier: files were not removed in %g s; they go later", _CLEAR_S)

    def flush(self) -> None:
        """Returns once all that was stored before is on disk, or refused there, and the files of
        what was removed are gone."""
        if self._writer:
            self._writer.flush()

    def stats(self) -> HostStats:
        """A snapshot."""
        with self._memory.lock:
            memory = self._memory.stats()
            misses, refusals = self._misses, Counter(self._memory.refusals)
        return HostStats(
            memory=memory,
            disk=self._disk.stats() if self._disk else None,
            misses=misses,
            refusals=refusals,
            ignored=self._disk.ignored() if self._disk else {},
        )

    def held_bytes(self) -> tuple[int, int]:
        """Bytes in use in memory, and on disk; unlike :meth:`stats`, at no cost."""
        return self._memory.held_bytes(), self._disk.held_bytes() if self._disk else 0

    def pinned_bytes(self) -> int:
        """Bytes of memory that nobody else could get now: of pinned entries, and of those that are
        being written or read."""
        return self._memory.pinned_bytes()

    def counts(self) -> tuple[int, Counter[str]]:
        """Evictions from memory, and refusals by reason (``file: ...``: of files on disk) so far;
        unlike :meth:`stats`, at no cost."""
        with self._memory.lock:
            evictions, why = self._memory.evictions, Counter(self._memory.refusals)
        for reason, count in (self._disk.ignored() if self._disk else {}).items():
            why[f"file: {reason}"] = count
        return evictions, why

    def close(self) -> None:
        """Writes what waits for the disk, and closes; a second call does nothing.

        Views and reservations that are still out stay valid as memory, and no more than that. What
        waits to be read is not; what is being read is waited for, but for a few seconds only.
        """
        with self._memory.lock:
            if self._closed:
                return
            self._closed = True
        self._reader.close()
        if self._writer:
            self._writer.close()
        if self._disk:
            self._disk.close()

    def __contains__(self, key: bytes) -> bool:
        return self.contains(key)

    def __enter__(self) -> HostTier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("this host tier is closed")

    def _publish(self, entry: Entry, key: bytes, cost: float) -> bool:
        """Lets an entry that is being written be found under a key, and no other."""
        _check_key(key)
        _check_cost(cost)
        self._check_open()
        return self._memory.publish(entry, key, cost)

    def _settle(self, entry: Entry, committed: bool) -> None:
        """Ends a reservation."""
        stored = self._memory.settle(entry, committed)
        if stored and self._writer and self._writer.put(entry):
            return  # the pin is the writer's
        self._memory.unpin(entry)

    def _miss(self) -> None:
        with self._memory.lock:
            self._misses += 1

    def _view(self, entry: Entry) -> View:
        return View(self._memory.pieces(entry), entry.spans, partial(self._memory.unpin, entry))


def _check_key(key: bytes) -> None:
    if not 0 < len(key) <= _MAX_KEY_BYTES:
        raise ValueError(f"key: expected 1 to {_MAX_KEY_BYTES} bytes, got {len(key)}")


def _check_cost(cost: float) -> None:
    if not (math.isfinite(cost) and cost >= 0):
        raise ValueError(f"cost: expected a number >= 0, got {cost}")


def _pieces(buffers: Any, name: str, *, writable: bool = False) -> list[Bytes]:
    if isinstance(buffers, Sequence) and not isinstance(buffers, (bytes, bytearray, memoryview)):
        return [
            as_bytes(buffer, f"{name}[{i}]", writable=writable) for i, buffer in enumerate(buffers)
        ]
    return [as_bytes(buffers, name, writable=writable)]
