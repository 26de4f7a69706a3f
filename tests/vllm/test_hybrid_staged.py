"""Restores as on a GPU, in memory of the CPU: what a replay reads is copied ahead of KV.

The states have the bits of those that are read in place, and the replay begins before KV is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hybrid_checks import (
    BASE,
    ROUNDING,
    Watched,
    check_mixed_batch,
    check_split_prefill,
    drop_states,
    pinned,
    restore_plan,
    tokens,
)
from hybrid_served import HybridServed, difference, save_hybrid

from kvspan.host import CopyJob, CopyQueue
from kvspan.vllm.hybrid.loading import AHEAD, Loading, StagedLoading


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HybridServed]:
    """With steps of 512 tokens: a replay of more runs in parts."""
    folder = save_hybrid("qwen3_5", tmp_path_factory.mktemp("model"))
    extra = {"decay": True, "host_gib": 0.125}
    served = HybridServed(folder, "none", extra=extra, max_num_batched_tokens=512)
    yield served
    served.close()


@pytest.fixture(autouse=True)
def _fresh(served: HybridServed, monkeypatch: pytest.MonkeyPatch) -> None:
    served.forget()
    replayer = served.replayer
    assert type(replayer.loading) is Loading, "on a CPU"
    with monkeypatch.context() as patch:
        patch.setattr(replayer, "STAGED", True)
        staged = replayer._make_loading()
    monkeypatch.setattr(replayer, "loading", staged)
    assert isinstance(replayer.loading, StagedLoading)


@pytest.mark.parametrize("m", [63, 64, 255, 500])
def test_exact_is_a_split_prefill(
    served: HybridServed, m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_split_prefill(served, Watched(served, monkeypatch), m)


def test_restores_among_fresh_requests(
    served: HybridServed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several in one step: the ring is used by one after the other."""
    check_mixed_batch(served, Watched(served, monkeypatch), (65, 180, 255), 1)


@pytest.mark.parametrize("replay", ["exact", "ratio:0.1", "ratio:0.5", "bounded:1e-2"])
@pytest.mark.parametrize("room", ["two reads", "less than one"])
def test_states_are_those_of_reads_in_place(
    served: HybridServed, replay: str, room: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a kept state or from zero, in a ring that has room or that has next to none."""
    replayer = served.replayer
    served.ask([BASE], 1)
    staged = replayer.loading
    if room == "less than one":
        staged = StagedLoading(torch.empty(4096, dtype=torch.uint8))
    prompt = BASE[:1700] + tokens(3, 40)
    watched = Watched(served, monkeypatch)
    for loading in (Loading(), staged):
        monkeypatch.setattr(replayer, "loading", loading)
        (answer,) = served.ask([prompt], 1, replay=replay)
        assert answer.cached == 1700
        served.forget()
        served.ask([BASE], 1)
    in_place, copied = watched.restored
    assert copied == in_place
    assert pinned(served) == 0


class KvLast:
    """A queue that begins to copy KV when it is told to; until then its job is waited for in vain.

    told: what happened, in order.
    """

    def __init__(self) -> None:
        self.queue = CopyQueue()
        self.told: list[str] = []
        self._kv: tuple[Any, Any] | None = None
        self._job: CopyJob | None = None

    def submit(self, src: Any, dst: Any, *, priority: int = 0, after: Any = 0) -> Any:
        if priority != 0:
            self.told.append("rows queued" if priority == AHEAD else "rows at once")
            return self.queue.submit(src, dst, priority=priority, after=after)
        self.told.append("kv queued")
        self._kv = src, dst
        return self

    def replay_begins(self) -> None:
        if self._kv is not None:
            self.told.append("replay")
            self._job = self.queue.submit(*self._kv)
            self._kv = None

    def wait_on_stream(self, stream: Any) -> bool:
        self.told.append("kv waited for")
        assert self._job is not None, "KV is waited for before the replay has begun"
        return self._job.wait_on_stream(stream)

    def wait(self) -> bool:
        assert self._job is not None
        return bool(self._job.wait())

    def cancel(self) -> None:
        if self._job is not None:
            self._job.cancel()


def test_replay_begins_before_kv_is_there(
    served: HybridServed, monkeypatch: pytest.MonkeyPatch
) -> None:
    replayer = served.replayer
    prompt = BASE[:1900] + tokens(2, 20)
    (full,) = served.ask([prompt], replay="off")
    served.forget()
    served.ask([BASE], 1)
    drop_states(served)
    queue = KvLast()
    monkeypatch.setattr(replayer, "queue", queue)
    for runner in replayer._runners.values():
        run = runner.run

        def run_and_tell(*args: Any, run: Any = run) -> None:
            queue.replay_begins()
            run(*args)

        monkeypatch.setattr(runner, "run", run_and_tell)
    (answer,) = served.ask([prompt])
    queue.queue.close()
    assert answer.cached == 1900 and answer.replay["replayed"] == 1900
    assert difference(answer, full) < ROUNDING
    kv, replay = queue.told.index("kv queued"), queue.told.index("replay")
    assert 0 < kv < replay and set(queue.told[:kv]) == {"rows queued"}
    assert queue.told[-1] == "kv waited for" and "rows at once" not in queue.told


def test_copies_that_are_cancelled_end_the_restore(
    served: HybridServed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows or KV: what has not arrived is not used, and nothing stays queued."""
    replayer = served.replayer
    served.ask([BASE], 1)
    plan = restore_plan(served, BASE[:1900] + tokens(2, 20), replay="ratio:0.1")

    for which in (AHEAD, 0):
        with Cancelling(which) as queue:
            monkeypatch.setattr(replayer, "queue", queue)
            with pytest.raises(RuntimeError, match="cancelled"):
                replayer.restore(plan)
                replayer.join()
            stats = queue.stats()
            assert (stats["bytes_queued"], stats["bytes_in_flight"]) == (0, 0)


class Cancelling(CopyQueue):
    """Cancels what has a priority."""

    def __init__(self, which: int) -> None:
        super().__init__(chunk_bytes=1 << 12, bytes_per_second=1 << 20)
        self._which = which

    def submit(self, src: Any, dst: Any, *, priority: int = 0, after: Any = 0) -> CopyJob:
        job = super().submit(src, dst, priority=priority, after=after)
        if priority == self._which:
            job.cancel()
        return job
