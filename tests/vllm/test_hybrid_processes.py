"""Hybrids on real vLLM whose workers are processes of their own, one or two tensor-parallel ones.

The scheduler stays in the test's process, so that states can be looked at in the host tier.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hybrid_checks import (
    BASE,
    ROUNDING,
    SUFFIX,
    WRONG,
    Kept,
    check_mixed_batch,
    check_split_prefill,
    drop_states,
    names,
    pinned,
    split_at,
    tokens,
)
from hybrid_served import HybridServed, difference, save_hybrid
from safetensors.torch import load_file, save_file
from vllm import SamplingParams


def with_a_group_that_forgets(folder: Path) -> Path:
    """Let the second group of layers of a saved model remember for a few tokens."""
    weights = load_file(folder / "model.safetensors")
    for layer in (4, 5, 6):
        name = f"model.layers.{layer}.linear_attn.dt_bias"
        step = torch.logspace(-1, -0.5, len(weights[name]))
        weights[name] = (step + torch.log(-torch.expm1(-step))).to(weights[name].dtype)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


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
        with_a_group_that_forgets(save_hybrid(name, tmp_path_factory.mktemp(name))),
        mode,
        extra={"decay": True},
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


def test_states_of_one_group(served: HybridServed) -> None:
    """All ranks' heads of it are kept by the first restore; the second one's state is whole."""
    kept = Kept(served)
    right = kept.donor(BASE[:777])
    drop_states(served)
    said = []
    for seed in (6, 7):
        (answer,) = served.ask([BASE[:777] + tokens(seed, SUFFIX)], 1, replay="bounded:1e-2")
        assert answer.cached == 777
        said.append(answer.replay)
        if seed == 6:
            assert len(names(served, b"G")) == 1 and not kept.restored
    assert [one["exact"] for one in said] == [False, True]
    assert said[0]["groups"][1]["start"] == "zero" and 0 < said[0]["groups"][1]["bound"] <= 1e-2
    assert [group["replayed_tokens"] for group in said[1]["groups"]] == [0, 777]
    assert kept.restored == [right]


def test_restores_among_fresh_requests(served: HybridServed) -> None:
    check_mixed_batch(served, Kept(served), (100, 777, 1531), 2)


def test_aborts_leave_nothing_behind(served: HybridServed) -> None:
    """Before, in and after the step of a restore, with and without other requests."""
    engine, pool = served.llm.llm_engine, served.core.scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    suffix = tokens(9, SUFFIX)
    expected = split_at(served, 777, suffix)
    served.ask([BASE[:1900]], 1)
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, detokenize=False)
    with served.chunks_of(256):
        for steps in (0, 1, 2, 5):
            ids = [f"{steps}-{m}" for m in (100, 777, 1531)]
            for i, m in enumerate((100, 777, 1531)):
                prompt = {"prompt_token_ids": BASE[:m] + tokens(60 + i, 300)}
                engine.add_request(ids[i], prompt, params)  # type: ignore[arg-type]
            for _ in range(steps):
                engine.step()
            engine.abort_request(ids[1:] if steps == 2 else ids)
            while engine.has_unfinished_requests():
                engine.step()
    (answer,) = served.ask([BASE[:777] + suffix])
    assert answer.cached == 777 and difference(answer, expected) < ROUNDING
    assert pinned(served) == 0 and not served.side.tracked and not served.side._ending
    assert served.llm.reset_prefix_cache() or served.mode == "none"
    assert pool.get_num_free_blocks() == free
