"""What kvspan must know of a model's layers to move cached keys, found out by asking the model.

A token that attends to nothing but itself gets the same hidden states at every position, in every
layer: only the rotation of its key differs. So two one-token rows at different positions show, for
each layer, which frequencies and which pairing the model uses, or that a layer rotates nothing. A
layer that no candidate explains is refused: nothing is guessed from the architecture's name.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from kvspan.engine.attention import UnsupportedAttentionError, attending
from kvspan.reference import rotate
from kvspan.rope_scaling import refusal

PROBE_POSITIONS = (0, 3, 61)  # far enough apart to tell frequencies, small enough for fp32
PROBE_TOKENS = 4  # more than one, since a padding token's keys may be all zero


class UnsupportedModelError(Exception):
    """transformers can run the model, this engine cannot; str() says why."""


@dataclass(frozen=True)
class LayerSpec:
    """One attention layer.

    inv_freq: float32 [rotary_dim / 2] in host memory; empty where keys do not rotate.
    window: sliding window in tokens, the current one included; None without.
    """

    num_kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None
    inv_freq: torch.Tensor
    is_neox: bool


class _Probe:
    """Keeps each layer's keys; a lone token's attention output is its own value."""

    def __init__(self) -> None:
        self.keys: dict[int, torch.Tensor] = {}
        self.value_dims: dict[int, int] = {}
        self.windows: dict[int, int | None] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        self.keys[layer] = key.detach().clone()
        self.value_dims[layer] = value.shape[-1]
        self.windows[layer] = window
        group = query.shape[0] // key.shape[0]
        return value.repeat_interleave(group, dim=0).transpose(0, 1)


def probe_layers(model: PreTrainedModel) -> tuple[list[LayerSpec], str]:
    """The spec of every layer, and why spans cannot be repositioned ("" when they can).

    Raises UnsupportedModelError where even ordinary attention would go wrong.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    if unknown := kinds - {"full_attention", "sliding_attention"}:
        raise UnsupportedModelError(f"layers of type {', '.join(sorted(unknown))}")
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedModelError("bidirectional attention")
    probe = _run_probe(model, config.num_hidden_layers)
    candidates = _inverse_frequencies(model)
    tolerance = 1e-4 if model.dtype == torch.float32 else 4e-2
    specs, refused = [], refused_rope(config)
    for layer in range(config.num_hidden_layers):
        if not probe.keys[layer].any():
            raise UnsupportedModelError(f"the keys of layer {layer} are all zero: empty weights?")
        inv_freq, is_neox, error = _explain_keys(probe.keys[layer], candidates)
        if not refused and not error <= tolerance:
            refused = (
                f"the keys of layer {layer} do not rotate with position as RoPE does "
                f"(relative error {error:.1e}, expected at most {tolerance:.0e})"
            )
        specs.append(
            LayerSpec(
                num_kv_heads=probe.keys[layer].shape[0],
                head_dim=probe.keys[layer].shape[-1],
                value_dim=probe.value_dims[layer],
                window=probe.windows[layer],
                inv_freq=inv_freq,
                is_neox=is_neox,
            )
        )
    for layer, kind in enumerate(getattr(config, "layer_types", None) or ()):
        # A window that does not reach the attention function would silently be ignored.
        if kind == "sliding_attention" and specs[layer].window is None:
            raise UnsupportedModelError(f"the sliding window of layer {layer} cannot be seen")
    return specs, refused


def _run_probe(model: PreTrainedModel, num_layers: int) -> _Probe:
    probe = _Probe()
    vocab = model.get_input_embeddings().num_embeddings
    tokens = [vocab * (i + 1) // (PROBE_TOKENS + 2) for i in range(PROBE_TOKENS)]
    ids = torch.tensor([tokens * len(PROBE_POSITIONS)], device=model.device)
    positions = torch.tensor([PROBE_POSITIONS], device=model.device)
    positions = positions.repeat_interleave(PROBE_TOKENS, 1)
    try:
        with torch.inference_mode(), attending(probe):
            model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=1)
    except (UnsupportedAttentionError, TypeError, RuntimeError, AttributeError) as e:
        raise UnsupportedModelError(f"its attention cannot be replaced: {e}") from e
    if sorted(probe.keys) != list(range(num_layers)):
        raise UnsupportedModelError(
            f"only {len(probe.keys)} of {num_layers} layers have attention that can be replaced"
        )
    return probe


def refused_rope(config: object) -> str:
    """Why keys of a model cannot be repositioned, as far as its config says; "" if it does not."""
    if getattr(config, "alibi", False):
        return refusal({"rope_type": "alibi"})
    seq_lens = (1, getattr(config, "max_position_embeddings", None) or sys.maxsize)
    reasons = (refusal(rope, seq_lens) for rope in _rope_parameters(config))
    return next(filter(None, reasons), "")


def _rope_parameters(config: object) -> list[dict[str, object]]:
    parameters = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in parameters or not parameters:
        return [parameters]
    return [p for p in parameters.values() if isinstance(p, dict)] or [parameters]


def _inverse_frequencies(model: PreTrainedModel) -> list[torch.Tensor]:
    """Every distinct inv_freq buffer of the model, float32 in host memory."""
    found: list[torch.Tensor] = []
    for name, buffer in model.named_buffers():
        leaf = name.rsplit(".", 1)[-1]
        if leaf.endswith("inv_freq") and "original" not in leaf:
            freq = buffer.detach().float().cpu().flatten()
            if not any(freq.shape == f.shape and torch.equal(freq, f) for f in found):
                found.append(freq)
    return found


def _explain_keys(
    keys: torch.Tensor, candidates: list[torch.Tensor]
) -> tuple[torch.Tensor, bool, float]:
    """The (inv_freq, is_neox) that best turn the keys at one position into those at the others.

    keys: [Hkv, positions * tokens, D]. The third value is the relative error that remains.
    """
    x = keys.double().cpu().unflatten(1, (len(PROBE_POSITIONS), PROBE_TOKENS)).movedim(0, 2)
    base, moved = x[:1].expand(len(PROBE_POSITIONS) - 1, -1, -1, -1), x[1:]
    options = [(torch.empty(0, dtype=torch.float32), True)]
    for inv_freq in candidates:
        if 2 * inv_freq.numel() <= keys.shape[-1]:
            options += [(inv_freq, True), (inv_freq, False)]

    def error(option: tuple[torch.Tensor, bool]) -> float:
        inv_freq, is_neox = option
        expected = rotate(base, PROBE_POSITIONS[1:], inv_freq, is_neox=is_neox)
        return float((moved - expected).norm() / moved.norm())

    best = min(options, key=error)
    return (*best, error(best))
