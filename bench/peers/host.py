"""The copy queue and the host tier against plain copies and files of the same bytes.

``overlap`` rehearses a restore over a slow link: a replay, here a fixed piece of numpy work, starts
on each chunk as it comes. It should take little longer than the longer of copy and replay alone.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvspan.host import CopyQueue, DiskLevel, HostTier
from peers.frame import Bench

MIB = 1 << 20
BLOCK = 1 << 16  # of one layer: 16 tokens, 8 heads, 128 dimensions, keys and values in bfloat16
ENTRY = 2 * MIB  # of 32 layers
NUM_ENTRIES = 32


def run(bench: Bench) -> None:
    _copies(bench)
    _tier(bench)
    with tempfile.TemporaryDirectory() as folder:
        _disk(bench, Path(folder))
    _overlap(bench)


def _copies(bench: Bench) -> None:
    num_blocks = 64 * MIB // BLOCK
    pool, host = np.ones((num_blocks, BLOCK), np.uint8), np.ones((num_blocks, BLOCK), np.uint8)
    order = np.random.default_rng(0).permutation(num_blocks)
    with CopyQueue() as one, CopyQueue(num_threads=2) as two:
        bench.compare(
            "64 MiB between two pools of the host",
            {
                "numpy copyto": lambda: np.copyto(pool, host),
                "CopyQueue": lambda: one.submit([host], [pool]).wait(),
                "CopyQueue, blocks in any order": lambda: one.submit(
                    [host], [(pool, order)]
                ).wait(),
                "CopyQueue, 2 threads": lambda: two.submit([host], [pool]).wait(),
                "numpy, blocks in any order": lambda: pool.__setitem__(order, host),
            },
            baseline="numpy copyto",
            num_bytes=2 * 64 * MIB,
        )


def _tier(bench: Bench) -> None:
    data = np.random.default_rng(0).integers(0, 256, ENTRY, np.uint8)
    out, copy = np.empty_like(data), np.empty((NUM_ENTRIES, ENTRY), np.uint8)
    with HostTier(NUM_ENTRIES * ENTRY) as tier:
        numbers = iter(range(1 << 62))

        def put() -> None:  # evicting from the 33rd on
            for _ in range(NUM_ENTRIES):
                assert tier.put(b"%d" % next(numbers), data, cost=1)

        def get() -> None:
            for _ in range(NUM_ENTRIES):
                assert tier.get(b"hit", out)

        def plain() -> None:
            for row in copy:
                np.copyto(row, data)

        put()
        tier.put(b"hit", data, cost=1e9)
        bench.compare(
            f"{NUM_ENTRIES} entries of {ENTRY // MIB} MiB in memory",
            {"numpy copyto": plain, "HostTier.put": put, "HostTier.get": get},
            baseline="numpy copyto",
            num_bytes=2 * NUM_ENTRIES * ENTRY,
        )


def _disk(bench: Bench, folder: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, ENTRY, np.uint8)
    out = np.empty_like(data)
    disk = DiskLevel(folder / "tier", 4 * NUM_ENTRIES * ENTRY, b"bench")
    numbers = iter(range(1 << 62))
    disk.write(b"hit", [data], 1e9, "span")
    (folder / "plain").write_bytes(data.data)

    def plain_write() -> None:
        with open(folder / "other", "wb", buffering=0) as stream:
            stream.write(data.data)
            os.fsync(stream.fileno())

    def plain_read() -> None:
        with open(folder / "plain", "rb", buffering=0) as stream:
            stream.readinto(out.data)

    case = f"an entry of {ENTRY // MIB} MiB"
    writes: dict[str, Callable[[], object]] = {
        "file, synced": plain_write,
        "DiskLevel.write": lambda: disk.write(b"%d" % next(numbers), [data], 1, "span"),
    }
    reads: dict[str, Callable[[], object]] = {
        "file": plain_read,
        "DiskLevel.read": lambda: disk.read(b"hit", [out]),
    }
    bench.compare(f"{case} to disk", writes, baseline="file, synced", num_bytes=ENTRY)
    bench.compare(f"{case} from the page cache, checked", reads, baseline="file", num_bytes=ENTRY)
    disk.close()


def _overlap(bench: Bench) -> None:
    chunks, chunk_seconds = 16, 0.01
    src, dst = np.ones(chunks * MIB, np.uint8), np.zeros(chunks * MIB, np.uint8)
    for name, share in (("replay as long as the copy", 1.0), ("replay of half the copy", 0.5)):
        with CopyQueue(chunk_bytes=MIB, bytes_per_second=MIB / chunk_seconds) as queue:

            def replay(seconds: float = share * chunk_seconds) -> None:
                end = time.perf_counter() + seconds
                while time.perf_counter() < end:
                    np.add(dst[:4096], 1)

            def restore(queue: CopyQueue = queue, replay: Callable[[], None] = replay) -> None:
                job = queue.submit([src], [dst])
                for chunk in range(1, chunks + 1):
                    job.wait(chunk)
                    replay()

            def copy(queue: CopyQueue = queue) -> None:
                queue.submit([src], [dst]).wait()

            def both(copy: Callable[[], None] = copy, replay: Callable[[], None] = replay) -> None:
                copy()
                for _ in range(chunks):
                    replay()

            bench.compare(
                f"overlap: {name}",
                {"copy alone": copy, "one after the other": both, "chunk by chunk": restore},
                baseline="copy alone",
                targets={"chunk by chunk": 1 / 1.15},
            )
