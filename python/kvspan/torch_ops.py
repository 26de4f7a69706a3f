"""The operations as ``torch.ops.kvspan.*``, for torch.compile and CUDA graphs.

Importing this module registers them with torch.library: mutating operations with schemas that say
what they write, and fake implementations, so that torch.compile traces through them (no graph
break) and functionalisation keeps their order. ::

    kvspan::rerope(k_src, k_dst!, src_blocks, dst_blocks, deltas, inv_freq, ...)
    kvspan::rerope_(k!, src_blocks, dst_blocks, deltas, inv_freq, ...)            within one pool
    kvspan::rerope_layers_(keys![], values![], src_blocks, dst_blocks, deltas, inv_freq[], ...)
    kvspan::copy_blocks(src, dst!, src_blocks, dst_blocks)
    kvspan::copy_blocks_(pool!, src_blocks, dst_blocks)                           within one pool

and those of linear attention, :mod:`kvspan.torch_ops_gated_delta`.

The ones with an underscore read and write the same pools: a schema must not call one memory both
read-only and written. Arguments mean what they do in :mod:`kvspan.ops`, moves and frequencies are
tensors in host memory, work on CUDA goes to torch's current stream. Block ids and deltas are read
when a call runs: a CUDA graph that captured one repeats the same moves. Outside of compiled code
the functions of :mod:`kvspan.ops` do the same with less overhead. Needs torch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvspan import ops
from kvspan.torch_ops_gated_delta import (
    causal_conv1d_,
    gated_delta_,
    gated_delta_state_,
    stream_of,
)

__all__ = [
    "causal_conv1d_",
    "copy_blocks",
    "copy_blocks_",
    "gated_delta_",
    "gated_delta_state_",
    "rerope",
    "rerope_",
    "rerope_layers_",
]


@torch.library.custom_op("kvspan::rerope", mutates_args=("k_dst",))
def rerope(
    k_src: Tensor,
    k_dst: Tensor,
    src_blocks: Tensor,
    dst_blocks: Tensor,
    deltas: Tensor,
    inv_freq: Tensor,
    is_neox: bool = True,
    axes: Sequence[int] | None = None,
    rotary_offset: int = 0,
    layout: str = "token_rows",
) -> None:
    """:func:`kvspan.ops.rerope` between two pools."""
    ops.rerope(
        k_src,
        k_dst,
        src_blocks,
        dst_blocks,
        deltas,
        inv_freq,
        is_neox=is_neox,
        axes=axes or (),
        rotary_offset=rotary_offset,
        layout=layout,
        stream=stream_of(k_dst),
    )


@torch.library.custom_op("kvspan::rerope_", mutates_args=("k",))
def rerope_(
    k: Tensor,
    src_blocks: Tensor,
    dst_blocks: Tensor,
    deltas: Tensor,
    inv_freq: Tensor,
    is_neox: bool = True,
    axes: Sequence[int] | None = None,
    rotary_offset: int = 0,
    layout: str = "token_rows",
) -> None:
    """:func:`kvspan.ops.rerope` within one pool."""
    ops.rerope(
        k,
        k,
        src_blocks,
        dst_blocks,
        deltas,
        inv_freq,
        is_neox=is_neox,
        axes=axes or (),
        rotary_offset=rotary_offset,
        layout=layout,
        stream=stream_of(k),
    )


@torch.library.custom_op("kvspan::rerope_layers_", mutates_args=("keys", "values"))
def rerope_layers_(
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    src_blocks: Tensor,
    dst_blocks: Tensor,
    deltas: Tensor,
    inv_freq: Sequence[Tensor],
    is_neox: Sequence[bool],
    axes: Sequence[int] | None = None,
    rotary_offset: int = 0,
    layout: str = "token_rows",
) -> None:
    """:func:`kvspan.ops.rerope_layers` within the pools of all layers; values may be empty."""
    ops.rerope_layers(
        keys,
        keys,
        values,
        values,
        src_blocks,
        dst_blocks,
        deltas,
        inv_freq,
        is_neox=is_neox,
        axes=axes or (),
        rotary_offset=rotary_offset,
        layout=layout,
        stream=stream_of(keys[0]) if keys else 0,
    )


@torch.library.custom_op("kvspan::copy_blocks", mutates_args=("dst",))
def copy_blocks(src: Tensor, dst: Tensor, src_blocks: Tensor, dst_blocks: Tensor) -> None:
    """:func:`kvspan.ops.copy_blocks` between two pools."""
    ops.copy_blocks(src, dst, src_blocks, dst_blocks, stream=stream_of(dst))


@torch.library.custom_op("kvspan::copy_blocks_", mutates_args=("pool",))
def copy_blocks_(pool: Tensor, src_blocks: Tensor, dst_blocks: Tensor) -> None:
    """:func:`kvspan.ops.copy_blocks` within one pool."""
    ops.copy_blocks(pool, pool, src_blocks, dst_blocks, stream=stream_of(pool))


@rerope.register_fake
@rerope_.register_fake
@rerope_layers_.register_fake
@copy_blocks.register_fake
@copy_blocks_.register_fake
def _(*args: object, **options: object) -> None:
    """Nothing is returned, and what is written keeps its shape."""
