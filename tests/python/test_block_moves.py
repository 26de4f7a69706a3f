"""Move plans, simulated: no conflict within a batch, and the end state of gather-then-scatter."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvspan.ops import CHOOSE_BLOCK, StepKind, plan_moves
from move_simulator import Problem, check

NUM_BLOCKS = 24
FREE = list(range(NUM_BLOCKS, 2 * NUM_BLOCKS))
SCRATCH = list(range(2 * NUM_BLOCKS, 3 * NUM_BLOCKS))

Moves = tuple[list[int], list[int], list[int]]


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


@st.composite
def chains(draw: st.DrawFn) -> Moves:
    """Every block to the next, from several starts: the deepest plans."""
    starts = draw(st.lists(st.integers(0, NUM_BLOCKS - 2), unique=True, min_size=1))
    src = [block for block in range(NUM_BLOCKS - 1) if block not in starts]
    return src, [block + 1 for block in src], [1] * len(src)


some_moves = any_moves() | permutations() | chains()
budgets = st.none() | st.integers(1, 40)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Moves with everything that can be asked for, and room enough to do it."""
    src, dst, delta = draw(some_moves)
    chosen = [draw(st.booleans()) and draw(st.booleans()) for _ in dst]
    dst = [CHOOSE_BLOCK if c else block for c, block in zip(chosen, dst, strict=True)]
    refs = [draw(st.integers(0, 2)) * (b not in dst) for b in range(NUM_BLOCKS)]
    return Problem(
        src,
        dst,
        delta,
        scratch=SCRATCH[: draw(st.integers(0, 4))],
        ref_counts=refs + [0] * 2 * NUM_BLOCKS,
        generations=[draw(st.integers(0, 4)) for _ in range(3 * NUM_BLOCKS)],
        free=FREE,
        host_blocks=NUM_BLOCKS,
        num_layers=draw(st.integers(1, 4)),
        launch_budget=draw(budgets),
        max_depth=draw(st.none() | st.integers(2, 6)),
        max_generations=5,
    )


@given(moves=some_moves, num_scratch=st.integers(1, 3), launch_budget=budgets)
def test_any_moves(moves: Moves, num_scratch: int, launch_budget: int | None) -> None:
    check(Problem(*moves, scratch=SCRATCH[:num_scratch], launch_budget=launch_budget))


@given(problem=problems())
def test_any_problem(problem: Problem) -> None:
    check(problem)


@given(moves=permutations(), num_scratch=st.integers(1, 4), launch_budget=budgets)
def test_a_permutation_costs_one_copy_a_block_and_one_a_cycle(
    moves: Moves, num_scratch: int, launch_budget: int | None
) -> None:
    plan = check(Problem(*moves, scratch=SCRATCH[:num_scratch], launch_budget=launch_budget))
    src, dst, delta = moves
    num_moved, cycles, seen = 0, [], set()
    for start, target in zip(src, dst, strict=True):
        size = 0
        num_moved += start != target
        while start not in seen:
            seen.add(start)
            size, start = size + 1, dst[src.index(start)]
        cycles += [size] if size > 1 else []
    assert plan.stats.num_copies == num_moved + len(cycles)
    assert plan.stats.num_cycles == plan.stats.num_saved == len(cycles)
    assert plan.stats.largest_cycle == max(cycles, default=0)
    assert plan.stats.num_in_place == sum(
        s == d and tokens != 0 for s, d, tokens in zip(src, dst, delta, strict=True)
    )


@given(moves=some_moves, max_depth=st.integers(2, 8))
def test_depth_is_bounded_where_scratch_is_not(moves: Moves, max_depth: int) -> None:
    plan = check(Problem(*moves, scratch=SCRATCH, max_depth=max_depth))
    assert plan.num_batches <= max_depth


