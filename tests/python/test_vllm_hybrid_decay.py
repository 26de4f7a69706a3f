"""Sums of decays and writes in pages of hybrids under vLLM, and the starts that are planned from
them, against the recurrence token by token in float64."""

from __future__ import annotations

import itertools
import pickle
import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from kvspan.errors import UsageError
from kvspan.host import HostTier
from kvspan.hybrid.groups import FULL, LINEAR, layer_map
from kvspan.hybrid.plan import GroupPlan
from kvspan.hybrid.policy import Policy
from kvspan.vllm.hybrid.decay import (
    ADDED,
    CELL,
    DECAY,
    WRITTEN,
    Bounds,
    Bytes,
    Cells,
    plan_bounded,
)
from kvspan.vllm.hybrid.geometry import Geometry
from kvspan.vllm.hybrid.plans import Settings
from kvspan.vllm.hybrid.policy import parse_policy
from kvspan.vllm.hybrid.store import PageStore
from kvspan.vllm.hybrid.tracking import Track

LAYERS = layer_map([LINEAR, LINEAR, FULL, LINEAR, FULL])
HEADS, DIM = 3, 4


@dataclass
class Gates:
    """Of T tokens: g, beta [T, layers, heads]; k, v [T, layers, heads, DIM]; float64."""

    g: Tensor
    beta: Tensor
    k: Tensor
    v: Tensor

    @property
    def write(self) -> Tensor:
        return (self.beta * self.v.norm(dim=-1)).float()

    def states(self, start: int = 0) -> Tensor:
        """[T + 1, layers, heads, DIM, DIM]: after each token, from zero before token `start`."""
        state = torch.zeros(*self.k.shape[1:], DIM, dtype=torch.float64)
        states = [state] * (start + 1)
        for g, beta, k, v in zip(
            self.g[start:], self.beta[start:], self.k[start:], self.v[start:], strict=True
        ):
            state = state * g.exp()[..., None, None]
            seen = torch.einsum("lhkv,lhk->lhv", state, k)
            state = state + torch.einsum("lhk,lhv->lhkv", k, beta[..., None] * (v - seen))
            states.append(state)
        return torch.stack(states)


def gates(tokens: int, rates: list[float], seed: int = 0, beta: float = 1.0) -> Gates:
    """rates: of decay, by layer; each head of a layer forgets a little faster than the last."""
    random_numbers = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random_numbers, dtype=torch.float64)

    shape = (tokens, len(rates), HEADS)
    fall = torch.tensor(rates)[:, None] * torch.linspace(1, 1.5, HEADS)
    k = draw(*shape, DIM)
    return Gates(
        -fall * draw(*shape).exp(),
        beta * draw(*shape).sigmoid(),
        k / k.norm(dim=-1, keepdim=True),
        draw(*shape, DIM),
    )


