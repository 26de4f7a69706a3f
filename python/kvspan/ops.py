"""The core operations: block hashes, move plans, key rotation and block copies.

Every tensor argument is a numpy array or any tensor with DLPack support (torch among them) and is
used in place, never copied. Importing this module imports numpy and the C++ extension, not torch.

Names of shapes: ``num_blocks`` blocks of a paged KV pool, ``block_size`` tokens per block,
``num_kv_heads`` and ``head_dim`` of the attention layer. Block tensors are written NHD,
``[num_blocks, block_size, num_kv_heads, head_dim]``; an HND pool is passed as a permuted view.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvspan import _core

__all__ = [
    "BlockChain",
    "MovePlan",
    "copy_blocks",
    "cuda_status",
    "digest_fields",
    "plan_moves",
    "rerope",
    "sha256_isas",
    "vector_isas",
]

Int64Array = npt.NDArray[np.int64]


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


@dataclass(frozen=True)
class MovePlan:
    """Block moves in batches to be run one after the other.

    Attributes:
        batches: per batch ``(src_blocks, dst_blocks, deltas)``, int64 ``[num_moves]`` each. The
            moves of a batch may run in any order or at once: no block is written twice, or read by
            one move and written by another. Running the batches in order gives what gathering all
            sources first and scattering them afterwards would.
    """

    batches: list[tuple[Int64Array, Int64Array, Int64Array]]

    @property
    def num_moves(self) -> int:
        """Moves of all batches, those through scratch blocks included."""
        return sum(len(src) for src, _, _ in self.batches)


def plan_moves(src_blocks: Any, dst_blocks: Any, deltas: Any, scratch_blocks: Any = ()) -> MovePlan:
    """Order block moves so that no source is overwritten before it has been read.

    Chains of moves become consecutive batches; a cycle is opened by saving one block to a scratch
    block. One scratch block is enough for any number of cycles; with more, cycles run side by side
    in fewer batches. Linear in the number of moves.

    Args:
        src_blocks: ``[num_moves]`` int64 block ids (or a list of ints); repeats are fine.
        dst_blocks: ``[num_moves]`` int64 block ids, distinct.
        deltas: ``[num_moves]`` int64, tokens to rotate by. A move with ``src == dst`` rotates in
            place; with delta 0 it is left out.
        scratch_blocks: int64 block ids that may be overwritten; distinct, none of them in use by a
            move. Needed only if there are cycles.

    Raises:
        ValueError: for repeated destinations, unequal lengths, negative ids, or too few scratch
            blocks (the message says how many are needed).
        TypeError: for arrays that are not int64.
    """
    return MovePlan(
        _core.plan_moves(
            _as_int64(src_blocks),
            _as_int64(dst_blocks),
            _as_int64(deltas),
            _as_int64(scratch_blocks),
        )
    )


def rerope(
    k_src: Any,
    k_dst: Any,
    src_blocks: Any,
    dst_blocks: Any,
    deltas: Any,
    inv_freq: Any,
    *,
    is_neox: bool = True,
    num_threads: int = 0,
    stream: int = 0,
    isa: str = "auto",
) -> None:
    """Move whole blocks of cached keys by ``deltas`` tokens: copy and rotate in one pass.

    A cached key is repositioned by rotating it by ``placement - canonical position`` (Span Queries,
    arXiv 2511.02749). The angle ``delta * inv_freq[i]`` and its cosine and sine are computed in
    float64, the rotation in float32, and the result is rounded once, so a delta of a million tokens
    is still exact to the storage type. Every instruction set gives the same bits.
    ``cpp/include/kvspan/rerope.h`` states the error bound.

    Args:
        k_src: ``[num_src_blocks, block_size, num_kv_heads, head_dim]``, float32, bfloat16 or
            float16, CPU or CUDA; block, token and head strides are free, ``head_dim`` contiguous.
        k_dst: ``[num_dst_blocks, ...]``, otherwise like ``k_src``; **written**. The same view as
            ``k_src``, or memory that does not overlap it. Its old content is not read.
        src_blocks: ``[num_moves]`` int64 block ids in ``k_src``, in host memory (or a list).
        dst_blocks: ``[num_moves]`` int64 block ids in ``k_dst``, distinct, in host memory. Within
            one tensor no block may be read by one move and written by another: order moves with
            :func:`plan_moves` and run its batches one by one.
        deltas: ``[num_moves]`` int64 tokens, any sign, in host memory; 0 copies exactly.
        inv_freq: ``[rotary_dim / 2]`` float32, in host memory, radians per token, as the model
            itself uses them (after linear, Llama-3 or YaRN scaling). The first ``rotary_dim``
            dimensions are rotated, the others are copied bit for bit.
        is_neox: pairs are ``(i, i + rotary_dim / 2)`` (NeoX, Llama) or, if False, ``(2i, 2i + 1)``
            (GPT-J, interleaved).
        num_threads: on the CPU; 0 chooses by the size of the work.
        stream: on CUDA, the ``cudaStream_t`` as an int (0: default stream). The work is only
            enqueued.
        isa: on the CPU, the code to run: ``"auto"`` or one of :func:`vector_isas`.

    Raises:
        ValueError: for shapes, devices, ids or values that do not fit, with what was expected.
        TypeError: for a wrong dtype or an object that is no tensor.
        RuntimeError: for CUDA tensors without CUDA in this build or a device, or a failed call.
    """
    _core.rerope(
        k_src,
        k_dst,
        _as_int64(src_blocks),
        _as_int64(dst_blocks),
        _as_int64(deltas),
        inv_freq,
        is_neox=is_neox,
        num_threads=num_threads,
        stream=stream,
        isa=isa,
    )


def copy_blocks(
    src: Any,
    dst: Any,
    src_blocks: Any,
    dst_blocks: Any,
    *,
    num_threads: int = 0,
    stream: int = 0,
) -> None:
    """Copy whole blocks bit for bit: values, or keys that keep their position.

    Args:
        src: ``[num_src_blocks, block_size, num_kv_heads, head_dim]`` (or 2 to 4 dimensions), any
            dtype of 1, 2, 4 or 8 bytes, CPU or CUDA; the last dimension contiguous.
        dst: ``[num_dst_blocks, ...]``, otherwise like ``src``; **written**. The same view as
            ``src``, or memory that does not overlap it.
        src_blocks: ``[num_moves]`` int64 block ids in ``src``, in host memory (or a list).
        dst_blocks: ``[num_moves]`` int64 block ids in ``dst``; rules as for :func:`rerope`.
        num_threads: on the CPU; 0 chooses by the size of the work.
        stream: on CUDA, the ``cudaStream_t`` as an int. The work is only enqueued.

    Raises:
        ValueError, TypeError, RuntimeError: as for :func:`rerope`.
    """
    _core.copy_blocks(
        src,
        dst,
        _as_int64(src_blocks),
        _as_int64(dst_blocks),
        num_threads=num_threads,
        stream=stream,
    )


def sha256_isas() -> tuple[str, ...]:
    """SHA-256 code of this machine, fastest first: of ``sha_ni``, ``armv8``, ``scalar``."""
    return _core.sha256_isas()


def vector_isas() -> tuple[str, ...]:
    """Kernel code of this machine, widest first: of ``avx512``, ``avx2``, ``baseline``."""
    return _core.vector_isas()


def cuda_status() -> str:
    """One line on CUDA: not in this build, in it without a usable device, or the device count."""
    if not _core.built_with_cuda():
        return "built without CUDA"
    count = _core.cuda_device_count()
    return f"{count} CUDA device(s)" if count else "no CUDA device"


def _as_int64(values: Any) -> Any:
    """Sequences of ints become int64 arrays; arrays and tensors pass through, to be checked."""
    if hasattr(values, "__dlpack__"):
        return values
    array = np.asarray(values)
    return array.astype(np.int64) if array.size == 0 else array
