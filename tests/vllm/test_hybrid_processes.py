"""Hybrids on real vLLM whose workers are processes of their own, one or two tensor-parallel ones.

The scheduler stays in the test's process, so that states can be looked at in the host tier.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hybrid_checks import (
    BASE,
    ROUNDING,
    SUFFIX,
    WRONG,
    Kept,
    check_mixed_batch,
    check_split_prefill,
    split_at,
    tokens,
)
from hybrid_served import HybridServed, difference, save_hybrid


@pytest.fixture(
    scope="module",
    params=[("qwen3_5", "none", 1), ("qwen3_next", "align", 2)],
    ids=lambda p: f"{p[0]}-{p[1]}-{p[2]}",
)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HybridServed]:
    name, mode, ranks = request.param
    served = HybridServed(
        save_hybrid(name, tmp_path_factory.mktemp(name)),
        mode,
        distributed_executor_backend="mp",
        tensor_parallel_size=ranks,
        max_model_len=2560,
    )
    assert served.side.store.geometry.ranks == ranks
    yield served
    served.close()


@pytest.fixture(autouse=True)
def _fresh(served: HybridServed) -> None:
    served.forget()


@pytest.mark.parametrize("m", [65, 777, 1531])
def test_exact_is_a_split_prefill(served: HybridServed, m: int) -> None:
    check_split_prefill(served, Kept(served), m)


def test_zero_state_shows(served: HybridServed) -> None:
    suffix = tokens(3, SUFFIX)
    expected = split_at(served, 777, suffix)
    served.ask([BASE[:1900] + tokens(4, SUFFIX)], 1)
    (answer,) = served.ask([BASE[:777] + suffix], replay="zero")
    assert answer.cached == 777 and difference(answer, expected) > WRONG
    (answer,) = served.ask([BASE[:777] + suffix])
    assert answer.cached == 777 and difference(answer, expected) < ROUNDING


def test_answers_are_resumed_at_their_end(served: HybridServed) -> None:
    (first,) = served.ask([BASE[:300]], 40, settle=False)
    second = BASE[:300] + list(first.tokens) + tokens(5, 50)
    (answer,) = served.ask([second])
    assert answer.cached == 339 and answer.replay["replayed"] == 0


def test_restores_among_fresh_requests(served: HybridServed) -> None:
    check_mixed_batch(served, Kept(served), (100, 777, 1531), 2)
