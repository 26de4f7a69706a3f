"""Groups, policies, plans, matches and stores of Tail-Replay, and that bounds hold."""

from __future__ import annotations

import doctest
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_models import Track, hybrid_config, make_runner, random_tokens, tiny_hybrid
from kvspan.engine.pool import BlockPool
from kvspan.errors import UsageError
from kvspan.hybrid import groups, policy
from kvspan.hybrid.groups import FULL, LINEAR, Group, LayerMap, is_hybrid, layer_map
from kvspan.hybrid.hidden import HiddenCache
from kvspan.hybrid.match import BlockIndex
from kvspan.hybrid.plan import make_mark, plan_exact, plan_restore
from kvspan.hybrid.policy import Policy
from kvspan.hybrid.replay import restore
from kvspan.hybrid.state import Mark, Prefix, RecurrentState, StateStore
from kvspan.ops import BlockChain
from tiny_models import configs

EXACT = Policy()


@pytest.mark.parametrize("module", [groups, policy], ids=lambda m: m.__name__)
def test_doctests(module: object) -> None:
    result = doctest.testmod(module)  # type: ignore[arg-type]
    assert result.attempted and not result.failed


@pytest.mark.parametrize(
    ("pattern", "expected", "streams"),
    [
        ("LLLFLLLF", [(None, (0, 1, 2)), (3, (4, 5, 6))], (3,)),
        ("FLFL", [(0, (1,)), (2, (3,))], (0, 2)),
        ("LFFL", [(None, (0,)), (2, (3,))], (2,)),
        ("LL", [(None, (0, 1))], ()),
    ],
)
def test_groups(
    pattern: str, expected: list[tuple[int | None, tuple[int, ...]]], streams: tuple[int, ...]
) -> None:
    found = layer_map([{"L": LINEAR, "F": FULL}[c] for c in pattern])
    assert found.groups == tuple(Group(*group) for group in expected)
    assert found.streams == streams
    assert sorted(found.full + found.linear) == list(range(len(pattern)))


def test_which_models_are_hybrids() -> None:
    assert is_hybrid(hybrid_config("olmo_hybrid"))
    assert not is_hybrid(configs()["llama"])
    assert groups.refusal(hybrid_config("qwen3_next")) == ""


@pytest.mark.parametrize("text", ["", "exact:1", "bounded", "bounded:0", "ratio:1.5", "ratio:nan"])
def test_policies_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="replay policy; expected exact, bounded:EPS"):
        Policy.parse(text)


def state_at(position: int) -> RecurrentState:
    return RecurrentState(position, [], [])


@pytest.mark.parametrize(
    ("matched", "checkpoint", "boundary"),
    [
        (100, None, 0),  # the first piece is computed again: nothing is replayed
        (300, None, 256),
        (700, None, 640),
        (700, 512, 512),
        (700, 256, 640),
        (700, 690, 690),  # an answer's end, past the grid
        (1024, 1024, 1024),
    ],
)
def test_where_exact_replays_end(matched: int, checkpoint: int | None, boundary: int) -> None:
    kept = None if checkpoint is None else state_at(checkpoint)
    plan = plan_exact(EXACT, matched, 2, kept)
    assert plan.exact and plan.boundary == boundary
    assert {group.start for group in plan.groups} == {checkpoint or 0}
    at = plan_exact(EXACT, matched, 2, kept, on_grid=False)
    assert at.exact and at.boundary == matched


LAYERS = layer_map([LINEAR, LINEAR, FULL, LINEAR, FULL])


def fake_mark(position: int, slow: bool = False) -> Mark:
    none, all_heads = torch.tensor([], dtype=torch.long), torch.arange(2)
    which = (none, none, all_heads if slow else none)
    return Mark(position, torch.ones(3, 2), which, tuple(torch.zeros(len(w), 1, 1) for w in which))


def decays(per_token: list[float]) -> object:
    rates = torch.tensor(per_token)[:, None].expand(-1, 2)
    return lambda start, end: rates * (end - start)


