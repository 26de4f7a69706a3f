"""Move plans, simulated: no conflict within a batch, and the end state of gather-then-scatter."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvspan import reference
from kvspan.ops import MovePlan, copy_blocks, plan_moves, rerope

NUM_BLOCKS = 24
SCRATCH = [100, 101, 102]

Moves = tuple[list[int], list[int], list[int]]
# What a block holds: the block its content came from and the tokens it was rotated by since.
Pool = dict[int, tuple[int, int]]


def simulate(plan: MovePlan) -> Pool:
    """Run the plan, each batch in a shuffled order, and check every batch for conflicts."""
    pool: Pool = {}
    shuffle = random.Random(0).shuffle
    for src, dst, delta in plan.batches:
        assert src.dtype == dst.dtype == delta.dtype == np.int64
        assert len(src) == len(dst) == len(delta) > 0
        assert len(set(dst)) == len(dst), "a block is written twice in a batch"
        for i, block in enumerate(dst):
            readers = set(np.flatnonzero(src == block))
            assert readers <= {i}, "a block is written and read by others in a batch"
        order = list(range(len(src)))
        shuffle(order)
        for i in order:
            origin, rotated = pool.get(int(src[i]), (int(src[i]), 0))
            pool[int(dst[i])] = (origin, rotated + int(delta[i]))
    return pool


def check(moves: Moves, scratch: list[int] = SCRATCH) -> MovePlan:
    src, dst, delta = moves
    plan = plan_moves(src, dst, delta, scratch)
    pool = simulate(plan)
    for s, d, tokens in zip(src, dst, delta, strict=True):
        assert pool.get(d, (d, 0)) == (s, tokens)
    assert set(pool) <= set(dst) | set(scratch), "a block that is no destination was written"
    return plan


@st.composite
def any_moves(draw: st.DrawFn) -> Moves:
    """Distinct destinations, any sources: chains, fan-out, self moves, and some cycles."""
    dst = draw(st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True, max_size=NUM_BLOCKS))
    src = [draw(st.integers(0, NUM_BLOCKS - 1)) for _ in dst]
    return src, dst, [draw(st.integers(-3, 3)) for _ in dst]


@st.composite
def permutations(draw: st.DrawFn) -> Moves:
    """Nothing but cycles (and self moves)."""
    src = draw(st.permutations(range(draw(st.integers(0, NUM_BLOCKS)))))
    return list(src), list(range(len(src))), [draw(st.integers(-3, 3)) for _ in src]


@given(moves=any_moves() | permutations(), num_scratch=st.integers(1, 3))
def test_any_moves(moves: Moves, num_scratch: int) -> None:
    check(moves, SCRATCH[:num_scratch])


@given(moves=any_moves() | permutations())
def test_on_real_blocks(moves: Moves) -> None:
    """Copies and rotations, batch by batch in place, against gathering everything first."""
    src, dst, delta = moves
    inv_freq = torch.tensor([1.0, 0.5])
    k = torch.randn(NUM_BLOCKS + 1, 2, 1, 4, generator=torch.Generator().manual_seed(0))
    v = k.flip(-1).contiguous()
    expected_k, expected_v = k.clone(), reference.move_blocks(v, src, dst)
    reference.rerope(k, expected_k, src, dst, delta, inv_freq)
    for batch_src, batch_dst, batch_delta in plan_moves(src, dst, delta, [NUM_BLOCKS]).batches:
        rerope(k, k, batch_src, batch_dst, batch_delta, inv_freq)
        # A value only moves; rotating in place leaves it where it is.
        copy_blocks(v, v, batch_src, batch_dst)
    torch.testing.assert_close(k[:-1], expected_k[:-1], rtol=0, atol=1e-6)
    assert torch.equal(v[:-1], expected_v[:-1])


@pytest.mark.parametrize(
    ("src", "dst", "num_batches"),
    [
        ([], [], 0),
        ([0, 1, 2], [5, 6, 7], 1),
        ([0, 0, 0], [1, 2, 3], 1),
        ([0, 1, 2], [1, 2, 3], 3),
        ([3], [3], 1),
        ([3, 3], [3, 4], 2),
        ([0, 1], [1, 0], 3),
        ([0, 1, 2, 3], [1, 0, 3, 2], 3),
        ([0, 1, 1, 1], [1, 0, 8, 9], 3),
    ],
    ids=[
        "nothing", "independent", "fan-out", "chain", "self", "self-and-reader", "swap",
        "two-swaps", "swap-with-readers",
    ],
)  # fmt: skip
def test_number_of_batches(src: list[int], dst: list[int], num_batches: int) -> None:
    assert len(check((src, dst, [7] * len(src))).batches) == num_batches


def test_one_scratch_block_serves_every_cycle_in_turn() -> None:
    swaps: Moves = ([1, 0, 3, 2, 5, 4], [0, 1, 2, 3, 4, 5], [1] * 6)
    assert len(check(swaps, [9]).batches) > len(check(swaps, [9, 10, 11]).batches)


def test_in_place_without_rotation_is_left_out() -> None:
    assert plan_moves([3, 4], [3, 5], [0, 0]).num_moves == 1


def test_a_long_chain_and_a_long_cycle_are_linear() -> None:
    n = 200_000
    start = time.perf_counter()
    chain = plan_moves(np.arange(n), np.arange(1, n + 1), np.zeros(n, np.int64))
    cycle = plan_moves(np.arange(n), np.roll(np.arange(n), 1), np.zeros(n, np.int64), [n])
    # Well under a second; quadratic planning would take minutes.
    assert time.perf_counter() - start < 20
    assert (chain.num_moves, cycle.num_moves) == (n, n + 1)


@pytest.mark.parametrize(
    ("src", "dst", "delta", "scratch", "message"),
    [
        ([0, 1], [5, 5], [0, 0], [], "expected distinct blocks, got block 5 at both 0 and 1"),
        ([0], [1, 2], [0], [], r"dst_blocks: expected \[1\] like src_blocks, got \[2\]"),
        ([0], [1], [], [], r"deltas: expected \[1\] like src_blocks, got \[0\]"),
        ([-1], [1], [0], [], r"src_blocks\[0\]: expected a block id >= 0, got -1"),
        ([0, 1], [1, 0], [0, 0], [], "so 1 scratch block is needed, got 0"),
        ([0], [1], [0], [1], r"scratch_blocks\[0\]: block 1 is also a destination"),
        ([0], [1], [0], [0], "scratch_blocks: block 0 is also a source"),
        ([0], [1], [0], [7, 7], "scratch_blocks: expected distinct blocks, got block 7 twice"),
        ([[0]], [1], [0], [], r"src_blocks: expected one dimension, got \[1, 1\]"),
    ],
)
def test_bad_moves(
    src: list[int], dst: list[int], delta: list[int], scratch: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan_moves(src, dst, delta, scratch)


def test_other_integer_types_are_refused() -> None:
    with pytest.raises(TypeError, match="src_blocks: expected int64, got int32"):
        plan_moves(np.array([0], np.int32), [1], [0])
    with pytest.raises(TypeError, match="deltas: expected int64, got float64"):
        plan_moves([0], [1], [0.5])
