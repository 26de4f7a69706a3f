"""Rotary frequencies from a model's configuration, and which of them let cached keys be moved.

A key can be moved by rotating it only if its frequencies are the same before and after, so they
must not depend on the length of the sequence. Frequencies taken from the model itself are always
right; those here are for where there is none at hand, and equal transformers' bit for bit. Needs
torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")

_REASONS = {
    "dynamic": "dynamic NTK RoPE, whose frequencies change with the length of the sequence",
    "alibi": "ALiBi, whose keys hold no position: attention scores are biased by distance",
}


class UnsupportedRopeError(ValueError):
    """Keys of this kind cannot be moved by a rotation; str() says why."""


def refusal(rope_parameters: Mapping[str, Any], seq_lens: Iterable[int] = ()) -> str:
    """Why keys with these parameters cannot be moved; "" where they can.

    Args:
        rope_parameters: as in a transformers configuration; without ``rope_type``: default.
        seq_lens: lengths of all sequences in which the keys are computed and used. LongRoPE changes
            its frequencies beyond ``original_max_position_embeddings`` tokens, and is accepted only
            if all of these are known to lie on one side.
    """
    kind = rope_parameters.get("rope_type") or "default"
    if kind in STATIC_ROPE_TYPES:
        return ""
    if kind == "longrope":
        switch = _number(rope_parameters, "original_max_position_embeddings")
        lens = list(seq_lens)
        if not lens:
            return f"longrope RoPE, which changes its frequencies at {switch:g} tokens"
        if min(lens) <= switch < max(lens):
            return (
                f"longrope RoPE, which changes its frequencies at {switch:g} tokens, across "
                f"sequences of {min(lens)} to {max(lens)}"
            )
        return ""
    known = ", ".join((*STATIC_ROPE_TYPES, "longrope"))
    return _REASONS.get(kind, f"{kind} RoPE; expected one of {known}")


def inverse_frequencies(
    rope_parameters: Mapping[str, Any], head_dim: int, *, seq_lens: Iterable[int] = ()
) -> torch.Tensor:
    """Radians per token of every rotated pair, float32 ``[rotary_dim / 2]`` on the CPU.

    The attention factor of YaRN and LongRoPE scales keys once, when they are computed, and so is no
    part of this.

    Args:
        rope_parameters: as in a transformers configuration: ``rope_type``, ``rope_theta``,
            ``partial_rotary_factor``, and what the type needs.
        head_dim: dimensions of a head, before ``partial_rotary_factor``.
        seq_lens: as for :func:`refusal`.

    Raises:
        UnsupportedRopeError: where keys cannot be moved.
        ValueError: for a parameter that is missing or no number.
    """
    lens = list(seq_lens)
    if reason := refusal(rope_parameters, lens):
        raise UnsupportedRopeError(reason)
    kind = rope_parameters.get("rope_type") or "default"
    base = _number(rope_parameters, "rope_theta")
    rotary_dim = int(head_dim * (rope_parameters.get("partial_rotary_factor") or 1.0))
    if rotary_dim < 2:
        raise ValueError(f"head_dim: expected at least 2 rotary dimensions, got {rotary_dim}")
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    wavelengths = base**exponents  # over 2 pi
    if kind == "linear":
        return 1.0 / wavelengths / _number(rope_parameters, "factor")
    if kind == "llama3":
        return _llama3(1.0 / wavelengths, rope_parameters)
    if kind == "yarn":
        return _yarn(wavelengths, rotary_dim, base, rope_parameters)
    if kind == "longrope":
        switch = _number(rope_parameters, "original_max_position_embeddings")
        name = "long_factor" if max(lens) > switch else "short_factor"
        factors = rope_parameters.get(name)
        if not isinstance(factors, Sequence) or len(factors) != len(exponents):
            raise ValueError(f"rope_parameters[{name!r}]: expected {len(exponents)} numbers")
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * wavelengths)
    return 1.0 / wavelengths


def mrope_axes(mrope_section: Sequence[int], *, interleaved: bool) -> list[int]:
    """The position axis (0 time, 1 height, 2 width) of every frequency, for M-RoPE.

    Args:
        mrope_section: frequencies of each axis, ``[t, h, w]``; their sum is ``rotary_dim / 2``.
        interleaved: False for one run per axis (Qwen2-VL); True for ``t h w t h w ... t t``
            (Qwen3-VL): height and width take every third frequency until theirs are used up.
    """
    axes = [axis for axis, count in enumerate(mrope_section) for _ in range(count)]
    if not interleaved:
        return axes
    num_axes = len(mrope_section)
    axes = [0] * len(axes)
    for axis in range(1, num_axes):
        places = range(axis, num_axes * mrope_section[axis], num_axes)
        if places and places[-1] >= len(axes):
            raise ValueError(
                f"mrope_section[{axis}]: expected at most one in {num_axes} of {len(axes)} "
                f"frequencies, got {mrope_section[axis]}"
            )
        for place in places:
            axes[place] = axis
    return axes


def _number(rope_parameters: Mapping[str, Any], name: str) -> float:
    value = rope_parameters.get(name)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ValueError(f"rope_parameters[{name!r}]: expected a number, got {value!r}")
    return value


def _llama3(inv_freq: torch.Tensor, parameters: Mapping[str, Any]) -> torch.Tensor:
    """Low frequencies are divided by factor, high ones kept, those between blended."""
    factor = _number(parameters, "factor")
    low, high = _number(parameters, "low_freq_factor"), _number(parameters, "high_freq_factor")
    original = _number(parameters, "original_max_position_embeddings")
    wavelength = 2 * math.pi / inv_freq
    scaled = torch.where(wavelength > original / low, inv_freq / factor, inv_freq)
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * scaled / factor + smooth * scaled
    is_medium = ~(wavelength < original / high) * ~(wavelength > original / low)
    return torch.where(is_medium, blended, scaled)


def _yarn(
    wavelengths: torch.Tensor, rotary_dim: int, base: float, parameters: Mapping[str, Any]
) -> torch.Tensor:
    """A ramp from kept to interpolated frequencies (YaRN, arXiv 2309.00071)."""
    factor = _number(parameters, "factor")
    original = _number(parameters, "original_max_position_embeddings")
    truncate = parameters.get("truncate", True)

    def dimension(num_rotations: float) -> float:
        """Of the wavelength that turns so many times in the original context."""
        turns = original / (num_rotations * 2 * math.pi)
        return (rotary_dim * math.log(turns)) / (2 * math.log(base))

    low = dimension(parameters.get("beta_fast") or 32)
    high = dimension(parameters.get("beta_slow") or 1)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low)
    kept = 1 - ramp.clamp(0, 1)
    return 1.0 / (factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept
