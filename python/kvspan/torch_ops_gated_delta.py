"""The linear-attention operations as ``torch.ops.kvspan.*``; see :mod:`kvspan.torch_ops`. ::

    kvspan::gated_delta_(q, k, v, g, beta, out!, state!, cu_seqlens?, has_initial_state, ...)
    kvspan::gated_delta_state_(k, v, g, beta, state!, cu_seqlens?, has_initial_state, ...)
    kvspan::causal_conv1d_(x, weight, bias?, out!, state!, cu_seqlens?, silu)

States are read and written in one tensor, as a model's cache holds them; what is in a state of the
gated delta rule before is not read if ``has_initial_state`` is False. All else is as in
:mod:`kvspan.ops`; ``cu_seqlens`` is in host memory and read when a call runs.
"""

import torch
from torch import Tensor

from kvspan import ops

__all__ = ["causal_conv1d_", "gated_delta_", "gated_delta_state_"]


def stream_of(tensor: Tensor) -> int:
    """torch's current stream where a tensor lies on CUDA; 0 in host memory."""
    if not tensor.is_cuda:
        return 0
    return int(torch.cuda.current_stream(tensor.device).cuda_stream)


@torch.library.custom_op("kvspan::gated_delta_", mutates_args=("out", "state"))
def gated_delta_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    out: Tensor,
    state: Tensor,
    cu_seqlens: Tensor | None = None,
    has_initial_state: bool = True,
    state_layout: str = "kv",
    qk_l2norm: bool = True,
    scale: float | None = None,
) -> None:
    """:func:`kvspan.ops.gated_delta`."""
    ops.gated_delta(
        q,
        k,
        v,
        g,
        beta,
        initial_state=state if has_initial_state else None,
        cu_seqlens=cu_seqlens,
        out=out,
        final_state=state,
        state_layout=state_layout,
        qk_l2norm=qk_l2norm,
        scale=scale,
        stream=stream_of(v),
    )


@torch.library.custom_op("kvspan::gated_delta_state_", mutates_args=("state",))
def gated_delta_state_(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    cu_seqlens: Tensor | None = None,
    has_initial_state: bool = True,
    state_layout: str = "kv",
    qk_l2norm: bool = True,
) -> None:
    """:func:`kvspan.ops.gated_delta_state`."""
    ops.gated_delta_state(
        k,
        v,
        g,
        beta,
        initial_state=state if has_initial_state else None,
        cu_seqlens=cu_seqlens,
        final_state=state,
        state_layout=state_layout,
        qk_l2norm=qk_l2norm,
        stream=stream_of(v),
    )


@torch.library.custom_op("kvspan::causal_conv1d_", mutates_args=("out", "state"))
def causal_conv1d_(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    state: Tensor,
    cu_seqlens: Tensor | None = None,
    silu: bool = True,
) -> None:
    """:func:`kvspan.ops.causal_conv1d`."""
    ops.causal_conv1d(
        x,
        weight,
        bias,
        state=state,
        cu_seqlens=cu_seqlens,
        out=out,
        activation="silu" if silu else None,
        stream=stream_of(x),
    )


@gated_delta_.register_fake
@gated_delta_state_.register_fake
@causal_conv1d_.register_fake
def _(*args: object, **options: object) -> None:
    """Nothing is returned, and what is written keeps its shape."""
