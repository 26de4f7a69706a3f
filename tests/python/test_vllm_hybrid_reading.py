"""Prefixes of hybrid models on disk: lookups wait for no file, and find what has been read."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybrid_store_machine import GEOMETRY, ROOT, SIZE, Machine, digest
from kvspan.host import DiskLevel, HostTier
from kvspan.vllm.hybrid import store as stores
from kvspan.vllm.hybrid.entries import full_name
from kvspan.vllm.hybrid.plans import Plan
from kvspan.vllm.hybrid.policy import Policy
from kvspan.vllm.hybrid.tracking import Track
from slow_disk import WAIT, SlowDisk, leave_on_disk, nothing_is_held

TOKENS = list(range(100))


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """Its tier has a disk; TOKENS have run, and memory is empty."""
    made = Machine(every=16)
    made.store.tier.close()
    made.store.tier = HostTier(
        len(made.memory), page_bytes=GEOMETRY.page_bytes, memory=made.memory,
        disk=DiskLevel(tmp_path, 2**20, b"x"),
    )  # fmt: skip
    made.run(TOKENS, 100, 100)
    leave_on_disk(made.store.tier)
    yield made
    nothing_is_held(made.store.tier)
    made.store.tier.close()


def track_of(machine: Machine, policy: str = "exact") -> Track:
    return Track(machine.settings, ROOT, Policy(policy))


def wait_for(track: Track) -> None:
    end = time.monotonic() + WAIT
    assert track.fetch is not None
    while not track.fetch.done:
        assert time.monotonic() < end
        time.sleep(0.001)


def test_one_round_of_reading(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Pages, the beginning of one, and the state where the match ends once that has been read."""
    slow = SlowDisk(monkeypatch)
    track, prompt = track_of(machine), [*TOKENS, 7]
    assert track.begin(machine.store, prompt, 0) is None
    fetch = track.fetch
    assert fetch is not None and not fetch.done and not track.pages
    slow.go_on()
    wait_for(track)
    assert sorted({key[:1] for key in slow.begun}) == [b"F", b"S", b"T"]
    plan = track.begin(machine.store, prompt, 0)
    assert plan is not None and (plan.length, plan.start) == (100, 100) and track.fetch is None
    machine.check(plan, TOKENS)
    assert len(slow.begun) == len(set(slow.begun)) == 100 // SIZE + 2
    track.end_plan()


def test_given_up(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `read` only memory counts, and nothing of the disk is forgotten."""
    view = machine.store.tier.view  # reads
    keys = track_of(machine).keys(TOKENS)
    parents = [ROOT, *keys]
    for i in range(3):
        name = full_name(parents[i], TOKENS[i * SIZE], keys[i])
        with_page = view(name)
        assert with_page is not None
        with_page.release()
    slow = SlowDisk(monkeypatch)
    track, prompt = track_of(machine), [*TOKENS, 7]
    assert track.begin(machine.store, prompt, 0) is None and track.fetch is not None
    plan = track.begin(machine.store, prompt, 0, read=False)
    assert plan is not None and plan.length == 3 * SIZE and track.fetch is None
    machine.check(plan, TOKENS)
    track.end_plan()
    slow.go_on()
    assert track.begin(machine.store, prompt, 0) is None
    wait_for(track)
    again = track.begin(machine.store, prompt, 0)
    assert again is not None and again.length == 100
    track.end_plan()


def test_who_ends_meanwhile_leaves_nothing(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowDisk(monkeypatch)
    track = track_of(machine)
    assert track.begin(machine.store, [*TOKENS, 7], 0) is None and track.fetch is not None
    track.end_plan()
    track.stop(machine.store)
    assert track.fetch is None
    slow.go_on()


def test_off_reads_nothing(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowDisk(monkeypatch)
    track = track_of(machine, "off")
    assert track.begin(machine.store, [*TOKENS, 7], 0) is None and track.fetch is None
    assert not slow.begun


def test_memory_that_holds_a_part(machine: Machine) -> None:
    """Rounds of reading do not get further: what fits is used."""
    tier = machine.store.tier
    taken = []
    while (page := machine.store.open()) is not None:
        taken.append(page)
    for page in taken[:6]:
        machine.store.close(page)
    track, prompt = track_of(machine), [*TOKENS, 7]
    plan: Plan | None = None
    for _ in range(3):
        assert track.begin(machine.store, prompt, 0) is None
        wait_for(track)
    plan = track.begin(machine.store, prompt, 0, read=False)
    assert plan is not None and plan.length == 6 * SIZE
    machine.check(plan, TOKENS)
    track.end_plan()
    for page in taken[6:]:
        machine.store.close(page)
    assert tier.stats().refusals["pinned"] > 0


def test_the_latest_of_many_beginnings_are_read(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that part within a page after the same first token: a few files tell."""
    monkeypatch.setattr(stores, "MOST_READ", 3)
    store = machine.store
    store.clear()
    shared = TOKENS[:SIZE]
    for i in range(6):
        machine.run([*shared, 50, 60, 200 + i], SIZE + 3, SIZE + 3)
    leave_on_disk(store.tier)
    slow = SlowDisk(monkeypatch)
    slow.go_on()
    track = track_of(machine)
    prompt = [*shared, 50, 60, 205, 9]
    assert track.begin(store, prompt, 0) is None
    wait_for(track)
    plan = track.begin(store, prompt, 0)
    assert plan is not None and plan.length == SIZE + 3
    assert sum(key[:1] == b"T" for key in slow.begun) == 3
    assert digest(prompt[: plan.length]).tolist() == plan.pages[1].pages[0][
        GEOMETRY._hidden_start + 16 : GEOMETRY._hidden_start + 24
    ].tolist()  # fmt: skip
    track.end_plan()
