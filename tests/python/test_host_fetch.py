"""Entries that are read from disk in the background: nobody else waits for a slow disk."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvspan.host import Fetch, HostTier, reading
from slow_disk import WAIT, SlowDisk
from test_host_disk import PAGE, content, file_of, open_tier


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    disk = SlowDisk(monkeypatch)
    yield disk
    disk.go_on()


def stored(path: Path, *keys: bytes) -> None:
    with open_tier(path) as tier:
        for key in keys:
            assert tier.put(key, content(key), cost=1)
            tier.flush()


def fetched(tier: HostTier, *keys: bytes) -> tuple[Fetch, threading.Event]:
    done = threading.Event()
    return tier.fetch(keys, lambda fetch: done.set()), done


def held(tier: HostTier, key: bytes, nbytes: int = 1000) -> bytes | None:
    """What memory has."""
    view = tier.view(key, from_disk=False)
    if view is None:
        return None
    with view:
        assert view.nbytes == nbytes
        return b"".join(page.tobytes() for page in view.pages)


def test_others_go_on_while_a_file_is_read(tmp_path: Path, slow: SlowDisk) -> None:
    stored(tmp_path, b"a")
    with open_tier(tmp_path) as tier:
        fetch, done = fetched(tier, b"a", b"nowhere")
        slow.wait_for(1)
        assert not fetch.done and not done.is_set()
        assert b"a" in tier and not tier.in_memory(b"a") and held(tier, b"a") is None
        assert tier.put(b"b", content(b"b"), cost=1)
        tier.flush()
        assert held(tier, b"b") == content(b"b")
        assert tier.fetch([b"b"]).done, "nothing to read"
        assert not fetch.done and tier.pinned_bytes() > 0
        slow.go_on()
        assert done.wait(WAIT) and fetch.done
        assert fetch.nbytes == 1000 and fetch.seconds >= 0
        assert held(tier, b"a") == content(b"a")
        stats = tier.stats()
        assert stats.disk is not None and stats.disk.hits == 1
        fetch.release()
        fetch.release()
        assert slow.begun == [b"a"]


def test_what_several_want_is_read_once(tmp_path: Path, slow: SlowDisk) -> None:
    stored(tmp_path, b"a", b"b")
    with open_tier(tmp_path) as tier:
        fetches = [fetched(tier, b"a", b"b") for _ in range(5)]
        answers: list[bytes] = []

        def get() -> None:
            out = bytearray(1000)
            assert tier.get(b"a", out)
            answers.append(bytes(out))

        threads = [threading.Thread(target=get) for _ in range(3)]
        for thread in threads:
            thread.start()
        slow.wait_for(2)
        fetches[0][0].release()  # the others still wait for the same files
        slow.go_on()
        for fetch, done in fetches[1:]:
            assert done.wait(WAIT)
            fetch.release()
        for thread in threads:
            thread.join(WAIT)
        assert not fetches[0][1].is_set(), "who has left is not told"
        assert answers == [content(b"a")] * 3
        assert sorted(slow.begun) == [b"a", b"b"]
        tier.flush()
        assert tier.pinned_bytes() == 0


def test_what_nobody_waits_for_is_not_read(tmp_path: Path, slow: SlowDisk) -> None:
    keys = [b"%d" % i for i in range(12)]
    stored(tmp_path, *keys)
    with open_tier(tmp_path, pages=80) as tier:
        fetch, done = fetched(tier, *keys)
        slow.wait_for(reading._NUM_THREADS)
        fetch.release()
        out = bytearray(1000)
        late, late_done = fetched(tier, keys[-1])
        slow.go_on()
        assert late_done.wait(WAIT) and held(tier, keys[-1]) == content(keys[-1])
        assert tier.get(keys[0], out) and not done.is_set()
        late.release()
        assert sorted(slow.begun) == sorted([*keys[: reading._NUM_THREADS], keys[-1]])


def test_who_waits_does_not_wait_for_the_queue(tmp_path: Path, slow: SlowDisk) -> None:
    """A caller's own thread reads what waits behind others."""
    keys = [b"%d" % i for i in range(reading._NUM_THREADS + 1)]
    stored(tmp_path, *keys)
    with open_tier(tmp_path, pages=40) as tier:
        fetch, done = fetched(tier, *keys)
        slow.wait_for(reading._NUM_THREADS)
        answers: list[bytes | None] = []
        thread = threading.Thread(target=lambda: answers.append(_get(tier, keys[-1])))
        thread.start()
        slow.wait_for(len(keys))
        assert slow.begun[-1] == keys[-1] and not done.is_set()
        slow.go_on()
        thread.join(WAIT)
        assert done.wait(WAIT) and answers == [content(keys[-1])]
        assert len(slow.begun) == len(keys)
        fetch.release()
        assert tier.pinned_bytes() == 0


def _get(tier: HostTier, key: bytes) -> bytes | None:
    out = bytearray(1000)
    return bytes(out) if tier.get(key, out) else None


@pytest.mark.parametrize("call", [lambda tier: tier.remove(b"a"), HostTier.clear], ids="rc")
def test_removed_while_it_is_read(
    tmp_path: Path, slow: SlowDisk, call: Callable[[HostTier], None]
) -> None:
    stored(tmp_path, b"a")
    with open_tier(tmp_path) as tier:
        fetch, done = fetched(tier, b"a")
        slow.wait_for(1)
        call(tier)
        assert tier.put(b"a", content(b"new"), cost=1), "its key is free at once"
        slow.go_on()
        assert done.wait(WAIT)
        assert held(tier, b"a") == content(b"new")
        fetch.release()
        tier.flush()
        assert tier.pinned_bytes() == 0
    with open_tier(tmp_path) as tier:
        assert tier.stored_keys() == [b"a"] and _get(tier, b"a") == content(b"new")


