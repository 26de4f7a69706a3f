"""What a restore within a bound leaves behind, on the trained hybrid, whose first group of layers
has a head that hardly forgets: its exact state, and at the second time that of all groups."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hybrid_checks import Watched, drop_states, names, pinned
from hybrid_served import HybridServed

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import tiny_hybrid_task as task  # noqa: E402  found by the path above

MODEL = ROOT / "tests" / "fixtures" / "tiny_hybrid"
TEXT = list(task.text(held_out=True)[:1600])
M = 1200


@pytest.fixture(scope="module", params=["none", "align"])
def served(request: pytest.FixtureRequest) -> Iterator[HybridServed]:
    served = HybridServed(MODEL, request.param, extra={"k_min": 16, "replay": "bounded:1e-3"})
    yield served
    served.close()


@pytest.fixture(autouse=True)
def _fresh(request: pytest.FixtureRequest) -> None:
    if "served" in request.fixturenames:
        donate(request.getfixturevalue("served"))


def donate(served: HybridServed) -> None:
    """Leave pages of TEXT, and no state."""
    served.forget()
    served.ask([TEXT], 1, replay="off")
    drop_states(served)


def prompt(length: int, seed: int) -> list[int]:
    """Leaves TEXT at `length`."""
    return [*TEXT[:length], (TEXT[length] + seed) % 256, *TEXT[: 20 + seed]]


def slow(state: bytes) -> bytes:
    """The first group's half of a state."""
    return state[: len(state) // 2]


def test_slow_group_is_replayed_once(served: HybridServed, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(served, monkeypatch)
    for length in (M, M + 150):
        (answer,) = served.ask([prompt(length, 1)], 1, replay="exact")
        assert answer.cached == length and answer.replay["exact"]
    right = watched.restored[:]
    drop_states(served)
    found = []
    for length in (M, M + 150):
        (answer,) = served.ask([prompt(length, 2)], 1)
        assert answer.cached == length and not answer.replay["exact"]
        first, fast = answer.replay["groups"]
        found.append((first["replayed_tokens"], first["start"], first["bound"]))
        assert fast["start"] == "zero" and 0 < fast["bound"] <= 1e-3
        assert fast["replayed_tokens"] < 300
    assert found == [(M, "zero", 0.0), (150, "part", 0.0)]
    assert [slow(state) for state in watched.restored[2:]] == [slow(state) for state in right]
    assert watched.restored[2:] != right, "the others are approximate"
    assert len(names(served, b"G")) == 2 and not names(served, b"S")
    assert not pinned(served)


def test_exact_requests_do_not_see_it(
    served: HybridServed, monkeypatch: pytest.MonkeyPatch
) -> None:
    (full,) = served.ask([prompt(M, 1)], replay="exact")
    donate(served)
    watched = Watched(served, monkeypatch)
    served.ask([prompt(M, 2)], 1)
    (part,) = names(served, b"G")
    with served.side.store.tier.view(part) as view:
        for at, count in view.spans:  # whoever reads it will be wrong
            served.replayer.memory[at : at + count] = 0x41
    (answer,) = served.ask([prompt(M, 1)], replay="exact")
    assert (answer.cached, answer.replay["replayed"], answer.replay["state_from"]) == (M, M, 0)
    assert answer.replay["exact"] and answer.tokens == full.tokens
    assert answer.logprobs == full.logprobs
    assert slow(watched.restored[0]) == slow(watched.restored[1])


def test_second_request_makes_the_exact_state(
    served: HybridServed, monkeypatch: pytest.MonkeyPatch
) -> None:
    (full,) = served.ask([prompt(M, 4)], replay="exact")
    donate(served)
    watched = Watched(served, monkeypatch)
    asked = [served.ask([prompt(M, seed)])[0] for seed in (2, 3, 4)]
    said = [answer.replay for answer in asked]
    assert [answer.cached for answer in asked] == [M] * 3
    assert [one["exact"] for one in said] == [False, True, True]
    assert [group["replayed_tokens"] for group in said[1]["groups"]] == [0, M]
    assert said[2]["replayed"] == 0
    assert watched.restored[1] == watched.restored[2]
    assert (asked[2].tokens, asked[2].logprobs) == (full.tokens, full.logprobs)
    turn = prompt(M, 3) + list(asked[1].tokens) + TEXT[:30]
    (answer,) = served.ask([turn])
    assert answer.cached == len(turn) - 31, "all but the last token, which was never run"
    assert answer.replay["exact"]
    lost = prompt(M, 2) + list(asked[0].tokens) + TEXT[:30]
    assert served.ask([lost])[0].cached == M, "what followed an approximate state"
