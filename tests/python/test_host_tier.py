"""The host tier in memory: what is stored comes back, what goes first, pins, threads."""

from __future__ import annotations

import doctest
import random
import threading
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest

import kvspan.host
import kvspan.host.eviction
from kvspan.host import HostTier

PAGE = 64


@pytest.fixture
def tier() -> Iterator[HostTier]:
    with HostTier(8 * PAGE, page_bytes=PAGE) as tier:
        yield tier


def content(key: bytes, nbytes: int) -> bytes:
    """The only bytes that may ever be stored under a key."""
    return random.Random(key).randbytes(nbytes)


def fetch(tier: HostTier, key: bytes, nbytes: int) -> bytes | None:
    out = bytearray(nbytes)
    return bytes(out) if tier.get(key, out) else None


@pytest.mark.parametrize("module", [kvspan.host, kvspan.host.eviction], ids=["host", "eviction"])
def test_the_documented_examples(module: ModuleType) -> None:
    failures, tests = doctest.testmod(module)
    assert failures == 0 and tests > 0


def test_what_is_stored_comes_back(tier: HostTier) -> None:
    data = content(b"a", 150)
    assert tier.put(b"a", [data[:7], b"", np.frombuffer(data[7:], np.uint8)], cost=1)
    halves = bytearray(80), np.zeros((7, 10), np.uint8)
    assert tier.get(b"a", halves)
    assert halves[0] + halves[1].tobytes() == data
    assert b"a" in tier and tier.nbytes(b"a") == 150
    assert not tier.get(b"b", bytearray(1)) and tier.nbytes(b"b") is None
    stats = tier.stats()
    assert (stats.memory.hits, stats.misses, stats.memory.entries) == (1, 1, 1)
    assert (stats.memory.bytes, stats.memory.by_kind) == (3 * PAGE, {"span": 150})
    assert tier.held_bytes() == (stats.memory.bytes, 0)


def test_a_second_put_keeps_the_first(tier: HostTier) -> None:
    assert tier.put(b"a", b"one", cost=1) and tier.put(b"a", b"two", cost=1)
    assert fetch(tier, b"a", 3) == b"one"


def test_pages_anywhere(tier: HostTier) -> None:
    """Entries keep their bytes when memory is left in holes."""
    for i in range(8):
        assert tier.put(bytes([i]), content(bytes([i]), PAGE), cost=1)
    for i in range(0, 8, 2):
        tier.remove(bytes([i]))
    assert tier.put(b"wide", content(b"wide", 4 * PAGE - 5), cost=1)
    with tier.view(b"wide") as view:  # type: ignore[union-attr]
        assert len(view.pages) == 4 and view.nbytes == 4 * PAGE - 5
        with pytest.raises(ValueError, match="read-only"):
            view.pages[0][0] = 1
    assert fetch(tier, b"wide", 4 * PAGE - 5) == content(b"wide", 4 * PAGE - 5)
    for i in range(1, 8, 2):
        assert fetch(tier, bytes([i]), PAGE) == content(bytes([i]), PAGE)


