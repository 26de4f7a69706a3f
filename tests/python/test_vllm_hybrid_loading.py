"""What restores read beside KV: in place, and staged ahead of KV in a ring of memory."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kvspan.host import CopyJob, CopyQueue
from kvspan.vllm.hybrid.loading import AHEAD, AT_ONCE, Loading, Pieces, StagedLoading

MEMORY = np.random.default_rng(0).integers(0, 256, 1 << 16, dtype=np.uint8)


def pieces_at(*spans: tuple[int, int]) -> Pieces:
    return [MEMORY[at : at + count] for at, count in spans]


def random_pieces(rng: random.Random, most: int) -> Pieces:
    counts = [rng.randint(1, most) for _ in range(rng.randint(1, 4))]
    return pieces_at(*((rng.randrange(len(MEMORY) - count), count) for count in counts))


class Watched:
    """A queue that notes what it is given: priorities, and what it is to wait for."""

    def __init__(self) -> None:
        self.queue = CopyQueue()
        self.given: list[int] = []
        self.jobs: list[CopyJob] = []
        self.after: list[Any] = []

    def submit(self, src: Any, dst: Any, *, priority: int = 0, after: Any = 0) -> CopyJob:
        self.given.append(priority)
        self.after.append(after)
        self.jobs.append(self.queue.submit(src, dst, priority=priority))
        return self.jobs[-1]


@pytest.fixture
def queue() -> Iterator[Any]:
    watched = Watched()
    yield watched
    watched.queue.close()


def test_in_place() -> None:
    loading = Loading()
    one, two = pieces_at((5, 100)), pieces_at((10, 7), (3, 9))
    found = loading.read(one)
    assert found.data_ptr() == one[0].ctypes.data, "no copy"
    own = loading.read(one, private=True)
    assert own.data_ptr() != one[0].ctypes.data and torch.equal(own, found)
    assert loading.read(two).tolist() == [*MEMORY[10:17], *MEMORY[3:12]]


@pytest.mark.parametrize("seed", range(20))
def test_a_ring_gives_what_is_read(queue: Any, seed: int) -> None:
    """Whatever fits into it, in the order told, with others between, and until the next read."""
    rng = random.Random(seed)
    loading = StagedLoading(torch.zeros(rng.choice([700, 2048, 5000, 1 << 16]), dtype=torch.uint8))
    for _ in range(3):
        reads = [random_pieces(rng, rng.choice([10, 400, 900])) for _ in range(rng.randint(0, 30))]
        loading.begin(queue, reads)
        for planned in reads:
            for pieces in [random_pieces(rng, 500), planned] if rng.random() < 0.2 else [planned]:
                found = loading.read(pieces, private=rng.random() < 0.5)
                for job in queue.jobs:
                    assert job.wait(), "what is queued for later has been copied, too"
                assert np.array_equal(found.numpy(), np.concatenate(pieces))
        loading.end()
    assert queue.queue.stats()["jobs_cancelled"] == 0


def test_it_is_queued_before_kv(queue: Any) -> None:
    """As much as there is room for; the rest goes before the KV that is left then."""
    reads = [pieces_at((i * 100, 256)) for i in range(5)]
    loading = StagedLoading(torch.zeros(512, dtype=torch.uint8))
    loading.begin(queue, reads)
    assert queue.given == [AHEAD, AHEAD]
    queue.submit([MEMORY], [np.empty_like(MEMORY)])
    loading.read(reads[0])
    assert queue.given == [AHEAD, AHEAD, 0], "the first is still in use"
    loading.read(reads[1])
    assert queue.given[3:] == [AHEAD]
    loading.read(pieces_at((7, 30)))
    assert queue.given[4:] == [AHEAD, AT_ONCE]
    for read in reads[2:]:
        assert np.array_equal(loading.read(read).numpy(), read[0])
    assert queue.given[6:] == [AHEAD]
    loading.end()


def test_places_that_were_used_in_the_same_step_wait_for_that(queue: Any) -> None:
    """Others wait for what came before the step, so that they hold up nothing."""
    loading = StagedLoading(torch.zeros(1024, dtype=torch.uint8))
    reads = [pieces_at((i * 100, 256)) for i in range(6)]
    for before in (7, 8):
        loading.start(before)
        for part in (reads[:2], reads[2:5]):
            loading.begin(queue, part)
            for pieces in part:
                loading.read(pieces)
            loading.end()
        loading.begin(queue, reads[5:])
        loading.end()
    used = 0  # on a GPU the stream of what is enqueued by then
    assert queue.after == [7, 7, 7, 7, used, used, 8, 8, 8, 8, used, used]


def test_a_restore_that_ends_early(queue: Any) -> None:
    """What it has queued is cancelled, and does not get into the next one's way."""
    queue.queue.close()
    queue.queue = CopyQueue(chunk_bytes=1 << 10, bytes_per_second=1 << 14)
    loading = StagedLoading(torch.zeros(1 << 16, dtype=torch.uint8))
    loading.begin(queue, [pieces_at((0, 1 << 15)), pieces_at((0, 1 << 14))])
    loading.end()
    stats = queue.queue.stats()
    assert (stats["jobs_cancelled"], stats["bytes_queued"], stats["bytes_in_flight"]) == (2, 0, 0)
    loading.begin(queue, [pieces_at((3, 50))])
    assert np.array_equal(loading.read(pieces_at((3, 50))).numpy(), MEMORY[3:53])
    loading.end()


def test_what_was_cancelled_is_not_read(queue: Any) -> None:
    queue.queue.close()
    queue.queue = CopyQueue(chunk_bytes=1 << 10, bytes_per_second=1 << 14)
    loading = StagedLoading(torch.zeros(1 << 16, dtype=torch.uint8))
    read = pieces_at((0, 1 << 15))
    loading.begin(queue, [read])
    queue.jobs[0].cancel()
    with pytest.raises(RuntimeError, match="cancelled"):
        loading.read(read)
    loading.end()
