"""What a step of a hybrid leaves in the host's memory, written at once and by way of the device."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest
import torch

from kvspan.host import CopyQueue
from kvspan.vllm.hybrid.geometry import Geometry, cut
from kvspan.vllm.hybrid.orders import Fill, Work
from kvspan.vllm.hybrid.saving import Places, Rows, Saved, Saving, StagedSaving

SIZE, BLOCKS, PAGES = 8, 12, 10
STATE = 333
GEOMETRY = Geometry(
    size=SIZE, layers=2, block_bytes=SIZE * 24, streams=3, row_bytes=20, state_bytes=STATE, ranks=2
)
TABLE = ([0],)


class Memory:
    """The host's: pages, and after them states of both ranks."""

    def __init__(self, rank: int) -> None:
        self.held = np.zeros(PAGES * GEOMETRY.page_bytes + 10 * 2 * STATE, np.uint8)
        self.places = Places(GEOMETRY, rank, self.page, self.pieces)
        self.rank = rank

    def page(self, at: int) -> np.ndarray:
        return self.held[at : at + GEOMETRY.page_bytes]

    def pieces(self, spans: Any) -> list[np.ndarray]:
        mine = cut(spans, self.rank * STATE, (self.rank + 1) * STATE)
        return [self.held[at : at + n] for at, n in mine]


class Pass:
    """One step's tensors, and what is to be written of them."""

    def __init__(self, rng: random.Random) -> None:
        generator = torch.Generator().manual_seed(rng.randrange(2**31))

        def noise(*shape: int) -> torch.Tensor:
            return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)

        self.works = []
        self.first_of: dict[str, int] = {}
        slots: list[int] = []
        free = rng.sample(range(PAGES), PAGES)
        for number in range(rng.randint(1, 4)):
            begin = number * 3 * SIZE + rng.randrange(SIZE)
            count = rng.randint(1, 2 * SIZE)
            fills = []
            at = begin
            while at < begin + count:
                first = at % SIZE
                n = min(SIZE - first, begin + count - at)
                fills.append(Fill(free.pop() * GEOMETRY.page_bytes, first, n))
                at += n
            # Rows of requests without work stand between.
            slots += [1000 + len(slots)] * rng.randint(0, 2)
            slots += range(begin, begin + count)
            self.first_of[str(number)] = len(slots) - count
            self.works.append(Work(begin, fills, [], request=str(number)))
        rng.shuffle(self.works)
        # What vLLM's runner tells: slots, or the order of its batch.
        self.rows = rng.choice([Rows(torch.tensor(slots)), Rows(first_of=self.first_of)])
        self.streams = [noise(len(slots), 20).view(torch.bfloat16) for _ in range(3)]
        # Axes of a block in an order that is not the memory's.
        self.pools = [noise(BLOCKS, 3, SIZE, 8).view(torch.float32).transpose(1, 2) for _ in "kv"]
        pages = rng.sample(range(PAGES), rng.randint(0, 4))
        self.copies = [(p * GEOMETRY.page_bytes, rng.randrange(BLOCKS)) for p in pages]
        self.state = [noise(3, 55), noise(168).view(torch.float32)[::1]]
        start = PAGES * GEOMETRY.page_bytes + 2 * STATE * rng.randrange(10)
        middle = rng.randrange(1, 2 * STATE)  # in two pieces
        self.spans = ((start + middle, 2 * STATE - middle), (start, middle))

    def save(self, saving: Saving, step: int, failed: bool = False) -> None:
        saving.rows(self.streams, self.rows, self.works)
        if self.copies:
            saving.blocks(self.pools, self.copies)
        saving.state(self.spans, self.state)
        saving.end(step, failed)

    def overwrite(self) -> None:
        """As the next pass does."""
        for tensor in (*self.streams, *self.pools, *self.state):
            tensor.view(torch.uint8).fill_(7)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("staged", [192, 1024, 1 << 16], ids="{}B".format)
def test_staged_writes_what_is_written_at_once(rank: int, staged: int) -> None:
    rng = random.Random(rank)
    expected, found = Memory(rank), Memory(rank)
    at_once = Saving(expected.places)
    staging = torch.zeros(staged, dtype=torch.uint8)
    queue = CopyQueue(chunk_bytes=100, bytes_per_second=5e6)
    later = StagedSaving(found.places, staging, queue)
    for step in range(1, 25):
        one = Pass(rng)
        one.save(at_once, step)
        one.save(later, step)
        one.overwrite()
        assert at_once.saved() == Saved(step)
        assert later.saved().step <= step
        if step % 5 == 0:
            while later.saved().step < step:
                pass
            assert later.saved() == Saved(step)
            assert (found.held == expected.held).all()
    later.close()


def test_a_step_ends_with_its_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps end in their order, whatever was to be written; what failed is told."""
    rng = random.Random(5)
    memory = Memory(0)
    queue = CopyQueue()
    gate = threading.Event()
    real = queue.submit

    class Held:
        """A job that ends once the gate is open."""

        def __init__(self, job: Any) -> None:
            self.job = job

        @property
        def state(self) -> str:
            return str(self.job.state) if gate.is_set() else "pending"

        def wait_on_stream(self, stream: Any) -> bool:
            return bool(self.job.wait_on_stream(stream))

    monkeypatch.setattr(queue, "submit", lambda *a, **k: Held(real(*a, **k)))
    saving = StagedSaving(memory.places, torch.zeros(1 << 16, dtype=torch.uint8), queue)
    saving.end(1, False)  # nothing to write
    assert saving.saved() == Saved(1)
    good, bad = Pass(rng), Pass(rng)
    good.save(saving, 2)
    bad.save(saving, 3, failed=True)
    saving.end(5, False)
    assert saving.saved() == Saved(1)
    gate.set()
    while saving.saved().step < 5:
        pass
    assert saving.saved() == Saved(5, (3, 4)), "of step 4 nothing is known"
    saving.close()
    expected = Memory(0)
    good.save(Saving(expected.places), 2)
    assert (memory.held == expected.held).all()


def test_copies_that_fail() -> None:
    rng = random.Random(6)
    queue = CopyQueue(chunk_bytes=64, bytes_per_second=1e4)
    saving = StagedSaving(Memory(0).places, torch.zeros(1 << 16, dtype=torch.uint8), queue)
    Pass(rng).save(saving, 1)
    queue.close()  # gives up what is under way
    assert saving.saved() == Saved(1, (1,))


def test_what_failed_long_ago_is_forgotten() -> None:
    saved = Saved().then(1, True)
    for step in range(2, 5000):
        saved = saved.then(step, False)
    assert saved == Saved(4999)
    assert saved.then(5001, True) == Saved(5001, (5000, 5001))
