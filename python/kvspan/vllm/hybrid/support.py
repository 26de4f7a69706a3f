"""What of vLLM's configurations Tail-Replay works with, and its settings.

Everything else is refused by name; a reason says what to set instead, where a setting helps.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvspan.errors import KvspanError, UsageError
from kvspan.host import HostTier
from kvspan.host.folder_lock import check_folder
from kvspan.host.pages import Bytes
from kvspan.hybrid.groups import LINEAR, layer_map
from kvspan.ops import digest_fields
from kvspan.vllm import HYBRIDS
from kvspan.vllm.host_disk import check_room, open_disk, weights
from kvspan.vllm.hybrid.decay import Cells
from kvspan.vllm.hybrid.geometry import Geometry
from kvspan.vllm.hybrid.policy import Policy, parse_policy
from kvspan.vllm.hybrid.store import PageStore
from kvspan.vllm.plugin import HYBRIDS_MODULE
from kvspan.vllm.settings import WHERE, check_settings, keeps_decays

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


logger = logging.getLogger("vllm.kvspan")

# Models whose blocks hand on one vector a token, which holds the residual.
_ONE_VECTOR = ("olmo_hybrid",)


@dataclass(frozen=True)
class Options:
    """What ``kv_connector_extra_config`` says, checked. Names as there but for the unit.

    pair: of hidden vectors both parts are kept that vLLM's blocks hand on, vector and residual.
    exact_hidden: what is kept of them is all there is, so that a replay can be exact.
    hold_blocks: vLLM's runner writes to blocks before it asks what is to be read of them.
    """

    policy: Policy
    policy_text: str
    host_bytes: int
    pair: bool
    exact_hidden: bool
    state_every: int
    min_match: int
    k_min: int
    decode: bool
    decay: bool
    hash_block: int
    disk: str
    disk_bytes: int
    disk_wait_s: float
    hold_blocks: bool = False


def options(vllm_config: VllmConfig) -> Options:
    """The settings given by the user; UsageError for one that makes no sense."""
    transfer = vllm_config.kv_transfer_config
    given = check_settings(transfer and transfer.kv_connector_extra_config, "hybrid")
    cache = vllm_config.cache_config
    all_kept = given["hidden"] == "pair"
    one = vllm_config.model_config.hf_text_config.model_type in _ONE_VECTOR
    return Options(
        parse_policy(given["replay"], f"{WHERE}.replay", given["k_min"]),
        given["replay"],
        int(given["host_gib"] * 2**30),
        all_kept and not one,
        all_kept or one,
        given["state_every"],
        given["min_match"],
        given["k_min"],
        given["decode"],
        keeps_decays(given),
        getattr(cache, "hash_block_size", None) or cache.block_size,
        given["disk"],
        int(given["disk_gib"] * 2**30),
        given["disk_wait_s"],
        bool(getattr(vllm_config, "use_v2_model_runner", False)),
    )


def check_early(extra: Mapping[str, object] | None) -> None:
    """Before a model is read, which may take minutes: whether its settings can be used.

    Raises:
        UsageError: with a line that the log has as well, above vLLM's tracebacks.
    """
    try:
        given = check_settings(extra, "hybrid")
        if folder := given["disk"]:
            try:
                check_folder(folder)
            except KvspanError as error:
                raise UsageError(f"{WHERE}.disk: {error}") from None
    except UsageError as error:
        logger.error("kvspan: %s", error)
        raise


def make_geometry(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, options: Options
) -> Geometry:
    """What pages and states hold; the same for the scheduler and all its workers."""
    from vllm.v1.kv_cache_interface import MambaSpec

    model = vllm_config.model_config
    config = model.hf_text_config
    groups = kv_cache_config.kv_cache_groups
    (attention,) = (g for g in groups if not isinstance(g.kv_cache_spec, MambaSpec))
    state_bytes = 0
    for group in groups:
        spec = group.kv_cache_spec
        if isinstance(spec, MambaSpec):
            parts = zip(spec.shapes, spec.dtypes, strict=True)
            one = sum(math.prod(shape) * dtype.itemsize for shape, dtype in parts)
            state_bytes += one * len(group.layer_names)
    ranks = vllm_config.parallel_config.tensor_parallel_size
    layers = layer_map(config.layer_types)
    cells = Cells(
        attention.kv_cache_spec.block_size,
        config.layer_types.count(LINEAR),
        config.linear_num_value_heads // ranks,
        ranks,
    )
    return Geometry(
        size=attention.kv_cache_spec.block_size,
        layers=len(attention.layer_names),
        block_bytes=attention.kv_cache_spec.page_size_bytes,
        streams=len(layers.streams),
        row_bytes=config.hidden_size * (2 if options.pair else 1) * model.dtype.itemsize,
        state_bytes=state_bytes,
        ranks=ranks,
        cells=cells if options.decay else None,
        groups=tuple(len(group.layers) for group in layers.groups),
    )


def make_store(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    options: Options,
    take_memory: Callable[[int], Bytes],
) -> PageStore:
    """Where pages and states are kept; UsageError if they do not fit.

    take_memory: gives memory, uint8 [bytes asked for].
    """
    model = vllm_config.model_config
    config = model.hf_text_config
    geometry = make_geometry(vllm_config, kv_cache_config, options)
    page = geometry.page_bytes
    check_room(options.host_bytes, page, "one page")
    disk = None
    if options.disk:
        # Another model, or the same in other units of storage, must not be taken for this one.
        told = digest_fields(
            "kvspan/vllm/hybrid/disk/v3", model.model, model.revision, str(model.dtype),
            config.to_json_string(), repr(geometry), options.pair, weights(vllm_config),
            _kernels(vllm_config),
        )  # fmt: skip
        disk = open_disk(options.disk, options.disk_bytes, told)
    memory = take_memory(options.host_bytes)
    tier = HostTier(options.host_bytes, page_bytes=page, memory=memory, disk=disk)
    return PageStore(tier, geometry)


def _kernels(vllm_config: VllmConfig) -> str:
    """Changes with the code that the model runs: states that other kernels have rounded are not
    exact here."""
    import torch
    import vllm

    compiled = vllm_config.compilation_config.compute_hash()
    device = vllm_config.device_config.device_type
    return repr((vllm.__version__, torch.__version__, device, compiled))


def is_hybrid(kv_cache_config: KVCacheConfig) -> bool:
    """Whether some of the model's layers keep recurrent state."""
    from vllm.v1.kv_cache_interface import MambaSpec

    return any(isinstance(g.kv_cache_spec, MambaSpec) for g in kv_cache_config.kv_cache_groups)