class TestEviction:
    def test_least_recently_used_first_where_all_else_is_equal(self, tier: HostTier) -> None:
        keys = [bytes([i]) for i in range(8)]
        for key in keys:
            tier.put(key, bytes(PAGE), cost=1)
        for key in keys:  # each used once; the last use of key 0 is the newest
            fetch(tier, key, PAGE)
        fetch(tier, keys[0], PAGE)
        tier.put(b"new", bytes(2 * PAGE), cost=2)
        assert [key in tier for key in keys] == [True, False, False, True, True, True, True, True]
        assert tier.stats().memory.evictions == 2

    def test_what_saves_little_for_its_bytes_goes_first(self, tier: HostTier) -> None:
        tier.put(b"dear", bytes(4 * PAGE), cost=400)
        tier.put(b"cheap", bytes(PAGE), cost=10)
        tier.put(b"fair", bytes(3 * PAGE), cost=90)
        assert tier.put(b"new", bytes(PAGE), cost=50)
        assert b"cheap" not in tier and b"dear" in tier and b"fair" in tier
        assert tier.put(b"newer", bytes(2 * PAGE), cost=200)
        assert b"fair" not in tier and b"dear" in tier

    def test_what_is_not_used_ages(self, tier: HostTier) -> None:
        tier.put(b"dear", bytes(PAGE), cost=5)
        for i in range(60):
            tier.put(b"stream %d" % i, bytes(PAGE), cost=1)
        assert b"dear" not in tier

    def test_pinned_entries_stay(self, tier: HostTier) -> None:
        tier.put(b"a", bytes(4 * PAGE), cost=0)
        tier.put(b"b", bytes(4 * PAGE), cost=9)
        assert tier.pin(b"a") and tier.pin(b"a") and not tier.pin(b"c")
        tier.unpin(b"a")
        assert not tier.put(b"wide", bytes(5 * PAGE), cost=99)
        assert b"b" in tier, "nothing is evicted for what is refused"
        assert tier.put(b"c", bytes(PAGE), cost=1)
        assert b"a" in tier and b"b" not in tier
        tier.unpin(b"a")
        assert tier.put(b"wide", bytes(8 * PAGE), cost=99)
        assert tier.stats().refusals == {"pinned": 1}
        with pytest.raises(ValueError, match=r"key: expected a pinned entry, got 61"):
            tier.unpin(b"a")


def test_removed_while_viewed(tier: HostTier) -> None:
    tier.put(b"a", content(b"a", 8 * PAGE), cost=1)
    with tier.view(b"a") as view:  # type: ignore[union-attr]
        tier.remove(b"a")
        assert b"a" not in tier
        assert not tier.put(b"b", b"x", cost=1), "its memory is still in use"
        assert b"".join(page.tobytes() for page in view.pages) == content(b"a", 8 * PAGE)
    assert tier.put(b"b", content(b"b", 8 * PAGE), cost=1)


def test_reservations(tier: HostTier) -> None:
    reservation = tier.reserve(b"a", 2 * PAGE, cost=1, kind="hidden")
    assert reservation is not None and b"a" not in tier
    assert tier.reserve(b"a", 2 * PAGE, cost=1) is None
    for page in reservation.pages:
        page[:] = 7
    reservation.commit()
    assert fetch(tier, b"a", 2 * PAGE) == bytes([7]) * 2 * PAGE
    with (
        pytest.raises(RuntimeError, match="copy failed"),
        tier.reserve(b"b", 6 * PAGE, cost=1),  # type: ignore[union-attr]
    ):
        raise RuntimeError("copy failed")
    assert b"b" not in tier and tier.put(b"c", bytes(6 * PAGE), cost=1) and b"a" in tier
    assert tier.stats().refusals == {"exists": 1}


