"""How fast each head forgets, kept with the pages, and where `bounded` lets a replay start.

A head's state follows ``S <- exp(g) S (I - beta k k^T) + beta v k^T``, ``||k|| <= 1`` and beta from
0 to 2 (Tail-Replay, arXiv 2608.30310, section 2). No step makes an error larger than exp(g) times
what it was, which is the fixed-input bound of `kvspan.hybrid.plan`; and

    ||S_b|| <= exp(g_a+1 + ... + g_b) ||S_a|| + sum_j exp(g_j+1 + ... + g_b) beta_j ||v_j||

bounds the state where it was never seen: vLLM shows it only where steps end. Both sums are kept
per layer and head over cells of CELL tokens. Needs torch, not vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvspan.hybrid.groups import LayerMap
from kvspan.hybrid.plan import GroupPlan, budget
from kvspan.hybrid.policy import Policy

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

CELL = 64
DECAY, ADDED, WRITTEN = range(3)  # of a cell: sum of g, the second sum above, sum of beta ||v||
ROUNDING = 1.02  # sizes were computed from rounded values (bfloat16: 2^-8)
# Norms are known where steps end; where the replay does, a layer's may be smaller.
MARGIN = 0.5
_LEAST = float(np.finfo(np.float32).tiny)  # of a bound: 0 means exact


@dataclass(frozen=True)
class Cells:
    """What a page of `size` tokens keeps of gates, for each rank with its `heads`: float32 [cells,
    3, layers, heads], then norms [layers, heads] of the states at the end of the step that wrote
    to it last, NaN where not looked at."""

    size: int
    layers: int
    heads: int
    ranks: int = 1

    @property
    def per_page(self) -> int:
        return -(-self.size // CELL)

    @property
    def nbytes(self) -> int:
        return self.ranks * self._floats * 4

    @property
    def _floats(self) -> int:
        return (3 * self.per_page + 1) * self.layers * self.heads

    def part(self, held: Bytes, rank: int = 0) -> Floats:
        """All that a rank has written. A view."""
        floats: Floats = held.view(np.float32).reshape(self.ranks, self._floats)
        part: Floats = floats[rank]
        return part

    def sums(self, held: Bytes, rank: int = 0) -> Floats:
        """[cells, 3, layers, heads]. A view."""
        floats = self.part(held, rank)[: -self.layers * self.heads]
        return floats.reshape(self.per_page, 3, self.layers, self.heads)

    def norms(self, held: Bytes, rank: int = 0) -> Floats:
        """[layers, heads]. A view."""
        return self.part(held, rank)[-self.layers * self.heads :].reshape(self.layers, self.heads)

    def all_heads(self, view: Callable[[Bytes, int], Floats], held: Bytes) -> Floats:
        """`sums` or `norms` of all ranks, side by side."""
        return np.concatenate([view(held, rank) for rank in range(self.ranks)], -1)

    def add(
        self, held: Bytes, offset: int, decay: torch.Tensor, write: torch.Tensor, rank: int = 0
    ) -> None:
        """Tokens from `offset` of the page on have run; what is there before must have.

        decay, write: float32 [n, layers, heads], g and beta ||v||, on any device.
        """
        if offset == 0:
            self.norms(held, rank)[:] = np.nan
        sums, first = self.sums(held, rank), offset // CELL
        front, n = offset % CELL, len(decay)
        if n == 1:  # a decoded token
            one, written = decay[0].cpu().numpy(), write[0].cpu().numpy()
            cell = sums[first]
            if front == 0:
                cell[:] = 0
            cell[DECAY] += one
            cell[ADDED] = np.exp(one) * cell[ADDED] + written
            cell[WRITTEN] += written
            return
        count = -(-(front + n) // CELL)
        both = decay.new_zeros(2, count * CELL, self.layers, self.heads)
        both[0, front : front + n] = decay
        both[1, front : front + n] = write
        g, w = both.unflatten(1, (count, CELL))
        suffix = g.flip(1).cumsum(1).flip(1)
        later = torch.cat([suffix[:, 1:], torch.zeros_like(g[:, :1])], 1)
        new = torch.stack([suffix[:, 0], (later.exp() * w).sum(1), w.sum(1)], 1).cpu().numpy()
        if front:
            old = sums[first]
            new[0, ADDED] += np.exp(new[0, DECAY]) * old[ADDED]
            new[0, (DECAY, WRITTEN), :] += old[(DECAY, WRITTEN), :]
        sums[first : first + count] = new

    def cut(self, held: Bytes, end: int, rank: int = 0) -> None:
        """Leave what is sure of the page's first `end` tokens alone."""
        if end % CELL:
            cell = self.sums(held, rank)[end // CELL]
            cell[DECAY] = 0
            cell[ADDED] = cell[WRITTEN]


class Bounds(NamedTuple):
    """groups: where each starts. norms: what their bounds are relative to, of each group's layers.
    exact: where an exact replay would start instead."""

    eps: float
    groups: tuple[GroupPlan, ...]
    norms: tuple[tuple[float, ...], ...]
    exact: GroupPlan

    def exactly(self, parts: Mapping[int, int]) -> Bounds:
        """The same with every group replayed exactly, from the nearest state that there is."""
        groups = (_nearest(self.exact, parts.get(number)) for number in range(len(self.groups)))
        return self._replace(groups=tuple(groups))

    def hold(self, number: int, found: Sequence[float]) -> bool:
        """Whether the bound of group `number` is within eps, its layers' states having these norms
        after the replay: an exact one is smaller by the error at most."""
        bound = self.groups[number].bound or 0.0
        return all(
            bound * norm <= self.eps * (after - bound * norm)
            for norm, after in zip(self.norms[number], found, strict=True)
        )


def plan_bounded(
    policy: Policy, layers: LayerMap, length: int, state: int | None, pages: Sequence[Bytes],
    cells: Cells, parts: Mapping[int, int] | None = None,
) -> Bounds | None:  # fmt: skip
    """Where each group's replay starts, for a prefix of `length` tokens that `pages` cover.

    pages: their part that `cells` describes. state: position of the exact state to start from, if
    any. parts: by group, that of an exact state of its layers alone. None: only an exact restore is
    within the bound and its budget, or no norm is known.

    Heads that hardly forget are not carried alone as by marks in kvspan's own engine: vLLM shows
    heads only where steps end, where all of the state is kept, and the host tier takes no less for
    a few of them (docs/vllm.md). They make their group start from the nearest state of it.
    """
    known = [cells.all_heads(cells.norms, page) for page in pages]
    seen = [norms for norms in known if not np.isnan(norms).any()]
    if not seen:
        return None
    at, sums = _joined(pages, length, cells)
    norms = np.linalg.norm(seen[-1], axis=1)
    errors = _errors(sums, int(np.searchsorted(at, length - budget(length))))
    with np.errstate(divide="ignore", invalid="ignore"):
        bounds = np.linalg.norm(errors, axis=2) / norms  # [starts, layers]
    starts = at[len(at) - len(bounds) :]
    bounds[length - starts < policy.k_min] = np.inf
    exact = GroupPlan(state or 0, "zero" if state is None else "checkpoint", 0.0)
    of_group = [[layers.linear.index(layer) for layer in group.layers] for group in layers.groups]
    groups = []
    for number, linear in enumerate(of_group):
        worst = bounds[:, linear].max(1)
        good = np.flatnonzero((worst <= MARGIN * policy.value) & (starts > 0))
        plan = _nearest(exact, (parts or {}).get(number))
        if len(good) and (start := int(starts[good[-1]])) > plan.start:
            plan = GroupPlan(start, "zero", max(float(worst[good[-1]]), _LEAST))
        groups.append(plan)
    if not any(group.bound for group in groups):
        return None
    return Bounds(
        policy.value,
        tuple(groups),
        tuple(tuple(map(float, norms[linear])) for linear in of_group),
        exact,
    )


def _nearest(exact: GroupPlan, own: int | None) -> GroupPlan:
    """The exact plan of a group. own: position of a state of its layers alone."""
    return GroupPlan(own, "part", 0.0) if own and own > exact.start else exact


def _joined(pages: Sequence[Bytes], length: int, cells: Cells) -> tuple[NDArray[np.int64], Floats]:
    """The cells that end at `length` or before: where they begin, and the last ends; their sums."""
    first = np.arange(cells.per_page) * CELL
    begins = (np.arange(len(pages))[:, None] * cells.size + first).reshape(-1)
    ends = np.append(begins[1:], len(pages) * cells.size)
    count = int(np.searchsorted(ends, length, side="right"))
    held = [cells.all_heads(cells.sums, page) for page in pages]
    sums = np.concatenate(held)[:count]
    return np.append(begins[:count], ends[count - 1] if count else 0), sums


def _errors(sums: Floats, first: int) -> Floats:
    """[len(sums) + 1 - first, layers, heads]: what a replay from zero that starts with cell first,
    first + 1, ..., or behind the last one, can miss of the state after the last one.

    They never fall: what a later start misses is at least what one before misses.
    """
    left = np.concatenate([sums[::-1, DECAY].cumsum(0)[::-1], np.zeros_like(sums[:1, DECAY])])
    missed = ROUNDING * np.exp(left[1:]) * sums[:, ADDED]
    errors: Floats = np.concatenate([missed[:first].sum(0)[None], missed[first:]]).cumsum(0)
    return errors