def _built_here(architecture: str) -> bool:
    """Whether models of this class are made by `kvspan.vllm.hybrid.models`."""
    from vllm.model_executor.models.registry import ModelRegistry

    found = ModelRegistry.models.get(architecture)
    return getattr(found, "module_name", None) == HYBRIDS_MODULE


def refusal(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """Why prefix reuse at any token is off for this configuration; "" when it is on."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    kind = getattr(model.hf_text_config, "model_type", "")
    if kind not in HYBRIDS:
        return f"model type {kind}; expected one of {', '.join(HYBRIDS)}"
    attention = []
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        if isinstance(spec, MambaSpec):
            if "GDN" not in str(spec.mamba_type):
                return f"recurrent layers of type {spec.mamba_type}"
            if spec.mamba_cache_mode not in ("none", "align"):
                return f"mamba_cache_mode {spec.mamba_cache_mode}; set --mamba-cache-mode align"
        elif type(spec) is FullAttentionSpec and not spec.sliding_window:
            attention.append(spec)
        else:
            return f"its KV cache has {type(spec).__name__}"
    if len(attention) != 1:
        return f"{len(attention)} kinds of attention cache; expected 1"
    for what, size, count in (
        ("pipeline parallelism", "pipeline-parallel-size", parallel.pipeline_parallel_size),
        (
            "context parallelism",
            "decode-context-parallel-size",
            parallel.decode_context_parallel_size,
        ),
        ("several nodes", "nnodes", parallel.nnodes),
    ):
        if count > 1:
            return f"{what}; set --{size} 1"
    if parallel.distributed_executor_backend not in ("uni", "mp"):
        found = parallel.distributed_executor_backend
        return f"executor {found}; set --distributed-executor-backend mp"
    if vllm_config.lora_config is not None:
        return (
            "LoRA adapters, which vLLM gives the rows of a step and not those of a replay; leave "
            "--enable-lora out"
        )
    if vllm_config.speculative_config is not None:
        return "speculative decoding; leave --speculative-config out"
    if parallel.use_ubatching:
        return "dual-batch overlap, which splits a step's rows; leave --enable-dbo out"
    if parallel.use_sequence_parallel_moe:
        return (
            "sequence parallelism, which splits a step's rows; leave --enable-expert-parallel out"
        )
    if not _built_here(name := model.architecture):
        return (
            f"{name} is not kvspan's, so its hidden vectors are not captured; set VLLM_PLUGINS, if "
            "at all, so that it names kvspan, and no other plug-in that replaces that class"
        )
    return ""