def test_bounded_takes_the_shortest_tail_that_meets_its_bound() -> None:
    marks = [fake_mark(p) for p in (3840, 3584, 3328, 3072)]
    bounded = Policy.parse("bounded:0.001")
    plan = plan_restore(bounded, 3900, LAYERS, None, marks, decays([-0.03, -0.03, -0.02]))  # type: ignore[arg-type]
    # 3900 - 3584 = 316 tokens at 0.03: exp(-9.5); at 0.02 one mark more.
    assert [group.start for group in plan.groups] == [3584, 3328]
    assert plan.groups[0].bound == pytest.approx(math.exp(-0.03 * 316))
    assert not plan.exact and plan.boundary == 3900
    # 60 tokens would do for very fast heads, but k_min is 64.
    plan = plan_restore(bounded, 3900, LAYERS, None, marks, decays([-9.0, -9.0, -9.0]))  # type: ignore[arg-type]
    assert plan.groups[0].start == 3584


def test_bounded_falls_back_to_exact() -> None:
    bounded, never = Policy.parse("bounded:0.001"), decays([0.0, -1.0, 0.0])
    marks = [fake_mark(p, slow=True) for p in range(7936, 0, -256)]
    plan = plan_restore(bounded, 8000, LAYERS, state_at(1024), marks, never)  # type: ignore[arg-type]
    # A head of the first group never forgets and no mark carries it; those of the second do.
    assert plan.groups[0].source == "checkpoint" and plan.groups[0].bound == 0
    assert plan.groups[1].source == "mark" and plan.groups[1].start == 7936 - 256 * (
        8000 - 7936 < 64
    )
    assert plan_restore(bounded, 8000, LAYERS, state_at(7990), marks, never).exact  # type: ignore[arg-type]
    alone = plan_restore(bounded, 8000, LAYERS, None, marks, never)  # type: ignore[arg-type]
    assert alone.groups[0].start == 0 and alone.groups[0].bound == 0


def test_ratio_counts_and_its_least() -> None:
    for matched, k in ((4000, 200), (1000, 64), (50, 50)):
        plan = plan_restore(Policy.parse("ratio:0.05"), matched, LAYERS, None)
        assert [matched - g.start for g in plan.groups] == [k] * 2 or plan.exact
    assert plan.exact and plan.boundary == 0


