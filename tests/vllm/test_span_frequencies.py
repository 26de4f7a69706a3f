"""Rotary frequencies of spans: the model's own, in float32, or a refusal."""

from __future__ import annotations

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

from kvspan.errors import UsageError
from kvspan.vllm.support import rotary


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 512,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    ],
    ids=lambda scaling: scaling["rope_type"],
)  # fmt: skip
def test_frequencies_are_the_models_own_in_float32(scaling: dict[str, object]) -> None:
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=4, rope_parameters={"rope_theta": 50_000.0, **scaling}
    )
    inv_freq, is_neox = rotary(config, 32)
    assert is_neox and inv_freq.dtype == torch.float32
    assert torch.equal(inv_freq, LlamaRotaryEmbedding(config).inv_freq)
    with set_current_vllm_config(VllmConfig()):
        rope = get_rope(
            32, max_position=2048, rope_parameters=config.rope_parameters, dtype=torch.float32
        )
    assert rope.is_neox_style
    angles = torch.arange(2048)[:, None].double() * inv_freq.double()
    table = torch.cat([angles.cos(), angles.sin()], 1) * getattr(rope, "mscale", 1.0)
    assert (rope.cos_sin_cache[:2048].double() - table).abs().max() < 1e-3


def test_frequencies_that_differ_between_layers_are_refused() -> None:
    with pytest.raises(UsageError, match="no single set of rotary frequencies"):
        rotary(Gemma3TextConfig(), 256)
    for name in ("layer_rope_theta", "no_rope_layers", "dual_chunk_attention_config"):
        with pytest.raises(UsageError, match=name):
            rotary(LlamaConfig(rope_parameters={"rope_theta": 1e4}, **{name: [1, 0]}), 64)
