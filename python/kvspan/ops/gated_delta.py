"""Linear attention of hybrid models: the gated delta rule and the convolution before it."""

from __future__ import annotations

from typing import Any


def gated_delta(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    *,
    initial_state: Any = None,
    cu_seqlens: Any = None,
    out: Any = None,
    final_state: Any = None,
    state_layout: str = "kv",
    qk_l2norm: bool = True,
    scale: float | None = None,
) -> tuple[Any, Any]:
    """The gated delta rule (Gated DeltaNet, arXiv 2412.06464): outputs and the state after them.

    For each value head, token by token, from the state ``S [dk, dv]``::

        S <- exp(g) S;   S <- S + k beta (v - S^T k)^T;   out = scale * S^T q
    """
    from kvspan import reference_gated_delta

    return reference_gated_delta.gated_delta(
        q,
        k,
        v,
        g,
        beta,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        out=out,
        final_state=final_state,
        state_layout=state_layout,
        qk_l2norm=qk_l2norm,
        scale=scale,
    )


def gated_delta_state(
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    *,
    initial_state: Any = None,
    cu_seqlens: Any = None,
    final_state: Any = None,
    state_layout: str = "kv",
    qk_l2norm: bool = True,
) -> Any:
    """The state that :func:`gated_delta` ends with, of the same bits, without its outputs."""
    from kvspan import reference_gated_delta

    return reference_gated_delta.gated_delta_state(
        k,
        v,
        g,
        beta,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        final_state=final_state,
        state_layout=state_layout,
        qk_l2norm=qk_l2norm,
    )


def causal_conv1d(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    state: Any = None,
    cu_seqlens: Any = None,
    out: Any = None,
    activation: str | None = "silu",
) -> tuple[Any, Any]:
    """Causal depthwise convolution over tokens, then SiLU; ``state`` is updated in place."""
    from kvspan import reference_gated_delta

    return reference_gated_delta.causal_conv1d(
        x, weight, bias, state=state, cu_seqlens=cu_seqlens, out=out, activation=activation
    )