def pages_of(made: Gates, cells: Cells, cuts: list[int]) -> list[Bytes]:
    """Pages written in steps that end at the cuts; the norms are those after the last token."""
    tokens = len(made.g)
    rubbish = np.random.default_rng(0).integers(0, 256, (-(-tokens // cells.size), cells.nbytes))
    pages = list(rubbish.astype(np.uint8))
    for start, end in zip([0, *cuts], [*cuts, tokens], strict=True):
        at = start
        while at < end:
            page, offset = divmod(at, cells.size)
            n = min(cells.size - offset, end - at)
            rows = slice(at, at + n)
            cells.add(pages[page], offset, made.g[rows].float(), made.write[rows])
            at += n
    norms = made.states()[-1].flatten(-2).norm(dim=-1)
    for page in pages:
        cells.norms(page)[:] = norms.numpy()
    return pages


@pytest.mark.parametrize("size", [16, 64, 96, 528])
def test_sums_do_not_depend_on_where_steps_end(size: int) -> None:
    rng = random.Random(size)
    made = gates(700, [0.01, 0.1, 5.0])
    cells = Cells(size, 3, HEADS)
    cuts = [*sorted(rng.sample(range(1, 690), 40)), 698, 699]
    pages = pages_of(made, cells, cuts)
    for number, page in enumerate(pages):
        for i in range(cells.per_page):
            first = number * size + i * CELL
            end = min(first + CELL, (number + 1) * size, 700)
            if first >= end:
                continue
            g, write = made.g[first:end], made.write[first:end]
            later = g.sum(0) - g.cumsum(0)
            expected = {
                DECAY: g.sum(0),
                ADDED: (later.exp() * write).sum(0),
                WRITTEN: write.sum(0),
            }
            for kind, value in expected.items():
                np.testing.assert_allclose(cells.sums(page)[i, kind], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("beta", [0.05, 2.0])
@pytest.mark.parametrize("length", [1000, 991, 959])
def test_bounds_hold(length: int, beta: float) -> None:
    """The state that a replay from the planned start gives errs no more than the plan says."""
    made = gates(1000, [0.02, 0.05, 0.2], seed=length, beta=beta)
    cells = Cells(96, 3, HEADS)
    pages = pages_of(made, cells, [300, 431, 960])[: -(-length // 96)]
    whole = made.states()[length]
    tails: list[list[int]] = []
    errors: list[float] = []
    for eps in (0.9, 1e-1, 1e-2, 1e-3, 1e-4):
        plan = plan_bounded(Policy("bounded", eps, 16), LAYERS, length, None, pages, cells)
        assert plan is not None
        for group, norms, numbers in zip(plan.groups, plan.norms, ([0, 1], [2]), strict=True):
            assert group.bound is not None and 0 < group.bound <= eps
            replayed = made.states(group.start)[length]
            for number, norm in zip(numbers, norms, strict=True):
                error = float((replayed - whole)[number].norm()) / norm
                assert error <= group.bound
                errors.append(error)
        tails.append([length - group.start for group in plan.groups])
    if beta < 1:  # else writes wipe out what was missed, and nothing is tested
        assert max(errors) > 1e-3
    assert all(a[i] <= b[i] for a, b in itertools.pairwise(tails) for i in (0, 1))
    assert tails[0][0] < tails[-1][0] and tails[-1][1] < tails[-1][0] < length


def test_slow_group_starts_from_the_state() -> None:
    made = gates(1500, [0.2, 1e-5, 0.2])
    cells = Cells(128, 3, HEADS)
    pages = pages_of(made, cells, [])
    policy = Policy("bounded", 1e-3, 16)
    plan = plan_bounded(policy, LAYERS, 1490, 640, pages, cells)
    assert plan is not None
    slow, fast = plan.groups
    assert (slow.start, slow.source, slow.bound) == (640, "checkpoint", 0.0)
    assert fast.source == "zero" and fast.start % CELL == 0 and 1490 - 400 < fast.start <= 1474
    alone = plan_bounded(policy, LAYERS, 1490, None, pages, cells)
    assert alone is not None and (alone.groups[0].start, alone.groups[0].bound) == (0, 0.0)
    # From there an exact replay is no longer than the bounded one.
    assert plan_bounded(policy, LAYERS, 1490, fast.start, pages, cells) is None


def test_nothing_is_planned_from_what_is_not_known() -> None:
    made, cells, policy = gates(500, [0.3] * 3), Cells(128, 3, HEADS), Policy("bounded", 0.1, 16)
    pages = pages_of(made, cells, [])
    assert plan_bounded(policy, LAYERS, 490, None, pages, cells) is not None
    cells.sums(pages[1])[0, DECAY, 2, 1] = np.nan
    plan = plan_bounded(policy, LAYERS, 490, None, pages, cells)
    assert plan is not None and plan.groups[0].start > 0
    assert (plan.groups[1].start, plan.groups[1].bound) == (0, 0.0), "a page was broken"
    pages = pages_of(made, cells, [])
    for page in pages:
        cells.add(page, 0, made.g[:1].float(), made.write[:1])
    assert plan_bounded(policy, LAYERS, 490, None, pages, cells) is None, "no norms"


def test_heads_of_several_ranks_are_planned_for_together() -> None:
    made, policy = gates(500, [0.05, 0.1, 0.4]), Policy("bounded", 0.01, 16)
    alone = plan_bounded(
        policy, LAYERS, 490, None, pages_of(made, Cells(128, 3, HEADS), []), Cells(128, 3, HEADS)
    )
    cells = Cells(128, 3, 1, ranks=HEADS)
    pages = [np.empty(cells.nbytes, np.uint8) for _ in range(4)]
    norms = made.states()[-1].flatten(-2).norm(dim=-1)
    for rank in range(HEADS):
        head = slice(rank, rank + 1)
        for number, page in enumerate(pages):
            rows = slice(number * 128, min(number * 128 + 128, 500))
            cells.add(page, 0, made.g[rows, :, head].float(), made.write[rows, :, head], rank)
            cells.norms(page, rank)[:] = norms[:, head].numpy()
    assert alone is not None and alone == plan_bounded(policy, LAYERS, 490, None, pages, cells)


def test_bounds_hold_only_for_states_that_are_not_small() -> None:
    start = GroupPlan(64, "zero", 0.01)
    bounds = Bounds(0.02, (start, start), ((1.0, 2.0), (1.0,)), GroupPlan(0, "zero", 0.0))
    assert bounds.hold(0, [1.0, 2.0]) and bounds.hold(0, [0.52, 9.0])
    assert not bounds.hold(0, [1.0, 1.0]) and not bounds.hold(1, [0.005])
    assert not bounds.hold(1, [float("nan")])


def test_part_of_a_page_is_taken_for_no_less_than_it_holds() -> None:
    """As a request goes on in a page of which another had more."""
    made, cells = gates(128, [0.05, 0.5, 3.0]), Cells(128, 3, HEADS)
    for end in (1, 64, 70, 127):
        (page,) = pages_of(made, cells, [])
        cells.cut(page, end)
        rest = slice(end, 128)
        cells.add(page, end, made.g[rest].float(), made.write[rest])
        sums = cells.sums(page).astype(np.float64)
        bound = np.exp(sums[1, DECAY]) * sums[0, ADDED] + sums[1, ADDED]
        state = made.states()[-1].flatten(-2).norm(dim=-1).numpy()
        assert (state <= bound * (1 + 1e-5)).all()
        assert (sums[:, DECAY].sum(0) >= made.g.sum(0).numpy() - 1e-4).all()


def test_request_within_a_bound_leaves_nothing() -> None:
    """From what it finds a plan is made; what follows it is kept by nobody, and its audit says what
    was replayed of each group."""
    size, tokens = 128, list(range(1000))
    made = gates(1000, [0.2, 0.2, 1e-5])
    cells = Cells(size, 3, HEADS)
    geometry = Geometry(size, 1, 64, 1, 8, state_bytes=72, cells=cells, groups=(2, 1))
    memory = np.zeros(1 << 22, np.uint8)
    store = PageStore(
        HostTier(len(memory), page_bytes=geometry.page_bytes, memory=memory), geometry
    )
    settings = Settings(size, every=512, layers=LAYERS)
    table = (list(range(10)),)
    donor = Track(settings, bytes(32), parse_policy("exact", "test"))
    assert donor.begin(store, tokens, 0) is None
    pages = pages_of(made, cells, [])
    for start in (0, 512):
        ordered = donor.work(store, start, min(512, 1000 - start), table, 0, 1000)
        assert ordered is not None
        work, written = ordered
        assert work.seen == (min(start + 512, 1000), table)
        for fill in work.fills:
            page = memory[fill.page : fill.page + geometry.page_bytes]
            np.copyto(geometry.gates(page), pages[start // size])
            start += size
        written.settle(store, tokens)
    donor.stop(store)

    track = Track(settings, bytes(32), parse_policy("bounded:1e-3", "test", 16))
    plan = track.begin(store, [*tokens[:900], 1, 2], 0)
    assert plan is not None and plan.bounds is not None and not plan.exact
    fast, slow = plan.bounds.groups
    assert fast.source == "zero" and 900 - 300 < fast.start <= 884
    assert (slow.start, slow.source, plan.start) == (512, "checkpoint", 512)
    restore, written = track.accepted(store, plan, table)
    assert restore.bounds == plan.bounds and restore.begun is None and restore.keep is None
    assert pickle.loads(pickle.dumps(restore)).bounds == plan.bounds
    written.settle(store, tokens)
    assert track.work(store, 900, 2, table, 0, 902) is None
    said = track.audit.record()
    assert (said["policy"], said["exact"], said["state_from"]) == ("bounded:0.001", False, -1)
    assert said["groups"] == [
        {"replayed_tokens": 900 - fast.start, "start": "zero", "bound": fast.bound},
        {"replayed_tokens": 388, "start": "checkpoint", "bound": 0.0},
    ]
    track.end_plan()

    track = Track(settings, bytes(32), parse_policy("bounded:1e-3", "test", 16))
    plan = track.begin(store, [*tokens[:520], 1, 2], 0)
    assert plan is not None and plan.exact and plan.bounds is None, "the state is nearer"
    assert [group["bound"] for group in plan.audit.groups] == [0.0, 0.0]
    track.end_plan()


@pytest.mark.parametrize("text", ["bounded", "bounded:0", "bounded:x", "off:1", "Exact", None])
def test_unknown_policies(text: object) -> None:
    with pytest.raises(UsageError, match=r"here: unknown replay policy; expected .* or off; found"):
        parse_policy(text, "here")
