"""The memory level of a host tier: entries in pages, pinned or up for eviction."""

from __future__ import annotations

import threading
from collections import Counter

from kvspan.host.entries import Entry
from kvspan.host.eviction import EvictionOrder
from kvspan.host.pages import Bytes, PagePool
from kvspan.host.stats import LevelStats


class MemoryLevel:
    """Entries by key. Threads may share it; what they write to pages is not locked.

    Args:
        memory: bytes; what is left behind the last whole page is not used.
        page_bytes: an entry takes whole pages.

    Attributes:
        lock: held by every method; reentrant, so that several calls can be one.
        refusals: of :meth:`reserve`, and of others who count here, by reason.
    """

    def __init__(self, memory: Bytes, page_bytes: int) -> None:
        self.lock = threading.RLock()
        self.refusals: Counter[str] = Counter()
        self._pool = PagePool(memory, page_bytes)
        self._entries: dict[bytes, Entry] = {}
        self._reserved: set[bytes] = set()
        self._order = EvictionOrder()  # of what is not pinned
        self._evictable_pages = 0
        self._stats = LevelStats(budget=self._pool.num_pages * page_bytes)

    def reserve(self, key: bytes | None, nbytes: int, cost: float, kind: str) -> Entry | None:
        """Memory for an entry, pinned once and not found yet; evicts what it must.

        Args:
            key: nobody else gets it meanwhile; None: it is told by :meth:`publish`.
            nbytes, cost, kind: the entry's.

        Returns:
            None if it is refused, for one of the reasons of :meth:`HostTier.reserve`.
        """
        count = self._pool.pages_for(nbytes)
        with self.lock:
            why = None
            if key is not None and (key in self._entries or key in self._reserved):
                why = "exists"
            elif count > self._pool.num_pages:
                why = "too large"
            elif count > self._pool.num_free + self._evictable_pages:
                why = "pinned"
            if why:
                self.refusals[why] += 1
                return None
            while count > self._pool.num_free:
                self._evict()
            pages = self._pool.take(count)
            spans = self._pool.spans(pages, nbytes)
            entry = Entry(key or b"", kind, nbytes, cost, pages, spans, 1, removed=True)
            if key is not None:
                entry.reserved = True
                self._reserved.add(key)
            return entry

    def pieces(self, entry: Entry) -> list[Bytes]:
        """An entry's bytes, in order."""
        return self._pool.pieces(entry.spans)

    def publish(self, entry: Entry, key: bytes, cost: float) -> bool:
        """Lets an entry that is being written be found under a key, and no other; False, and under
        none, if the key is another's."""
        with self.lock:
            self.withdraw(entry)
            if key in self._entries or key in self._reserved:
                return False
            entry.key, entry.cost, entry.removed = key, cost, False
            self._entries[key] = entry
            return True

    def withdraw(self, entry: Entry) -> None:
        """An entry that is being written is found no more, and its key is anyone's."""
        with self.lock:
            if entry.reserved:
                self._reserved.discard(entry.key)
                entry.reserved = False
            if not entry.removed:
                del self._entries[entry.key]
                entry.removed = True

    def settle(self, entry: Entry, committed: bool) -> bool:
        """Ends what :meth:`reserve` began, but for the pin. Whether it can be found now."""
        with self.lock:
            reserved = entry.reserved
            if reserved or not committed:
                self.withdraw(entry)
            if committed and reserved:
                entry.removed = False
                self._entries[entry.key] = entry
            if not entry.removed:
                self._stats.stores += 1
            return not entry.removed

    def find(self, key: bytes) -> Entry | None:
        """An entry, pinned: a hit. None if it is not there."""
        with self.lock:
            entry = self._entries.get(key)
            if entry:
                self._stats.hits += 1
                entry.uses += 1
                self.pin(entry)
            return entry

    def peek(self, key: bytes) -> Entry | None:
        """An entry, which goes on as if nobody had looked; None if it is not there."""
        with self.lock:
            return self._entries.get(key)

    def pin(self, entry: Entry) -> None:
        """Keeps it until as many :meth:`unpin`."""
        with self.lock:
            if entry.pins == 0:
                self._order.discard(entry.key)
                self._evictable_pages -= len(entry.pages)
            entry.pins += 1

    def unpin(self, entry: Entry) -> None:
        """Takes one pin off; without any it may be evicted, or is freed if it was removed."""
        with self.lock:
            entry.pins -= 1
            if entry.pins > 0:
                return
            if entry.removed:
                self._pool.give_back(entry.pages)
                return
            size = len(entry.pages) * self._pool.page_bytes
            self._order.push(entry.key, entry.uses * entry.cost / size)
            self._evictable_pages += len(entry.pages)

    def remove(self, key: bytes) -> None:
        """Removes an entry, if it is there; its memory is free once its last pin is."""
        with self.lock:
            entry = self._entries.pop(key, None)
            if entry:
                entry.removed = True
                if entry.pins == 0:
                    self._order.discard(key)
                    self._evictable_pages -= len(entry.pages)
                    self._pool.give_back(entry.pages)

    def stored_keys(self) -> list[bytes]:
        with self.lock:
            return list(self._entries)

    def stats(self) -> LevelStats:
        """A snapshot."""
        with self.lock:
            by_kind: Counter[str] = Counter()
            num_pages = 0
            for entry in self._entries.values():
                by_kind[entry.kind] += entry.nbytes
                num_pages += len(entry.pages)
            stats = LevelStats(**vars(self._stats))
            stats.entries, stats.by_kind = len(self._entries), by_kind
            stats.bytes = num_pages * self._pool.page_bytes
            return stats

    def held_bytes(self) -> int:
        """Bytes in use."""
        with self.lock:
            return (self._pool.num_pages - self._pool.num_free) * self._pool.page_bytes

    def pinned_bytes(self) -> int:
        """Bytes that nobody else could get now: of pinned entries, and of those being written."""
        with self.lock:
            free = self._pool.num_free + self._evictable_pages
            return (self._pool.num_pages - free) * self._pool.page_bytes

    @property
    def evictions(self) -> int:
        """So far."""
        return self._stats.evictions

    def _evict(self) -> None:
        key = self._order.pop()
        assert key is not None, "fewer pages can be evicted than were counted"
        entry = self._entries.pop(key)
        self._evictable_pages -= len(entry.pages)
        self._pool.give_back(entry.pages)
        self._stats.evictions += 1
