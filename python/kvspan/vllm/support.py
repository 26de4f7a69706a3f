"""What of vLLM's configurations spans work with; everything else is refused by name.

A reason says what to set instead, where a setting helps.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from kvspan.errors import UsageError
from kvspan.rope_scaling import inverse_frequencies
from kvspan.vllm import TESTED_VERSIONS
from kvspan.vllm.moving import Layout

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


# What of vLLM the connector stands on, beside the connector interface itself.
_HOOKS = (
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.on_new_request",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.bind_gpu_block_pool",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.bind_kv_cache_manager",
    "vllm.v1.core.block_pool:BlockPool.get_cached_block",
    "vllm.v1.core.block_pool:BlockPool.get_new_blocks",
    "vllm.v1.core.block_pool:BlockPool.get_num_free_blocks",
    "vllm.v1.core.block_pool:BlockPool.touch",
    "vllm.v1.core.block_pool:BlockPool.free_blocks",
    "vllm.v1.core.block_pool:BlockPool.evict_blocks",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.get_block_ids",
    "vllm.v1.request:Request.update_block_hashes",
)
_ROW_HOOKS = (
    "vllm.v1.attention.backends.registry:register_backend",
    "vllm.v1.attention.backends.registry:AttentionBackendEnum.CPU_ATTN",
    "vllm.v1.attention.backend:CommonAttentionMetadata.replace",
)
_ROW_FIELDS = ("positions", "slot_mapping", "block_table_tensor", "query_start_loc_cpu")


def missing_hook(names: Iterable[str] = _HOOKS) -> str:
    """The first "module:attribute" that this vLLM does not have, or ""."""
    for name in names:
        module, _, path = name.partition(":")
        try:
            attrgetter(path)(importlib.import_module(module))
        except (ImportError, AttributeError):
            return name
    return ""


def _missing_row_hook() -> str:
    if name := missing_hook(_ROW_HOOKS):
        return name
    from vllm.v1.attention.backend import CommonAttentionMetadata

    known = {field.name for field in fields(CommonAttentionMetadata)}
    return next(
        (f"CommonAttentionMetadata.{name}" for name in _ROW_FIELDS if name not in known), ""
    )


def no_rows(vllm_config: VllmConfig) -> str:
    """Why attention rows and positions can't be changed (`kvspan.vllm.attention`), or ""."""
    from vllm.platforms import current_platform

    if name := _missing_row_hook():
        return f"this vLLM has no {name}"
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if not current_platform.is_cpu():
        return "not supported yet by the attention backends for GPUs"
    if not AttentionBackendEnum.CPU_ATTN.get_path().startswith("kvspan."):
        return "kvspan's general plug-in is not loaded (VLLM_PLUGINS must name kvspan if it is set)"
    if vllm_config.parallel_config.enable_dbo:
        return "dual batch overlap"
    return ""


def refusal(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, no_rows: str) -> str:
    """Why spans are off for this configuration; "" when they are on."""
    from vllm.platforms import current_platform
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    if name := missing_hook():
        return f"this vLLM has no {name}; tested with {', '.join(TESTED_VERSIONS)}"
    if getattr(vllm_config, "use_v2_model_runner", False):
        # It has another way to positions, and no forward context where spans look for it.
        return "vLLM's Model Runner V2; set VLLM_USE_V2_MODEL_RUNNER=0"
    model, cache, parallel = (
        vllm_config.model_config,
        vllm_config.cache_config,
        vllm_config.parallel_config,
    )
    groups = kv_cache_config.kv_cache_groups
    if not cache.enable_prefix_caching and no_rows:
        return (
            f"prefix caching is off, and its pool is where spans are kept ({no_rows}); "
            "set --enable-prefix-caching"
        )
    if len(groups) != 1:
        return f"the model has {len(groups)} kinds of KV cache (sliding windows or recurrent state)"
    spec = groups[0].kv_cache_spec
    if type(spec) is not FullAttentionSpec:
        return f"its KV cache is {type(spec).__name__}"
    if spec.sliding_window or getattr(spec, "attention_chunk_size", None):
        return "windowed or chunked attention; set --disable-sliding-window if a window is enough"
    if cache.cache_dtype in _FLOAT8:
        if current_platform.is_rocm():
            return f"kv_cache_dtype {cache.cache_dtype} on ROCm; set --kv-cache-dtype auto"
        if getattr(cache, "kv_cache_dtype_skip_layers", None):
            return "layers without the others' 8-bit KV cache; set --kv-cache-dtype auto"
    elif cache.cache_dtype not in ("auto", "bfloat16", "float16"):
        return f"kv_cache_dtype {cache.cache_dtype}; set --kv-cache-dtype auto or fp8"
    elif spec.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"a KV cache of {spec.dtype}; set --kv-cache-dtype auto or fp8"
    if kv_cache_config.needs_kv_cache_zeroing:
        return "blocks are zeroed before they are used again, which a source might be"
    if spec.block_size != cache.block_size:
        return (
            f"blocks of {spec.block_size} tokens under hashes of {cache.block_size}; "
            f"set --block-size {spec.block_size}"
        )
    if parallel.pipeline_parallel_size > 1:
        return "pipeline parallelism; set --pipeline-parallel-size 1"
    if getattr(parallel, "decode_context_parallel_size", 1) > 1:
        return "context parallelism; set --decode-context-parallel-size 1"
    if model.quantization == "gguf":
        return "GGUF weights, whose keys may rotate in other pairs; load them from safetensors"
    if vllm_config.speculative_config is not None:
        return "speculative decoding; leave --speculative-config out"
    try:
        rotary(model.hf_text_config, model.get_head_size())
        cache_layout(vllm_config, spec.block_size, spec.head_size)
    except ValueError as e:
        return str(e)
    return ""


