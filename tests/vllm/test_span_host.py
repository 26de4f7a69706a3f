"""Spans that the device has evicted and that come back from the host instead of being computed.

The pool of these tests has 60 blocks, and `flood` takes every one of them. What comes back is
compared with transformers, and with the hit on the device, bit by bit.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from served import BLOCK, Served
from span_hosted import (
    bits,
    flood,
    host_of,
    piece_tokens,
    pinned,
    seen_as,
    settle,
    steps,
    tier_of,
)
from test_spans import TOLERANCE, make
from traffic import Ask, Verdict, judge, run

from kvspan.layout import layout_from_tokens
from kvspan.vllm.span_tier import HostStep, SpanTier


@pytest.mark.parametrize(
    ("scope", "placement"),
    [("anchored", "sequential"), ("isolated", "sequential"), ("anchored", "parallel")],
)
def test_a_hit_from_the_host_is_the_hit_on_the_device(
    hosted: Served, counted: Counter[str], scope: str, placement: Any
) -> None:
    first = make([2, 0, 3], scope, seed=201)
    other = make([3, 2, 0], scope, seed=201, question=1)
    (miss,) = hosted.ask([first], placement=placement)
    (hit,) = hosted.ask([other], placement=placement)
    settle(hosted)
    flood(hosted)
    counted.clear()
    (back,) = hosted.ask([other], prepare=False, placement=placement)
    audit = hosted.audit(back)
    assert audit["computed_tokens"] == counted["span_tokens_prepared"] == 0
    assert audit["host_tokens"] == counted["host_tokens_loaded"] == piece_tokens(other)
    assert hosted.audit(hit)["host_tokens"] == 0
    assert bits(back) == bits(hit)
    assert hosted.error(first, miss, placement) <= TOLERANCE
    assert hosted.error(other, back, placement) <= TOLERANCE
    (again,) = hosted.ask([first], prepare=False, placement=placement)
    assert hosted.audit(again)["host_tokens"] == 0  # they are on the device now
    assert hosted.error(first, again, placement) <= TOLERANCE
    assert pinned(hosted) == 0


def test_every_byte_comes_back(hosted: Served) -> None:
    """Into other blocks of the pool, in every layer."""
    layout = make([3, 5, 2], seed=202)
    hosted.ask([layout])
    settle(hosted)
    host, caches = host_of(hosted), tier_of()._caches
    pieces = seen_as(hosted, layout).pieces

    def blocks() -> list[int]:
        found = [host._blocks_of(piece) for piece in pieces]
        return [block.block_id for some in found for block in some or ()]

    before = blocks()
    kept = [cache[before].clone() for cache in caches]
    flood(hosted)
    assert not blocks()
    hosted.ask([layout], prepare=False)
    after = blocks()
    assert len(after) == len(before) and after != before
    for cache, was in zip(caches, kept, strict=True):
        assert torch.equal(cache[after].view(torch.uint8), was.view(torch.uint8))


def test_device_host_and_new_spans_in_one_request(hosted: Served, counted: Counter[str]) -> None:
    hosted.ask([make([1, 2, 4], seed=203)])
    settle(hosted)
    flood(hosted)
    hosted.ask([make([2], seed=203)])
    layout = make([4, 2, 0, 1], seed=203, between=2)
    for prepare in (False, True):
        (output,) = hosted.ask([layout], prepare=prepare, timeout_s=0.2)
        assert hosted.error(layout, output) <= TOLERANCE
    assert counted["host_load_failures"] == 0 and counted["host_tokens_loaded"] > 0
    assert pinned(hosted) == 0


def test_preparations_find_spans_on_the_host(hosted: Served, counted: Counter[str]) -> None:
    """As the server does it: preparations and the request itself, all at once."""
    ask = Ask(make([5, 1, 3], seed=204))
    run(hosted, [ask])
    settle(hosted)
    flood(hosted)
    counted.clear()
    (output,) = run(hosted, [ask])
    assert output is not None and counted["span_tokens_prepared"] == 0
    assert hosted.audit(output)["host_tokens"] == piece_tokens(ask.layout)
    verdict = Verdict()
    judge(hosted, ask, output, verdict)
    assert not verdict.wrong and verdict.max_error <= TOLERANCE


def test_others_see_nothing_of_it(hosted: Served) -> None:
    """Not an ordinary request, not another tenant, not other boundaries."""
    layout = make([2, 1], seed=205)
    hosted.ask([layout])
    settle(hosted)
    flood(hosted)
    wider = layout_from_tokens(layout.token_ids, [(2 * BLOCK, layout.spans[-1][1])], BLOCK)
    for asked, salt in (
        (layout_from_tokens(layout.token_ids, (), BLOCK), None),
        (layout, "another"),
        (wider, None),
    ):
        (output,) = hosted.ask([asked], prepare=False, timeout_s=0.05, salt=salt)
        spans_from_host = hosted.audit(output).get("host_tokens", 0)
        assert spans_from_host <= (2 * BLOCK if asked is wider else 0)  # the anchor is the same
        assert hosted.error(asked, output) <= TOLERANCE


def test_control_wrong_blocks(hosted: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that change places between pieces must be found by the comparisons above."""
    layout = make([3, 2, 0], seed=206)
    hosted.ask([layout])
    settle(hosted)
    flood(hosted)
    begin = SpanTier.begin

    def mixed_up(self: SpanTier, step: HostStep) -> None:
        for batch in step.loads:
            ids = [number for one in batch for number in one.blocks]
            ids = [*ids[1:], ids[0]]  # order alone would make no difference to attention
            for i, one in enumerate(batch):
                mine, ids = tuple(ids[: len(one.blocks)]), ids[len(one.blocks) :]
                batch[i] = replace(one, blocks=mine)
        begin(self, step)

    monkeypatch.setattr(SpanTier, "begin", mixed_up)
    (output,) = hosted.ask([layout], prepare=False)
    assert hosted.audit(output)["host_tokens"] > 0
    assert hosted.error(layout, output) > 100 * TOLERANCE
    assert hosted.llm.llm_engine.reset_prefix_cache()


