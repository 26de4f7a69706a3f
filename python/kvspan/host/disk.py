"""The disk level of a host tier: one file an entry.

An entry is written to a temporary file, synced, and renamed, so that a file with an entry's name is
whole unless the disk itself failed; a checksum over all of it is compared whenever it is read,
after its bytes are where they were wanted. What does not fit is ignored, and counted by reason:

- ``torn``: a temporary file that a crash left, or a file shorter or longer than its header says.
  Removed.
- ``checksum``: a file whose bytes changed. Removed.
- ``other model``, ``other version``: a file with another fingerprint, or in another format of ours.
  Counted in the budget. Where room is needed these go first, from the oldest on.
- ``foreign``: a file that is not ours by its first bytes, or under another name than its key's.
  Left alone, and not counted.

Files are read with ``preadv`` straight into the caller's memory and not through a mapping: a file
that somebody cuts short meanwhile is then an error, and not the end of the process (SIGBUS), and
bytes are checked where they will be used.

A disk may be slow: files are written, read and removed without the lock that lookups take, so that
these wait for no file.

One process at a time owns a directory (a lock file says so) and may write, evict and remove;
others may open it with ``read_only=True`` at the same time, and find what the owner has stored.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvspan.errors import KvspanError
from kvspan.host import files, folder_lock
from kvspan.host.eviction import EvictionOrder
from kvspan.host.files import FileInfo, Ignored
from kvspan.host.pages import Bytes
from kvspan.host.stats import LevelStats

_TEMPORARY = ".tmp-"
_SUFFIX = ".kv"

_log = logging.getLogger("kvspan.host")


class DiskLevel:
    """Entries in files under a directory. Threads may share it.

    Args:
        path: the directory; made if it is missing.
        max_bytes: what all files of ours in the directory may take together, whatever model they
            are of.
        fingerprint: of everything that entries of one key must share besides: the model, the type
            and the layout of the bytes. Up to 32 bytes.
        read_only: take no lock, and write and remove nothing.

    Raises:
        KvspanError: if the directory cannot be used, or another process owns it.
        ValueError: for a budget or fingerprint that cannot be used.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        max_bytes: int,
        fingerprint: bytes,
        *,
        read_only: bool = False,
    ) -> None:
        if max_bytes <= 0:
            raise ValueError(f"max_bytes: expected more than 0, got {max_bytes}")
        if not 0 < len(fingerprint) <= 32:
            raise ValueError(f"fingerprint: expected 1 to 32 bytes, got {len(fingerprint)}")
        self.path = Path(path)
        self.max_bytes = max_bytes
        self.read_only = read_only
        self._fingerprint = fingerprint.ljust(32, b"\0")
        self._lock = threading.Lock()
        self._files: dict[bytes, FileInfo] = {}
        self._writing: set[bytes] = set()
        self._doomed: list[Path] = []  # to be removed once the lock is free
        self._order = EvictionOrder()
        self._bytes = 0
        self._others: dict[Path, int] = {}  # files of other models and versions, the oldest first
        self._others_bytes = 0
        self._numbers = itertools.count()
        self._ignored: Counter[str] = Counter()
        self._stats = LevelStats(budget=max_bytes)
        self._lock_file: int | None = None
        try:
            if not read_only:
                self.path.mkdir(parents=True, exist_ok=True)
                self._lock_file = folder_lock.own(self.path)
            self._scan()
            self.sweep()
        except OSError as error:
            self.close()
            raise KvspanError(f"cannot use {self.path} as host tier: {error.strerror}") from error
        if self._ignored:
            found = ", ".join(f"{n} {reason}" for reason, n in sorted(self._ignored.items()))
            if self._others and not read_only:
                found += (
                    f"; what other models and versions left takes {self._others_bytes / 2**30:.3g} "
                    f"of {max_bytes / 2**30:.3g} GiB and goes when room is needed"
                )
            _log.warning("%s: files that are not used: %s", self.path, found)

    def close(self) -> None:
        """Gives the directory up to another process."""
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    def nbytes(self, key: bytes) -> int | None:
        """The length of what is stored; None if it is not there."""
        with self._lock:
            file = self._find(key)
            return file.nbytes if file else None

    def stored_keys(self) -> list[bytes]:
        """What is stored, as far as this process knows."""
        with self._lock:
            return list(self._files)

    def describe(self, key: bytes) -> tuple[int, float, str] | None:
        """The length, cost and kind of an entry; None if it is not there."""
        with self._lock:
            file = self._find(key)
            return (file.nbytes, file.cost, file.kind) if file else None

    def write(self, key: bytes, pieces: Sequence[Bytes], cost: float, kind: str) -> str | None:
        """Stores an entry that is not there yet.

        Returns:
            None, or why it is refused: ``disk: too large`` for the budget, or ``disk: ENOSPC`` and
            the like.
        """
        nbytes = sum(map(len, pieces))
        head = files.make_header(key, nbytes, cost, kind, self._fingerprint)
        file = FileInfo(nbytes, files.file_bytes(head, nbytes), cost, kind)
        if file.file_bytes > self.max_bytes:
            return "disk: too large"
        with self._lock:
            if key in self._files or key in self._writing:
                return None
            self._writing.add(key)
            self._drop_other(self._path(key))
            self._make_room(file.file_bytes)
            self._bytes += file.file_bytes  # so that other writers do not take the same room
        self.sweep()
        try:
            self._put(self._path(key), head, pieces)
        except OSError as error:
            with self._lock:
                self._bytes -= file.file_bytes
                self._writing.discard(key)
            reason = errno.errorcode.get(error.errno or 0, "error")
            _log.warning("%s: cannot store: %s", self.path, error.strerror)
            return f"disk: {reason}"
        with self._lock:
            self._writing.discard(key)
            self._files[key] = file
            self._order.push(key, file.worth)
            self._stats.stores += 1
        return None

    def read(self, key: bytes, out: Sequence[Bytes]) -> bool:
        """Reads an entry into pieces of memory, together of its length.

        Returns:
            False if it is not there or its file is bad; ``out`` may be written all the same.
        """
        path = self._path(key)
        with self._lock:
            known = self._files.get(key)
        try:
            files.read_file(path, key, self._fingerprint, out)
        except FileNotFoundError:
            self._forget(key, known, None)
            return False
        except Ignored as why:
            _log.warning("%s: not used: %s", path, why)
            self._forget(key, known, str(why))
            return False
        except OSError as error:
            _log.warning("%s: cannot read: %s", path, error.strerror)
            self._forget(key, known, "unreadable")
            return False
        with self._lock:
            self._stats.hits += 1
            file = self._files.get(key)
            if file:
                file.uses += 1
                self._order.push(key, file.worth)
        return True

    def discard(self, key: bytes) -> bool:
        """Forgets an entry; its file goes with the next :meth:`sweep`.

        Returns:
            Whether it was there.
        """
        with self._lock:
            found = key in self._files and not self.read_only
            if found:
                self._drop(key)
        return found

    def sweep(self) -> None:
        """Removes the files of what was dropped. One that was written anew just then may go with
        it: it is a miss."""
        with self._lock:
            doomed, self._doomed = self._doomed, []
        for path in doomed:
            self._unlink(path)

    def stats(self) -> LevelStats:
        """A snapshot."""
        with self._lock:
            by_kind: Counter[str] = Counter()
            for file in self._files.values():
                by_kind[file.kind] += file.nbytes
            stats = LevelStats(**vars(self._stats))
            stats.entries, stats.bytes, stats.by_kind = len(self._files), self._bytes, by_kind
            stats.others, stats.others_bytes = len(self._others), self._others_bytes
            return stats

    def held_bytes(self) -> int:
        """What all files together take, those of other models and versions as well."""
        with self._lock:
            return self._bytes + self._others_bytes

    def ignored(self) -> Counter[str]:
        """Files that were not used, by reason."""
        with self._lock:
            return Counter(self._ignored)

    # What follows, but for _scan and what says so, is called with the lock held where it
    # changes anything.

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self.path / name[:2] / (name + _SUFFIX)

    def _scan(self) -> None:
        others = []
        for entry in self._entries():
            if entry.name.startswith(_TEMPORARY):
                self._ignored["torn"] += 1
                self._unlink(Path(entry.path))
                continue
            try:
                key, file = self._inspect(Path(entry.path))
            except Ignored as why:
                self._ignored[str(why)] += 1
                if str(why) in ("torn", "checksum"):
                    self._unlink(Path(entry.path))
                elif str(why) in ("other model", "other version"):
                    others.append(entry)
                continue
            self._files[key] = file
            self._bytes += file.file_bytes
            self._order.push(key, file.worth)
        for entry in sorted(others, key=_age):
            self._others[Path(entry.path)] = entry.stat().st_size
        self._others_bytes = sum(self._others.values())
        if not self.read_only:
            self._make_room(0)

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        with os.scandir(self.path) as folders:
            names = sorted(f.path for f in folders if f.is_dir(follow_symlinks=False))
        for name in names:
            with os.scandir(name) as files:
                # By age: where all else is equal, the oldest goes first.
                yield from sorted(
                    (f for f in files if f.is_file(follow_symlinks=False)),
                    key=_age,
                )

    def _inspect(self, path: Path) -> tuple[bytes, FileInfo]:
        key, file = files.read_info(path, self._fingerprint)
        if self._path(key) != path:
            raise Ignored("foreign")
        return key, file

    def _put(self, path: Path, head: bytes, pieces: Sequence[Bytes]) -> None:
        path.parent.mkdir(exist_ok=True)
        temporary = path.parent / f"{_TEMPORARY}{os.getpid()}-{next(self._numbers)}"
        try:
            files.write_file(temporary, head, pieces)
            os.replace(temporary, path)
        except BaseException:
            self._unlink(temporary)
            raise

    def _find(self, key: bytes) -> FileInfo | None:
        file = self._files.get(key)
        if file is None and self.read_only:  # the owner may have stored it since
            with contextlib.suppress(OSError, Ignored):
                file = self._inspect(self._path(key))[1]
        return file

    def _make_room(self, nbytes: int) -> None:
        while self._bytes + self._others_bytes + nbytes > self.max_bytes:
            if self._others:
                self._drop_other(next(iter(self._others)))
                self._stats.others_removed += 1
                continue
            key = self._order.pop()
            if key is None:
                return
            self._drop(key)
            self._stats.evictions += 1

    def _drop_other(self, path: Path) -> None:
        """Removes a file of another model or version, if that is what is there."""
        if path in self._others:
            self._others_bytes -= self._others.pop(path)
            self._doomed.append(path)

    def _drop(self, key: bytes) -> None:
        file = self._files.pop(key)
        self._order.discard(key)
        self._bytes -= file.file_bytes
        self._doomed.append(self._path(key))

    def _forget(self, key: bytes, known: FileInfo | None, reason: str | None) -> None:
        """Without the lock: the file that was `known` cannot be used, unless it is another now or,
        after the end, another process's."""
        with self._lock:
            if reason:
                self._ignored[reason] += 1
            if self._lock_file is None or known is None or self._files.get(key) is not known:
                return
            del self._files[key]
            self._order.discard(key)
            self._bytes -= known.file_bytes
            if reason in ("torn", "checksum"):
                self._doomed.append(self._path(key))
        self.sweep()

    def _unlink(self, path: Path) -> None:
        if not self.read_only:
            with contextlib.suppress(OSError):
                path.unlink()


def _age(file: os.DirEntry[str]) -> int:
    return file.stat().st_mtime_ns
