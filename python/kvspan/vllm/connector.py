"""vLLM's KV connector for spans: sources and destinations are blocks of vLLM's own pool.

Scheduler side: gives span requests their own block hashes, holds them back until their spans are
there, and reports the tokens that moves will fill. Where spans stay away, or are gone when vLLM
resumes a request that it had preempted, the request computes them itself under the same mask
(`kvspan.vllm.attention`). Worker side (`kvspan.vllm.worker_side`): executes the moves before the
forward pass of the step that was promised them, and rebuilds the attention metadata of steps with
spans in them. With a host tier, spans that the pool loses come back from there
(`kvspan.vllm.span_host`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, SupportsHMA
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import BlockHash

from kvspan.errors import UsageError
from kvspan.ops import digest_fields
from kvspan.vllm.hybrid.support import is_hybrid
from kvspan.vllm.params import SpanAudit, from_params
from kvspan.vllm.scheduling import Piece, SpanRequest, SpanScheduler
from kvspan.vllm.settings import check_settings
from kvspan.vllm.span_audits import SpanAudits
from kvspan.vllm.span_host import SpanHost
from kvspan.vllm.span_pool import refresh, steer
from kvspan.vllm.span_rows import RowPlanner
from kvspan.vllm.span_setup import HostSettings, flops, host_refusal, lora_name, num_workers
from kvspan.vllm.span_steps import StepMetadata, StepReport, Tracked
from kvspan.vllm.stats import SpanPromMetrics, SpanStats
from kvspan.vllm.support import no_rows, refusal, version_note
from kvspan.vllm.worker_side import WorkerSide, said_in_log

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.kvspan")

_NO_ROOM_NOW = "no room yet"


class KvspanConnector(WorkerSide, SupportsHMA):
    """See the module's text. Inert, and says why, where `support.refusal` finds a reason.

    For hybrid models the connector is a `kvspan.vllm.hybrid.connector.HybridConnector` instead.
    """

    def __new__(
        cls, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> Any:
        if is_hybrid(kv_cache_config):
            from kvspan.vllm.hybrid.connector import HybridConnector

            return HybridConnector(vllm_config, role, kv_cache_config)
        return super().__new__(cls)

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._no_rows = no_rows(vllm_config)
        self._reason = refusal(vllm_config, kv_cache_config, self._no_rows)
        self._block_size = vllm_config.cache_config.block_size
        self._caching = bool(vllm_config.cache_config.enable_prefix_caching)
        with said_in_log():
            extra = self._kv_transfer_config.kv_connector_extra_config
            settings = check_settings(extra, "spans")
        self._steer = settings["steer"]
        self._pool: BlockPool | None = None
        self._scheduler = SpanScheduler(self._lookup)
        self._rows = RowPlanner(
            self._block_size, vllm_config.scheduler_config.max_num_batched_tokens
        )
        self._tracked: dict[str, Tracked] = {}
        self._audits = SpanAudits()
        self._step = StepMetadata()
        self._host: SpanHost | None = None
        self._host_settings = HostSettings.of(settings) if settings["host_gib"] else None
        self._no_host = host_refusal(vllm_config) if self._host_settings else ""
        if self._reason or self._no_host:
            self._host_settings = None
        if role == KVConnectorRole.SCHEDULER:
            if note := version_note(vllm.__version__):
                logger.warning("kvspan: %s", note)
            off = self._reason or self._no_host or not self._caching
            say = logger.warning if off else logger.info
            say("kvspan: %s", self._state())
            if self._host_settings:
                self._host = self._make_host(self._host_settings)

    def _make_host(self, settings: HostSettings) -> SpanHost:
        def restored(name: str, pieces: Sequence[Piece]) -> None:
            self._audits.restored(self._tracked[name], pieces)

        return SpanHost(
            self._scheduler,
            self._block_size,
            num_workers(self._vllm_config),
            partial(flops, self._vllm_config.model_config.hf_text_config),
            restored,
            lambda: self._audits.stats,
            fresh=not settings.disk,
        )

    def _state(self) -> str:
        """What is on, and why the rest is off, in one line."""
        if self._reason:
            return f"span reuse is off, requests with spans run as ordinary ones: {self._reason}"
        reuse = "on" if self._caching else "off (set --enable-prefix-caching)"
        rows = f"off ({self._no_rows})" if self._no_rows else "on"
        host = f", {self._host_settings}" if self._host_settings else ""
        if self._no_host:
            host = f", nothing on the host ({self._no_host})"
        return (
            f"span reuse is {reuse}, blocks of {self._block_size}{host}; "
            f"missing spans computed in the step, and parallel placement: {rows}"
        )

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """No. vLLM asks where it will compile, and before it reads the model: a chance to say early
        what is wrong with the settings."""
        with said_in_log():
            check_settings(extra_config)
        return False

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # what is lost is computed again

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._pool = self._rows.pool = gpu_block_pool
        if self._host is not None:
            self._host.pool = gpu_block_pool
        self._scheduler.limit = 2 * gpu_block_pool.num_gpu_blocks

    def _lookup(self, key: bytes) -> int | None:
        assert self._pool is not None
        found = self._pool.get_cached_block(BlockHash(key), [0])
        return found[0].block_id if found else None

    def on_new_request(self, request: Request) -> None:
        reason, kind = self._reason, "configuration" if self._reason else "request"
        try:
            ids = request.prompt_token_ids
            params = from_params(request.kv_transfer_params, ids or [], self._block_size)
            if params is None:
                return
            if request.skip_reading_prefix_cache:
                reason = "the request must not read the cache (prompt log-probabilities)"
            elif request.mm_features or request.prompt_embeds is not None:
                reason = "multimodal inputs or embeddings"
            elif params.placement == "parallel" and self._no_rows:
                reason = f"parallel placement: {self._no_rows}"
        except UsageError as e:
            reason, kind = str(e), "declaration"
        if reason:
            self._audits.stats.refuse(kind)
            say = logger.debug if kind == "configuration" else logger.warning  # that was said once
            say("kvspan: request %s runs without spans: %s", request.request_id, reason)
            self._audits.notes[request.request_id] = SpanAudit(fallback=reason)
            return
        assert params is not None
        on_disk = bool(self._host_settings and self._host_settings.disk)
        spans = SpanRequest(
            params.layout,
            request.block_hashes,
            salt=request.cache_salt,
            lora=lora_name(request.lora_request, for_disk=on_disk),
            placement=params.placement,
        )
        self._tracked[request.request_id] = Tracked(
            request,
            spans,
            params.timeout_s,
            time.monotonic() + params.timeout_s,
            request._block_hasher,
            id=params.id,
            prepare_for=params.prepare_for,
        )
        self._audits.notes[request.request_id] = spans.audit
        request._block_hasher = lambda r: spans.extend(r.all_token_ids)[len(r.block_hashes) :]
        request.block_hashes.clear()
        request.update_block_hashes()

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return 0, False
        self._rows.release(tracked)
        self._scheduler.end(tracked.spans)  # of its work before a preemption
        tracked.plan, tracked.computes = [], False
        tracked.local_tokens = num_computed_tokens
        if self._host is not None and self._host.must_wait(
            request.request_id,
            tracked.spans,
            num_computed_tokens,
            self._own_blocks(request),
            tracked.timeout_s,
        ):
            self._audits.waits(tracked)
            return None, False
        match = self._scheduler.match(tracked.spans, num_computed_tokens, request.num_tokens)
        if not match.complete:
            resumed = request.num_preemptions > tracked.preemptions
            if resumed and self._no_rows:
                # Nobody is told to prepare its spans again, but somebody else may.
                tracked.preemptions = request.num_preemptions
                tracked.deadline = time.monotonic() + tracked.timeout_s
            wait = self._caching and (self._no_rows or not resumed)
            self._audits.waits(tracked)
            if wait and time.monotonic() < tracked.deadline:
                return None, False
            if reason := self._cannot_compute(tracked):
                if reason == _NO_ROOM_NOW:
                    return None, False
                self._give_up(tracked, reason)
                return None, False  # asked again, with the ordinary hashes' local hit
            tracked.computes = True
        tracked.plan = match.moves
        if not match.moves:
            return 0, False
        if self._steer and not tracked.computes:
            assert self._pool is not None
            steer(self._pool, match.moves, self._own_blocks(request))
        return (match.moves[-1].index + 1) * self._block_size - num_computed_tokens, False

    def _cannot_compute(self, tracked: Tracked) -> str:
        """Why a request cannot compute its missing spans itself; "" when it can."""
        if self._no_rows:
            return f"its spans were not prepared in time ({self._no_rows})"
        assert self._pool is not None
        own, scratch = self._own_blocks(tracked.request), self._rows.scratch_blocks(tracked.spans)
        free = int(self._pool.get_num_free_blocks())
        if own + scratch <= free:
            return ""
        if free < self._pool.num_gpu_blocks - 1:  # others will give theirs back
            return _NO_ROOM_NOW
        return "its spans were not prepared in time, and the pool has no room to compute them"

    def _own_blocks(self, request: Request) -> int:
        """What a request takes of the pool until its first token."""
        return int(-(-request.num_tokens // self._block_size) + 1)

    def _give_up(self, tracked: Tracked, reason: str) -> None:
        """Run as an ordinary request, under ordinary hashes: nothing it computes is a span."""
        request = tracked.request
        logger.warning("kvspan: request %s runs without spans: %s", request.request_id, reason)
        tracked.spans.audit.fallback = reason
        self._audits.admitted(tracked)
        self._audits.over(tracked)
        self._audits.stats.refuse("connector" if "another connector" in reason else "unprepared")
        del self._tracked[request.request_id]
        self._scheduler.end(tracked.spans)
        if self._host is not None:
            self._host.finished(request.request_id)
        request._block_hasher = tracked.ordinary_hasher
        request.block_hashes.clear()
        request.update_block_hashes()

    def _withdraw(self, tracked: Tracked, table: list[int]) -> None:
        """Goes on without spans though it was admitted with them: nobody may use its blocks."""
        assert self._pool is not None
        request, size = tracked.request, self._block_size
        self._pool.evict_blocks(set(table[tracked.local_tokens // size :]))
        self._give_up(tracked, "another connector's tokens were taken, kvspan is to be the first")
        name, now = request.request_id, time.monotonic_ns()

        def private(r: Request) -> list[BlockHash]:
            new = range(len(r.block_hashes), r.num_tokens // size)
            return [BlockHash(digest_fields("kvspan/vllm/private/v1", name, now, i)) for i in new]

        request._block_hasher = private
        request.block_hashes.clear()
        request.update_block_hashes()

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        self._audits.admitted(tracked)
        plan, tracked.plan = tracked.plan, []
        self._scheduler.begin(tracked.spans, tracked.local_tokens)
        if self._host is not None:
            self._host.admitted(request.request_id, tracked.spans, tracked.local_tokens)
        if plan and not num_external_tokens:
            # Under MultiConnector another connector was chosen, which knows fewer of its tokens.
            if self._cannot_compute(tracked):
                self._withdraw(tracked, blocks.get_block_ids()[0])
                return
            tracked.computes = True
        if tracked.computes:
            self._rows.hold(tracked)
        if not num_external_tokens:
            return
        table = blocks.get_block_ids()[0]
        self._step.moves += [(move.src, table[move.index], move.delta) for move in plan]
        in_place = sum(move.src == table[move.index] for move in plan)
        tracked.spans.audit.in_place_tokens += in_place * self._block_size
        refresh(self._pool, plan)
        tracked.spans.audit.moved_tokens += num_external_tokens
        self._audits.stats.add("span_tokens_moved", num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        step, self._step = self._step, StepMetadata()
        scheduled = scheduler_output.num_scheduled_tokens
        for name, count in scheduled.items():
            tracked = self._tracked.get(name)
            if tracked is None:
                continue
            done, spans = tracked.request.num_computed_tokens, tracked.spans
            before_end = done <= spans.end_of_spans
            if not before_end and spans.placement != "parallel":
                continue
            assert self._kv_cache_manager is not None
            table = self._kv_cache_manager.get_block_ids(name)[0]
            self._rows.plan(tracked, done, done + count, table, step)
            if before_end:
                self._audits.computes(tracked, spans.span_tokens(done, done + count))
                self._scheduler.mark_written(spans, done + count)
                if self._host is not None:
                    self._host.offer(name, spans, done + count, table)
        self._rows.release_done(scheduled)
        if self._host is not None:
            step.host = self._host.take_step()
        return step

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        report = connector_output.kv_connector_worker_meta
        if self._host is not None and isinstance(report, StepReport):
            self._host.take_report(report.host)

    def has_pending_push_work(self) -> bool:
        return self._host is not None and self._host.is_busy

    def reset_cache(self) -> bool | None:
        if self._host is None:
            return None
        self._host.clear()
        return True

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        if tracked := self._tracked.pop(request.request_id, None):
            self._rows.release(tracked)
            self._scheduler.end(tracked.spans)
            self._audits.over(tracked)
            if self._host is not None:
                self._host.finished(request.request_id)
        return False, self._audits.answer(request.request_id)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    def get_kv_connector_stats(self) -> SpanStats | None:
        if self._audits.stats.is_empty():
            return None
        stats, self._audits.stats = self._audits.stats, SpanStats()
        if self._host is not None:
            memory, disk = self._host.held_bytes
            stats.data.update(host_memory_bytes=memory, host_disk_bytes=disk)
        return stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> SpanStats:
        return SpanStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> SpanPromMetrics:
        return SpanPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
