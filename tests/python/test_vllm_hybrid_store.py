"""Pages and states of hybrids by content: what is found is what was computed for that prefix."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hybrid_store_machine import GEOMETRY, ROOT, SIZE, TABLE, Machine
from kvspan.errors import UsageError
from kvspan.host import DiskLevel, HostTier
from kvspan.vllm.hybrid.geometry import Geometry
from kvspan.vllm.hybrid.plans import Plan
from kvspan.vllm.hybrid.policy import Policy, parse_policy
from kvspan.vllm.hybrid.store import PageStore
from kvspan.vllm.hybrid.support import options
from kvspan.vllm.hybrid.tracking import Track


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
        longest = max((common(tokens[: prompt - 1], d) for d in done), default=0)
        assert matched == longest
        done.append(tokens)


@pytest.mark.parametrize("seed", range(10))
def test_evictions_stops_and_policies(seed: int) -> None:
    rng = random.Random(seed)
    every = 16 if seed % 2 else 1000
    machine = Machine(megabytes=20 * GEOMETRY.page_bytes / 2**20, every=every)
    bases = [[rng.randint(0, 9) for _ in range(200)] for _ in range(4)]
    last: list[int] = []
    for _ in range(150):
        base = rng.choice(bases)
        tokens = base[: rng.randint(0, 150)] + [rng.randint(0, 9) for _ in range(30)]
        if last and rng.random() < 0.4:  # its next turn
            tokens = [*last, *tokens[-20:]]
        prompt = rng.randint(1, len(tokens))
        policy = rng.choice(["exact", "ratio:0.1", "ratio:0.1", "ratio:0.5", "zero", "off"])
        local = 0 if rng.random() < 0.8 else rng.randint(0, (prompt - 1) // SIZE) * SIZE
        stop = None if rng.random() < 0.7 else rng.randint(local, len(tokens))
        machine.run(tokens, prompt, rng.randint(1, 40), policy, local, stop)
        last = tokens if len(tokens) < 200 else []
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
    restore, written = track.accepted(machine.store, plan, TABLE)
    assert restore.keep is None and written.state is None, "no state is kept"
    track.end_plan()
    track.stop(machine.store)
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
    _, written = track.accepted(machine.store, plan, TABLE)
    assert (track.audit.matched, track.audit.exact) == (70, False)
    written.settle(machine.store, (), failed=True)
    track.end_plan()
    track.stop(machine.store)
    machine.run([*tokens[:70], 7, 7, 5], 73, 100)  # leaves a state behind right there
    plan = track.begin(machine.store, [*tokens[:70], 7, 7, 5, 6], 0)  # after a preemption
    assert plan is not None and plan.exact
    _, written = track.accepted(machine.store, plan, TABLE)
    assert not track.audit.exact, "its earlier tokens came from an approximate state"
    written.settle(machine.store, (), failed=True)
    track.end_plan()
    track.stop(machine.store)


def test_chats_under_ratio_go_on_from_what_is_approximate() -> None:
    """The next turn finds it under the same policy, and nobody else ever does."""
    machine = Machine(every=1000)
    tokens = list(range(150))
    machine.run(tokens[:100], 100, 100)
    first = [*tokens[:70], *tokens[120:140]]
    turns = [first, [*first, *range(30)], [*first, *range(60)]]
    assert [machine.run(turn, len(turn) - 3, 9, "ratio:0.1") for turn in turns] == [70, 90, 120]
    assert machine.rough_reads == 20 + 50
    last = [*turns[-1], 5]
    for policy, matched in (("exact", 70), ("ratio:0.2", 70), ("ratio:0.1", 150)):
        assert machine.run(last, 151, 40, policy, salt="another") == 0 or policy != "exact"
        track = Track(machine.settings, ROOT, parse_policy(policy, "test", 1))
        plan = track.begin(machine.store, last, 0)
        assert plan is not None and plan.length == matched
        assert (plan.apart, plan.exact) == (70 if matched == 70 else 64, policy == "exact")
        track.end_plan()


def test_sums_of_hidden_vectors_are_exact_only_unread() -> None:
    machine = Machine(every=1000)
    tokens = list(range(100))
    machine.run(tokens, 100, 100)
    machine.settings.pair = False
    track = Track(machine.settings, ROOT, parse_policy("ratio:1", "test", 1))
    plan = track.begin(machine.store, [*tokens[:70], 7], 0)
    assert plan is not None and (plan.start, plan.exact) == (0, False)
    _, written = track.accepted(machine.store, plan, TABLE)
    written.settle(machine.store, (), failed=True)
    track.end_plan()
    track.stop(machine.store)
    plan = Track(machine.settings, ROOT, Policy()).begin(machine.store, [*tokens, 7], 0)
    assert plan is not None and plan.exact, "the state was kept, nothing is replayed"
    plan.release()


def test_step_over_before_its_last_token_is_known() -> None:
    """As under asynchronous scheduling: the next step runs before the last one's token is told."""
    machine = Machine()
    tokens = list(range(SIZE))
    track = Track(machine.settings, ROOT, Policy())
    track.begin(machine.store, tokens[:-1], 0)
    steps = []
    for start, count in ((0, SIZE - 1), (SIZE - 1, 1)):
        ordered = track.work(machine.store, start, count, TABLE, 0, SIZE - 1)
        assert ordered is not None
        machine.work(ordered[0], tokens, start)
        steps.append(ordered[1])
    for written in steps:
        written.settle(machine.store, tokens[:-1])
    assert machine.run([*tokens[:-1], 9], SIZE, SIZE, alone=False) == SIZE - 1
    track.publish(machine.store, tokens, SIZE)
    assert machine.run([*tokens, 9], SIZE + 1, SIZE, alone=False) == SIZE
    track.stop(machine.store)


