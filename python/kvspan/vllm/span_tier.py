"""The worker's side of spans on the host: copies between vLLM's KV cache and a host tier.

Every worker has a tier of its own for its own share of the model's heads, and does what the
scheduler (`kvspan.vllm.span_host`) says step by step. An entry is one `Piece`: its blocks of the
first layer in order, of the second, and so on, in vLLM's own layout. What goes wrong with one is
reported as failed, and the scheduler takes it for a miss. No step waits for a disk: files that a
load needs are read by the tier's threads, the last of which submits the copy.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from kvspan.host import CopyJob, CopyQueue, Fetch, HostTier, Reservation
from kvspan.ops import Stream
from kvspan.vllm.fence import Fence

logger = logging.getLogger("vllm.kvspan")

KIND = "span"


@dataclass(frozen=True)
class Transfer:
    """An entry to be copied. id: no other transfer of the engine has it. blocks: of vLLM's pool.

    cost: FLOPs to compute it again; for stores.
    """

    id: int
    key: bytes
    blocks: tuple[int, ...]
    cost: float = 0.0


@dataclass
class HostStep:
    """What the workers do in one step, in this order; `loads` after the step's moves, whose sources
    may be the very blocks that are loaded into, and `stores` after the forward pass.

    settle: ids of transfers whose blocks are about to be written: of stores, which are waited for,
    and of loads, which are cancelled with all others of their submission. clear: whether all that
    is kept is dropped. loads: what is copied together, in one submission.
    """

    settle: list[int] = field(default_factory=list)
    clear: bool = False
    loads: list[list[Transfer]] = field(default_factory=list)
    stores: list[Transfer] = field(default_factory=list)


@dataclass
class HostReport:
    """What became of transfers, by id, and what else happened since the last report.

    known: per worker, what it has at its start. gone: keys that a worker has dropped, some time
    ago. evictions: entries. refused: by reason, stores that the tier did not take, and files that
    it did not use. held: bytes in memory and on disk, by worker. read_s: seconds that loads waited
    for files, of all workers together.
    """

    done: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    known: list[frozenset[bytes]] = field(default_factory=list)
    gone: list[bytes] = field(default_factory=list)
    evictions: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    held: dict[int, tuple[int, int]] = field(default_factory=dict)
    read_s: float = 0.0

    def add(self, other: HostReport) -> None:
        self.done += other.done
        self.failed += other.failed
        self.known += other.known
        self.gone += other.gone
        self.evictions += other.evictions
        for reason, count in other.refused.items():
            self.refused[reason] = self.refused.get(reason, 0) + count
        self.held.update(other.held)
        self.read_s += other.read_s


@dataclass
class _Store:
    """A submission of one step's stores, and the memory that it fills."""

    job: CopyJob
    entries: list[tuple[Transfer, Reservation]]


class _Load:
    """A submission of loads: files to be read, if any, then a copy.

    found: ids of those that are copied. failed: nothing will be.
    """

    def __init__(self, transfers: list[Transfer]) -> None:
        self.transfers = transfers
        self.found: list[int] = []
        self.fetch: Fetch | None = None
        self.job: CopyJob | None = None
        self.failed = False
        self.read_s = 0.0
        self.views = contextlib.ExitStack()
        self.lock = threading.Lock()  # of what the thread that read last sets

    @property
    def state(self) -> str:
        """Of its copy: ``pending`` before it, ``failed`` if there is none."""
        with self.lock:
            if self.job is None:
                return "failed" if self.failed else "pending"
            return self.job.state

    def cancel(self) -> None:
        """No byte is written any more once this returns."""
        with self.lock:
            self.failed = True
        if self.fetch is not None:
            self.fetch.release()
        if self.job is not None:
            self.job.cancel()


