"""What a request takes from the store: how far it matches, and where the replay of its tail starts.

Knows nothing of vLLM, so that it can be tested without one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from kvspan.host import View
from kvspan.host.pages import Spans
from kvspan.hybrid.groups import LayerMap
from kvspan.hybrid.plan import GroupPlan, budget
from kvspan.vllm.hybrid.decay import Bounds, plan_bounded
from kvspan.vllm.hybrid.entries import FoundState, Match, state_name
from kvspan.vllm.hybrid.geometry import Geometry, page_of
from kvspan.vllm.hybrid.policy import Policy
from kvspan.vllm.hybrid.store import PageStore


@dataclass
class Settings:
    """page: tokens per page. every: tokens between kept states. least: a shorter match than this
    is computed again instead. decode: whether generated tokens are kept too. pair: whether hidden
    vectors are kept so that a replay of them is exact. layers: of the model, for "bounded"."""

    page: int
    policy: Policy = field(default_factory=Policy)
    every: int = 2048
    least: int = 1
    decode: bool = True
    pair: bool = True
    layers: LayerMap | None = None


@dataclass
class ReplayAudit:
    """What became of one request, in tokens.

    matched: taken from the cache. replayed: of those, run again through the linear-attention
    layers. state_from: the position of the exact state it started from; 0 is the start of the
    prompt, -1 zero in the middle of it. exact: whether the state was rebuilt without approximation.
    bytes: of KV, hidden vectors and state that were moved. groups: of "bounded", for each group
    what was replayed, from what (a "checkpoint", a "part" of one that this group has alone, or
    "zero") and the bound of its error; the bound is 0 where it was replayed exactly.
    """

    policy: str = "exact"
    matched: int = 0
    replayed: int = 0
    state_from: int = 0
    exact: bool = True
    bytes: int = 0
    refused: str = ""
    groups: list[dict[str, Any]] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Plan:
    """One restore: KV and state of `length` tokens, of which `local` are on the device already.

    pages, state: what it reads, which the store keeps until `release`. start: where the replay
    begins, from `state` or, without one, from zero. bounds: where each group's does instead. parts:
    where the states of groups are that start from one of their own; part_views: what has them.
    parting: under "bounded", the name that an exact state at `length` has. apart: where what is
    approximate begins, in KV and hidden vectors; `length` where nothing of them is.
    """

    length: int
    local: int
    start: int
    pages: list[View]
    state: View | None
    exact: bool
    token_ids: np.ndarray
    audit: ReplayAudit
    zero: bool = False
    bounds: Bounds | None = None
    parts: dict[int, Spans] = field(default_factory=dict)
    part_views: list[View] = field(default_factory=list)
    parting: bytes = b""
    apart: int = 0

    def release(self) -> None:
        for view in (*self.pages, *self.part_views):
            view.release()
        if self.state is not None:
            self.state.release()


class Prompt(NamedTuple):
    """Tokens (int64) whose root and whose full pages' keys these are.

    approximate: what follows it is that, however it is restored.
    """

    root: bytes
    tokens: np.ndarray
    keys: Sequence[bytes]
    approximate: bool = False


def make_plan(
    store: PageStore, settings: Settings, policy: Policy, prompt: Prompt, match: Match, local: int
) -> Plan | None:
    """The restore of what matches; None if something of it cannot be had, which the store then
    knows. local: tokens that the device has."""
    length = match.length
    state = store.nearest_state(match, prompt.root, prompt.tokens, length, prompt.keys)
    start = state.position if state is not None else 0
    tail = policy.tail(length)
    reached = length - start <= tail or start == length
    if not reached:
        state, start = None, length - tail
    names = [page.name for page in match.pages]
    held = _hold(store, names if state is None else [*names, state.name])
    if held is None:
        return None
    pages, rest = held[: len(names)], held[len(names) :]
    bounds, parts, part_views, parting = None, {}, [], b""
    if policy.name == "bounded":
        index = length // settings.page
        parent = prompt.keys[index - 1] if index else prompt.root
        parting = state_name(parent, prompt.tokens[index * settings.page : length])
        bounds, found = _plan_groups(store, settings, policy, prompt, match, state, pages, parting)
        views = _hold(store, [part.name for part in found.values()])
        if views is None:
            for view in held:
                view.release()
            return None
        part_views = views
        for view, (number, part) in zip(views, found.items(), strict=True):
            parts[number] = store.geometry.parts(part.groups, view.spans)[number]
    if bounds is not None:
        reached = not any(group.bound for group in bounds.groups)
        start = min(group.start for group in bounds.groups)
    exact = reached and (settings.pair or start == length) and match.exact == length
    audit = ReplayAudit(
        policy=str(policy),
        matched=length,
        replayed=length - start,
        state_from=start if reached else -1,
        exact=exact and not prompt.approximate,
    )
    if policy.name == "bounded" and settings.layers is not None:
        alike = GroupPlan(start, "zero" if state is None else "checkpoint", 0.0)
        audit.groups = [
            {"replayed_tokens": length - g.start, "start": g.source, "bound": g.bound}
            for g in (bounds.groups if bounds else (alike,) * len(settings.layers.groups))
        ]
    return Plan(
        length, local, start, pages, rest[0] if rest else None, exact, prompt.tokens[:length],
        audit, policy.name == "zero", bounds, parts, part_views, parting, max(match.exact, local),
    )  # fmt: skip


def _hold(store: PageStore, names: Sequence[bytes]) -> list[View] | None:
    """Views of all; None where something is on disk, or went meanwhile."""
    views = [store.view(name) for name in names]
    held = [view for view in views if view is not None]
    if len(held) == len(views):
        return held
    for view in held:
        view.release()
    return None


def _plan_groups(
    store: PageStore, settings: Settings, policy: Policy, prompt: Prompt, match: Match,
    state: FoundState | None, pages: Sequence[View], parting: bytes,
) -> tuple[Bounds | None, dict[int, FoundState]]:  # fmt: skip
    """Where each group of a bounded restore starts, and, by group, the parts that some start from;
    None if all start from the state.

    The first request that parts at a token is restored within its bound. Where another one does,
    more are to be expected, and so are further turns of each: the exact state is made once, if the
    last one is not too far, and kept; what follows it is exact then, and kept as well.
    """
    cells, layers = store.geometry.cells, settings.layers
    assert cells is not None and layers is not None, "asked for where it is not kept"
    near = {}
    for number in range(len(layers.groups)):
        part = store.nearest_state(
            match, prompt.root, prompt.tokens, match.length, prompt.keys, number,
            0 if state is None else state.position,
        )  # fmt: skip
        if part is not None:
            near[number] = part
    positions = {number: part.position for number, part in near.items()}
    bounds = plan_bounded(
        policy.bounded(), layers, match.length, None if state is None else state.position,
        [store.geometry.gates(page_of(page)) for page in pages], cells, positions,
    )  # fmt: skip
    if bounds is None:
        return None, {}
    far = match.length - bounds.exact.start > max(settings.every, budget(match.length))
    keeps = settings.pair and not prompt.approximate
    if keeps and not far and parting in store.partings:
        bounds = bounds.exactly(positions)
    starts = enumerate(bounds.groups)
    return bounds, {number: near[number] for number, group in starts if group.source == "part"}


def bytes_read(plan: Plan, geometry: Geometry, layers: LayerMap | None) -> int:
    """What a restore reads on all ranks: KV, hidden vectors and states. layers: for "bounded"."""
    pages = len(plan.pages) - plan.local // geometry.size
    state = plan.state.nbytes if plan.state is not None else 0
    rows = (plan.length - plan.start) * geometry.streams
    if plan.bounds is not None and layers is not None:
        groups = zip(layers.groups, plan.bounds.groups, strict=True)
        rows = sum(plan.length - g.start for group, g in groups if group.source is not None)
        if not any(group.source == "checkpoint" for group in plan.bounds.groups):
            state = 0
        state += sum(count for spans in plan.parts.values() for _, count in spans)
    kv = pages * geometry.kv_bytes * geometry.ranks
    return kv + rows * geometry.row_bytes + state
