"""vLLM's KV connector for spans: sources and destinations are blocks of vLLM's own pool.

Scheduler side: gives span requests their own block hashes, holds them back until their spans are
there, and reports the tokens that moves will fill. Worker side: executes the moves before the
forward pass of the step that was promised them.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import BlockHash

from kvspan.errors import UsageError
from kvspan.vllm.moving import BlockMover
from kvspan.vllm.params import KEY, SpanAudit, from_params
from kvspan.vllm.scheduling import Move, SpanRequest, SpanScheduler
from kvspan.vllm.support import cache_layout, refusal, rotary, version_note

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = init_logger("vllm.kvspan")


@dataclass
class MoveMetadata(KVConnectorMetadata):
    """Moves of one step: (source block, destination block, delta tokens)."""

    moves: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass
class _Tracked:
    """A request of vLLM's and what is known of its spans."""

    request: Request
    spans: SpanRequest
    deadline: float
    ordinary_hasher: Any
    plan: list[Move] = field(default_factory=list)
    local_tokens: int = 0


class KvspanConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module's text. Inert, and says why, where `support.refusal` finds a reason."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._reason = refusal(vllm_config, kv_cache_config)
        self._block_size = vllm_config.cache_config.block_size
        self._pool: BlockPool | None = None
        self._scheduler = SpanScheduler(self._lookup)
        self._tracked: dict[str, _Tracked] = {}
        self._notes: dict[str, SpanAudit] = {}
        self._step_moves: list[tuple[int, int, int]] = []
        self._mover: BlockMover | None = None
        if role == KVConnectorRole.SCHEDULER:
            if note := version_note(vllm.__version__):
                logger.warning("kvspan: %s", note)
            state = f"off: {self._reason}" if self._reason else f"on, blocks of {self._block_size}"
            logger.info("kvspan: span reuse is %s", state)

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # what is lost is computed again

    # Scheduler side.

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._pool = gpu_block_pool

    def _lookup(self, key: bytes) -> int | None:
        assert self._pool is not None
        found = self._pool.get_cached_block(BlockHash(key), [0])
        return found[0].block_id if found else None

    def on_new_request(self, request: Request) -> None:
        reason = self._reason
        try:
            ids = request.prompt_token_ids
            params = from_params(request.kv_transfer_params, ids or [], self._block_size)
            if params is None:
                return
            if request.skip_reading_prefix_cache:
                reason = "the request must not read the cache (prompt log-probabilities)"
            elif request.mm_features or request.prompt_embeds is not None:
                reason = "multimodal inputs or embeddings"
        except UsageError as e:
            reason = str(e)
        if reason:
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
        )
        hasher = request._block_hasher
        self._tracked[request.request_id] = _Tracked(
            request, spans, time.monotonic() + params.timeout_s, hasher
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
        tracked.plan = []
        tracked.local_tokens = num_computed_tokens
        moves = self._scheduler.match(tracked.spans, num_computed_tokens, request.num_tokens)
        if moves is None:
            if time.monotonic() < tracked.deadline:
                return None, False
            self._give_up(tracked)
            return None, False  # asked again, with the ordinary hashes' local hit
        tracked.plan = moves
        if not moves:
            return 0, False
        return (moves[-1].index + 1) * self._block_size - num_computed_tokens, False

    def _give_up(self, tracked: _Tracked) -> None:
        """Run as an ordinary request, under ordinary hashes: nothing it computes is a span."""
        request = tracked.request
        reason = "its spans were not prepared in time"
        logger.warning("kvspan: request %s runs without spans: %s", request.request_id, reason)
        tracked.spans.audit.fallback = reason
        del self._tracked[request.request_id]
        request._block_hasher = tracked.ordinary_hasher
        request.block_hashes.clear()
        request.update_block_hashes()

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        plan, tracked.plan = tracked.plan, []
        self._scheduler.forget_unwritten(tracked.spans, tracked.local_tokens)
        if not num_external_tokens:
            return
        table = blocks.get_block_ids()[0]
        self._step_moves += [(move.src, table[move.index], move.delta) for move in plan]
        tracked.spans.audit.moved_tokens += num_external_tokens

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> MoveMetadata:
        moves, self._step_moves = self._step_moves, []
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                done = tracked.request.num_computed_tokens + count
                self._scheduler.mark_written(tracked.spans, done)
        return MoveMetadata(moves)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._tracked.pop(request.request_id, None)
        audit = self._notes.pop(request.request_id, None)
        return False, {KEY: asdict(audit)} if audit else None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._reason:
            return
        model = self._vllm_config.model_config
        inv_freq, is_neox = rotary(model.hf_text_config, model.get_head_size())
        cache = next(iter(kv_caches.values()))
        layout = cache_layout(cache.dtype, self._block_size, model.get_head_size())
        self._mover = BlockMover(kv_caches, layout, inv_freq, is_neox)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, MoveMetadata)
        if metadata.moves:
            assert self._mover is not None
            self._mover.move(metadata.moves)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return  # the moves are over, or ahead on the same stream

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