def rotary(config: Any, head_size: int) -> tuple[torch.Tensor, bool]:
    """(inv_freq float32 [rotary_dim / 2], is_neox) of a model; ValueError where keys can't move."""
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, Mapping) or "rope_theta" not in parameters:
        raise UsageError("no single set of rotary frequencies (rope_parameters with rope_theta)")
    for name, reason in _OTHER_ROTATIONS.items():
        if getattr(config, name, None):
            raise UsageError(f"{reason} ({name})")
    if config.model_type not in IS_NEOX:
        raise UsageError(f"model type {config.model_type}; expected one of {', '.join(IS_NEOX)}")
    return inverse_frequencies(parameters, head_size), IS_NEOX[config.model_type]


def cache_layout(vllm_config: VllmConfig, block_size: int, head_size: int) -> Layout:
    """Where vLLM's attention keeps what in a block; UsageError where that is not known."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return "token_rows"
    # vLLM's CPU attention packs its blocks for the instruction set that it chooses here.
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    kept_as = vllm_config.cache_config.cache_dtype
    isa = _get_attn_isa(vllm_config.model_config.dtype, block_size, head_size, kept_as)
    if isa == "amx" and kept_as not in _FLOAT8:
        return "cpu_amx"
    if isa in ("vec", "vec16"):
        return "cpu_vec"
    kind = f"{isa} and {kept_as}" if kept_as in _FLOAT8 else isa
    raise UsageError(f"vLLM's CPU attention for {kind} keeps keys in an unknown layout")


def kept(cache: torch.Tensor, vllm_config: VllmConfig) -> torch.Tensor:
    """A layer's cache as what its bytes are; vLLM holds 8-bit floats as integers."""
    kind = _FLOAT8.get(vllm_config.cache_config.cache_dtype)
    return cache.view(kind) if kind else cache


# Caches of 8-bit floats with one scale a layer, a constant: that of a rotated key is the key's own.
_FLOAT8 = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


# Options of such models with which one set of frequencies is not the whole truth.
_OTHER_ROTATIONS = {
    "layer_rope_theta": "rotary frequencies that differ between layers",
    "no_rope_layers": "layers without rotary positions",
    "dual_chunk_attention_config": "dual chunk attention",
}

# Model types whose keys rotate in every layer with these frequencies, and whether in NeoX pairs.
IS_NEOX = {
    "llama": True,
    "mistral": True,
    "mixtral": True,
    "qwen2": True,
    "qwen2_moe": True,
    "qwen3": True,
    "qwen3_moe": True,
    "gemma": True,
    "granite": True,
    "granitemoe": True,
    "olmo2": True,
    "olmoe": True,
    "phi3": True,
    "stablelm": True,
    "cohere": False,
}


def version_note(version: str) -> str:
    """A warning for a vLLM that was not tested, or ""."""
    if version.split("+")[0] in TESTED_VERSIONS:
        return ""
    return f"vLLM {version} is not among the tested versions ({', '.join(TESTED_VERSIONS)})"
