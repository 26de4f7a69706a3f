"""Spans on every type of model that `kvspan.vllm.support` lists, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from served import SIZES, Served
from test_spans import TOLERANCE, make
from transformers import AutoConfig, AutoModelForCausalLM

from kvspan.vllm.support import IS_NEOX

# Some types have no head_dim of their own: hidden_size / num_attention_heads is 32 as well.
_COMMON = {**SIZES, "hidden_size": 128, "pad_token_id": 0}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
OPTIONS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "mixtral": _LOCAL_EXPERTS,
    "qwen2_moe": {
        **_EXPERTS, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 96,
    },
    "qwen3_moe": {**_EXPERTS, "moe_intermediate_size": 96},
    "granite": {"attention_multiplier": 0.3, "embedding_multiplier": 3.0},
    "granitemoe": {**_LOCAL_EXPERTS, "attention_multiplier": 0.3},
    "olmoe": _EXPERTS,
}  # fmt: skip


@pytest.mark.parametrize("model_type", IS_NEOX)
def test_spans_are_moved(model_type: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**_COMMON, **OPTIONS.get(model_type, {})})
    AutoModelForCausalLM.from_config(config).float().save_pretrained(tmp_path)
    served = Served(tmp_path, num_blocks=160, max_num_batched_tokens=2048)
    for order in ([2, 0, 3], [0, 3, 2]):
        layout = make(order, seed=81)
        (output,) = served.ask([layout])
        assert served.audit(output)["fallback"] == ""
        assert served.audit(output)["moved_tokens"] > 0
        assert served.error(layout, output) <= TOLERANCE
