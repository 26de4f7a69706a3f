"""The scheduler's side of the hybrid connector: everything but the copies and the replays.

It owns the host tier. For each step it sets aside the memory that the step's requests fill, tells
the workers where it is, and publishes what is there once all workers have said that the step is
over (`StepDone`). What a request that has finished leaves, its last page and its state, is copied
by the next step before anything else, while its blocks, which vLLM has freed, still hold it. Model
Runner V2 puts new requests' data into blocks before it asks; there vLLM frees them after that step.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import BlockHash

from kvspan.errors import UsageError
from kvspan.host import SharedMemory
from kvspan.hybrid.groups import LayerMap
from kvspan.ops import digest_fields
from kvspan.vllm.hybrid.orders import Table, Work
from kvspan.vllm.hybrid.plans import Plan, Settings, bytes_read
from kvspan.vllm.hybrid.refusing import Refusing
from kvspan.vllm.hybrid.requests import Tracked, asked_policy, not_replayed, root_of
from kvspan.vllm.hybrid.steps import Arena, ReplayMetadata, StepDone
from kvspan.vllm.hybrid.store import common_prefix
from kvspan.vllm.hybrid.support import Options
from kvspan.vllm.hybrid.tracking import Track, Written
from kvspan.vllm.params import KEY
from kvspan.vllm.stats import SpanStats

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from kvspan.vllm.hybrid.store import PageStore

logger = init_logger("vllm.kvspan")

MAX_WAIT_STEPS = 256  # for blocks to restore into
# A request that finds its prefix on disk only waits for so many rounds of reading, and as long as
# the setting disk_wait_s says in all. Then it goes on with what is in memory.
MAX_READS = 3


@dataclass
class Step:
    """A step that was sent to the workers: what it writes, and what its restores read."""

    number: int
    written: list[tuple[Tracked, Written]] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)


class Scheduling(Refusing):
    """One engine's. group: the attention's. shared: None where workers are in this process."""

    def __init__(
        self, caches: KVCacheConfig, options: Options, store: PageStore, group: int,
        arena: Arena, shared: SharedMemory | None, layers: LayerMap | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.manager: KVCacheManager | None = None  # bound before the first request
        self.store = store
        self.settings = Settings(
            store.geometry.size,
            policy=options.policy,
            every=options.state_every,
            least=options.min_match,
            decode=options.decode,
            pair=options.exact_hidden,
            layers=layers,
        )
        self._caches = caches
        self._options = options
        self._group = group
        self._arena = arena
        self._shared = shared
        self.tracked: dict[str, Tracked] = {}
        self._lasts: list[tuple[Tracked, Work, Written]] = []  # for the next step
        self._ending: dict[Tracked, int] = {}  # finished, not published to their end, which this is
        self._steps: deque[Step] = deque()
        self._number = 0
        self._busy = False
        self._hold = options.hold_blocks

    def bind(self, manager: KVCacheManager) -> None:
        self.manager = manager

    def on_new_request(self, request: Request) -> None:
        policy, reason, kind = None, "", "request"
        try:
            policy = asked_policy(request, self._options)
            reason = not_replayed(request)
        except UsageError as e:
            reason, kind = str(e), "declaration"
        if reason:
            if (request.kv_transfer_params or {}).get(KEY) is not None:
                self.refuse(request, reason, kind)
            return
        root = root_of(request, self.settings.page)
        track = Track(self.settings, root, policy or self.settings.policy)
        self.tracked[request.request_id] = Tracked(request, track, request._block_hasher)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tracked = self.tracked.get(request.request_id)
        if tracked is None:
            return 0, False
        track = tracked.track
        if request.skip_reading_prefix_cache:
            track.capturing = False
            return 0, False
        self._unload(tracked)
        if self._is_reading(tracked):
            return None, False
        began = time.perf_counter()
        plan = track.begin(
            self.store, request.all_token_ids, num_computed_tokens, self._may_read(tracked)
        )
        self.stats.add("replay_lookup_seconds", time.perf_counter() - began)
        if track.fetch is not None:
            if not tracked.reads:
                tracked.read_until = time.monotonic() + self._options.disk_wait_s
            tracked.reads += 1
            return None, False
        if self._more_is_coming(tracked, plan.length if plan else num_computed_tokens):
            track.end_plan()
            return None, False
        if plan is None:
            return 0, False
        if not self._has_room(request):
            track.end_plan()
            # What runs will give blocks back; but vLLM lets others pass who is held back,
            # and they may take them again and again. One that computes all keeps its turn.
            if self._busy and tracked.waited < MAX_WAIT_STEPS:
                tracked.waited += 1
                return None, False
            return 0, False
        return plan.length - num_computed_tokens, False

    def _is_reading(self, tracked: Tracked) -> bool:
        """Whether a request waits for files; others are scheduled meanwhile."""
        fetch = tracked.track.fetch
        if fetch is None:
            return False
        if not fetch.done and time.monotonic() < tracked.read_until:
            return True
        self.stats.add("replay_disk_seconds", fetch.seconds)
        if not fetch.done:
            logger.warning(
                "kvspan: request %s goes on without what is on disk: its files were not read in "
                "%g s (the setting disk_wait_s)",
                tracked.request.request_id, self._options.disk_wait_s,
            )  # fmt: skip
        return False

    def _may_read(self, tracked: Tracked) -> bool:
        """Whether a request may wait for files; not where others have waited in vain just now."""
        if tracked.reads:
            return tracked.reads < MAX_READS and time.monotonic() < tracked.read_until
        return not self.store.tier.stalled(self._options.disk_wait_s)

    def _unload(self, tracked: Tracked) -> None:
        """A restore that was planned never was in a step."""
        if tracked.loaded is not None:
            plan, _, written = tracked.loaded
            tracked.loaded = None
            plan.release()
            written.settle(self.store, (), failed=True)

    def _more_is_coming(self, tracked: Tracked, length: int) -> bool:
        """Whether a request that has just finished leaves more of this one's prompt than is found.

        The next turn of a chat may come before the step after the answer's last token, which
        stores the answer's end.
        """
        if tracked.track.policy.name == "off":
            return False
        request = tracked.request
        for other, end in self._ending.items():
            if other.track.root == tracked.track.root:
                shared = common_prefix(
                    np.asarray(other.request.all_token_ids, dtype=np.int64),
                    np.asarray(request.all_token_ids, dtype=np.int64),
                )
                if min(shared, end, request.num_tokens - 1) > length:
                    return True
        return False

    def _has_room(self, request: Request) -> bool:
        """Whether the request surely gets its blocks.

        In mode "align" vLLM counts one block of a recurrent group for tokens that a connector
        brings, takes two where they end in another block than the step, and stops the engine when
        the second is not there (0.32: MambaManager.get_num_blocks_to_allocate and
        allocate_external_computed_blocks).
        """
        assert self.manager is not None
        groups = self._caches.kv_cache_groups
        need = -(-(request.num_tokens + 1) // self.settings.page) + 2 * (len(groups) - 1)
        return bool(need <= self.manager.block_pool.get_num_free_blocks())

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        tracked = self.tracked.get(request.request_id)
        if tracked is None:
            return
        if not request.skip_reading_prefix_cache:  # once, however often it was asked before
            self.stats.add("replay_tokens_looked_up", request.num_tokens)
        tracked.reads = 0
        track = tracked.track
        plan = track.plan
        if plan is None:
            return
        if not num_external_tokens:
            track.end_plan()
            return
        track.plan = None  # the step's now
        table = tuple(list(ids) for ids in blocks.get_block_ids())
        restore, written = track.accepted(self.store, plan, table)
        tracked.loaded = plan, restore, written
        track.audit.bytes = bytes_read(plan, self.store.geometry, self.settings.layers)
        self.stats.add("replay_tokens_matched", plan.length - plan.local)
        self.stats.add("replay_tokens_replayed", plan.length - plan.start)
        self.stats.add("replay_approximate_requests", not plan.exact)
        self.stats.add("replay_bytes", track.audit.bytes)
        if not plan.exact:
            self._keep_apart(tracked, plan.apart, table)

    def _keep_apart(self, tracked: Tracked, start: int, table: Table) -> None:
        """Blocks from the first approximate position on, `start`, get keys that no other request
        looks up.

        Where all of a restore's KV is exact that is its end, where its state is not. The block that
        ends right there is among them: in mode "align" vLLM keeps its recurrent state. Those of the
        restore and of the coming step have their ordinary keys already and lose them.
        Each time: a request that vLLM has preempted may go on from an earlier token.
        """
        assert self.manager is not None
        request, ordinary = tracked.request, tracked.ordinary_hasher
        own = request.request_id
        if ordinary is None:
            return
        named: set[int] = set()
        last = max(start - 1, 0)
        for group, blocks in zip(self._caches.kv_cache_groups, table, strict=True):
            named.update(blocks[last // group.kv_cache_spec.block_size :])
        self.manager.block_pool.evict_blocks(named)

        def hasher(r: Request) -> list[BlockHash]:
            return [
                BlockHash(digest_fields("kvspan/vllm/approximate/v1", own, bytes(h)))
                for h in ordinary(r)
            ]

        del request.block_hashes[last // self._options.hash_block :]
        request._block_hasher = hasher
        request.update_block_hashes()

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ReplayMetadata:
        assert self.manager is not None
        self._number += 1
        step = Step(self._number)
        self._steps.append(step)
        metadata = ReplayMetadata(step.number, self._arena)
        lasts, self._lasts = self._lasts, []
        for tracked, work, written in lasts:
            metadata.lasts.append(work)
            if self._hold:
                metadata.held.append(work.request)
            step.written.append((tracked, written))
        counts = scheduler_output.num_scheduled_tokens
        self._busy = bool(counts)
        for request_id, count in counts.items():
            found = self.tracked.get(request_id)
            if found is None:
                continue
            request = found.request
            if found.loaded is not None:
                plan, restore, written = found.loaded
                found.loaded = None
                restore.scheduled = count
                metadata.loads.append(restore)
                step.plans.append(plan)
                step.written.append((found, written))
            ordered = found.track.work(
                self.store, request.num_computed_tokens, count,
                self.manager.get_block_ids(request_id), self._group, request.num_prompt_tokens,
            )  # fmt: skip
            if ordered is not None:
                ordered[0].request = request_id
                metadata.works.append(ordered[0])
                step.written.append((found, ordered[1]))
        return metadata

    @property
    def is_busy(self) -> bool:
        return bool(self._ending)

    def step_done(self, done: StepDone) -> None:
        """What steps that are over restored may go, and what they left behind may be found."""
        self.stats.add("replay_copy_seconds", done.copy_s)
        self.stats.add("replay_run_seconds", done.replay_s)
        self.stats.add("replay_wait_seconds", done.wait_s)
        while self._steps and self._steps[0].number <= done.step:
            step = self._steps.popleft()
            failed = step.number in done.failed
            for plan in step.plans:
                plan.release()
            for tracked, written in step.written:
                written.settle(self.store, tracked.request.all_token_ids, failed)
                if written.last:
                    tracked.track.stop(self.store)
                    del self._ending[tracked]

    def take_stats(self) -> SpanStats | None:
        stats = super().take_stats()
        if stats is not None:
            memory, disk = self.store.tier.held_bytes()
            stats.data.update(host_memory_bytes=memory, host_disk_bytes=disk)
        return stats

    def request_finished(
        self, request: Request, table: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        tracked = self.tracked.pop(request.request_id, None)
        if tracked is None:
            return super().request_finished(request, table)
        track = tracked.track
        if track.fetch is not None:
            self.stats.add("replay_disk_seconds", track.fetch.seconds)
        track.end_plan()
        self._unload(tracked)
        # By the time that the next step runs those sent before it have run, to the last token.
        computed = request.num_computed_tokens
        done = min(computed, request.num_tokens)
        ordered = track.last_work(self.store, done, table, self._group, state=computed == done)
        if ordered is None:
            track.stop(self.store)
        else:
            ordered[0].request = request.request_id
            self._lasts.append((tracked, *ordered))
            self._ending[tracked] = done
        return self._hold and ordered is not None, {KEY: track.audit.record()}

    def clear(self) -> bool | None:
        # Nor may be found later what was computed until now.
        for tracked in (*self.tracked.values(), *self._ending):
            tracked.track.stop(self.store)
        self.store.clear()
        return True

    def close(self) -> None:
        self.store.tier.close()
        if self._shared is not None:
            self._shared.close()
