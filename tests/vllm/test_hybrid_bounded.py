"""Replay within a bound under vLLM: on OLMo Hybrid, which runs in float32, so that rounding hides
no error of a state."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hybrid_checks import BASE, SUFFIX, Watched, drop_states, names, tokens
from hybrid_served import HybridServed, difference, save_hybrid
from olmo_kernels import olmo_on_cpu
from safetensors.torch import load_file, save_file

from kvspan.vllm.hybrid.decay import Bounds

ROUNDING = 1e-4  # relative, of a float32 state over two thousand tokens


def forget_sooner(folder: Path) -> Path:
    """Let the heads of a saved model remember for a few to some hundred tokens."""
    weights = load_file(folder / "model.safetensors")
    for name, bias in weights.items():
        if name.endswith(".dt_bias"):
            step = torch.logspace(-2, -0.5, len(bias))
            weights[name] = step + torch.log(-torch.expm1(-step))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def olmo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HybridServed]:
    folder = forget_sooner(save_hybrid("olmo_hybrid", tmp_path_factory.mktemp("olmo")))
    with olmo_on_cpu():
        extra = {"k_min": 1, "decay": True, "state_every": 4096}
        served = HybridServed(folder, "align", dtype="float32", extra=extra)
        yield served
        served.close()


def states(served: HybridServed, held: bytes) -> dict[int, torch.Tensor]:
    """By layer, the recurrent state of what `Watched` saw."""
    found, at = {}, 0
    for layer, module in served.replayer.states.modules.items():
        for part in module.kv_cache:
            one = part[0]
            size = one.numel() * one.element_size()
            tensor = torch.frombuffer(bytearray(held[at : at + size]), dtype=one.dtype)
            at += size
        found[layer] = tensor.view(one.shape)
    assert at == len(held)
    return found


def errors(served: HybridServed, held: bytes, expected: bytes) -> dict[int, float]:
    """By layer, of the state relative to what it should be."""
    found, right = states(served, held), states(served, expected)
    return {i: float((found[i] - right[i]).norm() / right[i].norm()) for i in found}


@pytest.mark.parametrize("m", [777, 1531, 1999])
def test_states_are_within_their_bounds(
    olmo: HybridServed, m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    olmo.forget()
    watched = Watched(olmo, monkeypatch)
    right = watched.donor(BASE[:m])
    groups = olmo.replayer.groups
    tails, seen = [], []
    for number, eps in enumerate((0.5, 1e-1, 1e-2, 1e-4)):
        drop_states(olmo)
        olmo.llm.reset_prefix_cache()
        (answer,) = olmo.ask([BASE[:m] + tokens(10 + number, SUFFIX)], 1, replay=f"bounded:{eps}")
        assert answer.cached == m and answer.replay["policy"] == f"bounded:{eps:g}"
        tails.append([group["replayed_tokens"] for group in answer.replay["groups"]])
        if answer.replay["exact"]:
            assert watched.restored[-1] == right
            continue
        found = errors(olmo, watched.restored[-1], right)
        for group, said in zip(groups, answer.replay["groups"], strict=True):
            assert 0 <= said["bound"] <= eps
            first = found[group.layers[0]]  # whose inputs are exact
            assert first <= said["bound"] + ROUNDING
            seen.append(first)
    assert max(seen) > 3 * ROUNDING  # else nothing was tested
    for shorter, longer in itertools.pairwise(tails):
        assert all(a <= b for a, b in zip(shorter, longer, strict=True))


def test_nothing_within_a_bound_is_hit(olmo: HybridServed) -> None:
    """What follows such a restore is found by nobody, here or in vLLM's own cache."""
    olmo.forget()
    long = BASE[:777] + tokens(6, 900)
    (expected,) = olmo.ask([long])
    olmo.forget()
    olmo.ask([BASE + tokens(4, SUFFIX)], 1)
    before = names(olmo, b"FTS")
    (rough,) = olmo.ask([long], replay="bounded:0.5")
    assert rough.cached == 777 and not rough.replay["exact"]
    assert names(olmo, b"FTS") == before
    (answer,) = olmo.ask([long])
    assert answer.cached <= 777 and answer.replay["exact"]
    assert difference(answer, expected) < 1e-3
    (again,) = olmo.ask([long], replay="bounded:0.5")
    assert again.cached > 777, "the exact request is a source"


def test_pages_that_were_gone_on_in(olmo: HybridServed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that left another amid a page has its own sums from there on."""
    olmo.forget()
    second = BASE[:777] + tokens(6, 700)
    olmo.ask([BASE + tokens(4, SUFFIX)], 1)
    (answer,) = olmo.ask([second], 1)
    assert answer.cached == 777 and answer.replay["exact"]
    watched = Watched(olmo, monkeypatch)
    for number, policy in enumerate(("exact", "bounded:1e-2")):
        drop_states(olmo)
        olmo.llm.reset_prefix_cache()
        (answer,) = olmo.ask([second[:1100] + tokens(30 + number, 20)], 1, replay=policy)
        assert answer.cached == 1100
    right, found = watched.restored
    for group, said in zip(olmo.replayer.groups, answer.replay["groups"], strict=True):
        error = errors(olmo, found, right)[group.layers[0]]
        assert error <= said["bound"] + ROUNDING


def test_bound_that_does_not_hold_is_replayed_exactly(
    olmo: HybridServed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The norms that a plan relied on may be larger than the state's: that shows in what a replay
    gives."""
    olmo.forget()
    watched = Watched(olmo, monkeypatch)
    right = watched.donor(BASE[:1531])
    drop_states(olmo)
    olmo.llm.reset_prefix_cache()
    monkeypatch.setattr(Bounds, "hold", lambda *_: False)
    (answer,) = olmo.ask([BASE[:1531] + tokens(2, SUFFIX)], 1, replay="bounded:0.1")
    assert answer.cached == 1531 and not answer.replay["exact"]
    assert watched.restored == [right]


def test_server_that_keeps_no_decays(olmo: HybridServed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(olmo.side, "_options", replace(olmo.side._options, decay=False))
    (answer,) = olmo.ask([BASE[:100]], 1, replay="bounded:0.1")
    assert answer.replay["refused"] == (
        "kv_transfer_params.kvspan.replay: bounded needs a server that keeps decays; expected its "
        "option decay to be true; found false"
    )
