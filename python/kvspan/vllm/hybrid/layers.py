"""vLLM's modules as Tail-Replay uses them: running one layer by itself."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata
from vllm.v1.attention.backends.utils import compute_causal_conv1d_metadata


def run_block(
    block: Any, hidden: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What a decoder block hands on: (hidden, residual), or OLMo's single vectors and None."""
    if hasattr(block.linear_attn, "in_proj_qkvg"):
        return block(hidden_states=hidden, positions=positions), None
    after, residual = block(hidden_states=hidden, residual=residual, positions=positions)
    return after, residual


def run_linear(module: Any, x: torch.Tensor) -> torch.Tensor:
    """A linear-attention layer over normed rows."""
    if hasattr(module, "in_proj_qkvg"):
        output = torch.empty_like(x)
        module(hidden_states=x, output=output)
        return output
    given: torch.Tensor = module(hidden_states=x)
    return given


def mixed_qkv(module: Any, x: torch.Tensor) -> torch.Tensor:
    """[n, channels]: what a layer's convolution gets for the normed rows x."""
    if hasattr(module, "in_proj_qkvg"):  # OLMo
        qkvg, _ = module.in_proj_qkvg(x)
        return qkvg[:, : module.conv_dim // module.tp_size]
    qkvz, _ = module.in_proj_qkvz(x)
    if module.gqa_interleaved_layout:
        ba, _ = module.in_proj_ba(x)
        q, k, v, *_ = module.fix_query_key_value_ordering(qkvz, ba)
        return torch.cat([t.reshape(len(x), -1) for t in (q, k, v)], -1)
    return qkvz[:, : module.conv_dim // module.tp_size]


def one_sequence(n: int, slot: int, device: torch.device) -> GDNAttentionMetadata:
    """For one sequence of n tokens that continues the state in `slot`."""
    starts_cpu = torch.tensor([0, n], dtype=torch.int32)
    starts = starts_cpu.to(device)
    slots = torch.tensor([slot], dtype=torch.int32, device=device)
    common: dict[str, Any] = {
        "num_spec_decodes": 0,
        "num_spec_decode_tokens": 0,
        "num_actual_tokens": n,
        "non_spec_query_start_loc": starts,
        "non_spec_state_indices_tensor": slots,
    }
    if n == 1:  # the chunked kernels want more; one token is what decoding does
        return GDNAttentionMetadata(
            num_prefills=0, num_prefill_tokens=0, num_decodes=1, num_decode_tokens=1, **common
        )
    has_state = torch.ones(1, dtype=torch.bool, device=device)
    nums, batch, offsets = compute_causal_conv1d_metadata(starts_cpu, device=device)
    return GDNAttentionMetadata(
        num_prefills=1,
        num_prefill_tokens=n,
        num_decodes=0,
        num_decode_tokens=0,
        has_initial_state=has_state,
        prefill_query_start_loc=starts,
        prefill_state_indices=slots,
        prefill_has_initial_state=has_state,
        nums_dict=nums,
        batch_ptr=batch,
        token_chunk_offset_ptr=offsets,
        **common,
    )
