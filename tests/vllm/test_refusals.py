"""What kvspan does not work with is said by name, once, with what to set where that helps."""

from __future__ import annotations

import logging
import re
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hybrid_checks import BASE
from hybrid_served import HybridServed, save_hybrid
from served import Served, save_tiny
from test_spans import make
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from kvspan.vllm import support
from kvspan.vllm.hybrid import support as hybrid_support
from kvspan.vllm.hybrid.support import is_hybrid
from kvspan.vllm.plugin import register


def attention(**changes: Any) -> FullAttentionSpec:
    sizes = {"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
    return FullAttentionSpec(**{**sizes, **changes})


def window() -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float32, sliding_window=64
    )


def recurrent(**changes: Any) -> MambaSpec:
    values: dict[str, Any] = {
        "block_size": 32, "shapes": ((4, 3), (2, 4, 4)), "dtypes": (torch.float32,) * 2,
        "mamba_type": "GDN_ATTN", "mamba_cache_mode": "align",
    }  # fmt: skip
    return MambaSpec(**{**values, **changes})


def caches(*specs: Any) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=groups)


def configuration(model_type: str, changes: dict[str, Any]) -> Any:
    """What the refusals read of vLLM's configuration. changes: a dotted name to a value."""
    rope = {"rope_type": "default", "rope_theta": 1e4}
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(model_type=model_type, rope_parameters=rope),
            quantization=None,
            dtype=torch.float32,
            get_head_size=lambda: 64,
            architecture="Qwen3_5ForCausalLM",
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=True, cache_dtype="auto", block_size=32),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            world_size=1,
            nnodes=1,
            distributed_executor_backend="uni",
            use_ubatching=False,
            use_sequence_parallel_moe=False,
        ),
        speculative_config=None,
        lora_config=None,
    )
    for name, value in changes.items():
        part, _, last = name.rpartition(".")
        setattr(attrgetter(part)(config) if part else config, last, value)
    return config


