"""Naive twins of :mod:`kvspan.ops.gated_delta`: token by token, in float64, the truth for tests.

Nothing here shares code with the C++ core. Needs torch. Arguments, shapes and what is written are
those of the operations. float64 tensors are taken too, and then the results are float64.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    out: Tensor | None = None,
    final_state: Tensor | None = None,
    state_layout: str = "kv",
    qk_l2norm: bool = True,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Twin of :func:`kvspan.ops.gated_delta`."""
    if out is None:
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
    if scale is None:
        scale = q.shape[-1] ** -0.5
    queries = _keys(q, v, qk_l2norm) * scale
    state = _run(queries, k, v, g, beta, initial_state, cu_seqlens, out, state_layout, qk_l2norm)
    return out, _written(final_state, state, v)


def gated_delta_state(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    final_state: Tensor | None = None,
    state_layout: str = "kv",
    qk_l2norm: bool = True,
) -> Tensor:
    """Twin of :func:`kvspan.ops.gated_delta_state`."""
    state = _run(None, k, v, g, beta, initial_state, cu_seqlens, None, state_layout, qk_l2norm)
    return _written(final_state, state, v)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    out: Tensor | None = None,
    activation: str | None = "silu",
) -> tuple[Tensor, Tensor]:
    """Twin of :func:`kvspan.ops.causal_conv1d`."""
    num_channels, width = weight.shape
    bounds = _bounds(cu_seqlens, len(x))
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if state is None:
        state = x.new_zeros(len(bounds), num_channels, width - 1)
    for n, (begin, end) in enumerate(bounds):
        rows = torch.cat([state[n].T.double(), x[begin:end].double()])
        for t in range(begin, end):
            window = rows[t - begin : t - begin + width]  # [W, C], the last row is token t
            y = (window * weight.T.double()).sum(0)
            if bias is not None:
                y = y + bias.double()
            out[t] = (y * torch.sigmoid(y) if activation == "silu" else y).to(out.dtype)
        state[n] = rows[len(rows) - (width - 1) :].T.to(state.dtype)
    return out, state


def _bounds(cu_seqlens: Tensor | None, num_tokens: int) -> list[tuple[int, int]]:
    """First token and one past the last, of each sequence."""
    offsets = [0, num_tokens] if cu_seqlens is None else [int(i) for i in cu_seqlens]
    return list(itertools.pairwise(offsets))


def _keys(keys: Tensor, v: Tensor, l2norm: bool) -> Tensor:
    """``[T, Hv, dk]`` float64: normalised if so asked, repeated for the value heads of each."""
    keys = keys.double()
    if l2norm:
        keys = keys * torch.rsqrt((keys * keys).sum(-1, keepdim=True) + 1e-6)
    return keys.repeat_interleave(v.shape[1] // keys.shape[1], dim=1)


def _run(
    queries: Tensor | None,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    out: Tensor | None,
    state_layout: str,
    qk_l2norm: bool,
) -> Tensor:
    """The state after the last token of each sequence, float64 in the caller's layout."""
    keys, values = _keys(k, v, qk_l2norm), v.double()
    alpha, strength = g.double().exp()[..., None, None], beta.double()[..., None]
    bounds = _bounds(cu_seqlens, len(k))
    states = values.new_zeros(len(bounds), v.shape[1], k.shape[2], v.shape[2])
    if initial_state is not None:
        states += initial_state if state_layout == "kv" else initial_state.transpose(2, 3)
    for n, (begin, end) in enumerate(bounds):
        state = states[n]  # [Hv, dk, dv]
        for t in range(begin, end):
            state = state * alpha[t]
            read = torch.einsum("hkv,hk->hv", state, keys[t])
            state = state + torch.einsum("hk,hv->hkv", keys[t], strength[t] * (values[t] - read))
            if out is not None and queries is not None:
                out[t] = torch.einsum("hkv,hk->hv", state, queries[t]).to(out.dtype)
        states[n] = state
    return states if state_layout == "kv" else states.transpose(2, 3)


def _written(final_state: Tensor | None, state: Tensor, v: Tensor) -> Tensor:
    if final_state is None:
        dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
        final_state = torch.empty(state.shape, dtype=dtype)
    return final_state.copy_(state)
