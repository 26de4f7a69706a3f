"""Moving blocks: keys copied and rotated, values copied."""

from __future__ import annotations

from typing import Any

from kvspan import _core
from kvspan.ops._arrays import as_int64


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
        as_int64(src_blocks),
        as_int64(dst_blocks),
        as_int64(deltas),
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
        as_int64(src_blocks),
        as_int64(dst_blocks),
        num_threads=num_threads,
        stream=stream,
    )


def vector_isas() -> tuple[str, ...]:
    """Kernel code of this machine, widest first: of ``avx512``, ``avx2``, ``baseline``."""
    return _core.vector_isas()
