"""Tail-Replay joined to vLLM's connector interface: a scheduler's side or a worker's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import MambaSpec

from kvspan.errors import KvspanError
from kvspan.host import SharedMemory
from kvspan.host.pages import Bytes, anonymous_memory
from kvspan.hybrid.groups import layer_map
from kvspan.vllm.hybrid.refusing import Refusing
from kvspan.vllm.hybrid.scheduling import Scheduling
from kvspan.vllm.hybrid.steps import Arena, ReplayMetadata, StepDone
from kvspan.vllm.hybrid.support import make_geometry, make_store, options, refusal
from kvspan.vllm.hybrid.working import LOCAL, Working

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvspan.vllm.stats import SpanStats

logger = init_logger("vllm.kvspan")


class HybridConnector(KVConnectorBase_V1, SupportsHMA):
    """See the package's text. Inert, and says why, where `support.refusal` finds a reason.

    scheduling: the scheduler's side; None on a worker's. working: the worker's; None on the
    scheduler's, and where inert.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._reason = refusal(vllm_config, kv_cache_config)
        self._engine = str(vllm_config.kv_transfer_config.engine_id)
        self.scheduling: Refusing | None = None
        self.working: Working | None = None
        if role != KVConnectorRole.SCHEDULER:
            return
        if self._reason:
            self.scheduling = Refusing(self._reason)
            logger.warning("kvspan: prefix reuse at any token is %s", self._why_off())
            return
        try:
            self.scheduling = self._make_scheduling(kv_cache_config)
        except KvspanError as error:  # one line that is found above vLLM's tracebacks
            logger.error("kvspan: %s", error)
            raise

    def _why_off(self) -> str:
        cache = self._vllm_config.cache_config
        left = "no prefix is reused"
        if cache.enable_prefix_caching:
            left = (
                f"prefixes are hit at multiples of {cache.block_size} tokens only, and by no "
                "request that is the first to part there"
            )
        return f"off, {left}: {self._reason}"

    def _make_scheduling(self, caches: KVCacheConfig) -> Scheduling:
        """With its host tier; KvspanError where the settings cannot be used."""
        config = self._vllm_config
        given = options(config)
        shared: SharedMemory | None = None

        def take_memory(nbytes: int) -> Bytes:
            nonlocal shared
            logger.info("kvspan: taking %.1f GiB of memory on the host", nbytes / 2**30)
            if config.parallel_config.distributed_executor_backend == "uni":
                LOCAL[self._engine] = anonymous_memory(nbytes, provided=True)
                return LOCAL[self._engine]
            shared = SharedMemory(nbytes, provided=True)
            return shared.memory

        store = make_store(config, caches, given, take_memory)
        arena = Arena(shared.name if shared else "", given.host_bytes, self._engine)
        group = next(
            i
            for i, one in enumerate(caches.kv_cache_groups)
            if not isinstance(one.kv_cache_spec, MambaSpec)
        )
        logger.info(
            "kvspan: prefix reuse at any token is on, policy %s, pages of %d tokens",
            given.policy_text, store.geometry.size,
        )  # fmt: skip
        layers = layer_map(config.model_config.hf_text_config.layer_types) if given.decay else None
        return Scheduling(caches, given, store, group, arena, shared, layers)

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # Scheduler side.

    @property
    def _side(self) -> Refusing:
        assert self.scheduling is not None, "of the scheduler's side"
        return self.scheduling

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._side.bind(kv_cache_manager)

    def on_new_request(self, request: Request) -> None:
        self._side.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._side.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._side.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ReplayMetadata:
        return self._side.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        done = connector_output.kv_connector_worker_meta
        if isinstance(done, StepDone):
            self._side.step_done(done)

    def has_pending_push_work(self) -> bool:
        return self.scheduling is not None and self.scheduling.is_busy

    def get_kv_connector_stats(self) -> SpanStats | None:
        return None if self.scheduling is None else self.scheduling.take_stats()

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._side.request_finished(request, block_ids)

    def reset_cache(self) -> bool | None:
        return self._side.clear()

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if not self._reason:
            assert self._kv_cache_config is not None
            given = options(self._vllm_config)
            geometry = make_geometry(self._vllm_config, self._kv_cache_config, given)
            self.working = Working(self._vllm_config, self._kv_cache_config, geometry, given.pair)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, ReplayMetadata)
        if self.working is not None:
            self.working.before_step(kv_connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, ReplayMetadata)
        if self.working is not None:
            self.working.before_pass(metadata, **kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return  # restored before the pass

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        return  # kept once the pass is over

    def wait_for_save(self) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, ReplayMetadata)
        if self.working is not None:
            self.working.after_pass(metadata)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        released = self.working.take_released() if self.working is not None else None
        return released or None, None

    def build_connector_worker_meta(self) -> StepDone | None:
        return None if self.working is None else self.working.take_done()

    def shutdown(self) -> None:
        if self.working is not None:
            self.working.close()
        if self.scheduling is not None:
            self.scheduling.close()
            LOCAL.pop(self._engine, None)
