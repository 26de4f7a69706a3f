"""The linear-attention operations on every device present, against their twins in float64.

CUDA multiplies matrices of 16-bit types as tf32; the CPU is held to tighter bounds elsewhere.
"""

from __future__ import annotations

import pytest
import torch

from devices import DEVICES, stream_of
from kvspan import ops, reference_gated_delta

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LENGTHS = (65, 0, 1, 130, 64)


def assert_close(found: torch.Tensor, expected: torch.Tensor, dtype: str) -> None:
    error = (found.cpu().double() - expected).abs().max().item()
    assert error <= (1e-4 if dtype == "fp32" else 1e-2) * expected.abs().max().item()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["kv", "vk"])
def test_gated_delta(layout: str, dtype: str, device: str) -> None:
    random = torch.Generator().manual_seed(0)
    count = sum(LENGTHS)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=random)

    q, k, v = (normal(count, h, d).to(DTYPES[dtype]) for h, d in ((2, 128), (2, 128), (4, 96)))
    g, beta = -0.3 * normal(count, 4).abs(), 2 * normal(count, 4).sigmoid()
    initial = normal(len(LENGTHS), 4, *((128, 96) if layout == "kv" else (96, 128)))
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0)
    doubles = [x.double() for x in (q, k, v, g, beta)]
    expected_out, expected_state = reference_gated_delta.gated_delta(
        *doubles, initial_state=initial, cu_seqlens=bounds, state_layout=layout
    )
    there = [x.to(device) for x in (q, k, v, g, beta)]
    state = initial.to(device, copy=True)
    out = torch.full_like(there[2], torch.nan)
    ops.gated_delta(
        *there,
        initial_state=state,
        final_state=state,
        out=out,
        cu_seqlens=bounds,
        state_layout=layout,
        stream=stream_of(device),
    )
    assert_close(out, expected_out, dtype)
    assert_close(state, expected_state, dtype)
    only = ops.gated_delta_state(
        *there[1:],
        initial_state=initial.to(device),
        cu_seqlens=bounds,
        state_layout=layout,
        stream=stream_of(device),
    )
    assert torch.equal(only, state)


@pytest.mark.parametrize("device", DEVICES)
def test_continuing_at_a_chunk_gives_the_bits_of_not_stopping(device: str) -> None:
    random = torch.Generator().manual_seed(0)
    k, v = (torch.randn(193, 2, 64, generator=random).bfloat16().to(device) for _ in range(2))
    g, beta = (-torch.rand(193, 2, generator=random).to(device) for _ in range(2))
    whole = ops.gated_delta_state(k, v, g, -beta, stream=stream_of(device))
    parts = None
    for rows in (slice(0, 64), slice(64, 192), slice(192, 193)):
        parts = ops.gated_delta_state(
            k[rows], v[rows], g[rows], -beta[rows], initial_state=parts, stream=stream_of(device)
        )
    assert torch.equal(whole, parts)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_causal_conv1d(dtype: str, device: str) -> None:
    random = torch.Generator().manual_seed(0)
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0)
    for num_channels, width in ((264, 4), (37, 4), (40, 3)):
        shapes = ((260, num_channels), (num_channels, width), (num_channels,))
        x, weight, bias, state = (
            torch.randn(shape, generator=random).to(DTYPES[dtype])
            for shape in (*shapes, (len(LENGTHS), num_channels, width - 1))
        )
        found_state, expected_state = state.to(device), state.clone()
        out, _ = ops.causal_conv1d(
            x.to(device),
            weight.to(device),
            bias.to(device),
            state=found_state,
            cu_seqlens=bounds,
            stream=stream_of(device),
        )
        expected, _ = reference_gated_delta.causal_conv1d(
            x.double(), weight.double(), bias.double(), state=expected_state, cu_seqlens=bounds
        )
        assert_close(out, expected, dtype)
        assert torch.equal(found_state.cpu(), expected_state)
