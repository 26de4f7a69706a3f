"""Models of the embedded engine: opened from folders, in part supported, refused by name."""

from __future__ import annotations

import copy
import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvspan.engine import open_engine
from kvspan.engine.local import LocalEngine
from kvspan.errors import KvspanError, UsageError
from test_engine_requests import rag
from test_local_engine import open_tiny
from tiny_models import configs, tiny_model, word_tokenizer


@pytest.mark.parametrize(
    "rope,reason",
    [
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "dynamic NTK RoPE"),
        (
            {
                "rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0,
                "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
                "original_max_position_embeddings": 2048,
            },
            "longrope RoPE",
        ),
    ],
    ids=["dynamic", "longrope"],
)  # fmt: skip
def test_unsupported_rope_falls_back_to_ordinary_caching(rope: dict, reason: str) -> None:
    config = copy.deepcopy(configs()["llama"])
    config.rope_parameters = rope
    torch.manual_seed(0)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with LocalEngine(model, word_tokenizer(), name="x") as engine:
        capabilities = engine.capabilities()
        assert not capabilities.spans and reason in capabilities.reason
        result = engine.run(rag([1, 2]))
        assert result.reuse.spans == 0
        assert any(reason in note for note in result.reuse.notes)
        assert engine.run(rag([1, 2])).usage.cached_tokens > 0


def test_model_with_other_layers_is_refused_by_name() -> None:
    from transformers import AutoModelForCausalLM, Qwen3NextConfig

    config = Qwen3NextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_experts=2,
        num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=16,
        linear_value_head_dim=16, layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with pytest.raises(KvspanError, match="cannot run it: layers of type linear_attention"):
        LocalEngine(model, word_tokenizer(), name="hybrid")


def saved_model(folder: Path) -> Path:
    model = tiny_model("llama")
    model.save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


def test_open_engine_from_a_folder(tmp_path: Path) -> None:
    folder = saved_model(tmp_path / "m")
    phases = []
    engine = open_engine(str(folder), progress=lambda *step: phases.append(step))
    assert isinstance(engine, LocalEngine)
    with engine:
        assert len(engine.run(rag([1, 2])).token_ids) > 0
    assert ("load", 1, 1) in phases
    assert [done for name, done, _ in phases if name == "prefill"][-1] > 0
    with pytest.raises(UsageError, match="dtype: expected auto or one of"):
        open_engine(str(folder), dtype="int3")
    with pytest.raises(UsageError, match="device: expected auto, cpu or cuda"):
        open_engine(str(folder), device="abacus")
    with pytest.raises(UsageError, match=r"kv_cache_gib: expected .* to .* \(all memory\)"):
        open_engine(str(folder), kv_cache_gib=1e-6)
    with pytest.raises(UsageError, match="kv_cache_gib"):
        open_engine(str(folder), kv_cache_gib=1e6)
    with pytest.raises(UsageError, match="block_size"):
        open_engine(str(folder), block_size=0)


def test_open_engine_in_bfloat16(tmp_path: Path) -> None:
    with open_engine(str(saved_model(tmp_path / "m")), dtype="bfloat16") as engine:  # type: ignore[attr-defined]
        first = engine.run(rag([1, 2, 3], return_logprobs=True))
        moved = engine.run(rag([3, 1, 2], return_logprobs=True))
        engine.clear_cache()
        cold = engine.run(rag([3, 1, 2], return_logprobs=True))
    assert first.reuse.prepared_tokens == cold.reuse.prepared_tokens > 0
    assert moved.reuse.span_hits == 3
    assert np.abs(moved.first_logprobs - cold.first_logprobs).max() < 0.1


@pytest.mark.parametrize(
    "damage",
    ["missing", "no config", "bad config", "torn", "no weights", "a layer less", "all zero"],
)
def test_models_that_cannot_be_loaded(tmp_path: Path, damage: str) -> None:
    folder = saved_model(tmp_path / "m")
    error: type[Exception] = KvspanError
    if damage == "missing":
        folder = tmp_path / "nowhere"
        error = UsageError
    elif damage == "no config":
        (folder / "config.json").unlink()
        error = UsageError
    elif damage == "bad config":
        (folder / "config.json").write_text("{")
    elif damage == "torn":
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-4000])
    elif damage == "no weights":
        (folder / "model.safetensors").unlink()
    else:
        path = folder / "model.safetensors"
        weights = load_file(path)
        if damage == "a layer less":
            weights = {k: v for k, v in weights.items() if "layers.1." not in k}
        else:
            weights = {k: torch.zeros_like(v) for k, v in weights.items()}
        save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(error) as caught:
        open_engine(str(folder))
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_engines_give_their_memory_back() -> None:
    engine = open_tiny("llama", 16)
    engine.run(rag([1]))
    cache = engine.runner.cache.keys[0]
    engine.close()
    del engine
    gc.collect()
    assert len(gc.get_referrers(cache)) <= 1
