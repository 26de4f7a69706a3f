"""Which layers of a hybrid model form which groups, read off its config. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

FULL, LINEAR = "full_attention", "linear_attention"
# Text configs; the checkpoints of Qwen3.5 with vision carry one of these inside.
FAMILIES = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid")


@dataclass(frozen=True)
class Group:
    """Linear-attention layers in a row, and what feeds them.

    source: the full-attention layer before them, whose output vectors are their input; None where
        it is the token embedding, of which nothing has to be kept.
    layers: indices of the linear-attention layers, in order, at least one.
    """

    source: int | None
    layers: tuple[int, ...]


@dataclass(frozen=True)
class LayerMap:
    """full, linear: layer indices of each kind. groups: in the order of the model.

    Positions in `full` and `linear` number the KV caches and the recurrent states.
    """

    full: tuple[int, ...]
    linear: tuple[int, ...]
    groups: tuple[Group, ...]

    @property
    def streams(self) -> tuple[int, ...]:
        """Full-attention layers whose output is kept: those that feed a group.

        For models of LA-LA-LA-FA periods all but the last: L_FA - 1 of them.
        """
        return tuple(g.source for g in self.groups if g.source is not None)


def is_hybrid(config: Any) -> bool:
    """Whether a transformers config describes layers of linear attention."""
    return LINEAR in (getattr(config.get_text_config(), "layer_types", None) or ())


def refusal(config: Any) -> str:
    """Why the model cannot be run here, in a few words with its name; "" if it can."""
    text = config.get_text_config()
    if text.model_type not in FAMILIES:
        return f"hybrid models of type {text.model_type} (known are {', '.join(FAMILIES)})"
    if unknown := set(text.layer_types) - {FULL, LINEAR}:
        return f"layers of type {', '.join(sorted(unknown))}"
    return ""


def layer_map(layer_types: Sequence[str]) -> LayerMap:
    """Split a model's layers into groups.

    >>> layer_map(["linear_attention"] * 3 + ["full_attention"] + ["linear_attention"]).groups
    (Group(source=None, layers=(0, 1, 2)), Group(source=3, layers=(4,)))
    """
    groups: list[Group] = []
    source: int | None = None
    run: list[int] = []
    for i, kind in enumerate([*layer_types, FULL]):
        if kind == LINEAR:
            run.append(i)
            continue
        if run:
            groups.append(Group(source, tuple(run)))
        source, run = i, []
    of_kind = {
        kind: tuple(i for i, k in enumerate(layer_types) if k == kind) for kind in (FULL, LINEAR)
    }
    return LayerMap(of_kind[FULL], of_kind[LINEAR], tuple(groups))
