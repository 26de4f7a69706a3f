"""vLLM's OLMo Hybrid on CPUs: what its layer calls of Triton, by kvspan's operator and torch.

vLLM itself has no CPU kernels for this layer (0.32): its constructor wants Triton's allocator, and
the gates, the chunked and the recurrent rule are Triton's. Only these are replaced here, and the
loader of its convolution's weights, which in 0.32 does not see which of the three it is given
(vLLM's pull request 55858).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.mamba.gdn import olmo_gdn_linear_attn

from kvspan.ops import gated_delta


def _gates(
    a_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor, twice: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    g = -a_log.float().exp() * torch.nn.functional.softplus(a.float() + dt_bias.float())
    beta = b.float().sigmoid() * (2 if twice else 1)
    return g[None], beta[None]


def _chunked(
    *, q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: torch.Tensor, cu_seqlens: Any,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    rows = (part[0].contiguous() for part in (q, k, v, g, beta))
    out, state = gated_delta(
        *rows, initial_state=initial_state.float(), cu_seqlens=cu_seqlens, state_layout="vk"
    )
    return out[None], state


def _recurrent(
    *, initial_state: torch.Tensor, ssm_state_indices: torch.Tensor, **rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    at = ssm_state_indices.long()[: len(rest["cu_seqlens"]) - 1]
    out, state = _chunked(initial_state=initial_state[at], **rest)
    initial_state[at] = state.to(initial_state.dtype)
    return out, initial_state


_make_loader = olmo_gdn_linear_attn._make_fused_conv1d_weight_loader


def _loader(*sizes: Any) -> Any:
    load = _make_loader(*sizes)
    return lambda param, weight, shard=None: load(param, weight, getattr(weight, "shard_id", shard))


@contextmanager
def olmo_on_cpu() -> Iterator[None]:
    """Within it OLMo Hybrid is made and runs on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        for name, ours in (
            ("set_triton_allocator", lambda device: None),
            ("fused_olmo_hybrid_gdn_gating", _gates),
            ("chunk_gated_delta_rule", _chunked),
            ("fused_recurrent_gated_delta_rule", _recurrent),
            ("_make_fused_conv1d_weight_loader", _loader),
        ):
            patch.setattr(olmo_gdn_linear_attn, name, ours)
        yield
