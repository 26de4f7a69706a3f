"""What every token of a request sees and where it stands under vLLM, without a vLLM."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvspan.layout import SpanLayout, layout_from_tokens
from kvspan.vllm.scheduling import PlacedSpan, SpanRequest

SIZE = 4


@st.composite
def layouts(draw: st.DrawFn) -> SpanLayout:
    """Anchors, spans and texts between them of up to three blocks, in both scopes."""
    at, spans = SIZE * draw(st.integers(0, 3)), []
    for blocks in draw(st.lists(st.integers(1, 3), min_size=1, max_size=5)):
        spans.append((at, at + blocks * SIZE))
        at = spans[-1][1] + SIZE * draw(st.sampled_from([0, 0, 0, 1, 2]))
    num_tokens = spans[-1][1] + draw(st.integers(1, 9))
    scope = draw(st.sampled_from(["anchored", "isolated"]))
    return layout_from_tokens(np.arange(num_tokens), spans, SIZE, scope)  # type: ignore[arg-type]


def request_of(layout: SpanLayout, placement: str = "sequential") -> SpanRequest:
    anchor = [bytes(32)] * (layout.anchor_len // SIZE)
    return SpanRequest(layout, anchor, salt=None, lora="", placement=placement)  # type: ignore[arg-type]


def seen(request: SpanRequest, lo: int, hi: int) -> list[set[int]]:
    """The tokens that each of [lo, hi) attends to. Blocks of the anchor are numbered from 1000."""
    layout = request.layout

    def prefix(span: PlacedSpan) -> tuple[int, ...]:
        count = layout.anchor_len // SIZE if layout.scope == "anchored" else 0
        return tuple(range(1000, 1000 + count))

    rows = request.rows(lo, hi, prefix)
    if not rows:
        return [set(range(token + 1)) for token in range(lo, hi)]
    assert sum(row.num_tokens for row in rows) == hi - lo
    out = []
    for row in rows:
        keys = [block * SIZE + i for block in row.prefix for i in range(SIZE)]
        keys = [key - 1000 * SIZE for key in keys]
        keys += range(row.first_block * SIZE, layout.num_tokens)
        first = row.seq_len - row.num_tokens
        out += [set(keys[: first + i + 1]) for i in range(row.num_tokens)]
    return out


def must_see(layout: SpanLayout, token: int) -> set[int]:
    for start, end in layout.spans:
        if start <= token < end:
            anchor = range(layout.anchor_len if layout.scope == "anchored" else 0)
            return set(anchor) | set(range(start, token + 1))
    return set(range(token + 1))


@given(layouts(), st.data())
def test_rows_show_each_token_what_its_scope_says(layout: SpanLayout, data: st.DataObject) -> None:
    lo = data.draw(st.integers(0, layout.num_tokens - 1))
    hi = data.draw(st.integers(lo + 1, layout.num_tokens))
    got = seen(request_of(layout), lo, hi)
    assert got == [must_see(layout, token) for token in range(lo, hi)]


@given(layouts(), st.data())
def test_shifts_are_the_layouts_positions(layout: SpanLayout, data: st.DataObject) -> None:
    generated = 7
    lo = data.draw(st.integers(0, layout.num_tokens + generated - 1))
    hi = data.draw(st.integers(lo + 1, layout.num_tokens + generated))
    expected = layout.positions("parallel").tolist()
    expected += [expected[-1] + i + 1 for i in range(generated)]
    shifts = request_of(layout, "parallel").shifts(lo, hi)
    got = [s for count, shift in shifts for s in [shift] * count] or [0] * (hi - lo)
    assert [token - shift for token, shift in zip(range(lo, hi), got, strict=True)] == expected[
        lo:hi
    ]
    assert request_of(layout).shifts(lo, hi) == []


def test_span_hashes_of_different_places_differ() -> None:
    span = PlacedSpan(64, 96, 32, (bytes(32),), in_place=False)
    assert span.block_hash(0) != PlacedSpan(96, 128, 64, (bytes(32),), False).block_hash(0)
    assert PlacedSpan(64, 96, 0, (bytes(32),), in_place=True).block_hash(0) == bytes(32)
