"""Frequencies by configuration against transformers' own, and what cannot be moved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kvspan.rope_scaling import (
    STATIC_ROPE_TYPES,
    UnsupportedRopeError,
    inverse_frequencies,
    mrope_axes,
    refusal,
)

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 4.0,
    "original_max_position_embeddings": 32_768,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 4096,
    "factor": 32.0, "short_factor": [1.0 + i / 100 for i in range(48)],
    "long_factor": [1.0 + i for i in range(48)],
}  # fmt: skip


def transformers_frequencies(
    parameters: dict[str, Any], head_dim: int, seq_len: int | None = None
) -> torch.Tensor:
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=131_072,
        rope_parameters=dict(parameters),
    )
    if parameters.get("rope_type", "default") == "default":
        return LlamaRotaryEmbedding(config).inv_freq
    return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, seq_len=seq_len)[0]


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 10_000.0},
        {"rope_type": "default", "rope_theta": 1_000_000},
        {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 8.0},
        {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.5,
         "partial_rotary_factor": 0.5},
        LLAMA3,
        LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 512},
        YARN,
        YARN | {"beta_fast": 16, "beta_slow": 2, "mscale": 1.0, "mscale_all_dim": 0.5},
        YARN | {"truncate": False, "partial_rotary_factor": 0.75},
        YARN | {"original_max_position_embeddings": 8, "rope_theta": 10_000.0},
    ],
    ids=["default", "theta1e6", "linear", "linear-partial", "llama3", "llama3-short", "yarn",
         "yarn-mscale", "yarn-untruncated-partial", "yarn-degenerate"],
)  # fmt: skip
def test_equals_transformers_bit_for_bit(parameters: dict[str, Any], head_dim: int) -> None:
    ours = inverse_frequencies(parameters, head_dim)
    assert ours.dtype == torch.float32
    assert torch.equal(ours, transformers_frequencies(parameters, head_dim))


def test_the_types_differ() -> None:
    """A test above that compared the same frequencies throughout would prove little."""
    found = [
        inverse_frequencies(parameters | {"rope_theta": 500_000.0}, 128)
        for parameters in ({}, {"rope_type": "linear", "factor": 8.0}, LLAMA3, YARN)
    ]
    for i, a in enumerate(found):
        assert all(not torch.allclose(a, b, rtol=1e-3, atol=0) for b in found[i + 1 :])


@pytest.mark.parametrize(("seq_len", "seq_lens"), [(4096, (17, 4096)), (4097, (4097, 100_000))])
def test_longrope_on_one_side_of_its_switch(seq_len: int, seq_lens: tuple[int, int]) -> None:
    ours = inverse_frequencies(LONGROPE, 96, seq_lens=seq_lens)
    assert torch.equal(ours, transformers_frequencies(LONGROPE, 96, seq_len))


def test_longrope_across_its_switch_is_refused() -> None:
    """Field case 8: cached under the short factors, moved past the switch."""
    with pytest.raises(
        UnsupportedRopeError,
        match="longrope RoPE, which changes its frequencies at 4096 tokens, across sequences of "
        "4000 to 4097",
    ):
        inverse_frequencies(LONGROPE, 96, seq_lens=(4000, 4097))
    with pytest.raises(UnsupportedRopeError, match="changes its frequencies at 4096 tokens"):
        inverse_frequencies(LONGROPE, 96)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("dynamic", "dynamic NTK RoPE, whose frequencies change with the length"),
        ("alibi", "ALiBi, whose keys hold no position"),
        ("novel", "novel RoPE; expected one of default, linear, llama3, yarn, longrope"),
    ],
)
def test_refused_by_name(kind: str, reason: str) -> None:
    with pytest.raises(UnsupportedRopeError, match=reason):
        inverse_frequencies({"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}, 64)
    assert all(refusal({"rope_type": name}) == "" for name in STATIC_ROPE_TYPES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_theta": None}, r"rope_parameters\['rope_theta'\]: expected a number, got None"),
        ({"factor": "8"}, r"rope_parameters\['factor'\]: expected a number, got '8'"),
        ({"partial_rotary_factor": 0.01}, "head_dim: expected at least 2 rotary dimensions, got 0"),
    ],
)
def test_bad_parameters(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        inverse_frequencies(LLAMA3 | changes, 64)
    with pytest.raises(ValueError, match=r"rope_parameters\['long_factor'\]: expected 32 numbers"):
        inverse_frequencies(LONGROPE, 64, seq_lens=(5000,))


def test_mrope_axes() -> None:
    assert mrope_axes([2, 1, 1], interleaved=False) == [0, 0, 1, 2]
    assert mrope_axes([4, 2, 2], interleaved=True) == [0, 1, 2, 0, 1, 2, 0, 0]
    for section in ([16, 24, 24], [24, 20, 20]):
        contiguous = mrope_axes(section, interleaved=False)
        assert [contiguous.count(axis) for axis in range(3)] == section
    interleaved = mrope_axes([24, 20, 20], interleaved=True)
    assert [interleaved.count(axis) for axis in range(3)] == [24, 20, 20]
    with pytest.raises(
        ValueError, match=r"mrope_section\[1\]: expected at most one in 3 of 64 frequencies"
    ):
        mrope_axes([16, 24, 24], interleaved=True)
