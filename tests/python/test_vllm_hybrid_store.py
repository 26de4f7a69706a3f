"""Pages and states of hybrid models by content: what is found is what was computed for that prefix.

A stand-in for vLLM's worker writes, as KV, hidden vector and state of a position, a digest of all
tokens up to it; so whatever a restore reads can be checked.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvspan.errors import UsageError
from kvspan.host import DiskLevel, HostTier
from kvspan.vllm.hybrid.store import Geometry, OpenPage, PageStore, page_of, root_key
from kvspan.vllm.hybrid.support import options
from kvspan.vllm.hybrid.tracking import Plan, Policy, Settings, Track, Work, parse_policy

SIZE = 8
GEOMETRY = Geometry(size=SIZE, layers=2, block_bytes=SIZE * 8, streams=1, row_bytes=8)
ROOT = root_key(None, "", SIZE)


def digest(tokens: Sequence[int]) -> np.ndarray:
    """uint8 [8]: stands for what a model computes at the last of the tokens."""
    held = hashlib.sha256(np.asarray(tokens, np.int64).tobytes()).digest()[:8]
    return np.frombuffer(held, np.uint8)


class Machine:
    """One request at a time, in steps of `chunk` tokens."""

    def __init__(self, megabytes: float = 4.0, **settings: int) -> None:
        tier = HostTier(int(megabytes * 2**20), page_bytes=GEOMETRY.page_bytes)
        self.store = PageStore(tier, GEOMETRY)
        self.settings = Settings(SIZE, **settings)
        self.plans: list[Plan] = []

    def run(
        self, tokens: list[int], prompt: int, chunk: int, policy: str = "exact", local: int = 0,
        stop_at: int | None = None, salt: str | None = None,
    ) -> int:  # fmt: skip
        """Run a request; what its plan reads is checked. Returns the length of its match."""
        track = Track(self.settings, root_key(salt, "", SIZE), parse_policy(policy, "test", 1))
        plan = track.begin(self.store, tokens[:prompt], local)
        at = local
        if plan is not None:
            self.check(plan, tokens)
            begun = track.accepted(plan)
            if begun is not None:
                self.go_on(plan, begun)
            track.end_plan()
            at = plan.length
        matched = at
        table = ([7 + i for i in range(len(tokens) // SIZE + 1)],)
        end = len(tokens) if stop_at is None else stop_at
        while at < end:
            count = min(chunk, prompt - at) if at < prompt else 1
            work = track.work(self.store, at, count, table, 0, prompt)
            if work is not None:
                self.work(work, tokens)
            at += count
            track.publish(self.store, tokens[: max(at, prompt)], at)
        track.stop(self.store)
        self.store.tier.flush()  # what waits for the disk is pinned, too
        assert not any(e.pins for e in self.store.tier._entries.values())
        return matched

    def work(self, work: Work, tokens: list[int]) -> None:
        position = work.start
        for page in work.pages:
            base = position // SIZE * SIZE
            buffer = self.store.open(page)
            while position < min(base + SIZE, work.start + work.count):
                if page.filled == position - base:
                    row = digest(tokens[: position + 1])
                    GEOMETRY.hidden(buffer)[0, position - base] = row
                    page.filled += 1
                position += 1
        for page, block, saved in work.copies:
            base = (block - 7) * SIZE
            kv = GEOMETRY.kv(self.store.open(page)).reshape(2, SIZE, 8)
            for i in range(saved):
                kv[:, i] = digest(tokens[: base + i + 1])
            page.saved = saved
        if work.keep_state is not None:
            end = work.start + work.count
            work.track.keep_state(end, [digest(tokens[:end])], work.saves)

    def go_on(self, plan: Plan, begun: OpenPage) -> None:
        offset = plan.length % SIZE
        buffer = self.store.open(begun)
        np.copyto(GEOMETRY.kv(buffer), GEOMETRY.kv(page_of(plan.pages[-1])))
        GEOMETRY.hidden(buffer)[:, :offset] = GEOMETRY.hidden(page_of(plan.pages[-1]))[:, :offset]
        begun.filled = begun.saved = offset

    def check(self, plan: Plan, tokens: list[int]) -> None:
        for position in range(plan.length):
            page = page_of(plan.pages[position // SIZE])
            expected = digest(tokens[: position + 1])
            assert np.array_equal(GEOMETRY.hidden(page)[0, position % SIZE], expected)
            kv = GEOMETRY.kv(page).reshape(2, SIZE, 8)[:, position % SIZE]
            assert np.array_equal(kv, [expected, expected])
        if plan.state is not None:
            (held,) = plan.state.pages
            assert np.array_equal(held, digest(tokens[: plan.start]))


def common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y),
                min(len(a), len(b)))  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_match_ends_where_prompts_part(seed: int) -> None:
    """Without evictions a prompt finds the longest prefix that any request before has left."""
    rng = random.Random(seed)
    machine = Machine(every=rng.choice([5, 16, 1000]))
    done: list[list[int]] = []
    for _ in range(40):
        base = rng.choice(done) if done and rng.random() < 0.8 else []
        tokens = base[: rng.randint(0, len(base))] + [rng.randint(0, 2) for _ in range(30)]
        tokens = tokens[: rng.randint(2, len(tokens))]
        prompt = rng.randint(1, len(tokens))
        matched = machine.run(tokens, prompt, rng.randint(1, 20))
        # Generated tokens are found page by page; prompts to their end.
        longest = max((common(tokens[: prompt - 1], d) for d in done), default=0)
        assert longest // SIZE * SIZE <= matched <= max(longest, 0)
        whole = len(tokens) // SIZE * SIZE
        done.append(tokens[: max(prompt, whole)])


@pytest.mark.parametrize("seed", range(10))
def test_evictions_stops_and_policies(seed: int) -> None:
    rng = random.Random(seed)
    machine = Machine(megabytes=20 * GEOMETRY.page_bytes / 2**20, every=16)
    bases = [[rng.randint(0, 9) for _ in range(200)] for _ in range(4)]
    for _ in range(150):
        base = rng.choice(bases)
        tokens = base[: rng.randint(0, 150)] + [rng.randint(0, 9) for _ in range(30)]
        prompt = rng.randint(1, len(tokens))
        policy = rng.choice(["exact", "ratio:0.1", "zero", "off"])
        local = 0 if rng.random() < 0.8 else rng.randint(0, (prompt - 1) // SIZE) * SIZE
        stop = None if rng.random() < 0.7 else rng.randint(local, len(tokens))
        machine.run(tokens, prompt, rng.randint(1, 40), policy, local, stop)
    assert machine.store.tier.stats().memory.evictions > 50


def test_states_are_used_from_the_nearest() -> None:
    machine = Machine(every=16)
    tokens = list(range(100))
    machine.run(tokens, 100, 16)
    track = Track(machine.settings, ROOT, Policy())
    plan = track.begin(machine.store, [*tokens[:70], 7, 7], 0)
    assert plan is not None
    assert (plan.length, plan.start, plan.exact) == (70, 64, True)
    track.end_plan()


def test_ratio_is_approximate_only_without_a_state_near() -> None:
    machine = Machine(every=1000)
    tokens = list(range(100))
    machine.run(tokens, 100, 100)
    track = Track(machine.settings, ROOT, parse_policy("ratio:0.1", "test", 1))
    plan = track.begin(machine.store, [*tokens[:70], 7, 7], 0)
    assert plan is not None
    assert (plan.length, plan.start, plan.exact, plan.state) == (70, 63, False, None)
    assert track.accepted(plan) is None
    assert not track.capturing
    track.end_plan()
    track = Track(machine.settings, ROOT, parse_policy("ratio:0.1", "test", 1))
    plan = track.begin(machine.store, [*tokens, 7], 0)
    assert plan is not None and plan.exact, "the state at the prompt's end"
    track.end_plan()


def test_audit_says_what_was_restored() -> None:
    """Not what could have been, where vLLM had no blocks for it; and once approximate, always."""
    machine = Machine(every=1000)
    tokens = list(range(100))
    machine.run(tokens, 100, 100)
    track = Track(machine.settings, ROOT, parse_policy("ratio:0.1", "test", 1))
    assert track.begin(machine.store, [*tokens[:70], 7, 7], 0) is not None
    track.end_plan()
    assert (track.audit.matched, track.audit.exact) == (0, True)
    plan = track.begin(machine.store, [*tokens[:70], 7, 7], 0)
    assert plan is not None
    track.accepted(plan)
    assert (track.audit.matched, track.audit.exact) == (70, False)
    track.end_plan()
    machine.run([*tokens[:70], 7, 7, 5], 73, 100)  # leaves a state behind right there
    plan = track.begin(machine.store, [*tokens[:70], 7, 7, 5, 6], 0)  # after a preemption
    assert plan is not None and plan.exact
    track.accepted(plan)
    assert not track.audit.exact, "its earlier tokens came from an approximate state"
    track.end_plan()


def test_sums_of_hidden_vectors_are_exact_only_unread() -> None:
    machine = Machine(every=1000)
    tokens = list(range(100))
    machine.run(tokens, 100, 100)
    machine.settings.pair = False
    track = Track(machine.settings, ROOT, parse_policy("ratio:1", "test", 1))
    plan = track.begin(machine.store, [*tokens[:70], 7], 0)
    assert plan is not None and (plan.start, plan.exact) == (0, False)
    assert track.accepted(plan) is None and not track.capturing
    track.end_plan()
    plan = Track(machine.settings, ROOT, Policy()).begin(machine.store, [*tokens, 7], 0)
    assert plan is not None and plan.exact, "the state was kept, nothing is replayed"
    plan.release()


def test_step_over_before_its_last_token_is_known() -> None:
    """As under asynchronous scheduling: the next step runs before the last one's token is told."""
    machine = Machine()
    tokens = list(range(SIZE))
    track = Track(machine.settings, ROOT, Policy())
    track.begin(machine.store, tokens[:-1], 0)
    for start, count in ((0, SIZE - 1), (SIZE - 1, 1)):
        work = track.work(machine.store, start, count, ([7],), 0, SIZE - 1)
        assert work is not None
        machine.work(work, tokens)
    track.publish(machine.store, tokens[:-1], SIZE)
    assert machine.run([*tokens[:-1], 9], SIZE, SIZE) == SIZE - 1
    track.publish(machine.store, tokens, SIZE)
    assert machine.run([*tokens, 9], SIZE + 1, SIZE) == SIZE
    track.stop(machine.store)


