"""Stores of the host tier that are killed, or cross each other."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np

from test_host_disk import PAGE, content, fetch, open_tier

# A child stores entries of known content until it is killed: by its parent at any moment (even
# rounds), or by itself within a write or a sync, so that a torn file is certain. Not pytest's own
# process: it forks.
_KILLED = """
import os, random, signal, sys, time
from kvspan.host import DiskLevel, HostTier

path, rounds = sys.argv[1], int(sys.argv[2])

def tier():
    disk = DiskLevel(path, 300_000, b"model")
    return HostTier(1 << 20, page_bytes=4096, disk=disk)

def content(number):
    return random.Random(number).randbytes(20_000)

def die_in(name, call):
    original, calls = getattr(os, name), []

    def dying(fd, *pieces):
        calls.append(fd)
        if len(calls) == call:
            if pieces:
                os.write(fd, pieces[0][0][:100])
            os.kill(os.getpid(), signal.SIGKILL)
        return original(fd, *pieces)

    setattr(os, name, dying)

def store(round, stored):
    if round % 4 == 1:
        die_in("writev", random.Random(round).randrange(1, 12))
    elif round % 4 == 3:
        die_in("fsync", random.Random(round).randrange(1, 4))
    rng = random.Random(round)
    with tier() as store:
        while True:
            number = rng.randrange(43)
            store.put(b"%d" % number, content(number), cost=rng.random())
            store.flush()
            os.write(stored, b".")
            if rng.random() < 0.1:
                store.remove(b"%d" % rng.randrange(43))

rng = random.Random(0)
for round in range(rounds):
    stored, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        store(round, write_end)
    os.close(write_end)
    if round % 2 == 0:
        for _ in range(rng.randrange(1, 4)):
            os.read(stored, 1)
        time.sleep(rng.random() * 0.01)
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(stored)
    with tier() as kept:
        for number in range(43):
            out = bytearray(20_000)
            if kept.get(b"%d" % number, out):
                assert out == content(number), f"round {round}: wrong bytes of {number}"
        stats = kept.stats()
        assert set(stats.ignored) <= {"torn"}, stats
        print(stats.disk.entries, stats.ignored.get("torn", 0))
"""


def test_kill_9_during_stores(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", _KILLED, str(tmp_path), "50"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    found, torn = np.array([line.split() for line in run.stdout.splitlines()], int).T
    assert len(found) == 50
    assert found.max() >= 3, "entries survive"
    assert torn[1::2].all(), "a store that was cut short is dropped, and counted"
    assert not list(tmp_path.glob("*/.tmp-*"))


def test_threads_over_a_small_memory_and_a_small_disk(tmp_path: Path) -> None:
    """Stores, aborted stores, reads and removals: whole entries or none, and no memory lost."""
    sizes = {b"%d" % i: 1 + i * 397 % 3000 for i in range(40)}
    wrong: list[bytes] = []
    with open_tier(tmp_path, pages=40, disk_bytes=30_000) as tier:

        def work(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(150):
                key = rng.choice(list(sizes))
                expected = content(key, sizes[key])
                action = rng.random()
                if action < 0.4:
                    tier.put(key, expected, cost=rng.random())
                elif action < 0.5:
                    reservation = tier.reserve(key, sizes[key], cost=1)
                    if reservation:
                        reservation.pages[0][:] = 0
                        reservation.abort()
                elif action < 0.9:
                    if fetch(tier, key, sizes[key]) not in (None, expected):
                        wrong.append(key)
                else:
                    tier.remove(key)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        tier.flush()
        assert not wrong
        assert tier.put(b"all", bytes(40 * PAGE), cost=1)
        tier.flush()
        stats = tier.stats()
        assert stats.disk is not None and stats.disk.bytes <= 30_000
        assert tier.held_bytes()[1] == stats.disk.bytes
        assert tier.counts() == (stats.memory.evictions, stats.refusals)
        assert stats.memory.evictions and stats.refusals and not stats.ignored
    on_disk = {f.stem: f.stat().st_size for f in tmp_path.glob("*/*")}
    assert sum(on_disk.values()) == stats.disk.bytes and len(on_disk) == stats.disk.entries
    with open_tier(tmp_path, disk_bytes=30_000) as tier:
        assert {key.hex() for key in tier.stored_keys()} == set(on_disk)
