"""OLMo Hybrid under vLLM, in float32: what is restored differs from a prefill by rounding alone.

vLLM's operator for the other hybrids computes in bfloat16 on CPUs, where steps of other shapes
round differently; here a wrong row, gate or state has nothing to hide behind.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hybrid_checks import BASE, SUFFIX, Watched, check_split_prefill, names, split_at, tokens
from hybrid_served import HybridServed, difference, save_hybrid
from olmo_kernels import olmo_on_cpu
from vllm import SamplingParams

ROUNDING, WRONG = 2e-4, 0.05


@pytest.fixture(scope="module", params=["none", "align"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HybridServed]:
    folder = save_hybrid("olmo_hybrid", tmp_path_factory.mktemp("olmo"))
    with olmo_on_cpu():
        served = HybridServed(folder, request.param, dtype="float32", extra={"k_min": 1})
        yield served
        served.close()


@pytest.fixture(autouse=True)
def _fresh(served: HybridServed) -> None:
    served.forget()


@pytest.mark.parametrize("m", [1, 64, 255, 777, 1531])
def test_first_request_that_parts(
    served: HybridServed, m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Donors as long as the prefix give its bits; of longer ones only the rounding differs."""
    if m > 1:  # of one token no page is kept in time
        check_split_prefill(served, Watched(served, monkeypatch), m)
        served.forget()
    suffix = tokens(2, SUFFIX)
    expected = split_at(served, m, suffix)
    served.ask([BASE + tokens(4, SUFFIX)], 1)
    (answer,) = served.ask([BASE[:m] + suffix])
    assert answer.cached == m and answer.replay["exact"]
    assert answer.tokens == expected.tokens
    assert difference(answer, expected) < ROUNDING
    served.forget()
    served.ask([BASE + tokens(4, SUFFIX)], 1)
    (zero,) = served.ask([BASE[:m] + suffix], replay="zero")
    assert difference(zero, expected) > (WRONG if m > 64 else 10 * ROUNDING)


def test_convolutions_of_an_approximate_tail(
    served: HybridServed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tail of one token: what the first layer of each group remembers of those before it."""
    watched = Watched(served, monkeypatch)
    served.ask([BASE + tokens(4, SUFFIX)], 1)
    (answer,) = served.ask([BASE[:777] + tokens(5, SUFFIX)], 1, replay="ratio:0.0001")
    assert (answer.cached, answer.replay["replayed"], answer.replay["exact"]) == (777, 1, False)
    if served.mode == "align":
        served.llm.reset_prefix_cache()
    (answer,) = served.ask([BASE[:777] + tokens(6, SUFFIX)], 1)
    assert (answer.cached, answer.replay["exact"]) == (777, True)
    layers = served.replayer.states.modules
    at = 0
    rough, exact = (torch.frombuffer(bytearray(held), dtype=torch.float32)
                    for held in watched.restored)  # fmt: skip
    for index, module in layers.items():
        conv, state = (part[0].numel() for part in module.kv_cache)
        if index % 4 == 0:
            torch.testing.assert_close(rough[at : at + conv], exact[at : at + conv])
        at += conv
        assert not torch.allclose(rough[at : at + state], exact[at : at + state], atol=1e-3)
        at += state
    assert at == len(exact)


def test_nothing_approximate_is_hit_after_a_preemption(served: HybridServed) -> None:
    """The request goes on from an earlier token than at first."""
    served.ask([BASE], 1)
    prompt = BASE[:1800] + tokens(7, SUFFIX)
    engine, size = served.llm.llm_engine, served.side.settings.page
    params = SamplingParams(
        max_tokens=8, detokenize=False, ignore_eos=True,
        extra_args={"kv_transfer_params": {"kvspan": {"replay": "ratio:0.02"}}},
    )  # fmt: skip
    engine.add_request("rough", {"prompt_token_ids": prompt}, params)
    engine.step()
    (rough,) = served.side.tracked.values()
    assert rough.track.audit.matched == 1800
    assert served.core.scheduler.reset_prefix_cache(reset_running_requests=True)
    keys = rough.track.keys(prompt)
    for name in names(served, b"FTSG"):
        if name[-32:] in keys[900 // size :] or name[1:33] in keys[900 // size - 1 :]:
            served.side.store.tier.remove(name)
    while engine.has_unfinished_requests():
        engine.step()
    served.settle()
    assert rough.request.num_preemptions == 1
    assert rough.track.audit.matched == 900 // size * size and not rough.track.audit.exact
    (answer,) = served.ask([BASE[:1797] + tokens(8, SUFFIX)])
    assert answer.cached <= 900


def test_approximate_kv_from_the_host_is_not_hit(served: HybridServed) -> None:
    """The second turn of a chat brings it to blocks of vLLM's; a request that computes the same
    tokens leaves states of vLLM's own beside them."""
    turn = BASE[:777] + tokens(6, 900)
    longer = [*turn, *tokens(7, 300)]
    served.ask([BASE], 1)
    for prompt, cached in ((turn, 777), (longer, len(turn))):
        (rough,) = served.ask([prompt], 1, replay="ratio:0.0001")
        assert rough.cached == cached and not rough.replay["exact"]
    served.ask([longer], 1, replay="off")
    (answer,) = served.ask([[*longer, *tokens(8, SUFFIX)]], replay="off")
    assert answer.cached > len(turn) or served.mode == "none"
    served.forget()
    (full,) = served.ask([[*longer, *tokens(8, SUFFIX)]], replay="off")
    assert difference(answer, full) < ROUNDING
