"""Plans of restores: where each group's replay starts, from what, and with which error bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kvspan.hybrid.groups import Group, LayerMap
from kvspan.hybrid.pieces import CHUNK, PIECE
from kvspan.hybrid.policy import Policy
from kvspan.hybrid.state import Mark, RecurrentState

Start = Literal["zero", "checkpoint", "mark", "part"]
BUDGET = 0.25  # of the matched tokens, what `bounded` may replay before it falls back to exact
BUDGET_MIN = 1024  # but this many it always may


@dataclass(frozen=True)
class GroupPlan:
    """Replay of one group over tokens [start, boundary).

    source: what its layers start from: zeros, a full checkpoint, one of this group alone ("part",
    under vLLM), or zeros but for the heads that `mark` carries, which are put in where the replay
    passes it. bound: of the fixed-input error
    of any of its layers' states at the boundary, relative to that state's norm (0: exact; None:
    not known). It does not cover what wrong inputs of the group's deeper layers add.
    """

    start: int
    source: Start
    bound: float | None
    mark: Mark | None = None


@dataclass(frozen=True)
class RestorePlan:
    """boundary: the position whose state is restored, and from which tokens are computed again.

    It is the matched length, or for an exact plan a position up to PIECE before: those tokens are
    computed anew in the very piece that the next ones need anyway, and keep their bits.
    """

    policy: Policy
    matched: int
    boundary: int
    groups: tuple[GroupPlan, ...]
    checkpoint: RecurrentState | None

    @property
    def exact(self) -> bool:
        return all(group.bound == 0 and group.source != "mark" for group in self.groups)


DecaySum = Callable[[int, int], Tensor]  # (start, end) -> sum of log decays, [layers, Hv]


def plan_exact(
    policy: Policy,
    matched: int,
    groups: int,
    checkpoint: RecurrentState | None,
    *,
    on_grid: bool = True,
) -> RestorePlan:
    """From the newest checkpoint at or before the matched length, or from the start.

    on_grid: False restores the state at the matched length itself, as a prefill that was split
    there would have it; going on from the grid instead equals a prefill that was not split.
    """
    at = checkpoint.position if checkpoint else 0
    boundary = matched
    if on_grid:
        grid = matched // CHUNK * CHUNK
        boundary = at if at > grid or at // PIECE == grid // PIECE else grid
    plan = GroupPlan(at, "checkpoint" if checkpoint else "zero", 0.0)
    return RestorePlan(policy, matched, boundary, (plan,) * groups, checkpoint)


def plan_restore(
    policy: Policy,
    matched: int,
    layers: LayerMap,
    checkpoint: RecurrentState | None,
    marks: Sequence[Mark] = (),
    decays: DecaySum | None = None,
) -> RestorePlan:
    """How to restore the state after `matched` tokens.

    checkpoint: the newest at or before it. marks: newest first, for `bounded`, as is decays.
    """
    if policy.kind == "exact":
        return plan_exact(policy, matched, len(layers.groups), checkpoint)
    if policy.kind == "zero":
        nothing = GroupPlan(matched, "zero", 1.0 if matched else 0.0)
        return RestorePlan(policy, matched, matched, (nothing,) * len(layers.groups), None)
    plans = [_plan_group(policy, matched, layers, g, marks, decays) for g in layers.groups]
    return settle(policy, matched, plans, checkpoint)


def settle(
    policy: Policy,
    matched: int,
    plans: Sequence[GroupPlan | None],
    checkpoint: RecurrentState | None,
) -> RestorePlan:
    """A plan of the groups' plans; None, or what begins no later, is replayed exactly instead."""
    groups = list(plans)
    if checkpoint is not None:
        saved = GroupPlan(checkpoint.position, "checkpoint", 0.0)
        groups = [saved if p is None or p.start <= saved.start else p for p in groups]
    zero = GroupPlan(0, "zero", 0.0)
    plan = RestorePlan(policy, matched, matched, tuple(p or zero for p in groups), checkpoint)
    return plan_exact(policy, matched, len(groups), checkpoint) if plan.exact else plan


