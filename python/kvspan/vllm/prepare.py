"""Which small requests have to run before a span request, so that it finds everything it needs.

A span is computed alone after its anchor (or alone, in isolated scope), by a request that ends
right behind it: ordinary causal attention then gives just what the scope says. Text between two
groups of spans sees the spans before it, so it is computed by the request cut off at the second
group. Every request here generates one token (the paper's G^1) that nobody reads.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from kvspan.layout import SpanLayout


def prepare_stages(layout: SpanLayout) -> list[list[SpanLayout]]:
    """Requests to be run before `layout`: stages one after the other, each all at once.

    The first stage has every distinct span but one that the request itself computes in its place,
    and the anchor, as an ordinary prompt, where no span is computed after it; then comes one stage
    for every text between spans.
    """
    if not layout.spans:
        return []
    distinct: dict[bytes, SpanLayout] = {}
    for start, end in layout.spans:
        distinct.setdefault(layout.token_ids[start:end].tobytes(), _alone(layout, start, end))
    first = list(distinct.values())
    if layout.scope == "isolated" and layout.anchor_len:
        first.append(SpanLayout(layout.token_ids[: layout.anchor_len + 1], (), layout.block_size))
    if len(layout.spans) == 1 and layout.spans[0][0] == layout.canonical_start:
        first = []
    stages = [first] if first else []
    segments = layout.segments()
    for (kind, start, _), (after, end, _) in pairwise(segments):
        if kind == "text" and after == "span":
            spans = tuple(span for span in layout.spans if span[1] <= start)
            stages.append([_cut(layout, end, spans)])
    return stages


def _alone(layout: SpanLayout, start: int, end: int) -> SpanLayout:
    """[anchor | span | one token], or [span | one token] in isolated scope."""
    base = layout.canonical_start
    ids = np.concatenate([layout.token_ids[:base], layout.token_ids[start : end + 1]])
    return SpanLayout(ids, ((base, base + end - start),), layout.block_size, layout.scope)


def _cut(layout: SpanLayout, end: int, spans: tuple[tuple[int, int], ...]) -> SpanLayout:
    return SpanLayout(layout.token_ids[: end + 1], spans, layout.block_size, layout.scope)
