"""Moving blocks: keys copied and rotated, values copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvspan import _core
from kvspan.ops._arrays import as_int64
from kvspan.ops.streams import Stream


def rerope(
    k_src: Any,
    k_dst: Any,
    src_blocks: Any,
    dst_blocks: Any,
    deltas: Any,
    inv_freq: Any,
    *,
    is_neox: bool = True,
    axes: Any = (),
    rotary_offset: int = 0,
    layout: str = "token_rows",
    num_threads: int = 0,
    stream: Stream = 0,
    isa: str = "auto",
) -> None:
    """Move whole blocks of cached keys by ``deltas`` tokens: copy and rotate in one pass.

    A cached key is repositioned by rotating it by ``placement - canonical position`` (Span Queries,
    arXiv 2511.02749). The angle ``delta * inv_freq[i]`` and its cosine and sine are computed in
    float64, the rotation in float32, and the result is rounded once, so a delta of a million tokens
    is still exact to the storage type. Every instruction set gives the same bits.
    ``cpp/include/kvspan/rerope.h`` states the error bound.

    8-bit floats need no scale: one that is the same for a whole tensor or head multiplies both
    dimensions of a pair, so it cancels. A rotated number beyond the type's range becomes its
    largest one; scales that leave a factor of sqrt(2) of room rule that out. Every move rounds
    anew, by up to 2**-4 (e4m3fn) or 2**-3 (e5m2) of the number: move from pristine blocks. Caches
    with a scale per token or per group of dimensions: the first need their scales moved along
    (:func:`copy_blocks`), the second cannot be rotated.

    Layouts, by name:

    ``token_rows``
        A contiguous row per token and head; other strides are free. An HND pool is passed as a
        permuted view, and a fused pool whose rows hold a key and then its value either as its key
        half, ``kv[..., :head_dim]``, or whole, when the values are copied beside.
    ``cpu_vec``, ``cpu_amx``
        The packed pools of vLLM's CPU attention, as vLLM allocates them: ``[num_blocks,
        num_kv_heads, block_size, 2 * head_dim]`` with, inside each block and head, first all keys
        and then all values (``kvspan/rerope.h`` gives the places). ``cpu_amx`` is for
        bfloat16, on CPUs with AMX. Values are copied beside.

    Args:
        k_src: ``[num_src_blocks, block_size, num_kv_heads, head_dim]``, or three dimensions without
            heads (MLA), or as ``layout`` says; float32, bfloat16, float16, float8_e4m3fn or
            float8_e5m2, CPU or CUDA.
        k_dst: ``[num_dst_blocks, ...]``, otherwise like ``k_src``; **written**. The same view as
            ``k_src``, or memory that does not overlap it. Its old content is not read.
        src_blocks: ``[num_moves]`` int64 block ids in ``k_src``, in host memory (or a list).
        dst_blocks: ``[num_moves]`` int64 block ids in ``k_dst``, distinct, in host memory. Within
            one tensor no block may be read by one move and written by another: order moves with
            :func:`plan_moves` and run its batches one by one.
        deltas: ``[num_moves]`` int64 tokens, any sign, in host memory; 0 copies exactly. M-RoPE:
            ``[num_moves, num_axes]``, a delta for each position axis (time, height, width).
        inv_freq: ``[rotary_dim / 2]`` float32, in host memory, radians per token, as the model
            itself uses them (after linear, Llama-3 or YaRN scaling). ``rotary_dim`` dimensions from
            ``rotary_offset`` on are rotated, the others are copied bit for bit. Of none at all, the
            keys are copied.
        is_neox: pairs are ``(i, i + rotary_dim / 2)`` (NeoX, Llama) or, if False, ``(2i, 2i + 1)``
            (GPT-J, interleaved).
        axes: ``[rotary_dim / 2]`` int64, the position axis of each frequency (see
            :func:`kvspan.rope_scaling.mrope_axes`); empty: axis 0.
        rotary_offset: the first rotated dimension; for MLA, where the decoupled rotary slice of a
            row starts.
        layout: where a block holds what; see above.
        num_threads: on the CPU; 0 chooses by the size of the work.
        stream: on CUDA, a ``cudaStream_t`` as an int (0: default stream), or a
            ``torch.cuda.Stream``, ``cuda.core.Stream`` or the like. The work is only enqueued; a
            captured graph repeats the same moves.
        isa: on the CPU, the code to run: ``"auto"`` or one of :func:`vector_isas`.

    Raises:
        ValueError: for shapes, devices, ids or values that do not fit, with what was expected.
        TypeError: for a wrong dtype or an object that is no tensor.
        RuntimeError: for CUDA tensors without CUDA in this build or a device, or a failed call.
    """
    rerope_layers(
        (k_src,),
        (k_dst,),
        (),
        (),
        src_blocks,
        dst_blocks,
        deltas,
        (inv_freq,),
        is_neox=is_neox,
        axes=axes,
        rotary_offset=rotary_offset,
        layout=layout,
        num_threads=num_threads,
        stream=stream,
        isa=isa,
    )


def rerope_layers(
    k_src: Sequence[Any],
    k_dst: Sequence[Any],
    v_src: Sequence[Any],
    v_dst: Sequence[Any],
    src_blocks: Any,
    dst_blocks: Any,
    deltas: Any,
    inv_freq: Sequence[Any],
    *,
    is_neox: bool | Sequence[bool] = True,
    axes: Any = (),
    rotary_offset: int = 0,
    layout: str = "token_rows",
    num_threads: int = 0,
    stream: Stream = 0,
    isa: str = "auto",
) -> None:
    """Move the same blocks in all layers at once: :func:`rerope` for keys, values copied beside.

    The moves are checked once, threads share out layers and moves, tables of cosines are shared by
    layers of equal frequencies; on CUDA one launch moves many layers.

    Args:
        k_src, k_dst: one tensor a layer, all of the same numbers of blocks; otherwise as for
            :func:`rerope`, and free to differ between layers.
        v_src, v_dst: one tensor a layer, ``[num_blocks, ...]`` as for :func:`copy_blocks`; or empty
            where values are not moved (blocks rotated in place, fused rows, packed layouts).
        inv_freq: one array a layer; an empty one where keys do not rotate: they are copied.
        is_neox: for all layers, or one a layer.
        src_blocks, dst_blocks, deltas, axes, rotary_offset, layout, num_threads, stream, isa: as
            for :func:`rerope`, the same for all layers.

    Raises:
        ValueError, TypeError, RuntimeError: as for :func:`rerope`.
    """
    _core.rerope(
        k_src,
        k_dst,
        v_src,
        v_dst,
        as_int64(src_blocks),
        as_int64(dst_blocks),
        as_int64(deltas),
        inv_freq,
        [is_neox] * len(k_src) if isinstance(is_neox, bool) else is_neox,
        as_int64(axes),
        rotary_offset,
        layout,
        num_threads,
        stream,
        isa,
    )


def copy_blocks(
    src: Any,
    dst: Any,
    src_blocks: Any,
    dst_blocks: Any,
    *,
    num_threads: int = 0,
    stream: Stream = 0,
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
        stream: on CUDA, as for :func:`rerope`. The work is only enqueued.

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
    """Kernel code of this machine, widest first.

    Of ``avx512_vbmi``, ``avx512``, ``avx2`` and ``baseline``.
    """
    return _core.vector_isas()
