"""Plans run on real pools give, bit for bit, what gathering everything first would."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from kvspan import reference
from kvspan.ops import plan_moves, rerope_layers, run_plan
from move_simulator import Problem
from test_block_moves import FREE, NUM_BLOCKS, SCRATCH, problems

BLOCKS = NUM_BLOCKS + len(FREE) + len(SCRATCH)
INV_FREQ = [
    torch.tensor([1.0, 0.5]), torch.tensor([1.0]), torch.empty(0), torch.tensor([0.25, 0.125])
]  # fmt: skip
IS_NEOX = [True, True, True, False]


def pools(dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Four layers' keys [BLOCKS, 2, 1, 4] and values [BLOCKS, 2, 1, 3]."""
    generator = torch.Generator().manual_seed(0)
    keys = [torch.randn(BLOCKS, 2, 1, 4, generator=generator).to(dtype) for _ in INV_FREQ]
    values = [torch.randn(BLOCKS, 2, 1, 3, generator=generator).to(dtype) for _ in INV_FREQ]
    return keys, values


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@given(
    problem=problems(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e5m2]),
    as_numpy=st.booleans(),
)
def test_plans_on_real_pools(problem: Problem, dtype: torch.dtype, as_numpy: bool) -> None:
    problem.num_layers = len(INV_FREQ)
    plan = problem.plan()
    if as_numpy:
        dtype = torch.float32
    keys, values = pools(dtype)
    expected_k, expected_v = pools(dtype)
    destinations = plan.destinations.tolist()
    rerope_layers(
        keys, expected_k, values, expected_v, problem.src, destinations, problem.delta, INV_FREQ,
        is_neox=IS_NEOX,
    )  # fmt: skip
    to_array: Any = torch.Tensor.numpy if as_numpy else lambda t: t
    run_plan(
        plan, [to_array(k) for k in keys], [to_array(v) for v in values], INV_FREQ,
        is_neox=IS_NEOX,
    )  # fmt: skip
    kept = [block for block in range(BLOCKS) if block not in problem.scratch]
    for ours, theirs in zip(keys + values, expected_k + expected_v, strict=True):
        assert torch.equal(bits(ours[kept]), bits(theirs[kept]))


@given(problem=problems())
def test_plans_against_the_reference(problem: Problem) -> None:
    assume(problem.src)  # the twin takes one move or more
    plan = problem.plan()
    (k, *_), (v, *_) = pools(torch.float32)
    expected_k, destinations = k.clone(), plan.destinations.tolist()
    expected_v = reference.move_blocks(v, problem.src, destinations)
    reference.rerope(k, expected_k, problem.src, destinations, problem.delta, INV_FREQ[0])
    run_plan(plan, [k], [v], [INV_FREQ[0]])
    kept = [block for block in range(BLOCKS) if block not in problem.scratch]
    torch.testing.assert_close(k[kept], expected_k[kept], rtol=0, atol=1e-6)
    assert torch.equal(v[kept], expected_v[kept])


def test_keys_alone_and_axes() -> None:
    """M-RoPE: a delta for each axis, taken along through a cycle's scratch block."""
    (k, *_), _ = pools(torch.float32)
    expected = k.clone()
    src, dst = [0, 1, 2, 5], [1, 0, 7, 5]
    deltas = np.array([[1, 0], [0, 2], [3, 3], [4, 5]])
    axes = [0, 1]
    rerope_layers([k], [expected], [], [], src, dst, deltas, [INV_FREQ[0]], axes=axes)
    plan = plan_moves(src, dst, np.abs(deltas).sum(1), [9])
    assert plan.stats.num_saved == 1
    run_plan(plan, [k], [], [INV_FREQ[0]], deltas=deltas, axes=axes)
    assert torch.equal(k[:9], expected[:9])
    with pytest.raises(
        ValueError, match=r"deltas: expected int64 \[4, num_axes\] .* got int64 \[4\]"
    ):
        run_plan(plan, [k], [], [INV_FREQ[0]], deltas=deltas[:, 0])


def test_repeated_rotation_drifts_within_the_generations() -> None:
    """Ten moves in place of a bf16 block: the drift that max_generations is for."""
    k = torch.randn(1, 16, 2, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    inv_freq = 10000.0 ** (-torch.arange(32) / 32)
    exact = reference.rotate(k, [100], inv_freq)
    generation = 0
    errors = []
    for _ in range(10):
        plan = plan_moves([0], [-1], [10], generations=[generation], max_generations=10)
        run_plan(plan, [k], [], [inv_freq])
        generation = int(plan.generations[0])
        partial = reference.rotate(k, [100 - 10 * generation], inv_freq)
        errors.append(float((partial - exact).norm() / exact.norm()))
    assert generation == 10
    assert all(error <= n * 2**-8 for n, error in enumerate(errors, 1))
    assert errors[-1] > 2 * errors[0]
    with pytest.raises(
        ValueError, match="max_generations = 10 times, got block 0 rotated 10 times"
    ):
        plan_moves([0], [-1], [10], generations=[generation], max_generations=10)