class TestPublishedWhileWritten:
    """An entry that is found, under one name after the other, while its writer goes on."""

    def test_found_under_its_latest_key(self, tier: HostTier) -> None:
        entry = tier.reserve(None, 2 * PAGE, kind="hidden")
        assert entry is not None and not tier.stored_keys()
        entry.pages[0][:PAGE] = 1
        assert entry.publish(b"half", 5.0)
        with tier.view(b"half") as view:  # type: ignore[union-attr]
            assert view.spans == entry.spans and view.pages[0][0] == 1
            entry.pages[0][PAGE:] = 2
            assert entry.publish(b"whole", 9.0)
            assert tier.stored_keys() == [b"whole"]
            entry.commit()
        assert fetch(tier, b"whole", 2 * PAGE) == bytes([1]) * PAGE + bytes([2]) * PAGE
        with pytest.raises(ValueError, match="this reservation has ended"):
            entry.publish(b"later", 1.0)

    def test_its_writer_keeps_it(self, tier: HostTier) -> None:
        entry = tier.reserve(None, 4 * PAGE)
        assert entry is not None and entry.publish(b"a", 0.0)
        assert not tier.put(b"wide", bytes(5 * PAGE), cost=99), "it is not evicted"
        tier.remove(b"a")
        assert not tier.put(b"wide", bytes(5 * PAGE), cost=99), "nor its memory given away"
        assert entry.publish(b"b", 0.0) and b"b" in tier
        entry.commit()
        assert tier.put(b"wide", bytes(5 * PAGE), cost=99) and b"b" not in tier

    def test_a_key_of_another_entry(self, tier: HostTier) -> None:
        tier.put(b"a", content(b"a", PAGE), cost=1)
        reserved = tier.reserve(b"c", PAGE, cost=1)
        entry = tier.reserve(None, 6 * PAGE)
        assert entry is not None and reserved is not None
        assert entry.publish(b"b", 1.0) and not entry.publish(b"a", 1.0)
        assert not entry.publish(b"c", 1.0) and tier.stored_keys() == [b"a"]
        entry.commit()
        reserved.commit()
        assert fetch(tier, b"a", PAGE) == content(b"a", PAGE)
        assert tier.put(b"d", bytes(6 * PAGE), cost=1), "what has no name is given back"

    def test_aborted(self, tier: HostTier) -> None:
        entry = tier.reserve(None, 8 * PAGE)
        assert entry is not None and entry.publish(b"a", 1.0)
        entry.abort()
        assert b"a" not in tier and tier.put(b"b", bytes(8 * PAGE), cost=1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t.put(b"", b"x", cost=1), "key: expected 1 to 96 bytes, got 0"),
        (lambda t: t.put(b"k", [], cost=1), "nbytes: expected 1 or more, got 0"),
        (lambda t: t.put(b"k", b"x", cost=float("nan")), "cost: expected a number >= 0, got nan"),
        (lambda t: t.get(b"there", bytearray(2)), "out: expected 3 bytes, got 2"),
        (lambda t: t.get(b"there", b"abc"), "out: expected a writable buffer, got a read-only one"),
        (lambda _: HostTier(10, page_bytes=64), "at least one page of 64, got 10"),
        (lambda _: HostTier(99, page_bytes=9, memory=bytearray(98)), "at least 99 bytes, got 98"),
    ],
)
def test_errors(tier: HostTier, call: object, message: str) -> None:
    tier.put(b"there", b"abc", cost=1)
    with pytest.raises(ValueError, match=message):
        call(tier)  # type: ignore[operator]


def test_wrong_types_and_closed_tiers(tier: HostTier) -> None:
    with pytest.raises(TypeError, match=r"parts\[1\]: expected a contiguous buffer of bytes"):
        tier.put(b"k", [b"x", np.zeros((4, 4))[:, 1]], cost=1)
    assert not tier.put(b"k", bytes(9 * PAGE), cost=1)
    assert tier.stats().refusals == {"too large": 1}
    tier.close()
    tier.close()
    with pytest.raises(ValueError, match="this host tier is closed"):
        tier.put(b"k", b"x", cost=1)


def test_given_memory_is_used() -> None:
    memory = np.zeros(4 * PAGE, np.uint8)
    with HostTier(4 * PAGE, page_bytes=PAGE, memory=memory) as tier:
        tier.put(b"k", b"\1" * PAGE, cost=1)
    assert memory.sum() == PAGE


def test_threads_see_whole_entries_or_none() -> None:
    """More entries than fit, stored, read, viewed and removed by many threads at once."""
    sizes = {bytes([i]): 1 + i * 17 % (5 * PAGE) for i in range(40)}
    wrong: list[bytes] = []
    with HostTier(20 * PAGE, page_bytes=PAGE) as tier:

        def work(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(600):
                key = rng.choice(list(sizes))
                expected = content(key, sizes[key])
                action = rng.random()
                if action < 0.4:
                    tier.put(key, expected, cost=rng.random())
                elif action < 0.7:
                    found = fetch(tier, key, sizes[key])
                    if found not in (None, expected):
                        wrong.append(key)
                elif action < 0.95:
                    view = tier.view(key)
                    if view:
                        if b"".join(p.tobytes() for p in view.pages) != expected:
                            wrong.append(key)
                        view.release()
                else:
                    tier.remove(key)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        # Nothing leaked: all of the memory can be had for one entry.
        assert tier.put(b"all", bytes(20 * PAGE), cost=1)