def test_what_the_tier_has_lost_is_computed(hosted: Served, counted: Counter[str]) -> None:
    layout = make([4, 3], seed=207)
    hosted.ask([layout])
    settle(hosted)
    flood(hosted)
    lost = seen_as(hosted, layout).pieces[1].key
    tier_of().tier.remove(lost)
    (output,) = hosted.ask([layout])
    assert counted["host_load_failures"] == 1 and counted["span_tokens_prepared"] > 0
    assert hosted.error(layout, output) <= TOLERANCE and pinned(hosted) == 0
    settle(hosted)
    assert tier_of().tier.contains(lost)


def test_copies_that_fail_are_misses(
    hosted: Served, counted: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that finds the queue full is dropped, a load that fails is computed instead."""

    class Broken:
        def submit(self, *args: object, **kwargs: object) -> None:
            raise RuntimeError("copy failed: no device")

        def try_submit(self, *args: object, **kwargs: object) -> None:
            return None

    layout = make([1, 2, 3], seed=216)
    with monkeypatch.context() as patch:
        patch.setattr(tier_of(), "_store_queue", Broken())
        hosted.ask([layout])
        settle(hosted)
    assert counted["copies wait"] >= 4 and counted["host_stores"] == 0 and pinned(hosted) == 0
    hosted.ask([layout], prepare=False)  # a span is offered again when it is used where it belongs
    hosted.ask([make([3, 1], seed=216)])
    settle(hosted)
    assert counted["host_stores"] > 0
    flood(hosted)
    prepared = counted["span_tokens_prepared"]
    with monkeypatch.context() as patch:
        patch.setattr(tier_of(), "_load_queue", Broken())
        (output,) = hosted.ask([layout])
    assert hosted.error(layout, output) <= TOLERANCE and pinned(hosted) == 0
    assert counted["host_load_failures"] > 0 and counted["span_tokens_prepared"] > prepared
    assert hosted.audit(output)["host_tokens"] == 0


def test_resetting_the_cache_forgets_the_host_too(hosted: Served) -> None:
    layout = make([4, 2], seed=208)
    hosted.ask([layout])  # stores may be under way
    assert hosted.llm.llm_engine.reset_prefix_cache(reset_connector=True)
    steps(hosted)
    assert not tier_of().tier.stored_keys()
    (output,) = hosted.ask([layout])
    assert hosted.audit(output)["host_tokens"] == 0
    assert hosted.error(layout, output) <= TOLERANCE
