"""vLLM's KV connector for spans: sources and destinations are blocks of vLLM's own pool.

Scheduler side: gives span requests their own block hashes, holds them back until their spans are
there, and reports the tokens that moves will fill. Where spans stay away, or are gone when vLLM
resumes a request that it had preempted, the request computes them itself under the same mask
(`kvspan.vllm.attention`). Worker side: executes the moves before the forward pass of the step that
was promised them, and rebuilds the attention metadata of steps with spans in them.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import BlockHash

from kvspan.errors import UsageError
from kvspan.ops import digest_fields
from kvspan.vllm.attention import StepPlan, apply
from kvspan.vllm.hybrid.support import is_hybrid
from kvspan.vllm.moving import BlockMover
from kvspan.vllm.params import KEY, SpanAudit, from_params
from kvspan.vllm.scheduling import Move, PlacedSpan, SpanRequest, SpanScheduler
from kvspan.vllm.stats import SpanPromMetrics, SpanStats
from kvspan.vllm.support import cache_layout, no_rows, refusal, rotary, version_note

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = init_logger("vllm.kvspan")

MAX_REMEMBERED = 4096  # requests whose preparations are counted
_NO_ROOM_NOW = "no room yet"


@dataclass
class StepMetadata(KVConnectorMetadata):
    """What the worker has to do in one step; moves are (source block, destination, delta tokens).

    moves: before the forward pass. late: in each layer when its new keys are written, before it
    attends. plan: attention rows and positions that are not vLLM's.
    """

    moves: list[tuple[int, int, int]] = field(default_factory=list)
    late: list[tuple[int, int, int]] = field(default_factory=list)
    plan: StepPlan = field(default_factory=StepPlan)


@dataclass
class _Tracked:
    """A request of vLLM's and what is known of its spans.

    deadline: until when it waits for others to prepare its spans.
    id, prepare_for: see `SpanParams`. computed: its own span tokens. waits_since: or 0.
    scratch: blocks held for rotated copies of the anchor while it computes spans itself, so many
    sets of them as it may need in one step.
    """

    request: Request
    spans: SpanRequest
    timeout_s: float
    deadline: float
    ordinary_hasher: Any
    preemptions: int = 0
    plan: list[Move] = field(default_factory=list)
    local_tokens: int = 0
    computes: bool = False
    scratch: list[KVCacheBlock] = field(default_factory=list)
    id: str = ""
    prepare_for: str = ""
    computed: int = 0
    waits_since: float = 0.0


class KvspanConnector(KVConnectorBase_V1, SupportsHMA):
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
        self._steer = self._kv_transfer_config.get_from_extra_config("steer", False) is True
        self._chunk = vllm_config.scheduler_config.max_num_batched_tokens
        self._pool: BlockPool | None = None
        self._scheduler = SpanScheduler(self._lookup)
        self._tracked: dict[str, _Tracked] = {}
        self._notes: dict[str, SpanAudit] = {}
        self._step = StepMetadata()
        self._holding: list[_Tracked] = []
        self._mover: BlockMover | None = None
        self._stats = SpanStats()
        self._prepared_for: dict[str, int] = {}
        if role == KVConnectorRole.SCHEDULER:
            if note := version_note(vllm.__version__):
                logger.warning("kvspan: %s", note)
            logger.info("kvspan: %s", self._state())

    def _state(self) -> str:
        """What is on, and why the rest is off, in one line."""
        if self._reason:
            return f"span reuse is off: {self._reason}"
        reuse = "on" if self._caching else "off (prefix caching is off)"
        rows = f"off ({self._no_rows})" if self._no_rows else "on"
        return (
            f"span reuse is {reuse}, blocks of {self._block_size}; "
            f"missing spans computed in the step, and parallel placement: {rows}"
        )

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # what is lost is computed again

    # Scheduler side.

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._pool = gpu_block_pool
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
            self._stats.refuse(kind)
            logger.warning("kvspan: request %s runs without spans: %s", request.request_id, reason)
            self._notes[request.request_id] = SpanAudit(fallback=reason)
            return
        assert params is not None
        lora = request.lora_request
        spans = SpanRequest(
            params.layout,
            request.block_hashes,
            salt=request.cache_salt,
            lora=f"{lora.lora_int_id}:{lora.lora_name}" if lora else "",
            placement=params.placement,
        )
        self._tracked[request.request_id] = _Tracked(
            request,
            spans,
            params.timeout_s,
            time.monotonic() + params.timeout_s,
            request._block_hasher,
            id=params.id,
            prepare_for=params.prepare_for,
        )
        self._notes[request.request_id] = spans.audit
        request._block_hasher = lambda r: spans.extend(r.all_token_ids)[len(r.block_hashes) :]
        request.block_hashes.clear()
        request.update_block_hashes()

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return 0, False
        self._release(tracked)
        self._scheduler.end(tracked.spans)  # of its work before a preemption
        tracked.plan, tracked.computes = [], False
        tracked.local_tokens = num_computed_tokens
        match = self._scheduler.match(tracked.spans, num_computed_tokens, request.num_tokens)
        if not match.complete:
            resumed = request.num_preemptions > tracked.preemptions
            if resumed and self._no_rows:
                # Nobody is told to prepare its spans again, but somebody else may.
                tracked.preemptions = request.num_preemptions
                tracked.deadline = time.monotonic() + tracked.timeout_s
            wait = self._caching and (self._no_rows or not resumed)
            tracked.waits_since = tracked.waits_since or time.monotonic()
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
            self._steer_to(tracked)
        return (match.moves[-1].index + 1) * self._block_size - num_computed_tokens, False

    def _count(self, tracked: _Tracked) -> None:
        """Spans looked up and found, when their request is over."""
        if tracked.prepare_for:
            return
        audit = tracked.spans.audit
        missed = tracked.computed + self._prepared_for.pop(tracked.id, 0)
        hit = 0 if audit.fallback else max(0, audit.span_tokens - missed)
        self._stats.add("span_tokens_looked_up", audit.span_tokens)
        self._stats.add("span_tokens_hit", hit)

    def _computes(self, tracked: _Tracked, count: int) -> None:
        """Notes that count tokens of spans are computed in a step."""
        self._stats.add("span_tokens_prepared", count)
        tracked.computed += count
        if count and tracked.prepare_for:
            known = self._prepared_for
            known[tracked.prepare_for] = known.get(tracked.prepare_for, 0) + count
            if len(known) > MAX_REMEMBERED:  # their requests never came
                del known[next(iter(known))]

    def _admitted(self, tracked: _Tracked) -> None:
        if tracked.waits_since:
            self._stats.add("span_deferred_seconds", time.monotonic() - tracked.waits_since)
            tracked.waits_since = 0.0

    def _cannot_compute(self, tracked: _Tracked) -> str:
        """Why a request cannot compute its missing spans itself; "" when it can."""
        if self._no_rows:
            return f"its spans were not prepared in time ({self._no_rows})"
        assert self._pool is not None
        own = -(-tracked.request.num_tokens // self._block_size) + 1
        free = int(self._pool.get_num_free_blocks())
        if own + self._scratch_blocks(tracked.spans) <= free:
            return ""
        if free < self._pool.num_gpu_blocks - 1:  # others will give theirs back
            return _NO_ROOM_NOW
        return "its spans were not prepared in time, and the pool has no room to compute them"

    def _scratch_blocks(self, spans: SpanRequest) -> int:
        """Blocks for the anchor as the spans of one step must see it."""
        moved = [span for span in spans.spans if span.delta and not span.in_place]
        if spans.layout.scope != "anchored" or not moved:
            return 0
        shortest = min(span.end - span.start for span in moved)
        sets: int = min(len(moved), self._chunk // shortest + 2)
        return sets * (spans.layout.anchor_len // spans.layout.block_size)

    def _release(self, tracked: _Tracked) -> None:
        if tracked.scratch:
            assert self._pool is not None
            self._pool.free_blocks(tracked.scratch)
            tracked.scratch = []
            self._holding.remove(tracked)

    def _give_up(self, tracked: _Tracked, reason: str) -> None:
        """Run as an ordinary request, under ordinary hashes: nothing it computes is a span."""
        request = tracked.request
        logger.warning("kvspan: request %s runs without spans: %s", request.request_id, reason)
        tracked.spans.audit.fallback = reason
        self._admitted(tracked)
        self._count(tracked)
        self._stats.refuse("connector" if "another connector" in reason else "unprepared")
        del self._tracked[request.request_id]
        self._scheduler.end(tracked.spans)
        request._block_hasher = tracked.ordinary_hasher
        request.block_hashes.clear()
        request.update_block_hashes()

    def _withdraw(self, tracked: _Tracked, table: list[int]) -> None:
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
        self._admitted(tracked)
        plan, tracked.plan = tracked.plan, []
        self._scheduler.begin(tracked.spans, tracked.local_tokens)
        if plan and not num_external_tokens:
            # Under MultiConnector another connector was chosen, which knows fewer of its tokens.
            if self._cannot_compute(tracked):
                self._withdraw(tracked, blocks.get_block_ids()[0])
                return
            tracked.computes = True
        if tracked.computes:
            assert self._pool is not None
            if count := self._scratch_blocks(tracked.spans):
                # Room for these was checked when the request was admitted, a moment ago.
                tracked.scratch = self._pool.get_new_blocks(count)
                self._holding.append(tracked)
        if not num_external_tokens:
            return
        table = blocks.get_block_ids()[0]
        self._step.moves += [(move.src, table[move.index], move.delta) for move in plan]
        in_place = sum(move.src == table[move.index] for move in plan)
        tracked.spans.audit.in_place_tokens += in_place * self._block_size
        self._refresh(plan)
        tracked.spans.audit.moved_tokens += num_external_tokens
        self._stats.add("span_tokens_moved", num_external_tokens)

    def _steer_to(self, tracked: _Tracked) -> None:
        """Makes vLLM hand out the sources themselves, so that keys are rotated where they lie.

        Saves the copies and their blocks, and uses the sources up: for spans that do not come
        again. Not where a source is in use, or wanted twice, or where the pool is short: a source
        must not be given up for a request that is not admitted then.
        """
        assert self._pool is not None
        blocks = [self._pool.blocks[move.src] for move in tracked.plan]
        needed = -(-tracked.request.num_tokens // self._block_size) + 1
        if needed > self._pool.get_num_free_blocks() or any(block.ref_cnt for block in blocks):
            return
        if len({block.block_id for block in blocks}) < len(blocks):
            return
        # Blocks without a hash go to the front of the free queue, in this order.
        self._pool.evict_blocks({block.block_id for block in blocks})
        self._pool.touch(blocks)
        self._pool.free_blocks(blocks)

    def _refresh(self, plan: list[Move]) -> None:
        """What is used is evicted last, as after a hit: a move alone does not touch its source."""
        assert self._pool is not None
        sources = [self._pool.blocks[src] for src in dict.fromkeys(move.src for move in plan)]
        idle = [block for block in sources if not block.ref_cnt]
        self._pool.touch(idle)
        self._pool.free_blocks(reversed(idle))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        step, self._step = self._step, StepMetadata()
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                done, spans = tracked.request.num_computed_tokens, tracked.spans
                if done <= spans.end_of_spans or spans.placement == "parallel":
                    self._plan(tracked, done, done + count, step)
                if done <= spans.end_of_spans:
                    self._computes(tracked, spans.span_tokens(done, done + count))
                    self._scheduler.mark_written(spans, done + count)
        for tracked in list(self._holding):
            # Later steps come after this one in the worker too, so its scratch is free already.
            done = tracked.request.num_computed_tokens
            done += scheduler_output.num_scheduled_tokens.get(tracked.request.request_id, 0)
            if done >= tracked.spans.end_of_spans or not done:
                self._release(tracked)
        return step

    def _plan(self, tracked: _Tracked, lo: int, hi: int, step: StepMetadata) -> None:
        """Adds what is special about a request's tokens [lo, hi) of this step."""
        spans = tracked.spans
        apart = spans.apart(lo, hi)
        shifts = spans.shifts(lo, hi)
        if not apart and not shifts:
            return
        assert self._kv_cache_manager is not None
        table = self._kv_cache_manager.get_block_ids(tracked.request.request_id)[0]
        first = table[lo // self._block_size]
        if shifts:
            step.plan.shifts[first] = shifts
        if apart:
            prefix = partial(self._anchor, tracked, table, apart, step)
            step.plan.rows[first] = spans.rows(lo, hi, prefix)
            spans.audit.computed_tokens += sum(min(s.end, hi) - max(s.start, lo) for s in apart)

    def _anchor(
        self,
        tracked: _Tracked,
        table: list[int],
        apart: list[PlacedSpan],
        step: StepMetadata,
        span: PlacedSpan,
    ) -> tuple[int, ...]:
        """Blocks with the anchor's KV at the distance from the span that its scope asks for."""
        if tracked.spans.layout.scope != "anchored":
            return ()
        count = tracked.spans.layout.anchor_len // self._block_size
        anchor = table[:count]
        if span.delta:
            at = apart.index(span) * count
            copies = [block.block_id for block in tracked.scratch[at : at + count]]
            step.late += [(a, b, span.delta) for a, b in zip(anchor, copies, strict=True)]
            anchor = copies
        return tuple(anchor)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        if tracked := self._tracked.pop(request.request_id, None):
            self._release(tracked)
            self._scheduler.end(tracked.spans)
            self._count(tracked)
        audit = self._notes.pop(request.request_id, None)
        return False, {KEY: asdict(audit)} if audit else None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    def get_kv_connector_stats(self) -> SpanStats | None:
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, SpanStats()
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

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._reason:
            return
        model = self._vllm_config.model_config
        inv_freq, is_neox = rotary(model.hf_text_config, model.get_head_size())
        cache = next(iter(kv_caches.values()))
        layout = cache_layout(cache.dtype, self._block_size, model.get_head_size())
        self._mover = BlockMover(kv_caches, layout, inv_freq, is_neox)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepMetadata)
        if connector_metadata.plan:
            attn_metadata = get_forward_context().attn_metadata
            apply(connector_metadata.plan, attn_metadata, self._block_size)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        if metadata.moves:
            assert self._mover is not None
            self._mover.move(metadata.moves)

    def wait_for_layer_load(self, layer_name: str) -> None:
        # The other moves are over, or ahead on the same stream.
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        if metadata.late:
            assert self._mover is not None
            self._mover.move(metadata.late, layer_name)

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        return  # nothing leaves vLLM's pool

    def wait_for_save(self) -> None:
        return
