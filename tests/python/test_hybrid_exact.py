"""Exact replay: at every boundary the states of a prefill that was split there, bit for bit.

KVSPAN_FULL_REPLAY=1 tests every boundary from 1 to 300 and 50 drawn ones up to 4,000.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from hybrid_models import FAMILIES, Track, make_runner, random_tokens, tiny_hybrid
from kvspan.hybrid.plan import plan_exact
from kvspan.hybrid.policy import Policy
from kvspan.hybrid.replay import LastLayer, ReplayOptions, restore

FULL = os.environ.get("KVSPAN_FULL_REPLAY", "") not in ("", "0")
if FULL:
    LENGTH = 4000
    drawn = np.random.default_rng(6).integers(301, LENGTH + 1, 50)
    BOUNDARIES = [*range(1, 301), *sorted(int(m) for m in drawn)]
else:
    LENGTH = 1100
    BOUNDARIES = [1, 2, 3, 4, 63, 64, 65, 128, 191, 255, 256, 257, 300, 511, 640, 1000, 1024, 1100]
SUFFIX, NEW = 5, 4
CAPACITY = LENGTH + 64


def first_difference(a: torch.Tensor, b: torch.Tensor) -> str:
    """ "" where bits are equal, else where they differ first."""
    if torch.equal(a, b):
        return ""
    at = tuple(torch.nonzero(a != b)[0].tolist())
    return f"at {at}: {float(a[at])!r} and {float(b[at])!r}"


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_every_boundary(name: str, dtype: torch.dtype) -> None:
    model = tiny_hybrid(name, dtype)
    runner = make_runner(model, 3 * CAPACITY)
    tokens = torch.tensor(random_tokens(LENGTH))
    donor = Track(runner, tokens, 0, CAPACITY, interval=512)
    donor.prefill(LENGTH)
    boundaries = BOUNDARIES if dtype == torch.float32 or FULL else BOUNDARIES[::4]
    for m in boundaries:
        suffix = torch.tensor(random_tokens(SUFFIX, seed=m))
        asked = torch.cat([tokens[:m], suffix])
        split = Track(runner, asked, CAPACITY, CAPACITY)
        split.prefill(m)
        expected = split.state.share()
        answer, logits = split.greedy(split.prefill(m + SUFFIX), NEW)
        usable = [c for c in donor.checkpoints if c.position <= m]
        for checkpoint in [None, *usable[-1:]]:
            plan = plan_exact(Policy(), m, 2, checkpoint, on_grid=False)
            assert plan.boundary == m and plan.exact
            state = restore(runner, tokens, donor.slots, plan).state
            for layer in range(len(state.conv)):
                where = f"boundary {m}, layer {layer}"
                assert not (d := first_difference(state.conv[layer], expected.conv[layer])), (
                    f"{where}: conv differs {d}"
                )
                assert not (d := first_difference(state.ssm[layer], expected.ssm[layer])), (
                    f"{where}: ssm differs {d}"
                )
            resumed = Track(runner, asked, 2 * CAPACITY, CAPACITY)
            resumed.copy_from(donor, m)
            resumed.state = state
            found, last = resumed.greedy(resumed.prefill(m + SUFFIX, write_from=m), NEW)
            assert found == answer, f"boundary {m}: tokens"
            assert not (d := first_difference(last, logits)), f"boundary {m}: logits differ {d}"


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("last", ["full", "mixer", "state"])
@pytest.mark.parametrize("side_by_side", [False, True], ids=["serial", "side by side"])
def test_options_change_no_bits(name: str, last: LastLayer, side_by_side: bool) -> None:
    runner = make_runner(tiny_hybrid(name), 512)
    donor = Track(runner, torch.tensor(random_tokens(300)), 0, 512)
    donor.prefill(300)
    plan = plan_exact(Policy(), 300, 2, None, on_grid=False)
    state = restore(
        runner, donor.tokens, donor.slots, plan, ReplayOptions(side_by_side, last)
    ).state
    for found, expected in zip(
        (*state.conv, *state.ssm), (*donor.state.conv, *donor.state.ssm), strict=True
    ):
        assert not first_difference(found, expected)
