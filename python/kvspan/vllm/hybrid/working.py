"""A worker's side of the hybrid connector: it reads and writes the host tier's memory as told."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from vllm.distributed import get_tensor_model_parallel_rank
from vllm.forward_context import get_forward_context

from kvspan import _core
from kvspan.host import map_shared
from kvspan.host.pages import Bytes
from kvspan.vllm.hybrid.replay import Replayer
from kvspan.vllm.hybrid.steps import Arena, ReplayMetadata, StepDone

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvspan.vllm.hybrid.store import Geometry

# Of schedulers in this process, by engine: their tiers' memory.
LOCAL: dict[str, Bytes] = {}


class Working:
    """One worker's. For the calls, see vLLM's KVConnectorBase_V1."""

    def __init__(
        self, config: VllmConfig, caches: KVCacheConfig, geometry: Geometry, pair: bool
    ) -> None:
        rank = get_tensor_model_parallel_rank()
        self.replayer = Replayer(config, caches, geometry, pair, rank)
        self._lock: _core.PageLock | None = None

    def before_step(self, metadata: ReplayMetadata) -> None:
        """Before anything else of a step: what finished requests left in blocks now free."""
        if metadata.arena is None:
            return
        if self.replayer.memory is None:
            self._attach(metadata.arena)
        self.replayer.keep(metadata.lasts, None)

    def _attach(self, arena: Arena) -> None:
        memory = map_shared(arena.name, arena.nbytes) if arena.name else LOCAL[arena.engine]
        self.replayer.memory = memory
        if self.replayer.device.type == "cuda":
            try:
                self._lock = _core.PageLock(memory)
            except RuntimeError as error:
                raise RuntimeError(
                    f"kvspan: {len(memory) / 2**30:.3g} GiB on the host (kv_connector_extra_config."
                    f"host_gib) cannot be page-locked: {error}"
                ) from None

    def before_pass(self, metadata: ReplayMetadata) -> None:
        for restore in metadata.loads:
            self.replayer.restore(restore)

    def after_pass(self, metadata: ReplayMetadata) -> None:
        if not metadata.step:
            return
        failed = sys.exc_info()[0] is not None
        if not failed and metadata.works:
            slots = get_forward_context().slot_mapping
            assert isinstance(slots, dict)
            self.replayer.keep(metadata.works, slots[self.replayer.attention_layer])
        self.replayer.saving.end(metadata.step, failed)

    def take_done(self) -> StepDone | None:
        saved = self.replayer.saving.saved()
        if not saved.step:
            return None
        timing = self.replayer.take_timing()
        return StepDone(*saved, timing.copy_s, timing.replay_s, timing.wait_s)

    def close(self) -> None:
        self.replayer.close()
        self._lock = None
