"""Which entry goes first: GreedyDual-Size-Frequency."""

from __future__ import annotations

import heapq
import itertools


class EvictionOrder:
    """Keys that may be evicted, the one to go first in front. Not thread-safe.

    >>> order = EvictionOrder()
    >>> order.push(b"cheap", 1.0)
    >>> order.push(b"dear", 10.0)
    >>> order.push(b"cheap too", 1.0)
    >>> order.pop(), order.pop()
    (b'cheap', b'cheap too')
    """

    def __init__(self) -> None:
        self._clock = 0.0
        self._order = itertools.count()
        self._heap: list[tuple[float, int, bytes]] = []
        self._current: dict[bytes, tuple[float, int]] = {}  # of each key; others in _heap are stale

    def __len__(self) -> int:
        return len(self._current)

    def push(self, key: bytes, worth: float) -> None:
        """Adds a key, or moves it: ``worth`` above the clock, behind others of equal worth.

        Args:
            key: an entry's.
            worth: what is lost with it for each byte that it takes, >= 0.
        """
        place = (self._clock + worth, next(self._order))
        self._current[key] = place
        heapq.heappush(self._heap, (*place, key))
        if len(self._heap) > 64 + 2 * len(self._current):
            self._heap = [(*place, key) for key, place in self._current.items()]
            heapq.heapify(self._heap)

    def discard(self, key: bytes) -> None:
        """Takes a key out, if it is there."""
        self._current.pop(key, None)

    def pop(self) -> bytes | None:
        """Takes out the key that goes first, and sets the clock to its worth; None if empty."""
        while self._heap:
            height, number, key = heapq.heappop(self._heap)
            if self._current.get(key) == (height, number):
                del self._current[key]
                self._clock = height
                return key
        return None
