"""Entries of a host tier on their way from disk to memory.

Files are read by a few threads, or by the thread of a caller that waits; several who want the same
entry read it once. What is read is checked where it will be used and cannot be found before.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from kvspan.host.disk import DiskLevel
from kvspan.host.entries import Entry
from kvspan.host.memory import MemoryLevel

_NUM_THREADS = 4
_JOIN_S = 5.0  # at the end, for reads under way

_log = logging.getLogger("kvspan.host")


class _Reading:
    """A file to be read. fetches: that wait for it. begun: by a thread. dropped: wanted no more."""

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.fetches: list[Fetch] = []
        self.entry: Entry | None = None
        self.begun = False
        self.dropped = False


class Fetch:
    """Entries that are brought into memory, and pinned there until :meth:`release`.

    Attributes:
        nbytes: what had to be read so far.
    """

    def __init__(self, reader: DiskReader, then: Callable[[Fetch], None] | None) -> None:
        self.nbytes = 0
        self._reader = reader
        self._then = then
        self._waits_for: list[_Reading] = []
        self._entries: list[Entry] = []
        self._began = time.monotonic()
        self._ended: float | None = None

    @property
    def done(self) -> bool:
        """Whether all of them are in memory, or cannot be had."""
        return self._ended is not None

    @property
    def seconds(self) -> float:
        """From its start to its end, or until now."""
        return (self._ended or time.monotonic()) - self._began

    def release(self) -> None:
        """Takes the pins off, once. What has not been read yet is not, unless others wait for it;
        of what is being read nobody is told."""
        self._reader.leave(self)


class DiskReader:
    """Brings entries from ``disk`` into ``memory``. Threads may share it; its own start when there
    is something to read in the background."""

    def __init__(
        self, memory: MemoryLevel, disk: DiskLevel | None, num_threads: int = _NUM_THREADS
    ) -> None:
        self._memory = memory
        self._disk = disk
        self._num_threads = num_threads
        self._work = threading.Condition(memory.lock)
        self._ended = threading.Condition(memory.lock)
        self._readings: dict[bytes, _Reading] = {}
        self._under_way: dict[_Reading, float] = {}  # since when
        self._queue: deque[_Reading] = deque()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed = False

    def find(self, key: bytes) -> Entry | None:
        """An entry, pinned, read by this thread if need be; None also where memory has no room."""
        with self._memory.lock:
            while True:
                entry = self._memory.find(key)
                if entry is not None or self._disk is None:
                    return entry
                reading = self._readings.get(key)
                if reading is None:
                    reading = self._readings[key] = _Reading(key)
                    break
                if not reading.begun:  # sooner than the threads will
                    self._queue.remove(reading)
                    break
                while self._readings.get(key) is reading:
                    self._ended.wait()
            reading.begun = True
        self._reserve(reading)
        return self._read(reading)

    def fetch(self, keys: Sequence[bytes], then: Callable[[Fetch], None] | None) -> Fetch:
        """See :meth:`HostTier.fetch`."""
        fetch = Fetch(self, then)
        with self._memory.lock:
            for key in dict.fromkeys(keys):
                entry = self._memory.peek(key)
                if entry is not None:
                    self._memory.pin(entry)
                    fetch._entries.append(entry)
                elif not self._closed and self._disk is not None and self._disk.nbytes(key):
                    reading = self._readings.get(key)
                    if reading is None:
                        reading = self._readings[key] = _Reading(key)
                        self._enqueue(reading)
                    reading.fetches.append(fetch)
                    fetch._waits_for.append(reading)
            at_once = not fetch._waits_for
            if at_once:
                fetch._ended = fetch._began
        if at_once:
            _tell(fetch)
        return fetch

    def leave(self, fetch: Fetch) -> None:
        """A fetch is over or given up."""
        with self._memory.lock:
            fetch._then = None
            if fetch._ended is None:
                fetch._ended = time.monotonic()
            for reading in fetch._waits_for:
                reading.fetches.remove(fetch)
                if not reading.fetches and not reading.begun and reading in self._queue:
                    self._queue.remove(reading)
                    self._forget(reading)
            for entry in fetch._entries:
                self._memory.unpin(entry)
            fetch._waits_for, fetch._entries = [], []

    def remove(self, key: bytes) -> None:
        """Removes an entry from memory, also one that is being read: who waits for it is told."""
        over: list[Fetch] = []
        with self._memory.lock:
            self._memory.remove(key)
            reading = self._readings.pop(key, None)
            if reading is not None:
                reading.dropped = True
                if reading.entry is not None:
                    self._memory.withdraw(reading.entry)
                if not reading.begun and reading in self._queue:
                    self._queue.remove(reading)
                over = self._end_fetches(reading, None)
                self._ended.notify_all()
        for fetch in over:
            _tell(fetch)

    def stalled(self, seconds: float) -> bool:
        """Whether a file is being read for longer than that."""
        latest = time.monotonic() - seconds
        with self._memory.lock:
            return any(began < latest for began in self._under_way.values())

    def keys(self) -> list[bytes]:
        """Of what is being read, or waits for that."""
        with self._memory.lock:
            return list(self._readings)

    def close(self) -> None:
        """Reads nothing more. Waits a little for what is under way; a disk that hangs does not hold
        up the end, its thread dies with the process."""
        with self._memory.lock:
            self._closed = True
            self._queue.clear()
            self._work.notify_all()
            threads = list(self._threads)
        end = time.monotonic() + _JOIN_S
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        if left := sum(thread.is_alive() for thread in threads):
            _log.warning("host tier: %d reads from disk did not end in %g s", left, _JOIN_S)

    def _enqueue(self, reading: _Reading) -> None:
        """With the lock held."""
        self._queue.append(reading)
        if len(self._queue) > self._idle and len(self._threads) < self._num_threads:
            name = f"kvspan-host-read-{len(self._threads)}"
            self._threads.append(threading.Thread(target=self._run, name=name, daemon=True))
            self._threads[-1].start()
        self._work.notify()

    def _run(self) -> None:
        while True:
            with self._memory.lock:
                self._idle += 1
                self._work.wait_for(lambda: self._queue or self._closed)
                self._idle -= 1
                if self._closed:
                    return
                reading = self._queue.popleft()
                reading.begun = True
                self._reserve(reading)  # so that who was first in the queue is first here, too
            entry = self._read(reading)
            if entry is not None:
                self._memory.unpin(entry)

    def _read(self, reading: _Reading) -> Entry | None:
        """Reads, and tells all who wait. The entry, pinned; None if it cannot be had."""
        with self._memory.lock:
            self._under_way[reading] = time.monotonic()
        try:
            found = self._fill(reading)
        except Exception:  # what waits must be told all the same
            _log.exception("host tier: reading from disk failed")
            found = False
        for fetch in self._end(reading, found):
            _tell(fetch)
        return reading.entry if found and not reading.dropped else None

    def _reserve(self, reading: _Reading) -> None:
        """Memory for what is read, if there is any."""
        assert self._disk is not None
        described = self._disk.describe(reading.key)
        if described is not None:
            with self._memory.lock:
                if not reading.dropped:
                    reading.entry = self._memory.reserve(reading.key, *described)

    def _fill(self, reading: _Reading) -> bool:
        if reading.entry is None:
            return False
        assert self._disk is not None
        return self._disk.read(reading.key, self._memory.pieces(reading.entry))

    def _end(self, reading: _Reading, found: bool) -> list[Fetch]:
        """Returns the fetches that are complete with this."""
        with self._memory.lock:
            del self._under_way[reading]
            entry = reading.entry
            found = found and not reading.dropped
            if entry is not None:
                self._memory.settle(entry, found)
            over = self._end_fetches(reading, entry if found else None)
            if entry is not None and not found:
                self._memory.unpin(entry)
            self._forget(reading)
            self._ended.notify_all()
            return over

    def _end_fetches(self, reading: _Reading, entry: Entry | None) -> list[Fetch]:
        """With the lock held: hands what was read to those who wait; returns the complete ones."""
        over = []
        for fetch in reading.fetches:
            if entry is not None:
                self._memory.pin(entry)
                fetch._entries.append(entry)
                fetch.nbytes += entry.nbytes
            fetch._waits_for.remove(reading)
            if not fetch._waits_for:
                fetch._ended = time.monotonic()
                over.append(fetch)
        reading.fetches = []
        return over

    def _forget(self, reading: _Reading) -> None:
        """With the lock held."""
        if self._readings.get(reading.key) is reading:
            del self._readings[reading.key]


def _tell(fetch: Fetch) -> None:
    then = fetch._then
    if then is None:
        return
    try:
        then(fetch)
    except Exception:
        _log.exception("host tier: what follows a read failed")
