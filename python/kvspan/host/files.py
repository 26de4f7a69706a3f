"""Files of the disk level: one entry each, whole or not used.

Format, little endian: magic (8 bytes), version and header length (uint32 each), fingerprint (32
bytes), payload length (uint64), cost (float64), lengths of key and kind (uint16 each), 4 bytes of
zero, key, kind; the payload; BLAKE2b-256 of all before.
"""

from __future__ import annotations

import hashlib
import math
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvspan.host.pages import Bytes

_MAGIC = b"kvspanHT"
_VERSION = 1
_HEADER = struct.Struct("<8sII32sQdHH4x")
_MAX_HEADER_BYTES = _HEADER.size + 2 * 0xFFFF
_DIGEST_BYTES = 32
_MAX_PIECES = 512  # of one preadv or writev; systems allow 1024


class Ignored(Exception):
    """A file that is not used; its text is the reason."""


@dataclass
class FileInfo:
    """What a file holds.

    Attributes:
        nbytes: the length of the payload.
        file_bytes: the length of the file.
        cost: FLOPs that a hit saves.
        kind: for the statistics.
        uses: hits since it was stored or found, and one.
    """

    nbytes: int
    file_bytes: int
    cost: float
    kind: str
    uses: int = 1

    @property
    def worth(self) -> float:
        """What is lost with it, for each byte that it takes."""
        return self.uses * self.cost / self.file_bytes


def make_header(key: bytes, nbytes: int, cost: float, kind: str, fingerprint: bytes) -> bytes:
    """A file's first bytes; ``fingerprint``: 32 bytes."""
    name = kind.encode()
    size = _HEADER.size + len(key) + len(name)
    fields = (_MAGIC, _VERSION, size, fingerprint, nbytes, cost, len(key), len(name))
    return _HEADER.pack(*fields) + key + name


def file_bytes(header: bytes, nbytes: int) -> int:
    """How long a file is."""
    return len(header) + nbytes + _DIGEST_BYTES


def read_info(path: Path, fingerprint: bytes) -> tuple[bytes, FileInfo]:
    """The key and description of an entry, by its header and its length alone.

    Raises:
        Ignored: if it is none of this fingerprint.
        OSError: if it cannot be read.
    """
    with open(path, "rb", buffering=0) as stream:
        head = stream.read(_MAX_HEADER_BYTES)
        key, info, _ = _parse(head, os.fstat(stream.fileno()).st_size, fingerprint)
    return key, info


def write_file(path: Path, header: bytes, pieces: Sequence[Bytes]) -> None:
    """Writes and syncs a new file.

    Raises:
        OSError: if it cannot be written, or is there already; what was written of it stays.
    """
    digest = hashlib.blake2b(header, digest_size=_DIGEST_BYTES)
    with open(path, "xb", buffering=0) as stream:
        _write_all(stream.fileno(), [memoryview(header)])
        for first in range(0, len(pieces), _MAX_PIECES):
            batch = pieces[first : first + _MAX_PIECES]
            _write_all(stream.fileno(), [piece.data for piece in batch])
        for piece in pieces:
            digest.update(piece.data)
        _write_all(stream.fileno(), [memoryview(digest.digest())])
        os.fsync(stream.fileno())


def read_file(path: Path, key: bytes, fingerprint: bytes, out: Sequence[Bytes]) -> None:
    """Reads an entry into pieces of memory, together of its length, and checks them there.

    Raises:
        Ignored: if it is not that entry, or not whole.
        OSError: if it cannot be read.
    """
    with open(path, "rb", buffering=0) as stream:
        head = stream.read(_MAX_HEADER_BYTES)
        found, info, offset = _parse(head, os.fstat(stream.fileno()).st_size, fingerprint)
        if found != key or info.nbytes != sum(map(len, out)):
            raise Ignored("foreign")
        digest = hashlib.blake2b(head[:offset], digest_size=_DIGEST_BYTES)
        for first in range(0, len(out), _MAX_PIECES):
            batch = out[first : first + _MAX_PIECES]
            offset = _read_all(stream.fileno(), [piece.data for piece in batch], offset)
        for piece in out:
            digest.update(piece.data)
        if os.pread(stream.fileno(), _DIGEST_BYTES, offset) != digest.digest():
            raise Ignored("checksum")


def _parse(head: bytes, size_on_disk: int, wanted: bytes) -> tuple[bytes, FileInfo, int]:
    """The key, the entry and the header's length, from a file's first bytes."""
    if not head.startswith(_MAGIC[: len(head)]):
        raise Ignored("foreign")
    if len(head) < _HEADER.size:
        raise Ignored("torn")
    _, version, size, fingerprint, nbytes, cost, key_len, kind_len = _HEADER.unpack_from(head)
    if version != _VERSION:
        raise Ignored("other version")
    if size != _HEADER.size + key_len + kind_len:
        raise Ignored("checksum")
    if fingerprint != wanted:
        raise Ignored("other model")
    if size_on_disk != size + nbytes + _DIGEST_BYTES or len(head) < size:
        raise Ignored("torn")
    key = head[_HEADER.size : _HEADER.size + key_len]
    try:
        kind = head[_HEADER.size + key_len : size].decode()
    except UnicodeDecodeError:
        raise Ignored("checksum") from None
    if not (math.isfinite(cost) and cost >= 0):
        raise Ignored("checksum")
    return key, FileInfo(nbytes, size_on_disk, cost, kind), size


def _write_all(fd: int, pieces: list[memoryview]) -> None:
    while pieces:
        pieces = _after(pieces, os.writev(fd, pieces))


def _read_all(fd: int, pieces: list[memoryview], offset: int) -> int:
    """Fills the pieces from ``offset`` on; returns where they end."""
    pieces = _after(pieces, 0)
    while pieces:
        count = os.preadv(fd, pieces, offset)
        if count == 0:
            raise Ignored("torn")
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
