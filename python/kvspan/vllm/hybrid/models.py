"""vLLM's hybrid models, built with the buffers that Tail-Replay reads.

vLLM traces a model for compilation before it makes any connector, so what a pass shall leave behind
has to be in the model from the start. The general plug-in registers a subclass of each of these
architectures, which differs from vLLM's own only in an engine whose KV connector is kvspan's.
"""

from __future__ import annotations

import functools
import importlib
import types
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from kvspan.vllm.hybrid.capture import Capture, capture_streams
from kvspan.vllm.hybrid.gates import tap_gates
from kvspan.vllm.hybrid.support import check_early
from kvspan.vllm.plugin import CONNECTOR, HYBRID_MODELS
from kvspan.vllm.settings import keeps_decays

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import KVTransferConfig, VllmConfig

logger = init_logger("vllm.kvspan")


def settings_of(transfer: KVTransferConfig | None) -> dict[str, Any] | None:
    """kvspan's ``kv_connector_extra_config``; None where kvspan's connector is not named."""
    if transfer is None:
        return None
    own = transfer.kv_connector_extra_config or {}
    inner = own.get("connectors", []) if transfer.kv_connector == "MultiConnector" else []
    for name, extra in (
        (transfer.kv_connector, own),
        *((one.get("kv_connector"), one.get("kv_connector_extra_config")) for one in inner),
    ):
        if name == CONNECTOR:
            return dict(extra or {})
    return None


def install(model: nn.Module, vllm_config: VllmConfig) -> Capture | None:
    """Let a model just built leave hidden vectors behind, and what its gates do where that is
    asked for, if the engine's connector is kvspan's."""
    extra = settings_of(vllm_config.kv_transfer_config)
    decoder = next(
        (m for m in model.modules() if hasattr(m, "layers") and hasattr(m, "embed_tokens")), None
    )
    if extra is None or decoder is None:
        return None
    if not all(hasattr(layer, "layer_type") for layer in decoder.layers):
        return None  # others have some of the layers, for which the connector refuses
    config = vllm_config.model_config
    pair = extra.get("hidden", "pair") == "pair"
    capture = capture_streams(
        decoder,
        config.hf_text_config.hidden_size,
        config.dtype,
        pair=pair,
        capacity=vllm_config.scheduler_config.max_num_batched_tokens,
    )
    told = f"capture/v1 {'pair' if pair else 'sum'}"
    if keeps_decays(extra):
        tap_gates(capture, decoder)
        told += " gates"
    _set_apart(vllm_config, told)
    logger.info("kvspan: what is kept is captured in buffers of %.1f MiB", capture.nbytes / 2**20)
    return capture


class _Also:
    """An ``additional_config`` that is no dict, and something beside it."""

    def __init__(self, ordinary: Any, told: str) -> None:
        self._ordinary, self._told = ordinary, told

    def compute_hash(self) -> str:
        return f"{self._ordinary.compute_hash()} {self._told}"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ordinary, name)


def _set_apart(vllm_config: VllmConfig, told: str) -> None:
    """Keep the compiled code apart from that of engines without capture.

    vLLM's key for ahead-of-time compiled code does not depend on the connector.
    """
    before = vllm_config.additional_config or {}
    if isinstance(before, dict):
        vllm_config.additional_config = {**before, "kvspan": told}
    else:
        vllm_config.additional_config = _Also(before, told)


@functools.cache
def __getattr__(name: str) -> type[nn.Module]:
    """vLLM's class of that name, with `install` at the end of its construction."""
    if name not in HYBRID_MODELS:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    base: Any = getattr(importlib.import_module(HYBRID_MODELS[name]), name)

    @functools.wraps(base.__init__)
    def build(self: Any, *args: Any, vllm_config: VllmConfig, **kwargs: Any) -> None:
        check_early(settings_of(vllm_config.kv_transfer_config))
        base.__init__(self, *args, vllm_config=vllm_config, **kwargs)
        install(self, vllm_config)

    own = {"__init__": build, "__module__": __name__, "__doc__": base.__doc__}
    return types.new_class(name, (base,), exec_body=lambda space: space.update(own))
