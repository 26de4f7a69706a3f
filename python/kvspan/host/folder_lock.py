"""Who owns the folder of a disk level: one process, as long as it holds a lock on a file in it."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path

from kvspan.errors import KvspanError, one_line

_NAME = "lock"


def own(folder: Path) -> int:
    """Locks a folder for this process, until the descriptor that it returns is closed.

    Raises:
        KvspanError: with the owner, if another process has it.
        OSError: if the lock's file cannot be opened.
    """
    handle = os.open(folder / _NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _take(handle, folder, fcntl.LOCK_EX)
        os.truncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    except BaseException:
        os.close(handle)
        raise
    return handle


def check_folder(path: str | os.PathLike[str]) -> None:
    """Whether a process could own a folder and write there now, as far as can be told without
    making anything.

    Raises:
        KvspanError: if it could not.
    """
    folder = Path(path)
    try:
        handle = os.open(folder / _NAME, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        parent = next(one for one in (folder, *folder.absolute().parents) if one.exists())
        if not os.access(parent, os.W_OK | os.X_OK):
            raise KvspanError(
                f"cannot use {folder} as host tier: may not write to {parent}"
            ) from None
        return
    except OSError as error:
        raise KvspanError(f"cannot use {folder} as host tier: {error.strerror}") from None
    try:
        _take(handle, folder, fcntl.LOCK_SH)
    finally:
        os.close(handle)


def _take(handle: int, folder: Path, kind: int) -> None:
    """Locks a folder's open lock file; KvspanError with who has it."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        told = os.pread(handle, 200, 0).decode(errors="replace")
        owner = one_line(told) if told.startswith("process ") else "another process"
        raise KvspanError(
            f"{folder} is in use; expected a folder that no running process keeps entries "
            f"in; found {owner}; stop that one or name another folder"
        ) from None
