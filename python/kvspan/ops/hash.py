"""Block hashes: chained keys of the full blocks of a prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvspan import _core
from kvspan.ops._arrays import Int64Array, as_int64

Spans: TypeAlias = Sequence[tuple[int, int]] | Int64Array


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
        fields: everything that all keys of a prompt must depend on: model, tenant salt, scope, LoRA
            (its name *and* its id: a name may come to stand for other weights), ... What belongs
            to some tokens only is an :class:`ExtraRange` instead.

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


class ExtraRange(NamedTuple):
    """What the tokens ``[start, end)`` stand for, besides their ids.

    Multimodal inputs put the same placeholder ids into the prompt whatever the image is; its hash
    then goes here, as do prompt embeddings or an adapter that is active for some tokens only. The
    range enters the key of every block it overlaps, together with its length and where it starts
    relative to the block: the same image at another offset gives other keys, and a span with an
    image keeps its keys when it is moved.

    Attributes:
        start: first token, counted from the start of the chain.
        end: one past the last token; an empty range changes nothing.
        digest: 32 bytes, from :func:`digest_fields`. Several things about the same tokens go into
            one digest.
    """

    start: int
    end: int
    digest: bytes


class TokenStore:
    """Makes keys from XXH3-128, a fast hash without collision resistance, and compares tokens.

    For one tenant whose inputs are trusted, above all on a processor without SHA instructions,
    where it is several times as fast; with them, SHA-256 keeps up on new content. Chains that are
    given the same store share what is equal and, even if hashes collide, nothing else: the tokens
    and parents behind every key are kept, compared whenever a hash is seen again, and hashed anew
    if they differ. So it takes memory for every distinct block, and its keys mean nothing in
    another store, process or machine.
    ``cpp/include/kvspan/token_store.h`` says more.

    Raises:
        RuntimeError: if kvspan was built without xxHash (see :func:`built_with_xxhash`).
    """

    def __init__(self) -> None:
        self._store = _core.TokenStore()

    def clear(self) -> None:
        """Drop everything, along with the cache that uses the keys. Chains end here."""
        self._store.clear()

    @property
    def num_entries(self) -> int:
        """Distinct preimages kept: blocks, extra ranges, starts and ends of spans."""
        return self._store.num_entries

    @property
    def num_bytes(self) -> int:
        """Bytes of the preimages kept."""
        return self._store.num_bytes

    @property
    def num_collisions(self) -> int:
        """Comparisons that found another preimage under the same hash."""
        return self._store.num_collisions


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
        store: None for SHA-256 keys; else xxh3-128 keys with the tokens compared. Not safe against
            untrusted inputs in every respect: see :class:`TokenStore`.

    Raises:
        ValueError: for a size, digest or ISA that cannot be used.
    """

    def __init__(
        self,
        block_size: int,
        *,
        root: bytes,
        span_root: bytes,
        anchored: bool,
        isa: str = "auto",
        store: TokenStore | None = None,
    ) -> None:
        self._chain = _core.BlockChain(
            block_size,
            root=root,
            span_root=span_root,
            anchored=anchored,
            isa=isa,
            store=None if store is None else store._store,
        )

    def extend(
        self,
        token_ids: Any,
        spans: Spans = (),
        extra: Sequence[ExtraRange | tuple[int, int, bytes]] = (),
    ) -> npt.NDArray[np.uint8]:
        """Add tokens; return the keys of the blocks they fill.

        Tokens of an unfinished last block are kept, and continued by the next call.

        Args:
            token_ids: ``[num_tokens]`` int32 or int64, on the CPU, ids in [0, 2**32). Both types
                give the same keys.
            spans: ``(start, end)`` token positions counted from the start of the chain, or an
                int64 array ``[num_spans, 2]``: sorted, disjoint, multiples of ``block_size``,
                within the tokens of this call. An empty span (``start == end``) changes nothing.
            extra: sorted, disjoint, within the tokens of this call; aligned to nothing.

        Returns:
            ``[num_new_full_blocks, 32]`` uint8, a new array.

        Raises:
            ValueError: for a bad id, span or extra range; the chain is then as before.
            TypeError: for another dtype, or an object that is no tensor.
        """
        return self._chain.extend(token_ids, spans, extra)

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


def extend_chains(
    chains: Sequence[BlockChain],
    token_ids: Any,
    cu_seqlens: Any,
    *,
    spans: Spans = (),
    cu_spans: Any = (),
    extra: Sequence[ExtraRange | tuple[int, int, bytes]] = (),
    cu_extra: Any = (),
    num_threads: int = 0,
) -> tuple[npt.NDArray[np.uint8], Int64Array]:
    """:meth:`BlockChain.extend` for many prompts in one call, without the GIL.

    The keys are the same. Prompts are spread over threads, and each thread hashes two independent
    chains at a time, which alone is about 1.5 times as fast as one by one. Roots, scopes and
    unfinished blocks are those of each chain, so one call serves new prompts and decoding ones.

    Args:
        chains: ``[num_prompts]``, distinct, of one ``block_size`` and one store.
        token_ids: ``[num_tokens]`` int32 or int64, on the CPU: the new tokens of all prompts, one
            prompt's after the other's.
        cu_seqlens: ``[num_prompts + 1]`` int64 (or a list): prompt ``i`` adds
            ``token_ids[cu_seqlens[i]:cu_seqlens[i + 1]]``.
        spans: of all prompts, as for :meth:`BlockChain.extend`: positions count from the start of
            each chain.
        cu_spans: ``[num_prompts + 1]`` int64: prompt ``i`` has
            ``spans[cu_spans[i]:cu_spans[i + 1]]``. May be left out where there are none.
        extra: of all prompts.
        cu_extra: ``[num_prompts + 1]`` int64, likewise.
        num_threads: at most; 0 chooses by the number of tokens.

    Returns:
        ``(keys, cu_blocks)``: ``[num_new_full_blocks, 32]`` uint8 and ``[num_prompts + 1]`` int64;
        prompt ``i`` has ``keys[cu_blocks[i]:cu_blocks[i + 1]]``.

    Raises:
        ValueError, TypeError: as for :meth:`BlockChain.extend`; all chains are then as before.
    """
    return _core.extend_chains(
        [chain._chain for chain in chains],
        token_ids,
        as_int64(cu_seqlens),
        spans,
        as_int64(cu_spans),
        extra,
        as_int64(cu_extra),
        num_threads,
    )


def sha256_isas() -> tuple[str, ...]:
    """SHA-256 code of this machine, fastest first: of ``sha_ni``, ``armv8``, ``scalar``."""
    return _core.sha256_isas()


def built_with_xxhash() -> bool:
    """Whether this build has xxHash, and so :class:`TokenStore` (CMake: ``KVSPAN_XXHASH``)."""
    return _core.built_with_xxhash()