def budget(matched: int) -> int:
    """How many of the matched tokens `bounded` replays at the most."""
    return max(BUDGET_MIN, math.ceil(BUDGET * matched))


def _plan_group(
    policy: Policy,
    matched: int,
    layers: LayerMap,
    group: Group,
    marks: Sequence[Mark],
    decays: DecaySum | None,
) -> GroupPlan | None:
    """The shortest replay that the policy allows; None where only an exact one does."""
    if policy.kind == "ratio":
        k = max(policy.k_min, math.ceil(policy.value * matched))
        start = max(0, matched - k)
        return GroupPlan(start, "zero", 0.0 if start == 0 else None)
    numbers = [layers.linear.index(layer) for layer in group.layers]
    longest = budget(matched)
    for i, mark in enumerate(marks):
        # Where a mark carries heads of deeper layers, the replay begins one mark before: those
        # heads never forget what they read, and read it from layers that are still warming up.
        warm = any(len(mark.which[number]) for number in numbers[1:])
        if decays is None or i + warm == len(marks):
            break
        first = marks[i + warm]
        if matched - first.position > longest:
            break
        if matched - mark.position >= policy.k_min:
            decay = decays(first.position, matched)
            bound = fixed_input_bound(first, mark, marks[0], decay, numbers)
            if bound <= policy.value:
                return GroupPlan(first.position, "mark", bound, mark)
    return GroupPlan(0, "zero", 0.0) if matched <= longest else None


def fixed_input_bound(
    start: Mark, mark: Mark, newest: Mark, decay: Tensor, numbers: Sequence[int]
) -> float:
    """Largest relative error over layers that start from zero at one mark, heads but at another.

    With ||k|| <= 1 and beta in [0, 2] no step makes a state's error larger than exp(g) times what
    it was, so that of a head is at most exp(sum g) ||S||; heads that `mark` carries have none.
    decay: float32 [layers, Hv], sum of g from start to the boundary. Relative to the layer's norm
    at the newest mark.
    """
    worst = 0.0
    for number in numbers:
        error = decay[number].double().exp() * start.norms[number].double()
        error[mark.which[number]] = 0.0
        norm = float(newest.norms[number].double().norm())
        bound = float(error.norm())
        worst = max(worst, bound / norm if norm else (math.inf if bound else 0.0))
    return worst


def make_mark(
    state: RecurrentState, recent_decay: Tensor, recent_tokens: int, forget: float = 1e-3
) -> Mark:
    """The mark of an exact state.

    recent_decay: float32 [layers, Hv], sum of g over the last recent_tokens tokens. A head that
    at this rate would keep more than `forget` of its state over BUDGET_MIN tokens is carried.
    """
    norms = torch.stack([ssm.flatten(1).norm(dim=1) for ssm in state.ssm])
    slow = recent_decay * (BUDGET_MIN / max(1, recent_tokens)) > math.log(forget)
    which = tuple(torch.nonzero(row).flatten() for row in slow)
    heads = tuple(ssm[heads] for ssm, heads in zip(state.ssm, which, strict=True))
    return Mark(state.position, norms, which, heads)


def record(
    plan: RestorePlan, exact: bool, bytes_moved: int, bytes_per_token: int
) -> dict[str, Any]:
    """What a request's record says of its restore.

    exact: of the whole, sources included. bytes_per_token: what is cached of a token, KV and
    hidden vectors.
    """
    return {
        "policy": str(plan.policy),
        "matched_tokens": plan.matched,
        "exact": exact,
        "groups": [
            {
                "replayed_tokens": max(0, plan.boundary - group.start),
                "start": group.source,
                "bound": group.bound,
            }
            for group in plan.groups
        ],
        "bytes_moved": bytes_moved,
        "bytes_per_token": bytes_per_token,
    }