class SpanTier:
    """caches: per layer, vLLM's tensor [num_blocks, ...]. rank: this worker's number.

    The tier is closed with this; its pages best have the size of one block of all layers.
    """

    def __init__(self, tier: HostTier, caches: Sequence[torch.Tensor], rank: int = 0) -> None:
        self.tier = tier
        self._caches = list(caches)
        self._rank = rank
        self._block_bytes = block_bytes(caches)
        device = self._caches[0].device
        self._fence = Fence(device)
        # Stores wait for the pass that computes them, and would hold up the loads behind them.
        self._store_queue = CopyQueue(str(device))
        # Loads have their memory already, on both sides.
        self._load_queue = CopyQueue(str(device), max_bytes_queued=1 << 62)
        self._stores: list[_Store] = []
        self._loads: list[_Load] = []
        self._told = set(tier.stored_keys())
        self._evictions = self._swept_at = 0
        self._refused: dict[str, int] = {}
        self._report: HostReport | None = HostReport(known=[frozenset(self._told)])

    def begin(self, step: HostStep) -> None:
        """Before the forward pass, which may write to blocks of the transfers to be settled."""
        settle = set(step.settle)
        for store in self._stores:
            if step.clear or any(transfer.id in settle for transfer, _ in store.entries):
                with contextlib.suppress(RuntimeError):  # is told with the others that failed
                    store.job.wait()
        for load in self._loads:
            if step.clear or any(transfer.id in settle for transfer in load.transfers):
                load.cancel()
        if step.clear:
            self._collect()
            self.tier.clear()
            self._told.clear()

    def load(self, submissions: Sequence[list[Transfer]]) -> None:
        """After the step's moves: begins its loads."""
        after = self._fence.behind() if submissions else 0
        for transfers in submissions:
            load = _Load(transfers)
            self._loads.append(load)
            keys = [transfer.key for transfer in transfers]
            load.fetch = self.tier.fetch(keys, partial(self._arrived, load, after))

    def keep(self, transfers: Sequence[Transfer]) -> None:
        """After the forward pass: its stores, in one submission; those without room are dropped."""
        entries = []
        for transfer in transfers:
            nbytes = len(transfer.blocks) * self._block_bytes
            reservation = self.tier.reserve(transfer.key, nbytes, cost=transfer.cost, kind=KIND)
            if reservation is not None:
                entries.append((transfer, reservation))
            elif self.tier.contains(transfer.key):
                self._tell(done=transfer)
                self._told.add(transfer.key)
            else:
                self._tell(failed=transfer)
        if not entries:
            return
        src = [item for transfer, _ in entries for item in self._blocks(transfer)]
        dst = [page for _, reservation in entries for page in reservation.pages]
        job = None
        try:
            job = self._store_queue.try_submit(src, dst, after=self._fence.behind())
        finally:
            if job is None:
                for transfer, reservation in entries:
                    reservation.abort()
                    self._tell(failed=transfer)
                self._refuse("copies wait", len(entries))
        if job is not None:
            self._stores.append(_Store(job, entries))

    def report(self) -> HostReport | None:
        """What happened since the last call."""
        self._collect()
        report, self._report = self._report, None
        if report is None:
            return None
        evictions, refused = self.tier.counts()
        if evictions - self._swept_at > len(self._told) // 64:  # so that it costs little each
            kept = self._told.intersection(self.tier.stored_keys())
            report.gone += self._told - kept
            self._told, self._swept_at = kept, evictions
        report.evictions, self._evictions = evictions - self._evictions, evictions
        for reason, count in refused.items():
            if new := count - self._refused.get(reason, 0):
                report.refused[reason] = report.refused.get(reason, 0) + new
        self._refused = dict(refused)
        report.held = {self._rank: self.tier.held_bytes()}
        return report

    def close(self) -> None:
        """Ends what is under way: stores are finished, loads are not."""
        for load in self._loads:
            load.cancel()
        for store in self._stores:
            with contextlib.suppress(RuntimeError):
                store.job.wait()
        self._collect()
        self._store_queue.close()
        self._load_queue.close()
        self.tier.close()

    def _arrived(self, load: _Load, after: Stream, fetch: Fetch) -> None:
        """All that a load needs is in memory, or cannot be had: copies what there is."""
        with load.lock:
            load.read_s = fetch.seconds if fetch.nbytes else 0.0
            try:
                if not load.failed:
                    self._submit(load, after)
            except (RuntimeError, ValueError) as error:
                logger.warning("kvspan: bringing spans back from the host failed: %s", error)
            finally:
                load.failed = load.job is None
                fetch.release()

    def _submit(self, load: _Load, after: Stream) -> None:
        src: list[Any] = []
        dst: list[Any] = []
        for transfer in load.transfers:
            view = self.tier.view(transfer.key, from_disk=False)
            if view is None:
                continue
            load.views.enter_context(view)
            expected = len(transfer.blocks) * self._block_bytes
            if view.nbytes != expected:
                logger.warning(
                    "kvspan: host entry %s: expected %d bytes, got %d", transfer.key.hex(),
                    expected, view.nbytes,
                )  # fmt: skip
                continue
            src += view.pages
            dst += self._blocks(transfer)
            load.found.append(transfer.id)
        if load.found:
            load.job = self._load_queue.submit(src, dst, after=after)

    def _blocks(self, transfer: Transfer) -> list[tuple[torch.Tensor, tuple[int, ...]]]:
        return [(cache, transfer.blocks) for cache in self._caches]

    def _collect(self) -> None:
        """Ends the transfers that are over."""
        pending, self._stores = self._stores, []
        for store in pending:
            state = store.job.state
            if state == "pending":
                self._stores.append(store)
                continue
            done = state == "done"
            for transfer, reservation in store.entries:
                if done:
                    reservation.commit()
                    self._tell(done=transfer)
                    self._told.add(transfer.key)
                else:
                    reservation.abort()
                    self._tell(failed=transfer)
            if not done:
                logger.warning("kvspan: copying spans to the host failed: %s", _why(store.job))
        loads, self._loads = self._loads, []
        for load in loads:
            state = load.state
            if state == "pending":
                self._loads.append(load)
                continue
            load.views.close()
            for transfer in load.transfers:
                if state == "done" and transfer.id in load.found:
                    self._tell(done=transfer)
                else:
                    self._tell(failed=transfer)
            if load.job is not None and state == "failed":
                logger.warning(
                    "kvspan: bringing spans back from the host failed: %s", _why(load.job)
                )
            if state != "cancelled" and self._report is not None:
                self._report.read_s += load.read_s

    def _tell(self, done: Transfer | None = None, failed: Transfer | None = None) -> None:
        self._report = self._report or HostReport()
        if done is not None:
            self._report.done.append(done.id)
        if failed is not None:
            self._report.failed.append(failed.id)

    def _refuse(self, reason: str, count: int) -> None:
        self._report = self._report or HostReport()
        self._report.refused[reason] = self._report.refused.get(reason, 0) + count


def block_bytes(caches: Sequence[torch.Tensor]) -> int:
    """Bytes of one block in all layers."""
    return sum(cache[0].numel() * cache.element_size() for cache in caches)


def _why(job: CopyJob) -> str:
    try:
        job.wait()
    except RuntimeError as error:
        return str(error)
    return job.state