def test_torn_and_vanished_files_are_misses(tmp_path: Path) -> None:
    stored(tmp_path, b"good", b"torn", b"gone", b"flipped")
    with open_tier(tmp_path, pages=20) as tier:
        torn, gone, flipped = (file_of(tmp_path, key) for key in (b"torn", b"gone", b"flipped"))
        torn.write_bytes(torn.read_bytes()[:-3])
        gone.unlink()
        data = bytearray(flipped.read_bytes())
        data[-50] ^= 1
        flipped.write_bytes(data)
        fetch, done = fetched(tier, b"torn", b"gone", b"good", b"flipped")
        assert done.wait(WAIT)
        assert held(tier, b"good") == content(b"good")
        for key in (b"torn", b"gone", b"flipped"):
            assert held(tier, key) is None and key not in tier
        assert tier.stats().ignored == {"torn": 1, "checksum": 1}
        assert not torn.exists() and not flipped.exists()
        fetch.release()
        assert tier.pinned_bytes() == 0


def test_memory_that_has_no_room(tmp_path: Path) -> None:
    """What is pinned stays, what is not goes; who gets no memory is told."""
    stored(tmp_path, b"a", b"b")
    with open_tier(tmp_path, pages=8) as tier:
        assert tier.put(b"pinned", content(b"pinned"), cost=1) and tier.pin(b"pinned")
        assert tier.put(b"free", content(b"free"), cost=1)
        tier.flush()
        fetch, done = fetched(tier, b"a", b"b")
        assert done.wait(WAIT)
        assert [tier.in_memory(key) for key in (b"free", b"pinned")] == [False, True]
        assert sum(tier.in_memory(key) for key in (b"a", b"b")) == 1
        assert tier.stats().refusals == {"pinned": 1}
        fetch.release()
        again, done = fetched(tier, b"a", b"b")
        assert done.wait(WAIT)
        assert b"a" in tier and b"b" in tier, "both are still on disk"
        again.release()
        tier.unpin(b"pinned")
        assert tier.pinned_bytes() == 0


def test_closed_while_it_is_read(
    tmp_path: Path,
    slow: SlowDisk,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A disk that hangs does not hold up the end."""
    monkeypatch.setattr(reading, "_JOIN_S", 0.0)
    keys = [b"%d" % i for i in range(6)]
    stored(tmp_path, *keys)
    tier = open_tier(tmp_path, pages=40)
    fetch, done = fetched(tier, *keys)
    slow.wait_for(reading._NUM_THREADS)
    with caplog.at_level(logging.WARNING):
        tier.close()
    assert "4 reads from disk did not end" in caplog.text
    fetch.release()
    torn = file_of(tmp_path, slow.begun[0])
    torn.write_bytes(torn.read_bytes()[:-1])
    slow.go_on()
    for thread in tier._reader._threads:
        thread.join(WAIT)
    assert len(slow.begun) == reading._NUM_THREADS and not done.is_set()
    assert torn.exists(), "the folder may be another's by now"
    with pytest.raises(ValueError, match="closed"):
        tier.fetch(keys)


def test_a_disk_that_is_slow_to_remove(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when its budget is full: lookups do not wait for that."""
    removing, go_on = threading.Event(), threading.Event()
    unlink = Path.unlink

    def slow_unlink(path: Path) -> None:
        removing.set()
        assert go_on.wait(WAIT)
        unlink(path)

    with open_tier(tmp_path, disk_bytes=2_500, pages=20) as tier:
        for key in (b"a", b"b"):
            assert tier.put(key, content(key), cost=1)
        tier.flush()
        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", slow_unlink)
            assert tier.put(b"c", content(b"c"), cost=1)
            assert removing.wait(WAIT)
            assert b"b" in tier and b"none" not in tier and tier.held_bytes()[1] <= 2_500
            go_on.set()
            tier.flush()
        assert tier._disk is not None and sorted(tier._disk.stored_keys()) == [b"b", b"c"]


def test_callbacks_that_fail_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stored(tmp_path, b"a")

    def fail(fetch: Fetch) -> None:
        raise RuntimeError("no")

    with open_tier(tmp_path) as tier:
        fetch = tier.fetch([b"a"], fail)
        other, done = fetched(tier, b"a")
        assert done.wait(WAIT)
        assert fetch.done and "what follows a read failed" in caplog.text
        fetch.release()
        other.release()


def test_threads_over_a_small_memory(tmp_path: Path) -> None:
    """Fetches that are given up, removals and stores: right bytes or none, and nothing stays."""
    sizes = {b"%d" % i: 1 + i * 397 % 3000 for i in range(30)}
    wrong: list[bytes] = []
    with open_tier(tmp_path, pages=60, disk_bytes=60_000) as tier:
        for key, size in sizes.items():
            tier.put(key, content(key, size), cost=1)
            tier.flush()

        def work(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(80):
                keys = rng.sample(list(sizes), rng.randint(1, 6))
                action = rng.random()
                if action < 0.2:
                    tier.put(keys[0], content(keys[0], sizes[keys[0]]), cost=rng.random())
                elif action < 0.3:
                    tier.remove(keys[0])
                elif action < 0.5:
                    tier.fetch(keys).release()
                else:
                    fetch, done = fetched(tier, *keys)
                    assert done.wait(WAIT)
                    for key in keys:
                        if held(tier, key, sizes[key]) not in (None, content(key, sizes[key])):
                            wrong.append(key)
                    fetch.release()

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        tier.flush()
        assert not wrong
        for key in sizes:
            tier.remove(key)
        assert tier.put(b"all", bytes(60 * PAGE), cost=1), "all memory is free"
