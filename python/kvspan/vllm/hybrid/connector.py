"""Tail-Replay joined to vLLM's connector interface."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.kv_cache_interface import MambaSpec

from kvspan.errors import KvspanError, UsageError
from kvspan.ops import digest_fields
from kvspan.vllm.hybrid.replay import Replayer, Timing
from kvspan.vllm.hybrid.steps import Load, ReplayMetadata, Shared, Step, Tracked
from kvspan.vllm.hybrid.store import root_key
from kvspan.vllm.hybrid.support import make_store, options, refusal
from kvspan.vllm.hybrid.tracking import ReplayAudit, Settings, Track, Work, parse_policy
from kvspan.vllm.params import KEY, fields_of
from kvspan.vllm.stats import SpanStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.kvspan")

MAX_WAIT_STEPS = 256  # for blocks to restore into


_SHARED: dict[str, Shared] = {}  # by engine


class HybridConnector(KVConnectorBase_V1, SupportsHMA):
    """See the package's text. Inert, and says why, where `support.refusal` finds a reason."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._reason = refusal(vllm_config, kv_cache_config)
        self._tracked: dict[str, Tracked] = {}
        self._audits: dict[str, ReplayAudit] = {}
        self._loads: list[Load] = []
        self._steps: deque[Step] = deque()
        self._number = 0
        self._stats = SpanStats()
        self._busy = False
        self._replayer: Replayer | None = None
        if not self._reason:
            try:
                self._set_up(vllm_config, kv_cache_config)
            except KvspanError as error:  # one line that is found above vLLM's tracebacks
                logger.error("kvspan: %s", error)
                raise
        if role == KVConnectorRole.SCHEDULER:
            say = logger.warning if self._reason else logger.info
            say("kvspan: prefix reuse at any token is %s", self._state_text())

    def _set_up(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        """The settings, and the store; KvspanError where they cannot be used."""
        self._options = options(vllm_config)
        self._group = next(
            i
            for i, group in enumerate(kv_cache_config.kv_cache_groups)
            if not isinstance(group.kv_cache_spec, MambaSpec)
        )
        self._engine = str(vllm_config.kv_transfer_config.engine_id)
        if self._engine not in _SHARED:
            store = make_store(vllm_config, kv_cache_config, self._options)
            _SHARED[self._engine] = Shared(store)
        self._shared = _SHARED[self._engine]
        self._store = self._shared.store
        self._settings = Settings(
            self._store.geometry.size,
            policy=self._options.policy,
            every=self._options.state_every,
            least=self._options.min_match,
            decode=self._options.decode,
            pair=self._options.exact_hidden,
        )

    def _state_text(self) -> str:
        if self._reason:
            cache = self._vllm_config.cache_config
            left = "no prefix is reused"
            if cache.enable_prefix_caching:
                left = (
                    f"prefixes are hit at multiples of {cache.block_size} tokens only, and by no "
                    "request that is the first to part there"
                )
            return f"off, {left}: {self._reason}"
        return (
            f"on, policy {self._options.policy_text}, pages of {self._settings.page} tokens, "
            f"{self._options.host_bytes / 2**30:.1f} GiB on the host"
        )

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # Scheduler side.

    def on_new_request(self, request: Request) -> None:
        reason, kind = self._reason, "configuration"
        policy = None
        refused = ""
        value = (request.kv_transfer_params or {}).get(KEY)
        try:
            told = fields_of(request.kv_transfer_params) or {}
            if "replay" in told and not reason:
                policy = parse_policy(
                    told["replay"], f"kv_transfer_params.{KEY}.replay", self._options.k_min
                )
                if policy.name == "exact" and not self._options.exact_hidden:
                    raise UsageError(
                        f"kv_transfer_params.{KEY}.replay: exact needs a server that keeps exact "
                        "hidden vectors",
                        expected="its option hidden to be pair", found="sum",
                    )  # fmt: skip
            if told.get("spans"):
                refused = "spans need KV that may move, and recurrent state can not"
            elif request.mm_features or request.prompt_embeds is not None:
                refused = "multimodal inputs or embeddings"
            elif request.pooling_params is not None:
                refused = "pooling"
            if refused and not reason:
                reason, kind = refused, "request"
        except UsageError as e:
            reason, kind = str(e), "declaration"
        if reason:
            if value is not None:
                self._stats.refuse(kind)
                say = logger.debug if kind == "configuration" else logger.warning  # said once
                say("kvspan: request %s runs without replay: %s", request.request_id, reason)
                self._audits[request.request_id] = ReplayAudit(policy="off", refused=reason)
            return
        lora = request.lora_request
        root = root_key(
            request.cache_salt,
            # The path, too: what is on disk may be read by a server with another LoRA of that name.
            f"{lora.lora_int_id}:{lora.lora_name}:{lora.lora_path}" if lora else "",
            self._settings.page,
        )
        track = Track(self._settings, root, policy or self._settings.policy)
        self._tracked[request.request_id] = Tracked(request, track, request._block_hasher)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return 0, False
        if request.skip_reading_prefix_cache:
            tracked.track.capturing = False
            return 0, False
        began = time.perf_counter()
        plan = tracked.track.begin(self._store, request.all_token_ids, num_computed_tokens)
        self._stats.add("replay_lookup_seconds", time.perf_counter() - began)
        if plan is None:
            return 0, False
        if not self._has_room(request):
            tracked.track.end_plan()
            # What runs will give blocks back; but vLLM lets others pass who is held back,
            # and they may take them again and again. One that computes all keeps its turn.
            if self._busy and tracked.waited < MAX_WAIT_STEPS:
                tracked.waited += 1
                return None, False
            return 0, False
        return plan.length - num_computed_tokens, False

    def _has_room(self, request: Request) -> bool:
        """Whether the request surely gets its blocks.

        In mode "align" vLLM counts one block of a recurrent group for tokens that a connector
        brings, takes two where they end in another block than the step, and stops the engine when
        the second is not there (0.32: MambaManager.get_num_blocks_to_allocate and
        allocate_external_computed_blocks).
        """
        groups = self._kv_cache_config.kv_cache_groups
        need = -(-(request.num_tokens + 1) // self._settings.page) + 2 * (len(groups) - 1)
        pool = self._kv_cache_manager.block_pool
        return bool(need <= pool.get_num_free_blocks())

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        if not request.skip_reading_prefix_cache:  # once, however often it was asked before
            self._stats.add("replay_tokens_looked_up", request.num_tokens)
        if tracked.track.plan is None:
            return
        track, plan = tracked.track, tracked.track.plan
        if not num_external_tokens:
            track.end_plan()
            return
        begun = track.accepted(plan)
        self._stats.add("replay_tokens_matched", plan.length - plan.local)
        self._stats.add("replay_tokens_replayed", plan.length - plan.start)
        self._stats.add("replay_approximate_requests", not plan.exact)
        plan.table = tuple(list(ids) for ids in blocks.get_block_ids())
        self._loads.append(Load(plan, track, begun))
        if not plan.exact:
            self._keep_apart(tracked, plan.length)

    def _keep_apart(self, tracked: Tracked, length: int) -> None:
        """Blocks computed after an approximate state get keys that no other request looks up."""
        request, ordinary = tracked.request, tracked.ordinary_hasher
        if ordinary is None or tracked.poisoned:
            return
        tracked.poisoned = True
        own = request.request_id

        def hasher(r: Request) -> list[BlockHash]:
            return [
                BlockHash(digest_fields("kvspan/vllm/approximate/v1", own, bytes(h)))
                for h in ordinary(r)
            ]

        # The block that ends right at the restore is among them: in mode "align" vLLM keeps its
        # recurrent state.
        per_block = self._options.hash_block
        del request.block_hashes[(length - 1) // per_block :]
        request._block_hasher = hasher
        request.update_block_hashes()

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ReplayMetadata:
        if self._reason:
            return ReplayMetadata()
        self._finish_steps()
        self._number += 1
        step = Step(self._number)
        self._steps.append(step)
        metadata = ReplayMetadata(step.number)
        counts = scheduler_output.num_scheduled_tokens
        self._busy = bool(counts)
        loads, self._loads = self._loads, []
        manager = self._kv_cache_manager
        for request_id, count in counts.items():
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            request, track = tracked.request, tracked.track
            start = request.num_computed_tokens
            for load in loads:
                if load.track is track:
                    load.plan.scheduled = count
                    metadata.loads.append(load)
                    step.plans.append(load.plan)
                    track.plan = None  # the step's now
            step.ends.append((tracked, start + count))
            work = track.work(
                self._store, start, count, manager.get_block_ids(request_id), self._group,
                request.num_prompt_tokens,
            )  # fmt: skip
            if work is not None:
                metadata.works.append(work)
        return metadata

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._finish_steps()

    def _finish_steps(self) -> None:
        """What steps that are over restored may go, and what they left behind may be found."""
        if self._reason:
            return
        while self._steps and self._steps[0].number <= self._shared.done:
            step = self._steps.popleft()
            for plan in step.plans:
                plan.release()
            for tracked, end in step.ends:
                tracked.done = end
                if self._tracked.get(tracked.request.request_id) is tracked:
                    tracked.track.publish(self._store, tracked.request.all_token_ids, end)

    def get_kv_connector_stats(self) -> SpanStats | None:
        on = not self._reason
        if on and self._replayer is None and (replayer := self._shared.replayer) is not None:
            timing, replayer.timing = replayer.timing, Timing()
            self._stats.add("replay_bytes", timing.bytes)
            self._stats.add("replay_copy_seconds", timing.copy_s)
            self._stats.add("replay_run_seconds", timing.replay_s)
            self._stats.add("replay_wait_seconds", timing.wait_s)
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, SpanStats()
        if on:
            memory, disk = self._store.tier.held_bytes()
            stats.data.update(host_memory_bytes=memory, host_disk_bytes=disk)
        return stats

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._finish_steps()
        tracked = self._tracked.pop(request.request_id, None)
        audit = self._audits.pop(request.request_id, None)
        if tracked is None:
            return False, {KEY: audit.record()} if audit else None
        track = tracked.track
        track.end_plan()
        under_way = any(one is tracked for step in self._steps for one, _ in step.ends)
        done = min(tracked.done, request.num_computed_tokens)
        work = self._last_work(track, done, block_ids, under_way)
        if work is not None:
            # The blocks are the request's until this returns.
            assert self._shared.replayer is not None
            self._shared.replayer.keep([work], None)
            track.publish(self._store, request.all_token_ids, done)
        track.stop(self._store)
        return False, {KEY: track.audit.record()}

    def _last_work(
        self, track: Track, done: int, table: tuple[list[int], ...], under_way: bool
    ) -> Work | None:
        """The unfinished page and the state at a request's end, if they can still be read.

        under_way: a step goes on from that state, and writes over it, at this moment.
        """
        size = self._settings.page
        index = (done - 1) // size
        if not track.capturing or not 0 <= index - track.base < len(track.pages):
            return None
        blocks = table[self._group]
        page = track.pages[index - track.base]
        copies = [(page, blocks[index], done - index * size)] if done % size else []
        state = None if under_way else table
        return Work(track, done, 0, [], blocks[index], copies, state, done - track.last_state)

    def reset_cache(self) -> bool | None:
        if self._reason:
            return None
        self._store.clear()
        return True

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if not self._reason:
            assert self._kv_cache_config is not None
            self._replayer = self._shared.replayer = Replayer(
                self._vllm_config, self._kv_cache_config, self._store, self._options.pair
            )

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, ReplayMetadata)
        if not metadata.loads:
            return
        assert self._replayer is not None
        for load in metadata.loads:
            self._replayer.restore(load.plan, load.track, load.begun)

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
        if self._replayer is None:
            return
        if metadata.works:
            slots = get_forward_context().slot_mapping
            assert isinstance(slots, dict)
            self._replayer.keep(metadata.works, slots[self._replayer.attention_layer])
        self._shared.done = metadata.step

    def shutdown(self) -> None:
        if self._replayer is not None:
            self._replayer.close()
        if not self._reason and (shared := _SHARED.pop(self._engine, None)):
            shared.store.tier.close()
