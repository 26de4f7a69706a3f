"""What a restored state is worth, judged by a hybrid that was trained to need it.

bench/replay_quality.py makes the full table; here fewer contexts, and the bounds that must hold.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import naive_replay

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "scripts")]
import replay_quality  # noqa: E402  found by the path above
import tiny_hybrid_task as task  # noqa: E402

CONTEXTS = 6


@pytest.fixture(scope="module")
def judge() -> Iterator[replay_quality.Judge]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    judge = replay_quality.Judge.load(replay_quality.MODEL)
    yield judge
    judge.engine.close()
    torch.set_num_threads(threads)


def texts(length: int, count: int) -> Tensor:
    rng = random.Random(length)
    return replay_quality.text_batch(task.text(held_out=True), length, count, rng)


@pytest.mark.parametrize("length", [500, 2000])
def test_recall_survives_a_replay_and_not_its_absence(
    judge: replay_quality.Judge, length: int
) -> None:
    rng = random.Random(length)
    source = task.text(held_out=True)
    ids, answers = replay_quality.recall_batch(source, length, False, CONTEXTS, rng)
    restores = replay_quality.restore_all(judge, ids, length, rng)
    shares = replay_quality.judge_recall(judge, restores, answers)
    assert shares["full"] >= 0.95
    assert shares["zero"] <= 0.6 * shares["full"]
    assert shares["ratio:0.05"] >= 0.95 * shares["full"]
    assert shares["bounded:1e-3"] >= 0.995 * shares["full"]
    assert shares["exact"] == shares["full"]


def test_held_out_text(judge: replay_quality.Judge) -> None:
    length = 1000
    restores = replay_quality.restore_all(judge, texts(length, 3), length, random.Random(0))
    rows = replay_quality.judge_text(judge, restores)
    errors = [rows[policy]["state_error"] for policy in replay_quality.POLICIES]
    assert errors[0] == 1 and errors[:4] == sorted(errors[:4], reverse=True) and errors[4] < 1e-3
    assert rows["zero"]["kl"] > 10 * rows["ratio:0.05"]["kl"] > 0
    assert rows["exact"]["state_error_max"] < 1e-5 and rows["exact"]["kl"] < 1e-6
    assert rows["bounded:1e-3"]["state_error_max"] < 1e-3
    assert rows["bounded:1e-3"]["top1"] > 0.99


@pytest.mark.parametrize("ratio", [0.05, 0.3, 0.9])
def test_states_are_those_of_the_naive_replay(judge: replay_quality.Judge, ratio: float) -> None:
    length, policy = 700, f"ratio:{ratio}"
    ids = texts(length, 1)
    judge.engine.clear_cache()
    judge.donate(ids[0, :length].tolist(), random.Random(0))
    judge.engine.cache.checkpoints.clear()  # a replay from zero, however long
    state, record = judge.restored(ids[0].tolist(), length, policy)
    captured = naive_replay.capture(judge.plain, ids[:, :length])
    tail = max(64, math.ceil(ratio * length))
    assert [group["replayed_tokens"] for group in record["groups"]] == [tail, tail]
    tails = {group: tail for group, _ in naive_replay.groups(judge.plain.config)}
    expected = naive_replay.restored(judge.plain, captured, tails)
    found = judge.with_states(captured.cache, [state])
    for layer in judge.engine.runner.map.linear:
        for kind in ("conv_states", "recurrent_states"):
            theirs = getattr(expected.layers[layer], kind)[0]
            ours = getattr(found.layers[layer], kind)[0]
            if kind == "conv_states":  # transformers keeps a column more than is ever read
                theirs, ours = theirs[..., 1:], ours[..., 1:]
            torch.testing.assert_close(
                ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max())
            )
