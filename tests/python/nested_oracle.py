"""What a prompt with inner answers in it must give, computed by transformers alone.

Like `span_oracle`, but a span may be an answer: its keys and values are those of its tokens after
the prompt of its own call, which may have answers in it again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel

from kvspan.layout import SpanLayout
from span_oracle import forward, rotated


@dataclass
class State:
    """Keys and values [1, heads, T, dim] of every layer, positions [T], and the last logits."""

    layers: list[tuple[torch.Tensor, torch.Tensor]]
    positions: torch.Tensor
    last: torch.Tensor | None = None

    def part(self, model: PreTrainedModel, start: int, delta: int) -> State:
        """Tokens from start on, moved by delta."""
        layers = [
            (rotated(model, i, keys[:, :, start:], delta), values[:, :, start:])
            for i, (keys, values) in enumerate(self.layers)
        ]
        return State(layers, self.positions[start:] + delta)

    def joined(self, other: State) -> State:
        layers = [
            (torch.cat([a, c], 2), torch.cat([b, d], 2))
            for (a, b), (c, d) in zip(self.layers, other.layers, strict=True)
        ]
        return State(layers, torch.cat([self.positions, other.positions]))


def extended(model: PreTrainedModel, state: State | None, ids: torch.Tensor, at: int) -> State:
    """The state after more tokens at positions at, at + 1, ..., which see all before them."""
    cache = DynamicCache()
    old = torch.arange(0)
    if state is not None:
        old = state.positions
        for i, (keys, values) in enumerate(state.layers):
            cache.update(keys, values, i)
    new = torch.arange(at, at + len(ids))
    order = torch.arange(len(old) + len(ids))
    seen = order[None] <= order[len(old) :, None]
    logits = forward(model, ids, new, torch.cat([old, new]), seen, cache)
    layers = [(layer.keys, layer.values) for layer in cache.layers]
    return State(layers, torch.cat([old, new]), logits[-1])


def prompt_state(model: PreTrainedModel, layout: SpanLayout, placement: str) -> State:
    """The state after a prompt, its tokens in order."""
    ids = torch.from_numpy(layout.token_ids).long()
    positions = layout.positions(placement)  # type: ignore[arg-type]
    state: State | None = None
    anchor: State | None = None
    span = 0
    for kind, start, end in layout.segments():
        at = int(positions[start])
        if kind != "span":
            state = extended(model, state, ids[start:end], at)
            anchor = anchor or state
            continue
        answer = layout.answer(span)
        span += 1
        if answer is not None:
            before, canonical = prompt_state(model, answer.prompt, answer.placement), answer.start
        else:
            before, canonical = anchor, layout.canonical_start
        alone = extended(model, before, ids[start:end], canonical)
        skip = 0 if before is None else len(before.positions)
        moved = alone.part(model, skip, at - canonical)
        state = moved if state is None else state.joined(moved)
    assert state is not None
    return state


def nested_logprobs(model: PreTrainedModel, layout: SpanLayout, placement: str) -> torch.Tensor:
    """log-probabilities [vocab] of the first token after the prompt. model: eager attention."""
    last = prompt_state(model, layout, placement).last
    assert last is not None
    return last.log_softmax(-1)