@given(moves=some_moves, launch_budget=st.integers(1, 6))
def test_without_cycles_no_plan_has_fewer_batches(moves: Moves, launch_budget: int) -> None:
    """The bound of Hu's algorithm: steps with h or more behind them need h batches more."""
    problem = Problem(*moves, launch_budget=launch_budget)
    writer = dict(zip(problem.dst, range(len(problem.dst)), strict=True))
    noop = [(s, t) == (d, 0) for s, d, t in zip(*moves, strict=True)]
    waits_for_me = [writer.get(s) for s in problem.src]
    behind = []
    for i in range(len(problem.src)):
        height, at = 0, i
        while (after := waits_for_me[at]) is not None and after != at and not noop[after]:
            height, at = height + 1, after
            if height > len(problem.src):
                return  # a cycle
        behind.append(height)
    behind = [h for h, skip in zip(behind, noop, strict=True) if not skip]
    bound = max((h + -(-sum(b >= h for b in behind) // launch_budget) for h in behind), default=0)
    assert check(problem).num_batches == bound


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
    assert check(Problem(src, dst, [7] * len(src), scratch=SCRATCH)).num_batches == num_batches


def test_one_scratch_block_serves_every_cycle_in_turn() -> None:
    swaps = ([1, 0, 3, 2, 5, 4], [0, 1, 2, 3, 4, 5], [1] * 6)
    assert check(Problem(*swaps, scratch=SCRATCH[:1])).num_batches == 9
    assert check(Problem(*swaps, scratch=SCRATCH[:3])).num_batches == 3


def test_in_place_without_rotation_is_left_out() -> None:
    assert check(Problem([3, 4], [3, 5], [0, 0])).num_steps == 1


class TestChosenDestinations:
    def test_in_place_where_nobody_else_wants_the_source(self) -> None:
        plan = check(Problem([3], [CHOOSE_BLOCK], [5], free=[8]))
        assert plan.destinations.tolist() == [3]
        assert plan.kinds.tolist() == [StepKind.IN_PLACE]

    def test_a_referenced_source_is_copied(self) -> None:
        refs = [0, 0, 0, 1, 0, 0, 0, 0, 0]
        for delta in (0, 5):
            plan = check(Problem([3], [CHOOSE_BLOCK], [delta], free=[8], ref_counts=refs))
            assert plan.destinations.tolist() == [8]

    def test_the_last_of_several_requests_takes_the_source(self) -> None:
        plan = check(Problem([3, 3, 3], [CHOOSE_BLOCK] * 3, [5, 6, 7], free=[8, 9]))
        assert plan.destinations.tolist() == [3, 8, 9]
        kinds = [StepKind(kind).name for kind in plan.kinds]
        assert kinds == ["DUPLICATE", "DUPLICATE", "IN_PLACE"]

    def test_the_move_that_stays_takes_the_source(self) -> None:
        plan = check(Problem([3, 3], [CHOOSE_BLOCK] * 2, [5, 0], free=[8]))
        assert plan.destinations.tolist() == [8, 3]
        assert plan.num_steps == 1

    def test_a_source_that_another_move_writes_is_copied(self) -> None:
        plan = check(Problem([3, 4], [CHOOSE_BLOCK, 3], [5, 5], free=[8]))
        assert plan.destinations.tolist() == [8, 3]


class TestHostStaging:
    SWAPS = ([1, 0, 3, 2], [0, 1, 2, 3], [1] * 4)

    def test_cycles_without_scratch_go_through_the_host(self) -> None:
        plan = check(Problem(*self.SWAPS, host_blocks=1))
        assert (plan.stats.num_staged, plan.stats.host_used, plan.num_batches) == (2, 1, 6)

    def test_only_components_that_do_not_fit_are_staged(self) -> None:
        ring = list(range(10, 20))
        src, dst = [1, 0, *ring], [0, 1, *ring[1:], ring[0]]
        plan = check(Problem(src, dst, [1] * 12, scratch=[30, 31], host_blocks=5, max_depth=3))
        assert (plan.stats.num_saved, plan.stats.num_staged, plan.stats.host_used) == (1, 5, 5)
        assert plan.num_batches == 3

    def test_refused_where_not_allowed(self) -> None:
        message = (
            r"scratch_blocks: expected at least 1, for the moves that wait for each other through "
            r"block [0-3], got 0 \(or host_blocks of 1, got 0\)"
        )
        with pytest.raises(ValueError, match=message):
            plan_moves(*self.SWAPS)


def test_small_batches_are_fused() -> None:
    src, dst = [0, 1, 2, 2, 2], [1, 9, 6, 7, 8]
    plan = check(Problem(src, dst, [1] * 5, num_layers=8, launch_budget=16))
    assert np.diff(plan.batch_offsets).tolist() == [4, 1]
    assert plan.fused.tolist() == [False, True]
    assert plan.stats.num_launches == 9


def test_generations_bound_the_drift() -> None:
    generations = [0, 7, 8, 0, 0, 0]
    problem = Problem([0, 1, 2], [3, 4, 5], [9, 9, 0], generations=generations, max_generations=8)
    assert check(problem).generations.tolist() == [1, 8, 8]
    problem.delta[2] = 1
    with pytest.raises(
        ValueError,
        match=r"src_blocks\[2\]: .* max_generations = 8 times, got block 2 rotated 8 times",
    ):
        problem.plan()


def test_million_moves_need_no_stack() -> None:
    n = 1_000_000
    blocks, deltas = np.arange(n), np.ones(n, np.int64)
    assert plan_moves(blocks, blocks + 1, deltas).num_batches == n
    cycle = plan_moves(blocks, np.roll(blocks, 1), deltas, [n])
    assert (cycle.num_steps, cycle.num_batches) == (n + 1, n + 1)
    assert plan_moves(blocks, np.roll(blocks, 1), deltas, [n], launch_budget=1).num_batches == n + 1


def test_plans_are_plain_data() -> None:
    plan = plan_moves([0, 1], [1, 0], [3, 4], [9])
    copy = pickle.loads(pickle.dumps(plan))
    for name in ("kinds", "src_blocks", "dst_blocks", "deltas", "moves", "fused", "generations"):
        ours, theirs = getattr(plan, name), getattr(copy, name)
        assert ours.dtype == theirs.dtype and ours.tolist() == theirs.tolist()
    assert copy.stats == plan.stats
    with pytest.raises(ValueError, match="read-only"):
        plan.deltas[0] = 1


def test_arrays_outlive_the_plan() -> None:
    deltas = [plan_moves([0], [1], [i]).deltas for i in range(200)]
    assert [int(d[0]) for d in deltas] == list(range(200))


@pytest.mark.parametrize("spread", [1, 10**12], ids=["dense-ids", "sparse-ids"])
def test_block_ids_may_be_far_apart(spread: int) -> None:
    for order in itertools.permutations(range(4)):
        src, dst = list(range(4)), list(order)
        near = plan_moves(src, dst, [1] * 4, [9])
        far = plan_moves(
            [b * spread for b in src], [b * spread for b in dst], [1] * 4, [9 * spread]
        )
        assert (near.src_blocks * spread).tolist() == far.src_blocks.tolist()
        assert near.batch_offsets.tolist() == far.batch_offsets.tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dst": [5, 5]}, "expected distinct blocks, got block 5 at both 0 and 1"),
        ({"dst": [1]}, r"dst_blocks: expected \[2\] like src_blocks, got \[1\]"),
        ({"delta": []}, r"deltas: expected \[2\] like src_blocks, got \[0\]"),
        ({"src": [-1, 1]}, r"src_blocks\[0\]: expected a block id >= 0, got -1"),
        ({"dst": [7, -2]}, r"dst_blocks\[1\]: expected a block id >= 0, got -2"),
        ({"scratch": [6]}, r"scratch_blocks\[0\]: block 6 is also a destination"),
        ({"scratch": [0]}, r"src_blocks\[0\]: block 0 is also a free or scratch block"),
        ({"free": [7]}, r"free_blocks\[0\]: block 7 is also a destination"),
        ({"scratch": [8, 8]}, r"scratch_blocks\[1\]: expected a block that is not free or scratch"),
        ({"scratch": [8], "free": [8]}, r"scratch_blocks\[0\]: expected a block that is not free"),
        ({"dst": [-1, -1], "ref_counts": [1] * 8}, "free_blocks: expected at least 2 .* got 0"),
        ({"ref_counts": [0] * 7}, r"dst_blocks\[1\]: expected a block in \[0, 7\) of ref_counts"),
        ({"generations": [0]}, r"dst_blocks\[0\]: expected a block in \[0, 1\) of generations"),
        ({"generations": [-1] * 8}, r"generations\[0\]: expected 0 or more, got -1"),
        ({"ref_counts": [0] * 6 + [2, 0]}, r"dst_blocks\[0\]: .* got block 6 with 2 references"),
        (
            {"ref_counts": [1] * 9, "dst": [0, 1]},
            r"dst_blocks\[0\]: expected an unreferenced block",
        ),
        ({"launch_budget": 0}, "launch_budget: expected 1 or more, got 0"),
        ({"num_layers": 0}, "num_layers: expected 1 or more, got 0"),
        ({"max_depth": 1}, "max_depth: expected 2 or more, got 1"),
        ({"host_blocks": -1}, "host_blocks: expected 0 or more, got -1"),
        ({"max_generations": -1}, "max_generations: expected 0 or more, got -1"),
    ],
)
def test_bad_arguments(arguments: dict[str, list[int]], message: str) -> None:
    good: dict[str, list[int]] = {"src": [0, 1], "dst": [6, 7], "delta": [3, 3]}
    with pytest.raises(ValueError, match=message):
        Problem(**(good | arguments)).plan()  # type: ignore[arg-type]


def test_other_types_are_refused() -> None:
    with pytest.raises(TypeError, match="src_blocks: expected int64, got int32"):
        plan_moves(np.array([0], np.int32), [1], [0])
    with pytest.raises(TypeError, match="deltas: expected int64, got float64"):
        plan_moves([0], [1], [0.5])
    with pytest.raises(ValueError, match=r"src_blocks: expected one dimension, got \[1, 1\]"):
        plan_moves([[0]], [1], [0])
