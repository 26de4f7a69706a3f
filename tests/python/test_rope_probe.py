"""What the engine finds out about a model's layers by asking the model."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, SmolLM3Config

from kvspan.engine.attention import IMPLEMENTATION
from kvspan.engine.rope import UnsupportedModelError, probe_layers
from tiny_models import configs, tiny_model


def probed(model):
    model.set_attn_implementation(IMPLEMENTATION)
    return probe_layers(model)


@pytest.mark.parametrize("name", list(configs()))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pairing_frequencies_and_windows(name: str, dtype: torch.dtype) -> None:
    model = tiny_model(name).to(dtype)
    specs, refused = probed(model)
    assert refused == "" and len(specs) == 3
    rotary_dim = 8 if "partial" in name else 16
    for layer, spec in enumerate(specs):
        assert spec.is_neox == ("interleaved" not in name)
        assert (spec.num_kv_heads, spec.head_dim, spec.value_dim) == (2, 16, 16)
        assert 2 * spec.inv_freq.numel() == rotary_dim
        sliding = name == "gemma3" and layer != 1
        assert spec.window == (24 if sliding else None)
        if name == "gemma3":
            theta = 1e4 if sliding else 1e6
            assert spec.inv_freq[1].item() == pytest.approx(theta ** (-2 / 16), rel=1e-2)


def test_layers_without_rotation_are_seen() -> None:
    """SmolLM3 leaves RoPE out of some layers."""
    sizes = {k: v for k, v in configs()["llama"].to_dict().items() if k in _SIZE_NAMES}
    config = SmolLM3Config(**sizes, no_rope_layers=[1, 0, 1], use_sliding_window=False)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    specs, refused = probed(model)
    assert refused == ""
    assert [spec.inv_freq.numel() for spec in specs] == [8, 0, 8]


_SIZE_NAMES = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "pad_token_id",
}


def test_keys_that_rotate_otherwise_are_refused() -> None:
    """A model whose frequencies are not those it shows: nothing is guessed."""
    model = tiny_model("llama")
    rotary = model.model.rotary_emb
    forward = rotary.forward
    rotary.forward = lambda x, position_ids: forward(x, position_ids * 3)
    _, refused = probed(model)
    assert "keys of layer 0 do not rotate with position as RoPE does" in refused


def test_windows_that_cannot_be_seen_are_refused() -> None:
    model = tiny_model("gemma3")
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None
    with pytest.raises(UnsupportedModelError, match="sliding window of layer 0 cannot be seen"):
        probed(model)


def test_soft_capped_attention_is_refused() -> None:
    from transformers import Gemma2Config

    sizes = {k: v for k, v in configs()["llama"].to_dict().items() if k in _SIZE_NAMES}
    model = AutoModelForCausalLM.from_config(
        Gemma2Config(**copy.deepcopy(sizes)), attn_implementation="eager"
    ).eval()
    with pytest.raises(UnsupportedModelError, match=r"attention cannot be replaced: .*softcap"):
        probed(model)