def test_step_that_failed_leaves_nothing() -> None:
    machine = Machine()
    tokens = list(range(100))
    assert machine.run(tokens, 100, 30, fail_at=60) == 0
    assert machine.run(tokens, 100, 30) == 24, "of the pages that were written to their end"


def test_memory_of_a_step_under_way_is_not_given_away() -> None:
    """A request is dropped while two steps still write for it; another is served meanwhile."""
    pages = 10
    machine = Machine(megabytes=pages * GEOMETRY.page_bytes / 2**20)
    tokens = list(range(5 * SIZE))
    track = Track(machine.settings, ROOT, Policy())
    track.begin(machine.store, tokens, 0)
    table = ([7 + i for i in range(6)],)
    steps = [track.work(machine.store, i * 16, 16, table, 0, 40) for i in range(2)]
    track.begin(machine.store, tokens, 0)  # preempted, and scheduled anew
    other = [9] * 99
    machine_pages = machine.store.tier.stats().memory.budget // GEOMETRY.page_bytes
    assert machine_pages == pages
    taken = [machine.store.open() for _ in range(pages)]
    assert sum(page is not None for page in taken) == pages - 4
    for page in filter(None, taken):
        machine.store.close(page)
    for ordered in steps:
        assert ordered is not None
        machine.work(ordered[0], other, ordered[1].end - 16)
        ordered[1].settle(machine.store, tokens)
    assert not machine.store.tier.stored_keys(), "what an earlier life wrote is not published"
    track.stop(machine.store)
    machine.nothing_is_held()
    assert machine.run(tokens, 40, 16) == 0


def test_ranks_have_parts_of_their_own() -> None:
    geometry = Geometry(4, layers=2, block_bytes=6, streams=2, row_bytes=5, state_bytes=3, ranks=3)
    page = np.zeros(geometry.page_bytes, np.uint8)
    parts = [geometry.tokens(page).view(np.uint8), geometry.hidden(page)]
    parts += [geometry.kv(page, rank) for rank in range(3)]
    for part in parts:
        part += 1
    assert (page == 1).all(), "they cover the page, and do not overlap"


def read_and_begin(track: Track, store: PageStore, tokens: list[int]) -> Plan | None:
    """The plan once all has been read that it needs."""
    while True:
        while track.fetch is not None and not track.fetch.done:
            time.sleep(0.001)
        plan = track.begin(store, tokens, 0)
        if track.fetch is None:
            return plan


def test_page_that_cannot_be_read_shortens_the_match(tmp_path: Path) -> None:
    machine = Machine(every=16)
    tokens = list(range(100))
    machine.store.tier = HostTier(
        2**20, page_bytes=GEOMETRY.page_bytes, memory=machine.memory,
        disk=DiskLevel(tmp_path, 2**20, b"x"),
    )  # fmt: skip
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
    assert track.begin(store, [*tokens, 7], 0) is None and track.fetch is not None
    plan = read_and_begin(track, store, [*tokens, 7])
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
    with pytest.raises(UsageError, match=r"expected exact, bounded:EPS .* found"):
        parse_policy(text, "here")


@pytest.mark.parametrize(
    ("name", "value"),
    [("disk_gib", 0), ("decode", "no"), ("disk", 5), ("host_gib", 1e300), ("host_gib", "4")],
)
def test_settings_that_make_no_sense(name: str, value: object) -> None:
    with pytest.raises(UsageError, match=rf"kv_connector_extra_config\.{name}.* expected"):
        options(config({name: value}))


def test_settings_left_out() -> None:
    found = options(config({}))
    assert (found.disk, found.decode, found.disk_bytes) == ("", True, 32 * 2**30)


def config(extra: dict[str, object]) -> Any:
    """What of vLLM's configuration is read for the settings."""
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
        cache_config=SimpleNamespace(block_size=16),
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(model_type="qwen3_5_text")),
    )
