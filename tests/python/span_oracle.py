"""What a span prompt's next-token log-probabilities must be, computed by transformers alone.

Each span is run by itself after its anchor, with an explicit 4-D mask and positions; its keys are
rotated to their placement in float64; then the rest of the prompt runs over the joined caches,
again with an explicit 4-D mask and positions. Nothing of kvspan takes part but the layout.
"""

from __future__ import annotations

import inspect

import torch
from transformers import DynamicCache, PreTrainedModel

from kvspan.layout import SpanLayout

INTERLEAVED = ("cohere", "glm")


def forward(
    model: PreTrainedModel,
    ids: torch.Tensor,
    q_pos: torch.Tensor,
    k_pos: torch.Tensor,
    visible: torch.Tensor,
    cache: DynamicCache,
) -> torch.Tensor:
    """Logits [T, vocab] of ids [T] appended to cache; visible bool [T, keys]."""
    config = model.config
    low = torch.finfo(model.dtype).min

    def mask(seen: torch.Tensor) -> torch.Tensor:
        return torch.zeros(seen.shape, dtype=model.dtype).masked_fill(~seen, low)[None, None]

    masks: torch.Tensor | dict[str, torch.Tensor] = mask(visible)
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        near = q_pos[:, None] - k_pos[None] < config.sliding_window
        masks = {"full_attention": mask(visible), "sliding_attention": mask(visible & near)}
    with torch.inference_mode():
        out = model(
            input_ids=ids[None],
            position_ids=q_pos[None],
            attention_mask=masks,
            use_cache=True,
            **{_cache_argument(model): cache},
        )
    return out.logits[0]


def _cache_argument(model: PreTrainedModel) -> str:
    """transformers renamed past_key_values to cache."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def causal(model: PreTrainedModel, ids: torch.Tensor) -> DynamicCache:
    cache = DynamicCache()
    positions = torch.arange(len(ids))
    forward(model, ids, positions, positions, positions[None] <= positions[:, None], cache)
    return cache


def layer_inv_freq(model: PreTrainedModel, layer: int) -> torch.Tensor:
    rotary = model.model.rotary_emb  # type: ignore[union-attr]
    if hasattr(rotary, "inv_freq"):
        return rotary.inv_freq  # type: ignore[return-value]
    return getattr(rotary, f"{model.config.layer_types[layer]}_inv_freq")


def rotated(model: PreTrainedModel, layer: int, keys: torch.Tensor, delta: int) -> torch.Tensor:
    """keys [1, H, T, D] moved by delta tokens."""
    angle = delta * layer_inv_freq(model, layer).double()
    n = angle.numel()
    turn = torch.polar(torch.ones_like(angle), angle)
    x = keys.double()
    if model.config.model_type in INTERLEAVED:
        pair = torch.complex(x[..., 0 : 2 * n : 2].contiguous(), x[..., 1 : 2 * n : 2].contiguous())
        pair = torch.view_as_real(pair * turn).flatten(-2)
    else:
        pair = torch.complex(x[..., :n].contiguous(), x[..., n : 2 * n].contiguous()) * turn
        pair = torch.cat([pair.real, pair.imag], -1)
    return torch.cat([pair, x[..., 2 * n :]], -1).to(keys.dtype)


def span_logprobs(model: PreTrainedModel, layout: SpanLayout, placement: str) -> torch.Tensor:
    """log-probabilities [vocab] of the first token after the prompt. model: eager attention."""
    return text_logprobs(model, layout, placement)[-1]


def text_logprobs(model: PreTrainedModel, layout: SpanLayout, placement: str) -> torch.Tensor:
    """log-probabilities [num_text, vocab] after every token that follows the first span.

    Without spans after every token. Text between spans counts.
    """
    ids = torch.from_numpy(layout.token_ids).long()
    positions = torch.from_numpy(layout.positions(placement)).long()  # type: ignore[arg-type]
    anchor = layout.anchor_len
    if not layout.spans:
        cache = DynamicCache()
        every = torch.arange(len(ids))
        seen = every[None] <= every[:, None]
        return forward(model, ids, every, every, seen, cache).log_softmax(-1)
    prefix = ids[:anchor] if layout.scope == "anchored" else ids[:0]
    parts = [(causal(model, ids[:anchor]), 0, 0, torch.arange(anchor))] if anchor else []
    for start, end in layout.spans:
        cache = causal(model, torch.cat([prefix, ids[start:end]]))
        delta = int(positions[start]) - len(prefix)
        parts.append((cache, len(prefix), delta, torch.arange(start, end)))
    joined = DynamicCache()
    for layer in range(model.config.num_hidden_layers):
        keys = [
            rotated(model, layer, cache.layers[layer].keys[:, :, skip:], delta)
            for cache, skip, delta, _ in parts
        ]
        values = [cache.layers[layer].values[:, :, skip:] for cache, skip, _, _ in parts]
        joined.update(torch.cat(keys, 2), torch.cat(values, 2), layer)
    text = torch.cat([torch.arange(lo, hi) for kind, lo, hi in layout.segments() if kind == "text"])
    order = torch.cat([index for *_, index in parts] + [text])
    logits = forward(
        model, ids[text], positions[text], positions[order], order[None] <= text[:, None], joined
    )
    return logits.log_softmax(-1)


def one_pass_logprobs(model: PreTrainedModel, layout: SpanLayout, placement: str) -> torch.Tensor:
    """The same in a single pass under one 4-D mask, where that is possible.

    It is where a span's own positions serve for both its queries and its readers: parallel
    placement, or isolated scope.
    """
    ids = torch.from_numpy(layout.token_ids).long()
    positions = torch.from_numpy(layout.positions(placement)).long()  # type: ignore[arg-type]
    owner = torch.zeros(len(ids), dtype=torch.long)
    for i, (start, end) in enumerate(layout.spans, start=1):
        owner[start:end] = i
    every = torch.arange(len(ids))
    in_anchor = every < (layout.anchor_len if layout.scope == "anchored" else 0)
    own = owner[:, None] == owner[None]
    seen = (every[None] <= every[:, None]) & ((owner[:, None] == 0) | own | in_anchor[None])
    logits = forward(model, ids, positions, positions, seen, DynamicCache())
    return logits[-1].log_softmax(-1)
