"""The thread that copies entries of a host tier from memory to disk, and removes files there."""

from __future__ import annotations

import queue
import threading
from enum import Enum

from kvspan.host.disk import DiskLevel
from kvspan.host.entries import Entry
from kvspan.host.memory import MemoryLevel


class _Task(Enum):
    """What there is to do besides entries."""

    SWEEP = "remove the files of what was discarded"
    END = "end the thread"


class DiskWriter:
    """Writes in the background what is handed over, and keeps it in memory until then.

    Args:
        memory: where the entries are.
        disk: where they go.
        max_pending_bytes: of entries that wait; beyond it none is taken.
    """

    def __init__(self, memory: MemoryLevel, disk: DiskLevel, max_pending_bytes: int) -> None:
        self._memory = memory
        self._disk = disk
        self._max_pending_bytes = max_pending_bytes
        self._pending_bytes = 0
        self._pending_sweeps = 0
        self._written = threading.Condition(memory.lock)
        self._queue: queue.SimpleQueue[Entry | _Task] = queue.SimpleQueue()
        self._thread: threading.Thread | None = threading.Thread(
            target=self._run, name="kvspan-host-write", daemon=True
        )
        self._thread.start()

    def put(self, entry: Entry) -> bool:
        """Takes over an entry and one pin of it; False if too much waits, or after the end."""
        with self._memory.lock:
            if self._thread is None:
                return False
            if self._pending_bytes + entry.nbytes > self._max_pending_bytes:
                self._memory.refusals["disk: too much waits"] += 1
                return False
            self._pending_bytes += entry.nbytes
            self._queue.put(entry)
            return True

    def sweep(self) -> None:
        """Has the files of what was discarded on disk removed, after all that was taken before;
        not after the end: they may be another process's then."""
        with self._memory.lock:
            if self._thread is not None:
                self._pending_sweeps += 1
                self._queue.put(_Task.SWEEP)

    def swept(self, timeout_s: float) -> bool:
        """Waits until all sweeps are done; False if they are not in time."""
        with self._written:
            return self._written.wait_for(lambda: self._pending_sweeps == 0, timeout_s)

    def flush(self) -> None:
        """Returns once all that was taken is on disk, or refused there, and all sweeps are done."""
        with self._written:
            self._written.wait_for(lambda: not self._pending_bytes and not self._pending_sweeps)

    def close(self) -> None:
        """Writes what waits, and ends."""
        with self._memory.lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(_Task.END)
            thread.join()

    def _run(self) -> None:
        while (task := self._queue.get()) is not _Task.END:
            if task is _Task.SWEEP:
                self._disk.sweep()
                with self._written:
                    self._pending_sweeps -= 1
                    self._written.notify_all()
            else:
                self._write(task)

    def _write(self, entry: Entry) -> None:
        why = None
        if not entry.removed:
            pieces = self._memory.pieces(entry)
            why = self._disk.write(entry.key, pieces, entry.cost, entry.kind)
        with self._written:
            removed = entry.removed
            if why:
                self._memory.refusals[why] += 1
            self._pending_bytes -= entry.nbytes
            self._memory.unpin(entry)
            if self._pending_bytes == 0:
                self._written.notify_all()
        if removed and self._disk.discard(entry.key):  # while it was written
            self._disk.sweep()