def test_page_that_cannot_be_read_shortens_the_match(tmp_path: Path) -> None:
    machine = Machine(every=16)
    tokens = list(range(100))
    machine.store.tier = HostTier(
        2**20, page_bytes=GEOMETRY.page_bytes, disk=DiskLevel(tmp_path, 2**20, b"x")
    )
    machine.run(tokens, 100, 100)
    machine.store.tier.close()
    keys = Track(machine.settings, ROOT, Policy()).keys(tokens)
    (bad,) = tmp_path.rglob(f"*{keys[5].hex()}.kv")
    held = bytearray(bad.read_bytes())
    held[len(held) // 2] ^= 1
    bad.write_bytes(held)
    tier = HostTier(2**20, page_bytes=GEOMETRY.page_bytes, disk=DiskLevel(tmp_path, 2**20, b"x"))
    store = PageStore(tier, GEOMETRY)
    track = Track(machine.settings, ROOT, Policy())
    plan = track.begin(store, [*tokens, 7], 0)
    assert plan is not None and plan.length == 5 * SIZE
    machine.check(plan, tokens)
    track.end_plan()
    tier.close()


def test_salts_share_nothing() -> None:
    machine = Machine()
    tokens = list(range(50))
    assert machine.run(tokens, 50, 50, salt="a") == 0
    assert machine.run(tokens, 50, 50, salt="b") == 0
    assert machine.run(tokens, 50, 50, salt="a") == 49


@pytest.mark.parametrize("text", ["", "ratio", "ratio:0", "ratio:2", "ratio:x", "exact:1", None, 3])
def test_unknown_policies(text: object) -> None:
    with pytest.raises(UsageError, match=r"expected exact, ratio:R .* found"):
        parse_policy(text, "here")


@pytest.mark.parametrize(
    ("name", "value"),
    [("disk_gib", 0), ("decode", "no"), ("disk", 5), ("host_gib", 1e300), ("host_gib", "4")],
)
def test_settings_that_make_no_sense(name: str, value: object) -> None:
    with pytest.raises(UsageError, match=rf"kv_connector_extra_config\.{name}.* expected"):
        options(config({name: value}))


def test_settings_left_out() -> None:
    found = options(config({"disk": None}))
    assert (found.disk, found.decode, found.disk_bytes) == ("", True, 32 * 2**30)


def config(extra: dict[str, object]) -> Any:
    """What of vLLM's configuration is read for the settings."""
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
        cache_config=SimpleNamespace(block_size=16),
    )