@pytest.mark.parametrize("name", ["qwen3_5", "olmo_hybrid"])
def test_bounds_hold_where_inputs_are_exact(name: str) -> None:
    """The first layer of each group, whose inputs and convolution are exact, errs within it."""
    runner = make_runner(tiny_hybrid(name), 1024)
    donor = Track(runner, torch.tensor(random_tokens(900)), 0, 1024)
    marks: list[Mark] = []
    for end in (256, 512, 768):
        donor.prefill(end)
        recent = runner.decays[: end // 16].sum(0)
        marks.insert(0, make_mark(donor.state, recent, end))
    donor.prefill(900)
    carried = sum(len(which) for which in marks[0].which)
    assert 0 < carried < sum(len(row) for row in marks[0].norms)

    def decay_sum(start: int, end: int) -> torch.Tensor:
        return runner.decays[start // 16 : -(-end // 16)].sum(0)

    seen = []
    for eps in (0.5, 1e-1, 1e-2, 1e-3, 1e-6):
        plan = plan_restore(Policy("bounded", eps), 900, runner.map, None, marks, decay_sum)
        state = restore(runner, donor.tokens, donor.slots, plan).state
        if plan.exact:
            continue
        for group, part in zip(runner.map.groups, plan.groups, strict=True):
            number = runner.linear_number[group.layers[0]]
            expected = donor.state.ssm[number]
            error = float((state.ssm[number] - expected).norm() / marks[0].norms[number].norm())
            assert part.bound is not None and part.bound <= eps
            assert error <= part.bound + 1e-5
            seen.append(error)
    assert max(seen) > 1e-5  # else nothing was tested


def make_prefix(tokens: list[int], block_size: int) -> Prefix:
    chain = BlockChain(block_size, root=b"r" * 32, span_root=b"s" * 32, anchored=True)
    ids = np.asarray(tokens, np.int64)
    hashes = [row.tobytes() for row in chain.extend(ids)]
    return Prefix(b"r" * 32, hashes, ids, block_size)


PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=6)


@settings(max_examples=60)
@given(PROMPTS, st.lists(st.booleans(), min_size=6, max_size=6), st.integers(1, 4))
def test_longest_match_is_that_of_a_search(
    prompts: list[list[int]], exact: list[bool], block_size: int
) -> None:
    pool = BlockPool(200)
    index = BlockIndex(pool)
    held: list[tuple[list[int], bool]] = []
    for tokens, is_exact in zip(prompts, exact, strict=False):
        prefix = make_prefix(tokens, block_size)
        for domains in (("exact",), ("exact", "approximate")):
            match = index.find(prefix, len(tokens), domains)  # type: ignore[arg-type]
            known = [t for t, e in held if e or len(domains) == 2]
            best = max((_common(tokens, other) for other in known), default=0)
            if len(domains) == 1:
                assert match.tokens == match.exact == best
            else:
                assert match.tokens >= max((_common(tokens, t) for t, e in held if e), default=0)
                assert match.exact <= match.tokens <= best
        blocks = pool.allocate(-(-len(tokens) // block_size))
        for i, block in enumerate(blocks):
            domain = "exact" if is_exact else "approximate"
            index.register(prefix, block, i, len(tokens), domain)  # type: ignore[arg-type]
        held.append((tokens, is_exact))


def _common(a: list[int], b: list[int]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def test_evicted_blocks_are_not_found() -> None:
    pool = BlockPool(4)
    index = BlockIndex(pool)
    prefix = make_prefix(list(range(10)), 4)
    blocks = pool.allocate(3)
    for i, block in enumerate(blocks):
        index.register(prefix, block, i, 10, "exact")
    pool.release(reversed(blocks))
    assert index.find(prefix, 10, ("exact",)).tokens == 10
    pool.evict(1)  # the last block goes first
    assert index.find(prefix, 10, ("exact",)).tokens == 8
    pool.evict()
    assert index.find(prefix, 10, ("exact",)).tokens == 0


def test_states_within_a_budget() -> None:
    prefix, other = make_prefix([1] * 40, 4), make_prefix([1] * 10 + [2] * 30, 4)

    def state(position: int) -> RecurrentState:
        return RecurrentState(position, [torch.zeros(1, 3)], [torch.zeros(1, 2, 2)])

    size = state(0).nbytes
    store: StateStore[RecurrentState] = StateStore(3 * size)
    for position in (8, 13, 20):
        store.put(prefix, state(position))
    assert [s.position for s in store.at_most(prefix, 19)] == [13, 8]
    assert [s.position for s in store.at_most(other, 40)] == [8]
    store.put(prefix, state(32))  # 20 was used least recently
    assert store.used_bytes == 3 * size and not store.has(prefix, 20)
    assert [s.position for s in store.at_most(prefix, 40)] == [32, 13, 8]
    big = RecurrentState(36, [torch.zeros(100, 3)], [])
    store.put(prefix, big)
    assert len(store) == 3 and not store.has(prefix, 36)
    store.clear()
    assert store.used_bytes == 0 and not list(store.at_most(prefix, 40))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_hidden_formats(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    residual, branch = torch.randn(5, 24).to(dtype), torch.randn(5, 24).to(dtype)
    slots, other = torch.tensor([3, 1, 8, 0, 5]), torch.tensor([2, 4])
    for format in ("sum", "pair", "int8"):
        cache = HiddenCache(2, 10, 24, dtype, torch.device("cpu"), format)  # type: ignore[arg-type]
        cache.write(1, slots, residual, branch)
        cache.copy(slots[:2], other)
        found, copied = cache.read(1, slots), cache.read(1, other)
        assert found.dtype == dtype and torch.equal(copied, found[:2])
        held = sum(t.nbytes for t in (*cache.vectors, *cache.scales))
        assert held == 10 * HiddenCache.bytes_per_token(2, 24, dtype, format)
        whole = residual + branch
        if cache.exact:
            assert torch.equal(found, whole)
        else:
            step = whole.float().abs().amax(-1, keepdim=True) / 127
            assert (
                (found.float() - whole.float()).abs()
                <= step * 0.51 + 0.02 * (dtype != torch.float32)
            ).all()


def test_layer_map_type() -> None:
    assert isinstance(LAYERS, LayerMap)
