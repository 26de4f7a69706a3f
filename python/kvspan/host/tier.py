"""The store itself; :mod:`kvspan.host` tells how it is used."""

from __future__ import annotations

import math
import queue
import threading
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from kvspan import _core
from kvspan.host.disk import DiskLevel
from kvspan.host.entries import Entry, Reservation, View
from kvspan.host.eviction import EvictionOrder
from kvspan.host.pages import Bytes, PagePool, anonymous_memory, as_bytes, copy_bytes
from kvspan.host.stats import HostStats, LevelStats

_MAX_KEY_BYTES = 96  # twice as many letters must fit a file's name


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
        self._pool = PagePool(arena[:memory_bytes], page_bytes)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # of _pending_bytes and _loading
        self._entries: dict[bytes, Entry] = {}
        self._reserved: set[bytes] = set()
        self._loading: set[bytes] = set()  # from the disk
        self._order = EvictionOrder()  # of what is not pinned
        self._evictable_pages = 0
        self._stats = LevelStats(budget=self._pool.num_pages * page_bytes)
        self._misses = 0
        self._refusals: Counter[str] = Counter()
        self._closed = False
        self._disk = disk
        self._max_pending_bytes = (
            memory_bytes // 4 if max_pending_bytes is None else max_pending_bytes
        )
        self._pending_bytes = 0
        self._to_write: queue.SimpleQueue[Entry | None] = queue.SimpleQueue()
        self._writer: threading.Thread | None = None
        if disk and not disk.read_only:
            self._writer = threading.Thread(
                target=self._write_entries, name="kvspan-host-disk", daemon=True
            )
            self._writer.start()

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
        if self._in_memory(key):
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
        entry = self._reserve(key, nbytes, cost, kind)
        if entry is None:
            return None
        spans = self._pool.spans(entry.pages, nbytes)
        return Reservation(
            self._pool.pieces(spans),
            spans,
            partial(self._publish, entry),
            partial(self._settle, entry, to_disk=True),
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
        entry = self._find(key)
        if entry:
            with self._view(entry) as view:
                copy_bytes(view.pages, pieces)
            return True
        # Of what memory has no room for.
        found = nbytes is not None and self._disk is not None and self._disk.read(key, pieces)
        if not found:
            self._miss()
        return found

    def view(self, key: bytes) -> View | None:
        """An entry in place, brought into memory from the disk if that is where it is.

        Returns:
            None if it is not there, or on disk and there is no memory for it.

        Raises:
            ValueError: if the tier is closed.
        """
        entry = self._find(key)
        if entry is None:
            self._miss()
            return None
        return self._view(entry)

    def contains(self, key: bytes) -> bool:
        """Whether an entry is in memory or on disk."""
        return self.nbytes(key) is not None

    def nbytes(self, key: bytes) -> int | None:
        """An entry's length; None if it is not there."""
        with self._lock:
            self._check_open()
            entry = self._entries.get(key)
            if entry:
                return entry.nbytes
        return self._disk.nbytes(key) if self._disk else None

    def stored_keys(self) -> list[bytes]:
        """What is stored in memory or on disk, each key once."""
        with self._lock:
            self._check_open()
            found = dict.fromkeys(self._entries)
        if self._disk:
            found.update(dict.fromkeys(self._disk.stored_keys()))
        return list(found)

    def pin(self, key: bytes) -> bool:
        """Keeps an entry in memory (brings it there first) until as many :meth:`unpin`.

        Returns:
            False if it is not there.
        """
        found = self._find(key) is not None
        if not found:
            self._miss()
        return found

    def unpin(self, key: bytes) -> None:
        """Takes one pin off.

        Raises:
            ValueError: if the entry is not there or not pinned.
        """
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or entry.pins == 0:
                raise ValueError(f"key: expected a pinned entry, got {key.hex()}")
            self._unpin_locked(entry)

    def remove(self, key: bytes) -> None:
        """Removes an entry from every level, if it is there."""
        with self._lock:
            self._check_open()
            entry = self._entries.pop(key, None)
            if entry:
                entry.removed = True
                if entry.pins == 0:
                    self._order.discard(key)
                    self._evictable_pages -= len(entry.pages)
                    self._pool.give_back(entry.pages)
        if self._disk:
            self._disk.remove(key)

    def flush(self) -> None:
        """Returns once all that was stored before is on disk, or refused there."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending_bytes == 0)

    def stats(self) -> HostStats:
        """A snapshot."""
        with self._lock:
            by_kind: Counter[str] = Counter()
            num_pages = 0
            for entry in self._entries.values():
                by_kind[entry.kind] += entry.nbytes
                num_pages += len(entry.pages)
            memory = LevelStats(**vars(self._stats))
            memory.entries, memory.by_kind = len(self._entries), by_kind
            memory.bytes = num_pages * self._pool.page_bytes
            misses, refusals = self._misses, Counter(self._refusals)
        return HostStats(
            memory=memory,
            disk=self._disk.stats() if self._disk else None,
            misses=misses,
            refusals=refusals,
            ignored=self._disk.ignored() if self._disk else {},
        )

    def held_bytes(self) -> tuple[int, int]:
        """Bytes in use in memory, and on disk; unlike :meth:`stats`, at no cost."""
        with self._lock:
            memory = (self._pool.num_pages - self._pool.num_free) * self._pool.page_bytes
        return memory, self._disk.held_bytes() if self._disk else 0

    def counts(self) -> tuple[int, Counter[str]]:
        """Evictions from memory, and refusals by reason (``file: ...``: of files on disk) so far;
        unlike :meth:`stats`, at no cost."""
        with self._lock:
            evictions, why = self._stats.evictions, Counter(self._refusals)
        for reason, count in (self._disk.ignored() if self._disk else {}).items():
            why[f"file: {reason}"] = count
        return evictions, why

    def close(self) -> None:
        """Writes what waits for the disk, and closes; a second call does nothing.

        Views and reservations that are still out stay valid as memory, and no more than that.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._writer:
            self._to_write.put(None)
            self._writer.join()
        if self._disk:
            self._disk.close()

    def __contains__(self, key: bytes) -> bool:
        return self.contains(key)

    def __enter__(self) -> HostTier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _in_memory(self, key: bytes) -> bool:
        with self._lock:
            self._check_open()
            return key in self._entries

    def _reserve(self, key: bytes | None, nbytes: int, cost: float, kind: str) -> Entry | None:
        """Memory for an entry, pinned once and not found yet; None if it is refused."""
        count = self._pool.pages_for(nbytes)
        with self._lock:
            self._check_open()
            why = None
            if key is not None and (key in self._entries or key in self._reserved):
                why = "exists"
            elif count > self._pool.num_pages:
                why = "too large"
            elif count > self._pool.num_free + self._evictable_pages:
                why = "pinned"
            if why:
                self._refusals[why] += 1
                return None
            while count > self._pool.num_free:
                self._evict()
            entry = Entry(key or b"", kind, nbytes, cost, self._pool.take(count), 1, removed=True)
            if key is not None:
                entry.reserved = True
                self._reserved.add(key)
            return entry

    def _publish(self, entry: Entry, key: bytes, cost: float) -> bool:
        """Lets an entry that is being written be found under a key, and no other."""
        _check_key(key)
        _check_cost(cost)
        with self._lock:
            self._check_open()
            self._withdraw(entry)
            if key in self._entries or key in self._reserved:
                return False
            entry.key, entry.cost, entry.removed = key, cost, False
            self._entries[key] = entry
            return True

    def _settle(self, entry: Entry, committed: bool, *, to_disk: bool) -> None:
        """Ends what :meth:`_reserve` began."""
        with self._lock:
            key, reserved = entry.key, entry.reserved
            if reserved or not committed:
                self._withdraw(entry)
            if committed and reserved:
                entry.removed = False
                self._entries[key] = entry
            if not entry.removed:
                self._stats.stores += 1
                if to_disk and self._writer and not self._closed:
                    if self._pending_bytes + entry.nbytes <= self._max_pending_bytes:
                        self._pending_bytes += entry.nbytes
                        self._to_write.put(entry)
                        return  # the pin goes to the writer
                    self._refusals["disk: too much waits"] += 1
            self._unpin_locked(entry)

    def _miss(self) -> None:
        with self._lock:
            self._misses += 1

    def _find(self, key: bytes) -> Entry | None:
        """An entry, pinned, from the disk if need be; None also where memory has no room for it."""
        with self._lock:
            self._check_open()
            self._changed.wait_for(lambda: key not in self._loading)
            entry = self._entries.get(key)
            if entry:
                self._stats.hits += 1
                entry.uses += 1
                self._pin(entry)
                return entry
            if self._disk is None:
                return None
            self._loading.add(key)
        try:
            return self._load(key, self._disk)
        finally:
            with self._lock:
                self._loading.discard(key)
                self._changed.notify_all()

    def _load(self, key: bytes, disk: DiskLevel) -> Entry | None:
        described = disk.describe(key)
        if described is None:
            return None
        entry = self._reserve(key, *described)
        if entry is None:
            return None
        found = False
        try:
            spans = self._pool.spans(entry.pages, entry.nbytes)
            found = disk.read(key, self._pool.pieces(spans))
        finally:
            entry.pins += found  # the caller's, besides the one that ends here
            self._settle(entry, found, to_disk=False)
        return entry if found else None

    def _view(self, entry: Entry) -> View:
        spans = self._pool.spans(entry.pages, entry.nbytes)
        return View(self._pool.pieces(spans), spans, partial(self._unpin, entry))

    # With the lock held.

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("this host tier is closed")

    def _evict(self) -> None:
        key = self._order.pop()
        assert key is not None, "fewer pages can be evicted than were counted"
        entry = self._entries.pop(key)
        self._evictable_pages -= len(entry.pages)
        self._pool.give_back(entry.pages)
        self._stats.evictions += 1

    def _withdraw(self, entry: Entry) -> None:
        """An entry that is being written is found no more, and its key is anyone's."""
        if entry.reserved:
            self._reserved.discard(entry.key)
            entry.reserved = False
        if not entry.removed:
            del self._entries[entry.key]
            entry.removed = True

    def _pin(self, entry: Entry) -> None:
        if entry.pins == 0:
            self._order.discard(entry.key)
            self._evictable_pages -= len(entry.pages)
        entry.pins += 1

    def _unpin_locked(self, entry: Entry) -> None:
        entry.pins -= 1
        if entry.pins > 0:
            return
        if entry.removed:
            self._pool.give_back(entry.pages)
            return
        size = len(entry.pages) * self._pool.page_bytes
        self._order.push(entry.key, entry.uses * entry.cost / size)
        self._evictable_pages += len(entry.pages)

    # Without it.

    def _unpin(self, entry: Entry) -> None:
        with self._lock:
            self._unpin_locked(entry)

    def _write_entries(self) -> None:
        assert self._disk is not None
        while entry := self._to_write.get():
            why = None
            if not entry.removed:
                pieces = self._pool.pieces(self._pool.spans(entry.pages, entry.nbytes))
                why = self._disk.write(entry.key, pieces, entry.cost, entry.kind)
            with self._changed:
                removed = entry.removed
                if why:
                    self._refusals[why] += 1
                self._pending_bytes -= entry.nbytes
                self._unpin_locked(entry)
                if self._pending_bytes == 0:
                    self._changed.notify_all()
            if removed:  # while it was written
                self._disk.remove(entry.key)


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
