"""Book-keeping of a paged KV pool: reference counts, cache keys, least-recently-used eviction."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Hashable, Iterable

from kvspan.errors import KvspanError


class PoolFullError(KvspanError):
    """Fewer blocks are free than were asked for."""


class BlockPool:
    """num_blocks blocks, each referenced, cached (a key, no reference: may be evicted) or free.

    A block gets its key only once its data has been written (DESIGN contract 3), so that whatever
    `lookup` finds is a legal source.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._free = list(range(num_blocks))  # a heap: low ids first keeps runs contiguous
        self._key_of: dict[int, Hashable] = {}
        self._block_of: dict[Hashable, int] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out: free ones and evictable ones."""
        return len(self._free) + len(self._evictable)

    @property
    def num_evictable(self) -> int:
        """Cached blocks that nobody references."""
        return len(self._evictable)

    @property
    def num_cached(self) -> int:
        return len(self._key_of)

    def lookup(self, key: Hashable) -> int | None:
        """The block cached under key, not referenced by this call."""
        return self._block_of.get(key)

    def acquire(self, blocks: Iterable[int]) -> None:
        """Reference blocks that `lookup` found."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._evictable[block]
            self._refs[block] += 1

    def allocate(self, count: int) -> list[int]:
        """count blocks with one reference each and no key, evicting cached ones if need be."""
        if count > self.num_available:
            raise PoolFullError(
                f"KV pool: expected {count} free blocks, got {self.num_available} "
                f"of {self.num_blocks}"
            )
        out = []
        for _ in range(count):
            if self._free:
                block = heapq.heappop(self._free)
            else:
                block, _none = self._evictable.popitem(last=False)
                self._drop_key(block)
            self._refs[block] = 1
            out.append(block)
        return out

    def release(self, blocks: Iterable[int]) -> None:
        """Give back one reference each; the first given back is the first to be evicted."""
        for block in blocks:
            self._refs[block] -= 1
            if self._refs[block] < 0:
                raise AssertionError(f"block {block} released more often than acquired")
            if self._refs[block] == 0:
                if block in self._key_of:
                    self._evictable[block] = None
                else:
                    heapq.heappush(self._free, block)

    def register(self, block: int, key: Hashable) -> None:
        """Make a written, referenced block findable; the first block under a key stays."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def evict(self, count: int | None = None) -> int:
        """Forget up to count unreferenced cached blocks (all by default); how many were."""
        evicted = 0
        while self._evictable and (count is None or evicted < count):
            block, _none = self._evictable.popitem(last=False)
            self._drop_key(block)
            heapq.heappush(self._free, block)
            evicted += 1
        return evicted

    def _drop_key(self, block: int) -> None:
        del self._block_of[self._key_of.pop(block)]
