"""A worker's side of the hybrid connector: it reads and writes the host tier's memory as told."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from vllm.distributed import get_tensor_model_parallel_rank
from vllm.forward_context import get_forward_context

from kvspan import _core
from kvspan.host import map_shared
from kvspan.host.pages import Bytes
from kvspan.vllm.hybrid.replay import Replayer
from kvspan.vllm.hybrid.saving import Rows
from kvspan.vllm.hybrid.steps import Arena, ReplayMetadata, StepDone

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvspan.vllm.hybrid.geometry import Geometry

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
        self._first_of: dict[str, int] | None = None
        self._released: set[str] = set()

    def before_step(self, metadata: ReplayMetadata) -> None:
        """Before anything else of a step: what finished requests left in blocks now free."""
        if metadata.arena is None:
            return
        if self.replayer.memory is None:
            self._attach(metadata.arena)
        self.replayer.keep(metadata.lasts, None)
        self._released.update(metadata.held)

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

    def before_pass(
        self,
        metadata: ReplayMetadata,
        scheduler_output: SchedulerOutput | None = None,
        request_ids: Sequence[str] = (),
        **_others: Any,
    ) -> None:
        """request_ids: the batch, in order, if vLLM's runner tells it (V2; it may call this after
        a pass for which nothing is restored)."""
        self._first_of = None
        if scheduler_output is not None:
            counts = [scheduler_output.num_scheduled_tokens[name] for name in request_ids]
            starts = accumulate(counts, initial=0)
            self._first_of = dict(zip(request_ids, starts, strict=False))
        for restore in metadata.loads:
            self.replayer.restore(restore)
        self.replayer.join()

    def after_pass(self, metadata: ReplayMetadata) -> None:
        if not metadata.step:
            return
        failed = sys.exc_info()[0] is not None
        if not failed and metadata.works:
            self.replayer.keep(metadata.works, self._rows())
        self.replayer.saving.end(metadata.step, failed)

    def _rows(self) -> Rows:
        if self._first_of is not None:
            return Rows(first_of=self._first_of)
        slots = get_forward_context().slot_mapping
        assert isinstance(slots, dict)
        return Rows(slots[self.replayer.attention_layer])

    def take_released(self) -> set[str]:
        """Finished requests whose blocks have been read."""
        released, self._released = self._released, set()
        return released

    def take_done(self) -> StepDone | None:
        saved = self.replayer.saving.saved()
        if not saved.step:
            return None
        timing = self.replayer.take_timing()
        return StepDone(*saved, timing.copy_s, timing.replay_s, timing.wait_s)

    def close(self) -> None:
        self.replayer.close()
        self._lock = None
