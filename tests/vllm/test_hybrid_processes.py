"""Hybrids on real vLLM whose workers are processes of their own, one or two tensor-parallel ones.

The scheduler stays in the test's process, so that states can be looked at in the host tier. As in
test_hybrid, the oracle is stock vLLM prefilling in two steps, split at the boundary.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hybrid_served import HybridServed, difference, save_hybrid
from test_hybrid import BASE, ROUNDING, SUFFIX, WRONG, drop_states, names, pinned, split_at, tokens

from kvspan.ops import digest_fields


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


def states_at(served: HybridServed, m: int) -> list[bytes]:
    """The bytes of all states that are kept for the first m tokens of BASE."""
    tier, size = served.side.store.tier, served.side.settings.page
    rest = BASE[m // size * size : m]
    told = digest_fields(
        "kvspan/vllm/hybrid/state", b"".join(t.to_bytes(8, "little") for t in rest)
    )
    found = []
    for name in names(served, b"S"):
        if name.endswith(len(rest).to_bytes(8, "little") + told):
            with tier.view(name) as view:
                found.append(b"".join(page.tobytes() for page in view.pages))
    return found


@pytest.mark.parametrize("m", [65, 777, 1531])
def test_exact_is_a_split_prefill(served: HybridServed, m: int) -> None:
    suffix = tokens(2, SUFFIX)
    expected = split_at(served, m, suffix)
    served.ask([BASE[:m]], 1)
    (state,) = states_at(served, m)
    drop_states(served)
    if served.mode == "align":
        served.llm.reset_prefix_cache()
    (answer,) = served.ask([BASE[:m] + suffix])
    assert answer.cached == m
    assert answer.replay["exact"] and answer.replay["replayed"] == m
    assert answer.tokens == expected.tokens
    (replayed,) = states_at(served, m)
    assert replayed == state
    assert pinned(served) == 0


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
    lengths = (100, 777, 1531)
    prompts = [BASE[:m] + tokens(20 + m, 30) for m in lengths]
    prompts += [tokens(40 + i, 300) for i in range(2)]
    expected = []
    for prompt in prompts:
        expected += served.ask([prompt], replay="off")
        served.forget()
    served.ask([BASE[:1900]], 1)
    with served.chunks_of(256):
        answers = served.ask(prompts, 24)
    assert [answer.cached for answer in answers[: len(lengths)]] == list(lengths)
    assert max(difference(a, e) for a, e in zip(answers, expected, strict=True)) < ROUNDING
    assert pinned(served) == 0
