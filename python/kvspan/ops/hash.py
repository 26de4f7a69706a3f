"""Block hashes: chained keys of the full blocks of a prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvspan import _core


def digest_fields(domain: str, *fields: str | bytes | int | None) -> bytes:
    """Hash typed fields to a 32-byte root for :class:`BlockChain`.

    Every field enters with its type and its length, so different field lists never give the same
    preimage: ``("ab", "c")`` and ``("a", "bc")``, ``1`` and ``"1"``, ``None`` and ``""`` and a
    missing field all differ.

    Preimage (SHA-256): the 16 bytes ``kvspan/1 fields`` (zero padded), then the domain and each
    field as one type byte (``s`` text as UTF-8, ``b`` bytes, ``i`` int as decimal text, ``?`` bool
    as ``0``/``1``, ``n`` None, empty), its length in bytes as an unsigned 64-bit little-endian
    number, and its bytes.

    Args:
        domain: what the root is for, e.g. ``"span"``; keeps roots of different uses apart.
        fields: everything a key must depend on: model, tenant salt, LoRA, multimodal inputs, ...

    Raises:
        TypeError: for a field of any other type.
    """
    digest = hashlib.sha256(b"kvspan/1 fields".ljust(16, b"\0"))
    for field in (domain, *fields):
        if isinstance(field, str):
            kind, data = b"s", field.encode("utf-8", "surrogatepass")
        elif isinstance(field, bytes):
            kind, data = b"b", field
        elif isinstance(field, bool):
            kind, data = b"?", b"1" if field else b"0"
        elif isinstance(field, int):
            kind, data = b"i", str(field).encode()
        elif field is None:
            kind, data = b"n", b""
        else:
            raise TypeError(
                f"digest_fields: expected str, bytes, int or None, got {type(field).__name__}"
            )
        digest.update(kind + len(data).to_bytes(8, "little") + data)
    return digest.digest()


class BlockChain:
    """Chained SHA-256 keys of the full blocks of one prompt, paused and resumed around spans.

    Outside spans a block's key commits to all content before it. Inside a span it commits to the
    span's own tokens, ``span_root`` and, if anchored, everything before the *first* span: a span
    has the same keys wherever it is placed (Span Queries, arXiv 2511.02749). After a span, keys
    depend on the content and order of all spans before. ``cpp/include/kvspan/block_hash.h`` gives
    the preimages byte by byte.

    Args:
        block_size: tokens per block, 1 to 2**20.
        root: 32 bytes, the parent of the first ordinary block (see :func:`digest_fields`).
        span_root: 32 bytes, mixed into every span's first parent.
        anchored: True for scope ``anchored``, False for ``isolated``.
        isa: the SHA-256 code to run: ``"auto"`` or one of :func:`sha256_isas`.

    Raises:
        ValueError: for a size, digest or ISA that cannot be used.
    """

    def __init__(
        self, block_size: int, *, root: bytes, span_root: bytes, anchored: bool, isa: str = "auto"
    ) -> None:
        self._chain = _core.BlockChain(
            block_size, root=root, span_root=span_root, anchored=anchored, isa=isa
        )

    def extend(
        self, token_ids: Any, spans: Sequence[tuple[int, int]] = ()
    ) -> npt.NDArray[np.uint8]:
        """Add tokens; return the keys of the blocks they fill.

        Tokens of an unfinished last block are kept, and continued by the next call.

        Args:
            token_ids: ``[num_tokens]`` int32 or int64, on the CPU, ids in [0, 2**32). Both types
                give the same keys.
            spans: ``(start, end)`` token positions counted from the start of the chain: sorted,
                disjoint, multiples of ``block_size``, within the tokens of this call. An empty span
                (``start == end``) changes nothing.

        Returns:
            ``[num_new_full_blocks, 32]`` uint8, a new array.

        Raises:
            ValueError: for a bad id or span; the chain is then as before.
            TypeError: for another dtype, or an object that is no tensor.
        """
        return self._chain.extend(token_ids, spans)

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._chain.block_size

    @property
    def num_tokens(self) -> int:
        """Tokens added so far, those of an unfinished block included."""
        return self._chain.num_tokens

    @property
    def digest(self) -> bytes:
        """The outer chain's 32-byte state after its last full block or span."""
        return self._chain.digest


def sha256_isas() -> tuple[str, ...]:
    """SHA-256 code of this machine, fastest first: of ``sha_ni``, ``armv8``, ``scalar``."""
    return _core.sha256_isas()
