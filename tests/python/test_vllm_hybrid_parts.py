"""States of some groups of layers, which a restore within a bound leaves: who finds them, and when
the exact state is made instead."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvspan.host import DiskLevel, HostTier
from kvspan.vllm.hybrid import plans
from kvspan.vllm.hybrid.decay import Cells
from kvspan.vllm.hybrid.entries import Partings
from kvspan.vllm.hybrid.geometry import Geometry, cut
from kvspan.vllm.hybrid.orders import Restore
from kvspan.vllm.hybrid.plans import Plan, Settings
from kvspan.vllm.hybrid.policy import parse_policy
from kvspan.vllm.hybrid.store import PageStore
from kvspan.vllm.hybrid.tracking import Track
from test_vllm_hybrid_decay import HEADS, LAYERS, gates, pages_of

SIZE, EVERY = 128, 512
TOKENS = list(range(1000))
ROOT = bytes(32)
CELLS = Cells(SIZE, 3, HEADS)
GEOMETRY = Geometry(SIZE, 1, 64, 1, 8, state_bytes=72, cells=CELLS, groups=(2, 1))
SETTINGS = Settings(SIZE, every=EVERY, layers=LAYERS)
TABLE = (list(range(10)),)
FAST, SLOW = 0, 1  # groups
BOUNDED = "bounded:1e-3"


def open_store(memory: np.ndarray, disk: Path | None = None) -> PageStore:
    level = DiskLevel(disk, 1 << 24, b"x") if disk else None
    tier = HostTier(len(memory), page_bytes=GEOMETRY.page_bytes, memory=memory, disk=level)
    return PageStore(tier, GEOMETRY)


@pytest.fixture
def memory() -> np.ndarray:
    return np.zeros(1 << 22, np.uint8)


@pytest.fixture
def store(memory: np.ndarray) -> PageStore:
    """With 1,000 tokens, whose layers of group 1 hardly forget, and states at 512 and 1,000."""
    return filled(open_store(memory), memory)


def filled(store: PageStore, memory: np.ndarray) -> PageStore:
    pages = pages_of(gates(1000, [0.2, 0.2, 1e-5]), CELLS, [])
    donor = Track(SETTINGS, ROOT, parse_policy("exact", "test"))
    assert donor.begin(store, TOKENS, 0) is None
    for start in range(0, 1000, EVERY):
        ordered = donor.work(store, start, min(EVERY, 1000 - start), TABLE, 0, 1000)
        assert ordered is not None
        work, written = ordered
        for number, fill in enumerate(work.fills, start // SIZE):
            page = memory[fill.page : fill.page + GEOMETRY.page_bytes]
            np.copyto(GEOMETRY.gates(page), pages[number])
        written.settle(store, TOKENS)
    donor.stop(store)
    return store


def begin(store: PageStore, length: int, policy: str = BOUNDED) -> tuple[Track, Plan]:
    track = Track(SETTINGS, ROOT, parse_policy(policy, "test", 16))
    plan = track.begin(store, [*TOKENS[:length], 1, 2], 0)
    assert plan is not None and plan.length == length
    return track, plan


def starts(plan: Plan) -> list[tuple[int, str]]:
    """Of each group: tokens replayed, and from what."""
    return [(group["replayed_tokens"], group["start"]) for group in plan.audit.groups]


Write = Callable[[Restore], None]


def run(
    store: PageStore, length: int, policy: str = BOUNDED, write: Write | None = None,
    failed: bool = False,
) -> Plan:  # fmt: skip
    """A request up to the end of its restore. write: as a worker does."""
    track, plan = begin(store, length, policy)
    restore, written = track.accepted(store, plan, TABLE)
    if write is not None:
        write(restore)
    written.settle(store, [*TOKENS[:length], 1, 2], failed)
    track.end_plan()
    track.stop(store)
    return plan


def kinds(store: PageStore) -> str:
    return "".join(sorted(chr(name[0]) for name in store.tier.stored_keys() if name[:1] in b"GS"))


def test_slow_group_is_replayed_once(store: PageStore, memory: np.ndarray) -> None:
    def write(restore: Restore) -> None:
        ((group, ((at, count),)),) = restore.keep_parts.items()
        assert (group, count) == (SLOW, 24)
        memory[at : at + count] = 77

    tail, slow = starts(run(store, 900, write=write))
    assert tail[1] == "zero" and slow == (388, "checkpoint")
    assert kinds(store) == "GSS"
    track, plan = begin(store, 960)
    assert starts(plan)[SLOW] == (60, "part") and starts(plan)[FAST][1] == "zero"
    ((group, ((at, count),)),) = plan.parts.items()
    assert (group, count) == (SLOW, 24) and (memory[at : at + count] == 77).all()
    assert not plan.exact and not plan.audit.exact
    restore, written = track.accepted(store, plan, TABLE)
    assert restore.parts == plan.parts
    assert not restore.keep_parts, "not worth it"
    written.settle(store, TOKENS, failed=True)
    track.end_plan()
    assert not store.tier.pinned_bytes()


def test_before_it_and_elsewhere_nobody_finds_it(store: PageStore) -> None:
    run(store, 900)
    assert starts(begin(store, 899)[1])[SLOW] == (387, "checkpoint")
    track = Track(SETTINGS, ROOT, parse_policy(BOUNDED, "test", 16))
    other = track.begin(store, [*TOKENS[:890], *([5] * 30)], 0)
    assert other is not None and starts(other)[SLOW] == (378, "checkpoint")
    tenant = Track(SETTINGS, bytes(31) + b"1", parse_policy(BOUNDED, "test", 16))
    assert tenant.begin(store, TOKENS, 0) is None


@pytest.mark.parametrize("policy", ["exact", "ratio:0.2"])
def test_other_policies_do_not_look_for_it(store: PageStore, policy: str) -> None:
    run(store, 900)
    _, plan = begin(store, 960, policy)
    assert not plan.parts and plan.bounds is None
    assert plan.start == (512 if policy == "exact" else 768)


def test_second_request_makes_the_exact_state(store: PageStore) -> None:
    run(store, 900)
    track, plan = begin(store, 900)
    assert starts(plan) == [(388, "checkpoint"), (0, "part")] and plan.exact and plan.audit.exact
    assert all(group["bound"] == 0 for group in plan.audit.groups)
    restore, written = track.accepted(store, plan, TABLE)
    assert track.capturing and restore.keep is not None and not restore.keep_parts
    _, third = begin(store, 900)
    assert not third.exact and starts(third)[SLOW] == (0, "part"), "one makes it"
    third.release()
    written.settle(store, [*TOKENS[:900], 1, 2])
    track.end_plan()
    track.stop(store)
    assert kinds(store) == "SSS", "what has it all is in place of the part"
    _, plan = begin(store, 900)
    assert plan.exact and plan.start == 900 and plan.state is not None
    plan.release()
    assert not store.tier.pinned_bytes()


def test_state_that_is_far_is_not_made(store: PageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    run(store, 900)
    monkeypatch.setattr(plans, "budget", lambda length: 300)
    monkeypatch.setattr(SETTINGS, "every", 387)
    assert not begin(store, 900)[1].exact
    monkeypatch.setattr(SETTINGS, "every", 388)
    assert begin(store, 900)[1].exact


def test_request_that_is_approximate_stays_so(store: PageStore) -> None:
    track, plan = begin(store, 900)
    _, written = track.accepted(store, plan, TABLE)
    written.settle(store, [*TOKENS[:900], 1, 2])
    track.end_plan()
    plan = track.begin(store, [*TOKENS[:900], 1, 2], 0)  # preempted, and scheduled anew
    assert plan is not None and not plan.exact
    assert starts(plan)[SLOW] == (0, "part") and starts(plan)[FAST][1] == "zero"
    track.end_plan()


def test_step_that_failed_leaves_nothing(store: PageStore) -> None:
    run(store, 900, failed=True)
    assert kinds(store) == "SS" and not begin(store, 900)[1].exact


def test_nothing_from_before_all_was_forgotten(store: PageStore, memory: np.ndarray) -> None:
    track, plan = begin(store, 900)
    _, written = track.accepted(store, plan, TABLE)
    track.end_plan()
    store.clear()
    written.settle(store, [*TOKENS[:900], 1, 2])
    assert not store.tier.stored_keys()
    filled(store, memory)
    assert starts(begin(store, 900)[1])[SLOW] == (388, "checkpoint")


def test_evicted_and_found_on_disk(memory: np.ndarray, tmp_path: Path) -> None:
    store = filled(open_store(memory, tmp_path), memory)
    run(store, 900)
    store.tier.close()
    store = open_store(np.zeros_like(memory), tmp_path)
    track = Track(SETTINGS, ROOT, parse_policy(BOUNDED, "test", 16))
    prompt = [*TOKENS[:960], 1, 2]
    while (plan := track.begin(store, prompt, 0)) is None:
        assert track.fetch is not None, "read in the background"
        while not track.fetch.done:
            time.sleep(0.001)
    assert starts(plan)[SLOW] == (60, "part")
    track.end_plan()
    for name in store.tier.stored_keys():
        if name[:1] == b"G":
            store.tier.remove(name)
    plan = track.begin(store, prompt, 0)
    assert plan is not None and starts(plan)[SLOW] == (448, "checkpoint")
    track.end_plan()
    store.tier.close()


def test_groups_of_several_ranks() -> None:
    geometry = Geometry(8, 1, 64, 1, 8, state_bytes=72, ranks=2, groups=(2, 1, 3))
    assert [geometry.part_bytes(group) for group in range(3)] == [48, 24, 72]
    spans = ((1000, 50), (0, 70))
    assert geometry.parts([0, 2], spans) == {0: ((1000, 48),), 2: ((1048, 2), (0, 70))}
    assert cut(spans, 24, 48) == ((1024, 24),), "the second rank's of group 0"


def test_partings_are_the_latest() -> None:
    partings = Partings(most=2)
    for name in (b"a", b"b", b"c"):
        partings.add(name)
    assert [name in partings for name in (b"a", b"b", b"c")] == [False, True, True]
    partings.discard(b"b")
    partings.discard(b"b")
    assert b"b" not in partings
