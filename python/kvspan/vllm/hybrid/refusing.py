"""The scheduler's side of the hybrid connector where replay is off; what is on builds on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from kvspan.vllm.hybrid.plans import ReplayAudit
from kvspan.vllm.hybrid.steps import ReplayMetadata, StepDone
from kvspan.vllm.params import KEY, PROBE
from kvspan.vllm.stats import SpanStats

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.kvspan")


class Refusing:
    """What remains of the scheduler's side where replay is off for a reason: it is said.

    For the calls, see vLLM's KVConnectorBase_V1.
    """

    def __init__(self, reason: str = "") -> None:
        self.reason = reason
        self.audits: dict[str, ReplayAudit] = {}
        self.stats = SpanStats()

    def bind(self, manager: KVCacheManager) -> None:
        return

    def on_new_request(self, request: Request) -> None:
        if KEY in (request.kv_transfer_params or {}):
            self.refuse(request, self.reason, "configuration")

    def refuse(self, request: Request, reason: str, kind: str) -> None:
        """Say in log, counters and answer that a request runs without replay."""
        self.stats.refuse(kind)
        quiet = kind == "configuration" or request.request_id.startswith(PROBE)  # said elsewhere
        say = logger.debug if quiet else logger.warning
        say("kvspan: request %s runs without replay: %s", request.request_id, reason)
        self.audits[request.request_id] = ReplayAudit(policy="off", refused=reason)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        return

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ReplayMetadata:
        return ReplayMetadata()

    @property
    def is_busy(self) -> bool:
        """Whether something that finished requests leave is still on its way."""
        return False

    def step_done(self, done: StepDone) -> None:
        return

    def request_finished(
        self, request: Request, table: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether vLLM is to hold the blocks in `table` until the workers say that they have been
        read, and what the answer's parameters say."""
        audit = self.audits.pop(request.request_id, None)
        return False, {KEY: audit.record()} if audit else None

    def take_stats(self) -> SpanStats | None:
        if self.stats.is_empty():
            return None
        stats, self.stats = self.stats, SpanStats()
        return stats

    def clear(self) -> bool | None:
        """Forget all that is kept; None where nothing is."""
        return None

    def close(self) -> None:
        return
