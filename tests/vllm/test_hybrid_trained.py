"""The trained hybrid of tests/fixtures under vLLM: what a state within a bound is worth."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hybrid_checks import drop_states, names
from hybrid_served import HybridServed
from transformers import AutoModelForCausalLM

from kvspan.vllm.hybrid.decay import CELL, DECAY
from kvspan.vllm.hybrid.geometry import page_of

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests" / "python")]
import tiny_hybrid_task as task  # noqa: E402  and this

import naive_replay  # noqa: E402  found by the path above

MODEL = ROOT / "tests" / "fixtures" / "tiny_hybrid"


@pytest.fixture(scope="module")
def trained() -> Iterator[HybridServed]:
    served = HybridServed(MODEL, "none", extra={"k_min": 16, "replay": "bounded:1e-3"})
    yield served
    served.close()


def test_decays_are_those_of_transformers(trained: HybridServed) -> None:
    trained.forget()
    ids = list(task.text(held_out=True)[:1000])
    trained.ask([ids], 1)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    captured = naive_replay.capture(model, torch.tensor([ids]))
    store = trained.side.store
    cells, size = store.geometry.cells, store.geometry.size
    checked = 0
    for name in names(trained, b"F"):
        with store.tier.view(name) as view:
            page = page_of(view)
            held = store.geometry.tokens(page)[1 : 1 + size].tolist()
            start = next(i for i in range(0, 1000, size) if ids[i : i + size] == held)
            sums = cells.sums(store.geometry.gates(page))
            for number, g in enumerate(captured.log_decay.values()):
                expected = g[0, start : start + size].unflatten(0, (-1, CELL)).sum(1)
                np.testing.assert_allclose(sums[:, DECAY, number], expected, rtol=0.03, atol=0.03)
            checked += 1
    assert checked == 1000 // size


def test_recall_survives(trained: HybridServed) -> None:
    """Which of three values is asked for only the recurrent state says."""
    rng, source, length = random.Random(1), task.text(held_out=True), 1500
    right = {"bounded:1e-3": 0, "zero": 0, "off": 0}
    asked = 0
    for _ in range(4):
        context = task.resumed_context(source, 24, length, 200, 4, rng)
        trained.forget()
        trained.ask([context.tokens[:length] + [1] * 20], 1)
        asked += len(context.answers)
        for policy in right:
            drop_states(trained)
            answers = trained.ask([context.tokens[:at] for at in context.answers], 1, replay=policy)
            for at, answer in zip(context.answers, answers, strict=True):
                right[policy] += answer.tokens[0] == context.tokens[at]
                said = answer.replay
                assert policy == "off" or said["matched"] == length
                if policy.startswith("bounded"):
                    slow, fast = said["groups"]
                    assert (slow["bound"], slow["replayed_tokens"]) == (0, length)
                    assert 0 < fast["bound"] <= 1e-3 and fast["replayed_tokens"] < 300
    print("NOTE", right, asked)
    assert right["bounded:1e-3"] >= right["off"] - 1 and right["off"] >= 0.9 * asked
    assert right["zero"] <= 0.6 * asked
