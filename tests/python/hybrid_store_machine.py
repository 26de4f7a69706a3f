"""A stand-in for vLLM's worker: as KV, hidden vector and state of a position it writes a digest of
all tokens up to it, so that whatever a restore reads can be checked."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvspan.host import HostTier
from kvspan.vllm.hybrid.geometry import Geometry, page_of
from kvspan.vllm.hybrid.orders import Restore, Work
from kvspan.vllm.hybrid.plans import Plan, Settings
from kvspan.vllm.hybrid.policy import parse_policy
from kvspan.vllm.hybrid.store import PageStore, root_key
from kvspan.vllm.hybrid.tracking import Track

SIZE = 8


GEOMETRY = Geometry(
    size=SIZE, layers=2, block_bytes=SIZE * 8, streams=1, row_bytes=8, state_bytes=8
)


ROOT = root_key(None, "", SIZE)


TABLE = ([7 + i for i in range(20)],)


def digest(tokens: Sequence[int], rough: str = "") -> np.ndarray:
    """uint8 [8]: stands for what a model computes at the last of the tokens. rough: the policy
    under which it went on from an approximate state."""
    held = hashlib.sha256(np.asarray(tokens, np.int64).tobytes() + rough.encode()).digest()[:8]
    return np.frombuffer(held, np.uint8)


class Machine:
    """One request at a time, in steps of `chunk` tokens; in Python, what a worker writes."""

    def __init__(self, megabytes: float = 4.0, **settings: int) -> None:
        self.memory = np.zeros(int(megabytes * 2**20), np.uint8)
        tier = HostTier(len(self.memory), page_bytes=GEOMETRY.page_bytes, memory=self.memory)
        self.store = PageStore(tier, GEOMETRY)
        self.settings = Settings(SIZE, **settings)
        self.rough = ""  # of the request that runs
        self.rough_reads = 0

    def run(
        self, tokens: list[int], prompt: int, chunk: int, policy: str = "exact", local: int = 0,
        stop_at: int | None = None, salt: str | None = None, fail_at: int | None = None,
        alone: bool = True,
    ) -> int:  # fmt: skip
        """Run a request; what its plan reads is checked. Returns the length of its match.

        fail_at: the step to this position fails. alone: nobody else holds anything.
        """
        track = Track(self.settings, root_key(salt, "", SIZE), parse_policy(policy, "test", 1))
        plan = track.begin(self.store, tokens[:prompt], local)
        at = local
        table = ([7 + i for i in range(len(tokens) // SIZE + 1)],)
        self.rough = ""
        if plan is not None:
            self.check(plan, tokens, policy if policy.startswith("ratio") else "")
            self.rough = "" if plan.exact else policy
            restore, written = track.accepted(self.store, plan, table)
            self.restore(restore, tokens)
            written.settle(self.store, tokens[:prompt])
            track.end_plan()
            at = plan.length
        matched = at
        end = len(tokens) if stop_at is None else stop_at
        while at < end:
            count = min(chunk, prompt - at) if at < prompt else 1
            ordered = track.work(self.store, at, count, table, 0, prompt)
            at += count
            if ordered is not None:
                failed = fail_at is not None and at >= fail_at
                if not failed:
                    self.work(ordered[0], tokens, at - count)
                ordered[1].settle(self.store, tokens[: max(at, prompt)], failed)
        ordered = track.last_work(self.store, at, table, 0, state=True)
        if ordered is not None:
            if fail_at is None:
                self.work(ordered[0], tokens, at)
            ordered[1].settle(self.store, tokens[: max(at, prompt)], fail_at is not None)
        track.stop(self.store)
        if alone:
            self.nothing_is_held()
        return matched

    def nothing_is_held(self) -> None:
        tier = self.store.tier
        tier.flush()  # what waits for the disk is pinned, too
        assert not tier.pinned_bytes()
        assert tier.held_bytes()[0] == tier.stats().memory.bytes, "all of it can be found"

    def work(self, work: Work, tokens: list[int], start: int) -> None:
        position = start
        for fill in work.fills:
            assert position % SIZE == fill.first
            page = self.page(fill.page)
            for i in range(fill.first, fill.first + fill.count):
                position += 1
                GEOMETRY.hidden(page)[0, i] = digest(tokens[:position], self.rough)
        for at, _ in work.copies:
            page = self.page(at)
            GEOMETRY.kv(page).reshape(2, SIZE, 8)[:] = GEOMETRY.hidden(page)[0]
        if work.state is not None:
            self.keep(work.state.spans, tokens[: work.state.position])

    def keep(self, spans: Any, tokens: list[int]) -> None:
        ((at, count),) = spans
        assert not self.rough, "states are exact"
        self.memory[at : at + count] = digest(tokens)

    def page(self, at: int) -> np.ndarray:
        return self.memory[at : at + GEOMETRY.page_bytes]

    def restore(self, restore: Restore, tokens: list[int]) -> None:
        if restore.begun is not None:
            offset = restore.length % SIZE
            own, donor = self.page(restore.begun), self.page(restore.pages[-1])
            np.copyto(GEOMETRY.kv(own), GEOMETRY.kv(donor))
            GEOMETRY.hidden(own)[:, :offset] = GEOMETRY.hidden(donor)[:, :offset]
        if restore.keep is not None:
            self.keep(restore.keep, tokens[: restore.length])

    def check(self, plan: Plan, tokens: list[int], rough: str = "") -> None:
        """rough: the only policy whose approximate pages it may read, from plan.apart on (where the
        device has tokens, any)."""
        for position in range(plan.length):
            page = page_of(plan.pages[position // SIZE])
            held = GEOMETRY.hidden(page)[0, position % SIZE]
            expected = digest(tokens[: position + 1])
            free = position >= plan.apart or position < plan.local
            if rough and free and not np.array_equal(held, expected):
                expected = digest(tokens[: position + 1], rough)
                assert not plan.exact
                self.rough_reads += 1
            assert np.array_equal(held, expected)
            kv = GEOMETRY.kv(page).reshape(2, SIZE, 8)[:, position % SIZE]
            assert np.array_equal(kv, [expected, expected])
        if plan.state is not None:
            (held,) = plan.state.pages
            assert np.array_equal(held, digest(tokens[: plan.start]))
