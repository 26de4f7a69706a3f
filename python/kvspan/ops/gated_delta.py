"""Linear attention of hybrid models: the gated delta rule and the convolution before it."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvspan import _core
from kvspan.ops._arrays import as_int64
from kvspan.ops.streams import Stream


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
    num_threads: int = 0,
    stream: Stream = 0,
    isa: str = "auto",
) -> tuple[Any, Any]:
    """The gated delta rule (Gated DeltaNet, arXiv 2412.06464): outputs and the state after them.

    For each sequence and value head, token by token, from a state ``S`` of ``[dk, dv]``::

        S <- exp(g) S;   S <- S + k (beta (v - S^T k))^T;   out = scale * S^T q

    computed by chunks of 64 tokens from each sequence's first (section 3 there), in float32.
    ``cpp/include/kvspan/gated_delta.h`` has the equations and the error. Shapes: ``T`` tokens of
    ``N`` sequences, ``Hk`` key heads, ``Hv`` value heads (a multiple), dimensions ``dk``, ``dv``;
    value head ``h`` uses key head ``h // (Hv / Hk)``.

    The state after a sequence depends on no later token and no other sequence; a sequence cut at a
    multiple of 64 tokens and continued from the state there gives the same bits as uncut.

    Args:
        q, k: ``[T, Hk, dk]`` float32, bfloat16 or float16, any strides but the last, CPU or CUDA.
        v: ``[T, Hv, dv]``, like ``k``.
        g: ``[T, Hv]`` float32, the logarithm of the decay; -inf forgets everything.
        beta: ``[T, Hv]`` float32, 0 to 1, or to 2 (negative eigenvalues).
        initial_state: ``[N, Hv, dk, dv]`` or as ``state_layout`` says, float32; None: zeros.
        cu_seqlens: ``[N + 1]`` int64 or int32 in host memory (or a list), the first token of each
            sequence, and ``T``; None: one sequence. A sequence may be empty.
        out: ``[T, Hv, dv]``, like ``v``; **written**. None: made. Must not overlap an input.
        final_state: like ``initial_state``; **written**. None: made. May be ``initial_state``.
        state_layout: ``"kv"``: states are ``[N, Hv, dk, dv]`` (transformers); ``"vk"``:
            ``[N, Hv, dv, dk]`` (vLLM on GPUs).
        qk_l2norm: divide each ``q`` and ``k`` by ``sqrt(|x|^2 + 1e-6)`` first.
        scale: None: ``dk ** -0.5``.
        num_threads: on the CPU; 0 chooses by the size of the work. The bits are the same.
        stream: on CUDA, as for :func:`rerope`. The work is only enqueued.
        isa: on the CPU, the code to run: ``"auto"`` or one of :func:`vector_isas`.

    Returns:
        ``out`` and ``final_state``.

    Raises:
        ValueError: for shapes, devices or values that do not fit, with what was expected.
        TypeError: for a wrong dtype or an object that is no tensor.
        RuntimeError: for CUDA tensors without CUDA in this build or a device, or a failed call.
    """
    if q is None:
        raise TypeError("q: expected a tensor like k, got None (see gated_delta_state)")
    if out is None:
        out = _empty(v, "v", np.shape(v))
    bounds, final_state = _bounds_and_state(k, v, g, cu_seqlens, final_state, state_layout)
    _core.gated_delta(
        q,
        k,
        v,
        g,
        beta,
        initial_state,
        out,
        final_state,
        bounds,
        state_layout,
        qk_l2norm,
        _size(k, -1) ** -0.5 if scale is None else scale,
        num_threads,
        stream,
        isa,
    )
    return out, final_state


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
    num_threads: int = 0,
    stream: Stream = 0,
    isa: str = "auto",
) -> Any:
    """The state that :func:`gated_delta` ends with, of the same bits, without its outputs.

    All that a replay needs of the last linear-attention layer before an attention layer. Arguments
    and errors are those of :func:`gated_delta`.

    Returns:
        ``final_state``.
    """
    bounds, final_state = _bounds_and_state(k, v, g, cu_seqlens, final_state, state_layout)
    _core.gated_delta(
        None,
        k,
        v,
        g,
        beta,
        initial_state,
        None,
        final_state,
        bounds,
        state_layout,
        qk_l2norm,
        1.0,
        num_threads,
        stream,
        isa,
    )
    return final_state


def causal_conv1d(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    state: Any = None,
    cu_seqlens: Any = None,
    out: Any = None,
    activation: str | None = "silu",
    num_threads: int = 0,
    stream: Stream = 0,
    isa: str = "auto",
) -> tuple[Any, Any]:
    """A causal convolution of each channel over its last ``W`` inputs, then SiLU.

    ``out[t] = silu(bias + sum_w weight[:, w] x[t - W + 1 + w])``, summed in float32 and rounded
    once; inputs before a sequence's first token come from ``state``.

    Args:
        x: ``[T, C]`` float32, bfloat16 or float16, channels contiguous, CPU or CUDA.
        weight: ``[C, W]``, ``W`` of 1 to 16, like ``x``.
        bias: ``[C]``, like ``x``; None: none.
        state: ``[N, C, W - 1]``, like ``x``, any strides; **updated in place**: the inputs before
            each sequence's first token become those before the token after its last. None: zeros.
        cu_seqlens: as for :func:`gated_delta`.
        out: ``[T, C]``, like ``x``; **written**. None: made. Must not overlap ``x``.
        activation: ``"silu"`` or None.
        num_threads, stream, isa: as for :func:`gated_delta`.

    Returns:
        ``out`` and ``state``.

    Raises:
        ValueError, TypeError, RuntimeError: as for :func:`gated_delta`.
    """
    if activation not in ("silu", None):
        raise ValueError(f"activation: expected 'silu' or None, got {activation!r}")
    bounds = _bounds(cu_seqlens, x)
    if out is None:
        out = _empty(x, "x", np.shape(x))
    if state is None:
        state = _empty(x, "x", (len(bounds) - 1, _size(x, -1), _size(weight, -1) - 1))
        state[...] = 0
    _core.causal_conv1d(
        x,
        weight,
        bias,
        state,
        out,
        bounds,
        activation == "silu",
        num_threads,
        stream,
        isa,
    )
    return out, state


def _bounds_and_state(
    k: Any, v: Any, g: Any, cu_seqlens: Any, final_state: Any, state_layout: str
) -> tuple[Any, Any]:
    """``cu_seqlens`` as an array, and ``final_state``, made if there is none."""
    bounds = _bounds(cu_seqlens, v)
    if final_state is None:
        sizes = [_size(k, -1), _size(v, -1)]
        if state_layout == "vk":
            sizes.reverse()
        # g is float32, as states are.
        final_state = _empty(g, "g", (len(bounds) - 1, _size(v, 1), *sizes))
    return bounds, final_state


def _bounds(cu_seqlens: Any, tokens: Any) -> Any:
    return np.array([0, _size(tokens, 0)]) if cu_seqlens is None else as_int64(cu_seqlens)


def _size(tensor: Any, dim: int) -> int:
    """Of one dimension; 1 where it is missing or empty, which the core then refuses."""
    shape = np.shape(tensor)
    return max(shape[dim], dim == -1) if -len(shape) <= dim < len(shape) else 1


def _empty(like: Any, name: str, shape: tuple[int, ...]) -> Any:
    """An array of ``like``'s kind, dtype and device."""
    if isinstance(like, np.ndarray):
        return np.empty(shape, like.dtype)
    if hasattr(like, "new_empty"):
        return like.new_empty(shape)
    raise TypeError(f"{name}: expected a numpy array or a torch tensor, got {type(like).__name__}")
