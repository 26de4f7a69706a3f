"""The scheduler's side of spans on the host: what is kept there, and what comes back when.

The tiers are the workers' (`kvspan.vllm.span_tier`), one for each share of the model. The scheduler
knows which keys all of them have confirmed, tells them what to copy with the steps it sends, and
hears what became of it with the steps' results; so it makes no difference whether workers are in
this process.

A piece that vLLM's pool has lost is brought back into blocks of the pool, under the hashes it had,
before a request that needs it is admitted: from then on it is a hit on the device like any other,
and whatever goes wrong is a miss like any other. Blocks are held (not evicted) only while copies
into them are under way, so that requests that wait cannot keep each other from being admitted. No
block waits for a store: where vLLM hands one out that is still being copied, the step that writes
to it waits for the copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvspan.vllm.scheduling import Piece, SpanRequest, SpanScheduler
from kvspan.vllm.span_tier import HostReport, HostStep, Transfer

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from kvspan.vllm.stats import SpanStats

MAX_ROUNDS = 3  # of loading for one request, until it is admitted


@dataclass(eq=False)
class _Load:
    """Pieces that come back together. waiters: by request, the pieces it waits for.

    transfers: ids. held: blocks of other pieces that the first waiter will need too.
    """

    transfers: list[int] = field(default_factory=list)
    waiters: dict[str, list[Piece]] = field(default_factory=dict)
    held: list[KVCacheBlock] = field(default_factory=list)
    arrived: list[tuple[Piece, list[KVCacheBlock]]] = field(default_factory=list)
    began: float = 0.0


@dataclass(eq=False)
class _Transfer:
    """left: workers that have not answered yet. hashes: of the blocks of a store, when it began."""

    id: int
    piece: Piece
    blocks: list[KVCacheBlock]
    left: int
    load: _Load | None = None
    hashes: list[Any] = field(default_factory=list)
    failed: bool = False


@dataclass
class _Wait:
    """A request that waits. rounds: of loading. loads: not over yet. until: for those."""

    rounds: int = 0
    loads: list[_Load] = field(default_factory=list)
    until: float = 0.0


class SpanHost:
    """scheduler: of the same engine. num_workers: that have to confirm.

    flops: of computing num_tokens tokens from a position on. restored: called with a request's name
    and the pieces that have come back for it. stats: where to count at the moment.
    fresh: whether the tiers are empty at their start; otherwise requests wait for the first report.
    """

    def __init__(
        self,
        scheduler: SpanScheduler,
        block_size: int,
        num_workers: int,
        flops: Callable[[int, int], float],
        restored: Callable[[str, Sequence[Piece]], None],
        stats: Callable[[], SpanStats],
        *,
        fresh: bool,
    ) -> None:
        self.pool: BlockPool | None = None
        self.held_bytes = (0, 0)
        self._scheduler = scheduler
        self._block_size = block_size
        self._num_workers = num_workers
        self._flops = flops
        self._restored = restored
        self._stats = stats
        self._known: set[bytes] | None = set() if fresh else None
        self._at_start: list[frozenset[bytes]] = []
        self._held_by: dict[int, tuple[int, int]] = {}
        self._step = HostStep()
        self._ids = count()
        self._transfers: dict[int, _Transfer] = {}
        self._storing: dict[bytes, _Transfer] = {}
        self._loading: dict[bytes, _Load] = {}
        self._waits: dict[str, _Wait] = {}
        self._offered: dict[str, set[bytes]] = {}

    @property
    def is_busy(self) -> bool:
        """Whether workers have something to tell."""
        return bool(self._transfers)

    # Loads.

    def must_wait(
        self, name: str, spans: SpanRequest, num_computed: int, own_blocks: int, timeout_s: float
    ) -> bool:
        """Whether a request is to be asked about again later; begins what it waits for.

        num_computed: tokens it would hit as things are. own_blocks: that it takes itself.
        timeout_s: how long it waits for one round of copies.
        """
        now = time.monotonic()
        wait = self._waits.setdefault(name, _Wait())
        if wait.loads and now < wait.until:
            return True
        if wait.loads:
            self._leave(name, wait)
            wait.rounds = MAX_ROUNDS
        if timeout_s <= 0 or wait.rounds >= MAX_ROUNDS:
            return False
        if self._known is None:
            return True
        missing = [piece for piece in spans.pieces if piece.end > num_computed]
        missing = [piece for piece in missing if self._blocks_of(piece) is None]
        wanted = [piece for piece in missing if self._can_come(piece)]
        fresh = [piece for piece in wanted if piece.key not in self._loading]
        needed = [piece for piece in spans.pieces if piece not in missing]
        begun = self._begin_load(fresh, needed, own_blocks) if fresh else None
        if fresh and begun is None:
            wanted = [piece for piece in wanted if piece.key in self._loading]
        for piece in wanted:
            load = self._loading[piece.key]
            load.waiters.setdefault(name, []).append(piece)
            if load not in wait.loads:
                wait.loads.append(load)
        if wait.loads:
            wait.rounds += 1
            wait.until = now + timeout_s
        return bool(wait.loads)

    def _can_come(self, piece: Piece) -> bool:
        assert self._known is not None
        if piece.is_span and self._scheduler.is_computing(piece.key):
            return False
        return piece.key in self._known

    def _blocks_of(self, piece: Piece) -> list[KVCacheBlock] | None:
        """The blocks that hold it on the device; None if one is missing."""
        assert self.pool is not None
        blocks = []
        for key in piece.hashes:
            found = self.pool.get_cached_block(key, [0])
            if not found:
                return None
            blocks.append(found[0])
        return blocks

    def _begin_load(self, pieces: list[Piece], needed: Iterable[Piece], own: int) -> _Load | None:
        """None where the pool has no room for them, or for the own blocks of the request."""
        pool = self.pool
        assert pool is not None
        held = [block for piece in needed for block in self._blocks_of(piece) or ()]
        idle = len({block.block_id for block in held if not block.ref_cnt})
        size = sum(len(piece.hashes) for piece in pieces)
        if max(own, size + idle) > pool.get_num_free_blocks():
            return None
        pool.touch(held)
        load = _Load(held=held, began=time.monotonic())
        blocks = pool.get_new_blocks(size)
        batch = []
        for piece in pieces:
            mine, blocks = blocks[: len(piece.hashes)], blocks[len(piece.hashes) :]
            one = _Transfer(next(self._ids), piece, mine, self._num_workers, load)
            self._transfers[one.id] = one
            self._loading[piece.key] = load
            load.transfers.append(one.id)
            batch.append(_order(one))
        self._step.loads.append(batch)
        return load

    def _leave(self, name: str, wait: _Wait) -> None:
        """A request waits no more; copies that nobody waits for are cancelled."""
        for load in wait.loads:
            load.waiters.pop(name, None)
            if not load.waiters:
                self._cancel(load)
        wait.loads = []

    def _cancel(self, load: _Load) -> None:
        unsent = [batch for batch in self._step.loads if batch[0].id in load.transfers]
        for batch in unsent:
            self._step.loads.remove(batch)
        if not unsent:  # who is given the blocks next writes to them after the cancelling
            self._step.settle += load.transfers
        for id in load.transfers:
            one = self._transfers.pop(id, None)
            if one is not None:
                self._drop(one)
        for piece, blocks in load.arrived:
            self._loading.pop(piece.key, None)
            self._free(blocks)
        self._free(load.held)

    def _drop(self, one: _Transfer) -> None:
        self._loading.pop(one.piece.key, None)
        self._free(one.blocks)

    def _free(self, blocks: list[KVCacheBlock]) -> None:
        """The last ones are evicted first, as vLLM does it."""
        assert self.pool is not None
        self.pool.free_blocks(reversed(blocks))

    def _loaded(self, one: _Transfer, load: _Load) -> None:
        """All workers have answered."""
        if one.failed:
            if self._known is not None:
                self._known.discard(one.piece.key)
            self._stats().add("host_load_failures", 1)
            self._drop(one)
        else:
            load.arrived.append((one.piece, one.blocks))
        load.transfers.remove(one.id)
        if load.transfers:
            return
        assert self.pool is not None
        for piece, blocks in load.arrived:
            # Stands for a request: vLLM takes nothing but the hashes from it.
            owner: Any = SimpleNamespace(block_hashes=list(piece.hashes))
            self.pool.cache_full_blocks(owner, blocks, 0, len(blocks), self._block_size, 0)
            if piece.is_span:
                self._scheduler.mark_loaded(piece.key)
            self._loading.pop(piece.key, None)
            self._free(blocks)
            self._stats().add("host_loads", 1)
            self._stats().add("host_tokens_loaded", piece.num_tokens)
        self._free(load.held)
        self._stats().add("host_load_seconds", time.monotonic() - load.began)
        came = {piece.key for piece, _ in load.arrived}
        for name, pieces in load.waiters.items():
            self._waits[name].loads.remove(load)
            self._restored(name, [piece for piece in pieces if piece.key in came])

    # Stores.

    def offer(self, name: str, spans: SpanRequest, end: int, table: Sequence[int]) -> None:
        """Keeps pieces that a request's blocks hold once a step is over that brings it to `end`."""
        if self._known is None:
            return
        assert self.pool is not None
        offered = self._offered.setdefault(name, set())
        for piece in spans.pieces:
            key = piece.key
            if not piece.is_here or piece.end > end or key in offered:
                continue
            if key in self._known or key in self._storing or key in self._loading:
                continue
            numbers = table[piece.start // self._block_size : piece.end // self._block_size]
            blocks = [self.pool.blocks[number] for number in numbers]
            hashes = [block.block_hash for block in blocks]
            if None in hashes:
                continue
            offered.add(key)
            cost = self._flops(piece.position, piece.num_tokens)
            one = _Transfer(next(self._ids), piece, blocks, self._num_workers, None, hashes)
            self._transfers[one.id] = self._storing[key] = one
            self._step.stores.append(_order(one, cost))

    def admitted(self, name: str, spans: SpanRequest, num_computed: int) -> None:
        """A request computes what is behind num_computed; it has waited for the last time."""
        if wait := self._waits.pop(name, None):
            self._leave(name, wait)
        for piece in spans.pieces:
            store = self._storing.get(piece.key)
            if store is not None and piece.is_here and piece.end > num_computed:
                self._step.settle.append(store.id)  # perhaps into the very same blocks

    def _stored(self, one: _Transfer) -> None:
        del self._storing[one.piece.key]
        if not one.failed and self._known is not None:
            self._known.add(one.piece.key)
            self._stats().add("host_stores", 1)
            self._stats().add("host_tokens_stored", one.piece.num_tokens)

    # Steps.

    def take_step(self) -> HostStep:
        """What the workers do in the step that is being sent."""
        for one in self._storing.values():
            if [block.block_hash for block in one.blocks] != one.hashes:
                self._step.settle.append(one.id)  # vLLM has handed a block out
        step, self._step = self._step, HostStep()
        return step

    def take_report(self, report: HostReport) -> None:
        for id in (*report.done, *report.failed):
            one = self._transfers.get(id)
            if one is None:  # cancelled
                continue
            one.left -= 1
            one.failed |= id in report.failed
            if one.left:
                continue
            del self._transfers[id]
            if one.load is None:
                self._stored(one)
            else:
                self._loaded(one, one.load)
        self._at_start += report.known
        if self._known is None and len(self._at_start) == self._num_workers:
            self._known = set(frozenset.intersection(*self._at_start))
        if self._known is not None:
            self._known.difference_update(report.gone)
        self._held_by.update(report.held)
        memory, disk = zip(*self._held_by.values(), strict=True) if self._held_by else ((), ())
        self.held_bytes = (sum(memory), sum(disk))
        self._stats().add("host_evictions", report.evictions)
        self._stats().add("host_disk_seconds", report.read_s / self._num_workers)
        for reason, times in report.refused.items():
            self._stats().refuse_host(reason, times)

    def finished(self, name: str) -> None:
        """A request is over, or given up."""
        self._offered.pop(name, None)
        if wait := self._waits.pop(name, None):
            self._leave(name, wait)

    def clear(self) -> None:
        """Forgets all that is kept, here and in the workers."""
        for load in list({id(load): load for load in self._loading.values()}.values()):
            for name in list(load.waiters):
                self._waits[name].loads.remove(load)
            self._cancel(load)
        for one in self._storing.values():
            self._transfers.pop(one.id)
        self._storing.clear()
        self._step.stores = []
        self._step.clear = True
        self._known = set()


def _order(one: _Transfer, cost: float = 0.0) -> Transfer:
    blocks = tuple(block.block_id for block in one.blocks)
    return Transfer(one.id, one.piece.key, blocks, cost)
