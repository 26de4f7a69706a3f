"""Attention over the paged pool, plugged into transformers as the "kvspan" implementation.

A forward pass runs many rows at once, flattened to one sequence [1, num_tokens]: a row is a run
of tokens of one sequence whose keys and values lie in pool blocks. Each layer writes the keys and
values of all its rows to the pool before any row attends, so that rows may read one another's
(spans read the anchor of the same pass).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

IMPLEMENTATION = "kvspan"
QUERY_BLOCK = 256  # queries per masked attention call: bounds the mask and skips hidden keys


class Attend(Protocol):
    """What a layer's attention call is handed to; query and key are after RoPE."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """query [Hq, T, D], key and value [Hkv, T, D] of the pass -> output [T, Hq, D]."""
        ...


class UnsupportedAttentionError(Exception):
    """A model asks for attention that this engine does not compute; str() says which."""


_current = threading.local()


@contextmanager
def attending(step: Attend) -> Iterator[None]:
    """Route the attention of forward passes on this thread to step."""
    _current.step = step
    try:
        yield
    finally:
        _current.step = None


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function transformers calls in place of its own attention; [1, H, T, D] tensors."""
    for name, given in (("softcap", softcap), ("attention sinks", s_aux)):
        if given is not None:
            raise UnsupportedAttentionError(f"attention with {name}")
    step: Attend | None = getattr(_current, "step", None)
    if step is None:
        raise RuntimeError("a model with kvspan's attention runs only inside `attending`")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: int = module.layer_idx
    out = step.attend(layer, query[0], key[0], value[0], scale, sliding_window)
    return out.unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, attention_forward)


class Slots:
    """Pool slots (block * block_size + offset) of a sequence's tokens, int64 [capacity]."""

    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids
        self.runs = contiguous_runs(ids)

    def gather(self, cache: torch.Tensor, first: int, end: int) -> torch.Tensor:
        """Keys or values of tokens [first, end): a view where the slots are one run, else a copy.

        cache: [num_slots, Hkv, D] -> [end - first, Hkv, D].
        """
        parts, at = [], 0
        for slot, length in self.runs:
            lo, hi = max(first - at, 0), min(end - at, length)
            if lo < hi:
                parts.append(cache[slot + lo : slot + hi])
            at += length
        return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass
class Row:
    """tokens [start, start + num_tokens) of one sequence.

    slots: where the sequence's tokens lie in the pool.
    positions: int64 [num slots], RoPE positions; None when they are 0, 1, 2, ...
    wants_logits: whether the last token's logits are asked for.
    """

    token_ids: torch.Tensor
    start: int
    slots: Slots
    positions: torch.Tensor | None = None
    wants_logits: bool = False
    masks: dict[tuple[int, int | None], torch.Tensor] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    def query_positions(self) -> torch.Tensor:
        if self.positions is None:
            return torch.arange(self.start, self.end, device=self.slots.ids.device)
        return self.positions[self.start : self.end]

    def mask(self, lo: int, hi: int, first: int, window: int | None) -> torch.Tensor:
        """bool [hi - lo, hi - first]: may query token lo + i see key token first + j.

        One mask serves all layers that share a window.
        """
        mask = self.masks.get((lo, window))
        if mask is None:
            device = self.slots.ids.device
            q = torch.arange(lo, hi, device=device)[:, None]
            k = torch.arange(first, hi, device=device)[None]
            mask = k <= q
            if window is not None:
                if self.positions is not None:
                    q, k = self.positions[lo:hi, None], self.positions[None, first:hi]
                mask &= q - k < window
            self.masks[lo, window] = mask
        return mask


def contiguous_runs(ids: torch.Tensor) -> list[tuple[int, int]]:
    """(first slot, length) of the maximal runs of consecutive numbers."""
    if ids.numel() == 0:
        return []
    breaks = (torch.nonzero(ids[1:] != ids[:-1] + 1).flatten() + 1).tolist()
    edges = [0, *breaks, ids.numel()]
    first = ids[torch.tensor(edges[:-1], device=ids.device)].tolist()
    return [(f, b - a) for f, a, b in zip(first, edges[:-1], edges[1:], strict=True)]


def attend_row(
    row: Row,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Causal attention of one row over its sequence's cached keys and values.

    query [Hq, T, D]; keys, values [num_slots, Hkv, D] (a layer's whole cache) -> [T, Hq, D].
    """
    dense = row.positions is None
    blocks = [(row.start, row.end)]
    if row.num_tokens > 1 and (row.start > 0 or window is not None):
        edges = [*range(row.start, row.end, QUERY_BLOCK), row.end]
        blocks = list(pairwise(edges))
    # With positions 0, 1, 2, ... the keys past the window are the first ones: leave them out.
    first = max(0, row.start + 1 - window) if window is not None and dense else 0
    k = row.slots.gather(keys, first, row.end).transpose(0, 1)
    v = row.slots.gather(values, first, row.end).transpose(0, 1)
    parts = []
    for lo, hi in blocks:
        q = query[:, lo - row.start : hi - row.start]
        low = max(first, lo + 1 - window) if window is not None and dense else first
        k_part, v_part = k[:, low - first : hi - first], v[:, low - first : hi - first]
        if lo == 0 and dense and (window is None or hi <= window):
            parts.append(_causal(q, k_part, v_part, scale))
        elif hi - lo > 1 or (window is not None and not dense):
            parts.append(_masked(q, k_part, v_part, row.mask(lo, hi, low, window), scale))
        else:
            parts.append(_masked(q, k_part, v_part, None, scale))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    out = F.scaled_dot_product_attention(
        q[None],
        k[None],
        v[None],
        is_causal=q.shape[1] > 1,
        scale=scale,
        enable_gqa=q.shape[0] != k.shape[0],
    )
    return out[0].transpose(0, 1)


def _masked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Query heads of one key head are stacked along the tokens, so keys are read once."""
    num_heads, num_tokens, dim = q.shape
    group = num_heads // k.shape[0]
    packed = q.reshape(k.shape[0], group * num_tokens, dim)
    if mask is not None:
        mask = mask.repeat(group, 1)
    out = F.scaled_dot_product_attention(packed[None], k[None], v[None], mask, scale=scale)
    return out[0].reshape(num_heads, num_tokens, dim).transpose(0, 1)
