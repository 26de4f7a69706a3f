"""Tail-Replay as a few lines of plain transformers: the oracle of kvspan.hybrid's tests.

For models of the Qwen3.5 kind (layers with ``linear_attn``); all sequences of a batch have the
same length. It knows neither blocks nor formats, and runs every layer of the tail whole.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache


@dataclass
class Captured:
    """A prefill of ``tokens`` tokens. ``hidden``: input of each group, [B, T, hidden], by the index
    of its attention layer (-1: the embedding). ``log_decay``: [B, T, heads] by layer."""

    tokens: int
    hidden: dict[int, Tensor]
    log_decay: dict[int, Tensor]
    cache: Any


def groups(config: Any) -> list[tuple[int, list[int]]]:
    """(attention layer or -1, the LA layers after it), without groups that have none."""
    found: list[tuple[int, list[int]]] = [(-1, [])]
    for i, kind in enumerate(config.layer_types):
        if kind == "full_attention":
            found.append((i, []))
        else:
            found[-1][1].append(i)
    return [group for group in found if group[1]]


@torch.no_grad()
def capture(model: Any, ids: Tensor) -> Captured:
    """Prefill ids [B, T] with an empty cache."""
    base = model.model
    hidden, decay, hooks = {-1: base.embed_tokens(ids)}, {}, []

    def keep_hidden(i: int) -> Any:
        return lambda _, __, out: hidden.__setitem__(i, out[0] if isinstance(out, tuple) else out)

    def keep_decay(i: int, layer: Any) -> Any:
        def hook(_: Any, __: Any, out: Tensor) -> None:
            steps = functional.softplus(out.float() + layer.dt_bias)
            decay[i] = -layer.A_log.float().exp() * steps

        return hook

    for i, layer in enumerate(base.layers):
        if base.config.layer_types[i] == "full_attention":
            hooks.append(layer.register_forward_hook(keep_hidden(i)))
        else:
            attention = layer.linear_attn
            hooks.append(attention.in_proj_a.register_forward_hook(keep_decay(i, attention)))
    cache = DynamicCache(config=base.config)
    model(ids, cache=cache, use_cache=True)
    for hook in hooks:
        hook.remove()
    return Captured(ids.shape[1], hidden, decay, cache)


def tail_for_bound(captured: Captured, layers: list[int], target: float) -> int:
    """The shortest tail, in whole chunks of 64, over which every head of these layers forgets to
    ``target`` of what it held; the whole prefix where one does not."""
    tail = 0
    for layer in layers:
        decay = (
            captured.log_decay[layer].flip(1).cumsum(1)
        )  # [B, T, heads]: over the last 1.. tokens
        enough = (decay <= math.log(target)).float()
        first = torch.where(enough.any(1), enough.argmax(1) + 1, captured.tokens)
        tail = max(tail, int(first.max()))
    return min(captured.tokens, -(-tail // 64) * 64)


@torch.no_grad()
def restored(model: Any, captured: Captured, tails: dict[int, int]) -> Any:
    """A copy of the cache whose LA states are rebuilt from the last ``tails[group]`` hidden vectors
    of each group (by its attention layer); 0 leaves zeros."""
    base, cache = model.model, copy.deepcopy(captured.cache)
    rebuilt = DynamicCache(config=base.config)
    for attention, layers in groups(base.config):
        begin = captured.tokens - tails[attention]
        hidden = captured.hidden[attention][:, begin:]
        for place, i in enumerate(layers):
            target = cache.layers[i]
            if tails[attention] == 0:
                target.conv_states[0].zero_()
                target.recurrent_states[0].zero_()
                continue
            layer = base.layers[i]
            if place == 0 and begin >= 3:  # the first layer's convolution is exact
                before = captured.hidden[attention][:, begin - 3 : begin]
                layer.linear_attn(layer.input_layernorm(before), cache=rebuilt)
                rebuilt.layers[i].recurrent_states[0].zero_()
            hidden = hidden + layer.linear_attn(layer.input_layernorm(hidden), cache=rebuilt)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            target.conv_states[0].copy_(rebuilt.layers[i].conv_states[0])
            target.recurrent_states[0].copy_(rebuilt.layers[i].recurrent_states[0])
    return cache


def state_errors(config: Any, exact: Any, other: Any) -> list[float]:
    """Of each LA layer: the distance of its recurrent states, relative to the norm of the exact."""
    errors = []
    for _, layers in groups(config):
        for i in layers:
            truth, found = exact.layers[i].recurrent_states[0], other.layers[i].recurrent_states[0]
            errors.append(float((found - truth).norm() / truth.norm()))
    return errors