@pytest.mark.parametrize(
    ("changes", "specs", "said"),
    [
        ({}, [attention()], "^$"),
        ({}, [attention(), window()], "2 kinds of KV cache"),
        ({}, [window()], "its KV cache is SlidingWindowSpec"),
        ({}, [attention(sliding_window=64)], "; set --disable-sliding-window"),
        (
            {"cache_config.cache_dtype": "fp8_per_token_head"},
            [attention()],
            "fp8_per_token_head; set --kv-cache-dtype auto or fp8",
        ),
        ({}, [attention(dtype=torch.uint8)], "torch.uint8; set --kv-cache-dtype auto"),
        (
            {"cache_config.cache_dtype": "fp8_e5m2"},
            [attention(dtype=torch.uint8)],
            "^$|amx and fp8_e5m2 keeps keys in an unknown layout",
        ),
        (
            {"cache_config.cache_dtype": "fp8", "cache_config.kv_cache_dtype_skip_layers": ["0"]},
            [attention(dtype=torch.uint8)],
            "layers without the others' 8-bit KV cache",
        ),
        ({}, [attention(block_size=64)], "blocks of 64 tokens .*; set --block-size 64"),
        ({"parallel_config.pipeline_parallel_size": 2}, [attention()], "; set --pipeline-parallel"),
        ({"parallel_config.decode_context_parallel_size": 2}, [attention()], "; set --decode-cont"),
        ({"model_config.quantization": "gguf"}, [attention()], "; load them from safetensors"),
        ({"speculative_config": "given"}, [attention()], "; leave --speculative-config out"),
        ({"use_v2_model_runner": True}, [attention()], "; set VLLM_USE_V2_MODEL_RUNNER=0"),
        ({"model_config.hf_text_config.model_type": "x"}, [attention()], "type x; expected one of"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_spans(changes: dict[str, Any], specs: list[Any], said: str) -> None:
    found = support.refusal(configuration("llama", changes), caches(*specs), "")
    assert re.search(said, found), found


def test_spans_without_a_cache() -> None:
    config = configuration("llama", {"cache_config.enable_prefix_caching": False})
    found = support.refusal(config, caches(attention()), "no rows")
    assert found.endswith("(no rows); set --enable-prefix-caching")
    assert support.refusal(config, caches(attention()), "") == ""


@pytest.mark.parametrize(
    ("changes", "specs", "said"),
    [
        ({}, [attention(), recurrent()], "^$"),
        (
            {"model_config.hf_text_config.model_type": "x"},
            [attention(), recurrent()],
            "one of qwen",
        ),
        ({}, [attention(), recurrent(mamba_type="mamba2")], "recurrent layers of type mamba2"),
        ({}, [attention(), recurrent(mamba_cache_mode="all")], "; set --mamba-cache-mode align"),
        ({}, [attention(), recurrent(), window()], "its KV cache has SlidingWindowSpec"),
        ({}, [attention(), recurrent(), attention()], "2 kinds of attention cache; expected 1"),
        ({"speculative_config": "given"}, [attention(), recurrent()], "; leave --speculative-con"),
        ({"lora_config": "given"}, [attention(), recurrent()], "LoRA adapters, .* --enable-lora"),
        ({"parallel_config.use_ubatching": True}, [attention(), recurrent()], "; leave --enable-d"),
        (
            {"parallel_config.nnodes": 2},
            [attention(), recurrent()],
            "several nodes; set --nnodes 1",
        ),
        (
            {"parallel_config.pipeline_parallel_size": 2},
            [attention(), recurrent()],
            "pipeline parallelism; set --pipeline-parallel-size 1",
        ),
        (
            {"parallel_config.distributed_executor_backend": "ray"},
            [attention(), recurrent()],
            "executor ray; set --distributed-executor-backend mp",
        ),
        (
            {"parallel_config.use_sequence_parallel_moe": True},
            [attention(), recurrent()],
            "; leave --enable-expert-parallel out",
        ),
        (
            {"model_config.architecture": "NoHybridForCausalLM"},
            [attention(), recurrent()],
            "NoHybridForCausalLM is not kvspan's, .*; set VLLM_PLUGINS",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_hybrids(changes: dict[str, Any], specs: list[Any], said: str) -> None:
    register()
    assert is_hybrid(caches(*specs)), "and so their connector asks the other refusal"
    found = hybrid_support.refusal(configuration("qwen3_5_text", changes), caches(*specs))
    assert re.search(said, found), found


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The warnings of kvspan, in the words of the log. A handler is lost when vLLM starts."""
    said: list[str] = []
    logger = logging.getLogger("vllm.kvspan")
    monkeypatch.setattr(logger, "warning", lambda text, *args: said.append(text % args))
    return said


def test_one_warning_where_spans_are_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setattr(support, "IS_NEOX", {"another": True})
    served = Served(save_tiny("llama", tmp_path), num_blocks=40, max_model_len=512)
    (output,) = served.ask([make([0, 1], seed=3)])
    served.close()
    assert "type llama; expected one of another" in served.audit(output)["fallback"]
    (line,) = said
    assert line.startswith("kvspan: span reuse is off, requests with spans run as ordinary ones: ")
    assert "model type llama; expected one of another" in line


@pytest.mark.parametrize(
    ("mode", "left"),
    [("none", "no prefix is reused"), ("align", "prefixes are hit at multiples of 256 tokens")],
)
def test_one_warning_where_replay_is_off(
    mode: str, left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setattr(hybrid_support, "HYBRIDS", ("another",))
    served = HybridServed(save_hybrid("qwen3_5", tmp_path), mode)
    (answer,) = served.ask([BASE[:100]], replay="exact")
    served.close()
    assert "type qwen3_5_text; expected one of another" in answer.replay["refused"]
    (line,) = said
    assert line.startswith("kvspan: prefix reuse at any token is off, ") and left in line
    assert "model type qwen3_5_text; expected one of another" in line
