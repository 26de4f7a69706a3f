"""Restores recurrent states at any token: each group's LA layers over its last hidden vectors."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvspan.engine.attention import Slots
from kvspan.hybrid.groups import Group
from kvspan.hybrid.pieces import Rows
from kvspan.hybrid.plan import GroupPlan, RestorePlan
from kvspan.hybrid.rows import HybridRunner
from kvspan.hybrid.state import Mark, RecurrentState

TAIL_ROWS = 512  # rows of a pass of an approximate replay

# Of a group's last layer: all of it, its FFN left out, or nothing computed but its state.
LastLayer = Literal["full", "mixer", "state"]


@dataclass(frozen=True)
class ReplayOptions:
    """side_by_side: groups in threads of their own, which on two cores has cost more than it gave
    (bench/replay_ttft.py). last: others than `state` are for ablation."""

    side_by_side: bool = False
    last: LastLayer = "state"


@dataclass(frozen=True)
class Restored:
    """bytes_moved: hidden vectors and states that were read."""

    state: RecurrentState
    bytes_moved: int


def restore(
    runner: HybridRunner,
    tokens: Tensor,
    slots: Slots,
    plan: RestorePlan,
    options: ReplayOptions | None = None,
) -> Restored:
    """The state at plan.boundary. tokens int64, slots: of the sequence, cached up to the boundary.

    Exact groups run in the pieces that a prefill runs in, and give the same bits.
    """
    options = options or ReplayOptions()
    state = runner.new_state()
    state.position = plan.boundary
    moved = 0
    for group, part in zip(runner.map.groups, plan.groups, strict=True):
        moved += _start(runner, plan, group, part, state)
        if group.source is not None:
            vectors = runner.hidden.vectors[runner.stream_number[group.source]]
            moved += max(0, plan.boundary - part.start) * vectors.shape[1] * vectors.itemsize
    work = [
        (group, part)
        for group, part in zip(runner.map.groups, plan.groups, strict=True)
        if part.start < plan.boundary
    ]

    def one(item: tuple[Group, GroupPlan]) -> None:
        group, part = item
        replay_group(runner, tokens, slots, group, part, plan.boundary, state, options.last)

    workers = min(len(work), torch.get_num_threads())
    # Bits may depend on the number of threads of a product: exact replays keep the prefill's.
    if options.side_by_side and workers > 1 and tokens.device.type == "cpu" and not plan.exact:
        with _threads_each(workers), ThreadPoolExecutor(workers) as pool:
            list(pool.map(one, work))
    else:
        for item in work:
            one(item)
    return Restored(state, moved)


@contextmanager
def _threads_each(workers: int) -> Iterator[None]:
    """Share torch's threads among workers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // workers))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _start(
    runner: HybridRunner, plan: RestorePlan, group: Group, part: GroupPlan, state: RecurrentState
) -> int:
    """Put what a group starts from into the state; bytes read."""
    moved = 0
    for layer in group.layers:
        number = runner.linear_number[layer]
        if part.source == "checkpoint":
            assert plan.checkpoint is not None
            state.conv[number] = plan.checkpoint.conv[number].clone()
            state.ssm[number] = plan.checkpoint.ssm[number]
            moved += state.conv[number].nbytes + state.ssm[number].nbytes
        elif part.mark is not None:
            moved += part.mark.heads[number].nbytes
    return moved


@torch.inference_mode()
def replay_group(
    runner: HybridRunner,
    tokens: Tensor,
    slots: Slots,
    group: Group,
    plan: GroupPlan,
    boundary: int,
    state: RecurrentState,
    last: LastLayer = "state",
) -> None:
    """Replay tokens [plan.start, boundary) of one group, from and to its part of the state."""
    exact = plan.bound == 0 and plan.source != "mark"
    if not exact:
        _prime(runner, tokens, slots, group, plan.start, state)
    at = plan.start
    while at < boundary:
        end = boundary
        if plan.mark is not None and at <= plan.mark.position:
            end = plan.mark.position
            if at == end:
                _put_heads(runner, group, plan.mark, state)
                end = boundary
        rows = Rows.piece(at, end) if exact else Rows.tight(at, min(at + TAIL_ROWS, end))
        x = rows.spread(group_input(runner, tokens, slots, group, at, rows.hi))
        for layer in group.layers[:-1]:
            x, _ = runner.linear(layer, rows, x, state)
        if last == "full":
            runner.linear(group.layers[-1], rows, x, state)
        elif last == "mixer":
            runner.mixer(group.layers[-1], rows, x, state)
        elif exact:
            runner.state_only(group.layers[-1], rows, x, state)
        else:
            runner.tail_state_only(group.layers[-1], rows, x, state)
        at = rows.hi


def _put_heads(runner: HybridRunner, group: Group, mark: Mark, state: RecurrentState) -> None:
    """The heads that a mark carries, as they were there."""
    for layer in group.layers:
        number = runner.linear_number[layer]
        state.ssm[number] = state.ssm[number].clone()
        state.ssm[number][mark.which[number]] = mark.heads[number]


def group_input(
    runner: HybridRunner, tokens: Tensor, slots: Slots, group: Group, lo: int, hi: int
) -> Tensor:
    """What a group's first layer takes in for tokens [lo, hi): [hi - lo, H]."""
    if group.source is None:
        return runner.family.embed(tokens[lo:hi])
    return runner.hidden.read(runner.stream_number[group.source], slots.ids[lo:hi])


def _prime(
    runner: HybridRunner,
    tokens: Tensor,
    slots: Slots,
    group: Group,
    start: int,
    state: RecurrentState,
) -> None:
    """The first layer's last convolution inputs before start, exactly; deeper layers keep zeros."""
    layer = group.layers[0]
    number = runner.linear_number[layer]
    lo = max(0, start - (runner.family.sizes.width - 1))
    if lo == start:
        return
    x = group_input(runner, tokens, slots, group, lo, start)
    mixed = runner.family.project(layer, x, outputs=False).mixed
    state.conv[number][:, lo - start :] = mixed.T
