"""Settings of the host tier for spans, what it does not go with, and whose bytes it holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvspan.host import HostTier
from kvspan.host.pages import anonymous_memory
from kvspan.ops import digest_fields
from kvspan.vllm.host_disk import check_room, open_disk, weight_files, weights
from kvspan.vllm.span_tier import SpanTier, block_bytes
from kvspan.vllm.support import missing_hook

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest

_HOOKS = (
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorWorkerMetadata",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1"
    ".build_connector_worker_meta",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.update_connector_output",
    "vllm.v1.core.block_pool:BlockPool.cache_full_blocks",
)


@dataclass(frozen=True)
class HostSettings:
    """memory_bytes, disk_bytes: of all workers together. disk: a folder, or ""."""

    memory_bytes: int
    disk: str
    disk_bytes: int

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> HostSettings:
        """given: settings that `check_settings` has checked."""
        return cls(int(given["host_gib"] * 2**30), given["disk"], int(given["disk_gib"] * 2**30))

    def __str__(self) -> str:
        disk = f" and {self.disk_bytes / 2**30:.3g} GiB in {self.disk}" if self.disk else ""
        return f"{self.memory_bytes / 2**30:.3g} GiB on the host{disk}"


def host_refusal(vllm_config: VllmConfig) -> str:
    """Why spans cannot be kept on the host though they are reused; "" when they can."""
    if name := missing_hook(_HOOKS):
        return f"this vLLM has no {name}"
    if not vllm_config.cache_config.enable_prefix_caching:
        return "prefix caching is off, and its pool is where spans are brought back to"
    events = vllm_config.kv_events_config
    if events is not None and events.enable_kv_cache_events:
        return "KV cache events, which tell of tokens that only requests have"
    return ""


def num_workers(vllm_config: VllmConfig) -> int:
    """Workers of one engine, each with its own share of every block."""
    return int(vllm_config.parallel_config.world_size)


def open_tier(
    vllm_config: VllmConfig,
    settings: HostSettings,
    caches: Mapping[str, torch.Tensor],
    layout: str,
    rank: int,
) -> SpanTier:
    """The tier of worker number `rank`; UsageError where the settings leave no room.

    caches: per layer, vLLM's tensor [num_blocks, ...]. layout: how its blocks are laid out.
    """
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    workers = num_workers(vllm_config)
    tensors = list(caches.values())
    page = block_bytes(tensors)
    check_room(settings.memory_bytes // workers, page, f"one block in each of {workers} workers"
               if workers > 1 else "one block")  # fmt: skip
    disk = None
    if settings.disk:
        folder = Path(settings.disk)
        if parallel.data_parallel_size > 1:
            folder /= f"engine{parallel.data_parallel_rank}"
        if workers > 1:
            folder /= f"worker{rank}"
        shapes = [(str(t.dtype), tuple(t.shape[1:]), t.stride()[1:]) for t in tensors]
        told = digest_fields(
            "kvspan/vllm/span/disk/v1", model.model, model.revision, str(model.dtype),
            model.hf_text_config.to_json_string(), layout, repr(shapes), workers, rank,
            vllm_config.cache_config.block_size, vllm_config.cache_config.cache_dtype,
            weights(vllm_config),
        )  # fmt: skip
        disk = open_disk(folder, settings.disk_bytes // workers, told)
    nbytes = settings.memory_bytes // workers
    tier = HostTier(
        nbytes,
        page_bytes=page,
        memory=anonymous_memory(nbytes, provided=True),
        page_locked=tensors[0].is_cuda,
        disk=disk,
    )
    return SpanTier(tier, tensors, rank)


def lora_name(lora: LoRARequest | None, *, for_disk: bool) -> str:
    """What of a LoRA goes into keys; on disk another server's may have the same name and number."""
    if lora is None:
        return ""
    name = f"{lora.lora_int_id}:{lora.lora_name}"
    return f"{name}:{lora.lora_path}:{weight_files(lora.lora_path)}" if for_disk else name


def flops(config: Any, position: int, num_tokens: int) -> float:
    """Roughly what computing num_tokens tokens from a position on costs, attention included.

    config: the model's, of transformers. What counts is that long spans cost more for each byte.
    """
    hidden, heads = config.hidden_size, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    linear = 4 * hidden * (heads + kv_heads) * head_dim + 6 * hidden * inner
    attention = 4 * heads * head_dim * (position + num_tokens / 2)
    return float(config.num_hidden_layers * num_tokens * (linear + attention))
