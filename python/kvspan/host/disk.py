"""The disk level of a host tier: one file an entry.

An entry is written to a temporary file, synced, and renamed, so that a file with an entry's name is
whole unless the disk itself failed; a checksum over all of it is compared whenever it is read,
after its bytes are where they were wanted. What does not fit is ignored, and counted by reason:

- ``torn``: a temporary file that a crash left, or a file shorter or longer than its header says.
  Removed.
- ``checksum``: a file whose bytes changed. Removed.
- ``foreign``: a file that is not ours by its first bytes, or another version's, or under another
  name than its key's. Left alone.
- ``other model``: a file with another fingerprint. Left alone.

Files are read with ``preadv`` straight into the caller's memory and not through a mapping: a file
that somebody cuts short meanwhile is then an error, and not the end of the process (SIGBUS), and
bytes are checked where they will be used.

One process at a time owns a directory (a lock file says so) and may write, evict and remove;
others may open it with ``read_only=True`` at the same time, and find what the owner has stored.

Format, little endian: magic (8 bytes), version and header length (uint32 each), fingerprint (32
bytes), payload length (uint64), cost (float64), lengths of key and kind (uint16 each), 4 bytes of
zero, key, kind; the payload; BLAKE2b-256 of all before.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import logging
import math
import os
import struct
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvspan.errors import KvspanError
from kvspan.host.eviction import EvictionOrder
from kvspan.host.pages import Bytes
from kvspan.host.stats import LevelStats

_MAGIC = b"kvspanHT"
_VERSION = 1
_HEADER = struct.Struct("<8sII32sQdHH4x")
_DIGEST_BYTES = 32
_TEMPORARY = ".tmp-"
_SUFFIX = ".kv"
_MAX_PIECES = 512  # of one preadv or writev; systems allow 1024

_log = logging.getLogger("kvspan.host")


class _Ignored(Exception):
    """A file that is not used; its text is the reason."""


@dataclass
class _File:
    nbytes: int  # of the payload
    file_bytes: int
    cost: float
    kind: str
    uses: int = 1

    @property
    def worth(self) -> float:
        return self.uses * self.cost / self.file_bytes


class DiskLevel:
    """Entries in files under a directory. Threads may share it.

    Args:
        path: the directory; made if it is missing.
        max_bytes: what all files together may take.
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
        self._files: dict[bytes, _File] = {}
        self._writing: set[bytes] = set()
        self._order = EvictionOrder()
        self._bytes = 0
        self._numbers = itertools.count()
        self._ignored: Counter[str] = Counter()
        self._stats = LevelStats(budget=max_bytes)
        self._lock_file: int | None = None
        try:
            if not read_only:
                self.path.mkdir(parents=True, exist_ok=True)
                self._own()
            self._scan()
        except OSError as error:
            self.close()
            raise KvspanError(f"cannot use {self.path} as host tier: {error.strerror}") from error
        if self._ignored:
            found = ", ".join(f"{n} {reason}" for reason, n in sorted(self._ignored.items()))
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
        head = self._head(key, nbytes, cost, kind)
        file = _File(nbytes, len(head) + nbytes + _DIGEST_BYTES, cost, kind)
        if file.file_bytes > self.max_bytes:
            return "disk: too large"
        with self._lock:
            if key in self._files or key in self._writing:
                return None
            self._writing.add(key)
            self._make_room(file.file_bytes)
            self._bytes += file.file_bytes  # so that other writers do not take the same room
        try:
            self._write_file(key, head, pieces)
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
        try:
            self._read_file(key, path, out)
        except FileNotFoundError:
            self._forget(key, None)
            return False
        except _Ignored as why:
            _log.warning("%s: not used: %s", path, why)
            self._forget(key, str(why))
            return False
        except OSError as error:
            _log.warning("%s: cannot read: %s", path, error.strerror)
            self._forget(key, "unreadable")
            return False
        with self._lock:
            self._stats.hits += 1
            file = self._files.get(key)
            if file:
                file.uses += 1
                self._order.push(key, file.worth)
        return True

    def remove(self, key: bytes) -> None:
        """Removes an entry, if it is there."""
        with self._lock:
            if key in self._files and not self.read_only:
                self._drop(key)

    def stats(self) -> LevelStats:
        """A snapshot."""
        with self._lock:
            by_kind: Counter[str] = Counter()
            for file in self._files.values():
                by_kind[file.kind] += file.nbytes
            stats = LevelStats(**vars(self._stats))
            stats.entries, stats.bytes, stats.by_kind = len(self._files), self._bytes, by_kind
            return stats

    def ignored(self) -> Counter[str]:
        """Files that were not used, by reason."""
        with self._lock:
            return Counter(self._ignored)

    # What follows, but for _own and _scan, is called with the lock held where it changes anything.

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self.path / name[:2] / (name + _SUFFIX)

    def _own(self) -> None:
        self._lock_file = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            self.close()
            raise KvspanError(
                f"{self.path} is another process's host tier; open it read-only, or use another"
            ) from None

    def _scan(self) -> None:
        for entry in self._entries():
            if entry.name.startswith(_TEMPORARY):
                self._ignored["torn"] += 1
                self._unlink(Path(entry.path))
                continue
            try:
                key, file = self._inspect(Path(entry.path))
            except _Ignored as why:
                self._ignored[str(why)] += 1
                if str(why) == "torn":
                    self._unlink(Path(entry.path))
                continue
            self._files[key] = file
            self._bytes += file.file_bytes
            self._order.push(key, file.worth)
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
                    key=lambda f: f.stat().st_mtime_ns,
                )

    def _inspect(self, path: Path) -> tuple[bytes, _File]:
        with open(path, "rb", buffering=0) as stream:
            head = stream.read(_HEADER.size + 2 * 0xFFFF)
            file_bytes = os.fstat(stream.fileno()).st_size
        key, file, _ = self._parse(head, file_bytes)
        if self._path(key) != path:
            raise _Ignored("foreign")
        return key, file

    def _head(self, key: bytes, nbytes: int, cost: float, kind: str) -> bytes:
        name = kind.encode()
        size = _HEADER.size + len(key) + len(name)
        fields = (_MAGIC, _VERSION, size, self._fingerprint, nbytes, cost, len(key), len(name))
        return _HEADER.pack(*fields) + key + name

    def _parse(self, head: bytes, file_bytes: int) -> tuple[bytes, _File, int]:
        """The key, the entry and the header's length, from a file's first bytes."""
        if not head.startswith(_MAGIC[: len(head)]):
            raise _Ignored("foreign")
        if len(head) < _HEADER.size:
            raise _Ignored("torn")
        _, version, size, fingerprint, nbytes, cost, key_len, kind_len = _HEADER.unpack_from(head)
        if version != _VERSION or size != _HEADER.size + key_len + kind_len:
            raise _Ignored("foreign")
        if fingerprint != self._fingerprint:
            raise _Ignored("other model")
        if file_bytes != size + nbytes + _DIGEST_BYTES or len(head) < size:
            raise _Ignored("torn")
        key = head[_HEADER.size : _HEADER.size + key_len]
        try:
            kind = head[_HEADER.size + key_len : size].decode()
        except UnicodeDecodeError:
            raise _Ignored("checksum") from None
        if not (math.isfinite(cost) and cost >= 0):
            raise _Ignored("checksum")
        return key, _File(nbytes, file_bytes, cost, kind), size

    def _write_file(self, key: bytes, head: bytes, pieces: Sequence[Bytes]) -> None:
        path = self._path(key)
        path.parent.mkdir(exist_ok=True)
        temporary = path.parent / f"{_TEMPORARY}{os.getpid()}-{next(self._numbers)}"
        digest = hashlib.blake2b(head, digest_size=_DIGEST_BYTES)
        try:
            with open(temporary, "xb", buffering=0) as stream:
                _write_all(stream.fileno(), [memoryview(head)])
                for first in range(0, len(pieces), _MAX_PIECES):
                    batch = pieces[first : first + _MAX_PIECES]
                    _write_all(stream.fileno(), [piece.data for piece in batch])
                for piece in pieces:
                    digest.update(piece.data)
                _write_all(stream.fileno(), [memoryview(digest.digest())])
                os.fsync(stream.fileno())
            os.replace(temporary, path)
        except BaseException:
            self._unlink(temporary)
            raise

    def _read_file(self, key: bytes, path: Path, out: Sequence[Bytes]) -> None:
        with open(path, "rb", buffering=0) as stream:
            head = stream.read(_HEADER.size + 2 * 0xFFFF)
            found, file, offset = self._parse(head, os.fstat(stream.fileno()).st_size)
            if found != key or file.nbytes != sum(map(len, out)):
                raise _Ignored("foreign")
            digest = hashlib.blake2b(head[:offset], digest_size=_DIGEST_BYTES)
            for first in range(0, len(out), _MAX_PIECES):
                batch = out[first : first + _MAX_PIECES]
                offset = _read_all(stream.fileno(), [piece.data for piece in batch], offset)
            for piece in out:
                digest.update(piece.data)
            if os.pread(stream.fileno(), _DIGEST_BYTES, offset) != digest.digest():
                raise _Ignored("checksum")

    def _find(self, key: bytes) -> _File | None:
        file = self._files.get(key)
        if file is None and self.read_only:  # the owner may have stored it since
            with contextlib.suppress(OSError, _Ignored):
                file = self._inspect(self._path(key))[1]
        return file

    def _make_room(self, nbytes: int) -> None:
        while self._bytes + nbytes > self.max_bytes:
            key = self._order.pop()
            if key is None:
                return
            self._drop(key)
            self._stats.evictions += 1

    def _drop(self, key: bytes) -> None:
        file = self._files.pop(key)
        self._order.discard(key)
        self._bytes -= file.file_bytes
        self._unlink(self._path(key))

    def _forget(self, key: bytes, reason: str | None) -> None:
        with self._lock:
            if reason:
                self._ignored[reason] += 1
            if self.read_only:
                return
            file = self._files.pop(key, None)
            if file:
                self._order.discard(key)
                self._bytes -= file.file_bytes
            if reason in ("torn", "checksum"):
                self._unlink(self._path(key))

    def _unlink(self, path: Path) -> None:
        if not self.read_only:
            with contextlib.suppress(OSError):
                path.unlink()


def _write_all(fd: int, pieces: list[memoryview]) -> None:
    while pieces:
        pieces = _after(pieces, os.writev(fd, pieces))


def _read_all(fd: int, pieces: list[memoryview], offset: int) -> int:
    """Fills the pieces from ``offset`` on; returns where they end."""
    pieces = _after(pieces, 0)
    while pieces:
        count = os.preadv(fd, pieces, offset)
        if count == 0:
            raise _Ignored("torn")
        offset += count
        pieces = _after(pieces, count)
    return offset


def _after(pieces: list[memoryview], count: int) -> list[memoryview]:
    """What is left of pieces behind their first ``count`` bytes, none of it empty."""
    left = []
    for piece in pieces:
        taken = min(count, len(piece))
        count -= taken
        if taken < len(piece):
            left.append(piece[taken:])
    return left
