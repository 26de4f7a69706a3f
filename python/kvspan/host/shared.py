"""Memory that several processes of one machine map."""

from __future__ import annotations

import mmap
import os

import numpy as np

from kvspan.host.pages import Bytes, ask_huge_pages, provide


class SharedMemory:
    """Memory that processes of the same user map by its name, as :func:`map_shared` does.

    It has no file: the system frees it once the last process that has it is gone, however that
    ends, and nothing stays in ``/dev/shm``, whose size is no limit either.

    Args:
        nbytes: 1 or more.
        provided: have the system provide all of it now, not page by page as it is first written.

    Attributes:
        memory: uint8 [nbytes].
        name: to map it by, while this process lives and :meth:`close` has not been called.
    """

    def __init__(self, nbytes: int, *, provided: bool = False) -> None:
        self._fd = os.memfd_create("kvspan", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, nbytes)
        self.memory = _map(self._fd, nbytes, provided=provided)
        self.name = f"/proc/{os.getpid()}/fd/{self._fd}"

    def close(self) -> None:
        """Nobody maps it any more; who has it keeps it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def map_shared(name: str, nbytes: int) -> Bytes:
    """uint8 [nbytes]: another process's :class:`SharedMemory`, writable.

    Raises:
        OSError: if it is not there.
        ValueError: if it has another length.
    """
    fd = os.open(name, os.O_RDWR | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        if size != nbytes:
            raise ValueError(f"{name}: expected shared memory of {nbytes} bytes, found {size}")
        return _map(fd, nbytes, provided=False)
    finally:
        os.close(fd)


def _map(fd: int, nbytes: int, *, provided: bool) -> Bytes:
    memory = mmap.mmap(fd, nbytes)
    if provided:
        provide(memory)
    else:
        ask_huge_pages(memory)
    return np.frombuffer(memory, np.uint8)
