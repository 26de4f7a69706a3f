"""Preparing beside a request: what is run, what is run again, and that all of it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from kvspan.layout import SpanLayout, layout_from_tokens
from kvspan.vllm import preparing
from kvspan.vllm.prepare import prepare_stages
from kvspan.vllm.preparing import Preparer

BLOCK = 4


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(preparing, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(preparing, "SECOND_WAIT_S", 0.01)
    monkeypatch.setattr(preparing, "LATER_WAITS_S", (0.01,) * 3)
    yield


def layout(*spans: int, text_before: int | None = None, scope: str = "anchored") -> SpanLayout:
    """An anchor of a block, one-block spans of these tokens, text in front of one of them."""
    ids, bounds = [1] * BLOCK, []
    for i, token in enumerate(spans):
        if i == text_before:
            ids += [2] * BLOCK
        bounds.append((len(ids), len(ids) + BLOCK))
        ids += [token] * BLOCK
    return layout_from_tokens([*ids, 3], bounds, BLOCK, scope)  # type: ignore[arg-type]


class Runs:
    """Stands for vLLM: what is run becomes cached; a part waits while `missing` says so."""

    def __init__(self) -> None:
        self.cached: set[bytes] = set()
        self.started: list[SpanLayout] = []
        self.running = 0
        self.most = 0
        self.waits: dict[bytes, asyncio.Event] = {}

    async def __call__(self, part: SpanLayout) -> int:
        key = part.token_ids[:-1].tobytes()
        self.started.append(part)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(0)
            if key in self.waits:
                await self.waits[key].wait()
            found = key in self.cached
            self.cached.add(key)
            return part.num_tokens - 1 if found else 0
        finally:
            self.running -= 1


def test_all_at_once_and_counted_once() -> None:
    async def run() -> None:
        runs, asked = Runs(), layout(7, 8, 9, 8)
        async with Preparer().beside(asked, runs) as done:
            while len(runs.cached) < 3:
                await asyncio.sleep(0)
            done.begun.set()
        assert runs.most == 3 and len(runs.started) == 3
        assert (
            (done.tokens, done.anchor, done.text) == (3 * BLOCK, BLOCK, 0)
            and not done.failure
            and done.rounds == 1
        )
        assert done.missed == {np.full(BLOCK, n, np.int32).tobytes() for n in (7, 8, 9)}

    asyncio.run(run())


def test_what_was_prepared_lately_is_not_asked_for_while_the_request_begins() -> None:
    async def run() -> None:
        runs, preparer = Runs(), Preparer()
        for asked, domain, started in (
            (layout(7, 8), "", 2),
            (layout(8, 7), "", 2),
            (layout(8, 9), "", 3),  # one is new
            (layout(8, 7), "another tenant", 5),
        ):
            async with preparer.beside(asked, runs, domain) as done:
                while len(runs.started) < started:
                    await asyncio.sleep(0)
                done.begun.set()
            assert len(runs.started) == started

    asyncio.run(run())


def test_what_was_evicted_is_prepared_again_a_bounded_number_of_times() -> None:
    async def run() -> None:
        runs, preparer, asked = Runs(), Preparer(), layout(7, 8)
        async with preparer.beside(asked, runs) as done:
            while done.rounds < 5:  # the first, the second, and three later ones
                runs.cached.clear()
                await asyncio.sleep(0)
            for _ in range(20):
                await asyncio.sleep(0.005)
            assert done.rounds == 5 and len(runs.started) == 5 * 2
        assert done.tokens >= 2 * BLOCK

    asyncio.run(run())


def test_one_that_waits_for_what_was_lost_is_left_alone_and_the_lost_one_run_again() -> None:
    async def run() -> None:
        runs, asked = Runs(), layout(7, 8, text_before=1)
        ((first, second), (cut,)) = prepare_stages(asked)
        waits = runs.waits[cut.token_ids[:-1].tobytes()] = asyncio.Event()
        async with Preparer().beside(asked, runs) as done:
            while done.rounds < 3:
                await asyncio.sleep(0)
            waits.set()
            while runs.running:
                await asyncio.sleep(0)
            done.begun.set()
        counts = [
            sum(np.array_equal(run.token_ids, part.token_ids) for run in runs.started)
            for part in (first, second, cut)
        ]
        assert counts[0] >= 3 and counts[1] >= 3 and counts[2] == 1
        assert (done.tokens, done.anchor, done.text) == (2 * BLOCK, BLOCK, BLOCK)

    asyncio.run(run())


def test_nothing_is_left_running_when_the_request_fails() -> None:
    async def run() -> None:
        runs, asked = Runs(), layout(7, 8)
        for part in prepare_stages(asked)[0]:
            runs.waits[part.token_ids[:-1].tobytes()] = asyncio.Event()
        with pytest.raises(OSError):
            async with Preparer().beside(asked, runs):
                while runs.running < 2:
                    await asyncio.sleep(0)
                raise OSError
        assert runs.running == 0

    asyncio.run(run())


def test_a_failure_is_kept_for_the_answer() -> None:
    async def fail(part: SpanLayout) -> int:
        raise ValueError("no room")

    async def run() -> None:
        async with Preparer().beside(layout(7, 8), fail) as done:
            while not done.failure:
                await asyncio.sleep(0)
        assert done.failure == "ValueError: no room" and done.tokens == 0

    asyncio.run(run())


@pytest.mark.parametrize("scope", ["anchored", "isolated"])
def test_stages(scope: str) -> None:
    """Spans alone; in isolated scope the anchor too, which no span is computed after."""
    stages = prepare_stages(layout(7, 8, 7, text_before=2, scope=scope))
    parts = [[part.token_ids.tolist() for part in stage] for stage in stages]
    anchor, one, two = [1] * BLOCK, [7] * BLOCK, [8] * BLOCK
    if scope == "anchored":
        assert parts[0] == [[*anchor, *one, 8], [*anchor, *two, 2]]
    else:
        assert parts[0] == [[*one, 8], [*two, 2], [*anchor, 7]]
        assert stages[0][-1].spans == ()
    assert parts[1:] == [[[*anchor, *one, *two, *[2] * BLOCK, 7]]]
    assert prepare_stages(layout(7)) == [] or scope == "isolated"
