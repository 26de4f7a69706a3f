"""Runs move plans on a pool of labels and checks every rule that a plan promises."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from kvspan.ops import CHOOSE_BLOCK, MovePlan, StepKind, plan_moves

# What a block holds: the block its content came from and the tokens it was rotated by since.
Content = tuple[int, int]
# A block of the pool, or of the host: ("host", id).
Place = int | tuple[str, int]


@dataclass
class Problem:
    """Arguments of plan_moves."""

    src: list[int]
    dst: list[int]
    delta: list[int]
    scratch: list[int] = field(default_factory=list)
    ref_counts: list[int] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    host_blocks: int = 0
    num_layers: int = 1
    launch_budget: int | None = None
    max_depth: int | None = None
    max_generations: int | None = None

    def plan(self) -> MovePlan:
        return plan_moves(
            self.src,
            self.dst,
            self.delta,
            self.scratch,
            ref_counts=self.ref_counts,
            generations=self.generations,
            free_blocks=self.free,
            host_blocks=self.host_blocks,
            num_layers=self.num_layers,
            launch_budget=self.launch_budget,
            max_depth=self.max_depth,
            max_generations=self.max_generations,
        )

    def refs(self, block: int) -> int:
        return self.ref_counts[block] if self.ref_counts else 0


def places(plan: MovePlan, step: int) -> tuple[Place, Place]:
    """Where a step reads and writes."""
    src, dst = int(plan.src_blocks[step]), int(plan.dst_blocks[step])
    kind = StepKind(plan.kinds[step])
    return (
        ("host", src) if kind is StepKind.FROM_HOST else src,
        ("host", dst) if kind is StepKind.TO_HOST else dst,
    )


def simulate(plan: MovePlan) -> tuple[dict[Place, Content], dict[Place, int]]:
    """Run the plan, each batch in a shuffled order; check every batch for conflicts.

    Returns what every written place holds, and how often that content was rotated by the plan.
    """
    pool: dict[Place, Content] = {}
    rotations: dict[Place, int] = {}
    shuffle = random.Random(0).shuffle
    for batch in plan.batches():
        steps = list(range(batch.start, batch.stop))
        assert steps, "an empty batch"
        reads = [places(plan, step)[0] for step in steps]
        writes = [places(plan, step)[1] for step in steps]
        assert len(set(writes)) == len(writes), "a block is written twice in a batch"
        readers: dict[Place, set[int]] = {}
        for step, place in zip(steps, reads, strict=True):
            readers.setdefault(place, set()).add(step)
        for step, place in zip(steps, writes, strict=True):
            assert readers.get(place, set()) <= {step}, "written and read in one batch"
        shuffle(steps)
        for step in steps:
            src, dst = places(plan, step)
            delta = int(plan.deltas[step])
            unwritten = src not in pool
            assert not (unwritten and isinstance(src, tuple)), "a host block read before written"
            origin, rotated = (int(src), 0) if unwritten else pool[src]  # type: ignore[arg-type]
            pool[dst] = (origin, rotated + delta)
            rotations[dst] = rotations.get(src, 0) + (delta != 0)
    return pool, rotations


def check(problem: Problem) -> MovePlan:
    """Plan, simulate, and compare with gathering all sources first and scattering them."""
    plan = problem.plan()
    pool, rotations = simulate(plan)
    check_destinations(problem, plan)
    destinations = plan.destinations.tolist()
    for i, dst in enumerate(destinations):
        expected = (problem.src[i], problem.delta[i])
        assert pool.get(dst, (dst, 0)) == expected, f"move {i}"
        before = problem.generations[problem.src[i]] if problem.generations else 0
        assert plan.generations[i] == before + (problem.delta[i] != 0)
        assert rotations.get(dst, 0) == (problem.delta[i] != 0), "rotated more than once"
        if problem.max_generations is not None:
            assert problem.delta[i] == 0 or plan.generations[i] <= problem.max_generations
    written = {place for place in pool if isinstance(place, int)}
    assert written <= set(destinations) | set(problem.scratch), "no destination, but written"
    assert not any(problem.refs(block) for block in written), "a referenced block was written"
    check_budgets(problem, plan)
    check_kinds(problem, plan)
    return plan


def check_destinations(problem: Problem, plan: MovePlan) -> None:
    free = iter(problem.free)
    for i, dst in enumerate(plan.destinations.tolist()):
        src = problem.src[i]
        if problem.dst[i] != CHOOSE_BLOCK:
            assert dst == problem.dst[i]
        elif dst != src:
            assert dst == next(free), "free blocks are taken in their order"
            in_use = [d for j, d in enumerate(plan.destinations.tolist()) if j != i]
            assert problem.refs(src) or src in in_use, "in place was possible"
        else:
            assert problem.refs(src) == 0
    assert len(set(plan.destinations.tolist())) == len(problem.src)


def check_budgets(problem: Problem, plan: MovePlan) -> None:
    stats = plan.stats
    sizes = np.diff(plan.batch_offsets)
    launches = 0
    for size, fused in zip(sizes.tolist(), plan.fused.tolist(), strict=True):
        if problem.launch_budget is None:
            assert fused
        else:
            assert size <= problem.launch_budget
            assert fused == (size * problem.num_layers <= problem.launch_budget)
        launches += 1 if fused else problem.num_layers
    assert stats.num_launches == launches
    kinds = plan.kinds
    scratch = set(plan.dst_blocks[kinds == StepKind.TO_SCRATCH].tolist())
    host = set(plan.dst_blocks[kinds == StepKind.TO_HOST].tolist())
    assert scratch <= set(problem.scratch) and len(scratch) == stats.scratch_used
    assert all(0 <= block < problem.host_blocks for block in host)
    assert len(host) == stats.host_used


def check_kinds(problem: Problem, plan: MovePlan) -> None:
    kinds = [StepKind(kind) for kind in plan.kinds]
    for step, kind in enumerate(kinds):
        src, dst, move = plan.src_blocks[step], plan.dst_blocks[step], int(plan.moves[step])
        saves = kind in (StepKind.TO_SCRATCH, StepKind.TO_HOST)
        assert (move == -1) == saves
        assert (kind is StepKind.IN_PLACE) == (src == dst and not saves and kind.name[:4] != "FROM")
        if saves:
            assert plan.deltas[step] == 0
            continue
        assert dst == plan.destinations[move] and plan.deltas[step] == problem.delta[move]
        assert (kind in (StepKind.FROM_SCRATCH, StepKind.FROM_HOST)) or src == problem.src[move]
    done = [
        i
        for i, dst in enumerate(plan.destinations)
        if (dst, 0) != (problem.src[i], problem.delta[i])
    ]
    assert sorted(m for m in plan.moves.tolist() if m >= 0) == done
    for block in set(problem.src):
        moves = {i for i, src in enumerate(problem.src) if src == block}
        duplicates = {
            m for m, kind in zip(plan.moves, kinds, strict=True) if kind is StepKind.DUPLICATE
        }
        copied = {i for i in moves if i in duplicates}
        assert len(copied) < len(moves), "one move of a source is no duplicate"
    stats = plan.stats
    assert stats.num_copies == sum(kind is not StepKind.IN_PLACE for kind in kinds)
    assert stats.num_in_place == kinds.count(StepKind.IN_PLACE)
    assert stats.num_duplicates == kinds.count(StepKind.DUPLICATE)
    assert stats.num_saved == kinds.count(StepKind.TO_SCRATCH)
    assert stats.num_staged == kinds.count(StepKind.TO_HOST)
