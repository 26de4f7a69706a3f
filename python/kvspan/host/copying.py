"""Copies in the background, between pools of blocks and the pages of a host tier.

The queue is C++ (``kvspan/copy_queue.h``); on a GPU it has a stream of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np

from kvspan import _core
from kvspan.ops.streams import Stream


class CopyJob:
    """A copy that was submitted. The queue keeps its tensors alive until it is settled.

    A job is settled when none of its chunks is under way any more: copied, cancelled or failed.
    """

    def __init__(self, job: _core.CopyJob) -> None:
        self._job = job

    @property
    def state(self) -> str:
        """``pending`` until it is settled; then ``done``, ``failed`` or ``cancelled``."""
        return self._job.state

    @property
    def num_chunks(self) -> int:
        """The chunks it was cut into."""
        return self._job.num_chunks

    @property
    def num_done(self) -> int:
        """How many of the first chunks are copied."""
        return self._job.num_done

    @property
    def bytes_done(self) -> int:
        """How many of the first bytes are copied."""
        return self._job.bytes_done

    def wait(self, num_chunks: int | None = None, timeout: float | None = None) -> bool | None:
        """Waits until the first chunks are copied.

        Args:
            num_chunks: how many; None: all of them, and the job settled.
            timeout: in seconds; None: as long as it takes.

        Returns:
            True; False if the job was cancelled before; None if the time was not enough.

        Raises:
            RuntimeError: if the copy failed before, with the reason.
            ValueError: if it does not have as many chunks.
        """
        return self._job.wait(-1 if num_chunks is None else num_chunks, timeout)

    def wait_on_stream(self, stream: Stream, num_chunks: int | None = None) -> bool:
        """Makes a CUDA stream wait for the first chunks; the host waits until they are enqueued.

        Args:
            stream: a ``cudaStream_t`` as an int, or a ``torch.cuda.Stream``, ``cuda.core.Stream``
                or the like.
            num_chunks: as for :meth:`wait`.

        Returns:
            False if the job was cancelled before. On the CPU as :meth:`wait`.

        Raises:
            RuntimeError, ValueError: as for :meth:`wait`.
        """
        return self._job.wait_on_stream(stream, -1 if num_chunks is None else num_chunks)

    def cancel(self) -> None:
        """Copies no more chunks, and waits for those under way; the job is settled then."""
        self._job.cancel()


class CopyQueue:
    """Copies jobs in the background, the most urgent first. Threads may share it.

    Args:
        device: ``cpu``, ``cuda`` or ``cuda:<index>``: of one side of the copies at least. On the
            host, memory to or from a GPU must be page-locked.
        chunk_bytes: jobs are cut into chunks of this, each with its event.
        max_bytes_in_flight: handed to the device at a time, but one chunk at least.
        max_bytes_queued: beyond this a submission waits, or is refused; one job always fits.
        num_threads: that copy, on the CPU.
        bytes_per_second: slows each of those down, to rehearse a slow link; 0: no limit.

    Raises:
        ValueError: for arguments that cannot be used.
        RuntimeError: if there is no such device.
    """

    def __init__(
        self,
        device: str = "cpu",
        *,
        chunk_bytes: int = 1 << 22,
        max_bytes_in_flight: int = 1 << 25,
        max_bytes_queued: int = 1 << 30,
        num_threads: int = 1,
        bytes_per_second: float = 0.0,
    ) -> None:
        self._queue = _core.CopyQueue(
            device,
            chunk_bytes,
            max_bytes_in_flight,
            max_bytes_queued,
            num_threads,
            bytes_per_second,
        )

    def submit(
        self, src: Sequence[Any], dst: Sequence[Any], *, priority: int = 0, after: Stream = 0
    ) -> CopyJob:
        """Copies the bytes of ``src``, item after item, to those of ``dst``.

        An item is a tensor (numpy, torch, ...) or a pair of a pool ``[num_blocks, ...]`` and an
        int64 array of the numbers of its blocks. Bytes are taken in the order of a tensor's
        strides, the longest first, so that what was copied from a pool comes back as it was.

        Args:
            src: read; together as many bytes as ``dst``.
            dst: written; items do not overlap.
            priority: a lower one goes first, also before the rest of a job that was begun; among
                equals who came first.
            after: CUDA: a stream, as for :meth:`CopyJob.wait_on_stream`, whose work so far is
                waited for: the producer of ``src``. Give such stores a queue of their own, since
                all behind them waits too.

        Returns:
            The job; this waits while too much is queued (see :meth:`try_submit`).

        Raises:
            ValueError, TypeError: for arguments that cannot be used.
        """
        job = self._queue.submit(_items(src), _items(dst), priority, after, True)
        assert job is not None, "waited for room"
        return CopyJob(job)

    def try_submit(
        self, src: Sequence[Any], dst: Sequence[Any], *, priority: int = 0, after: Stream = 0
    ) -> CopyJob | None:
        """As :meth:`submit`, but None instead of waiting while too much is queued."""
        job = self._queue.submit(_items(src), _items(dst), priority, after, False)
        return None if job is None else CopyJob(job)

    def stats(self) -> dict[str, int]:
        """Counters: ``jobs_done``, ``jobs_failed``, ``jobs_cancelled``, ``bytes_done``; now:
        ``bytes_queued``, ``bytes_in_flight``; ever: ``most_in_flight``."""
        return self._queue.stats()

    def close(self) -> None:
        """Cancels what is left, and waits for what is under way."""
        self._queue.close()

    def __enter__(self) -> CopyQueue:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _items(items: Sequence[Any]) -> list[Any]:
    return [
        (item[0], np.ascontiguousarray(item[1], np.int64)) if isinstance(item, tuple) else item
        for item in items
    ]
