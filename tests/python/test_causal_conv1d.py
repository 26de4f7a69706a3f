"""causal_conv1d against its twin in float64 and against torch's convolution."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvspan import ops, reference_gated_delta

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def inputs(
    num_tokens: int, num_channels: int, width: int, dtype: torch.dtype, num_sequences: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weight, bias, state."""
    random = torch.Generator().manual_seed(num_tokens + 7 * num_channels + 13 * width)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=random).to(dtype)

    return (
        normal(num_tokens, num_channels) * 3,
        normal(num_channels, width),
        normal(num_channels),
        normal(num_sequences, num_channels, width - 1),
    )


def check(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    **options: Any,
) -> None:
    out, found_state = torch.full_like(x, torch.nan), state.clone()
    got = ops.causal_conv1d(x, weight, bias, state=found_state, out=out, **options)
    assert got[0] is out
    assert got[1] is found_state
    options.pop("isa", None)
    options.pop("num_threads", None)
    doubles = [None if t is None else t.double() for t in (x, weight, bias)]
    expected_state = state.clone()
    expected, _ = reference_gated_delta.causal_conv1d(*doubles, state=expected_state, **options)  # type: ignore[arg-type]
    assert torch.equal(found_state, expected_state)
    place = {torch.float32: 2**-21, torch.bfloat16: 2**-8, torch.float16: 2**-11}[x.dtype]
    torch.testing.assert_close(out.double(), expected, rtol=1.01 * place, atol=5e-6)


@pytest.mark.parametrize("isa", ops.vector_isas())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 2, 4, 16])
def test_matches_the_twin(width: int, dtype: str, isa: str) -> None:
    for num_tokens, num_channels in ((1, 64), (3, 5), (65, 37), (131, 16)):
        x, weight, bias, state = inputs(num_tokens, num_channels, width, DTYPES[dtype])
        check(x, weight, bias, state, isa=isa)
        check(x, weight, None, state, activation=None, isa=isa)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_sequences_and_their_states(num_threads: int) -> None:
    lengths = (0, 1, 2, 3, 4, 70, 0, 129)
    x, weight, bias, state = inputs(sum(lengths), 48, 4, torch.bfloat16, len(lengths))
    cu_seqlens = torch.from_numpy(np.cumsum([0, *lengths])).int()
    check(x, weight, bias, state, cu_seqlens=cu_seqlens, num_threads=num_threads)


def test_cut_anywhere_it_gives_the_same_bits() -> None:
    x, weight, bias, state = inputs(140, 40, 4, torch.bfloat16)
    whole, last = ops.causal_conv1d(x, weight, bias, state=state.clone())
    for cut in (0, 1, 2, 3, 63, 64, 100, 139):
        carried = state.clone()
        parts = [
            ops.causal_conv1d(part, weight, bias, state=carried)[0] for part in (x[:cut], x[cut:])
        ]
        assert torch.equal(torch.cat(parts), whole)
        assert torch.equal(carried, last)


def test_made_results_and_torch() -> None:
    x, weight, bias, _ = inputs(90, 24, 4, torch.float32)
    out, state = ops.causal_conv1d(x, weight, bias)
    padded = torch.nn.functional.pad(x.T[None], (3, 0))
    y = torch.nn.functional.conv1d(padded, weight[:, None], bias, groups=24)
    torch.testing.assert_close(out, torch.nn.functional.silu(y)[0].T, atol=2e-6, rtol=2e-6)
    assert torch.equal(state[0], x[-3:].T)
    arrays = ops.causal_conv1d(x.numpy(), weight.numpy(), bias.numpy(), cu_seqlens=[0, 90])
    np.testing.assert_array_equal(arrays[0], out.numpy())


def test_strided_tensors_keep_what_is_between() -> None:
    x, weight, bias, state = inputs(70, 37, 4, torch.bfloat16)
    expected, expected_state = ops.causal_conv1d(x, weight, bias, state=state.clone())
    wide_x, wide_out = (torch.full((70, 50), torch.nan, dtype=x.dtype) for _ in range(2))
    wide_x[:, 5:42] = x
    pool = torch.full((2, 3, 40), torch.nan, dtype=x.dtype)  # [slots, width - 1, channels]
    slots = pool[1:, :, :37].mT
    slots.copy_(state)
    ops.causal_conv1d(
        wide_x[:, 5:42], weight.T.contiguous().T, bias, state=slots, out=wide_out[:, 3:40]
    )
    assert torch.equal(wide_out[:, 3:40], expected)
    assert torch.equal(slots, expected_state)
    assert wide_out.isnan().sum() == 70 * 13
    assert pool.isnan().sum() == pool.numel() - slots.numel()


@pytest.mark.parametrize("isa", ops.vector_isas())
def test_silu_of_all_sizes(isa: str) -> None:
    """Large inputs neither overflow nor lose their value; NaN stays NaN."""
    y = torch.tensor([0.0, -0.0, 1e-30, 1.0, 20.0, 88.0, 1e4, 3e38, torch.inf])
    x = torch.cat([y, -y[:-1], torch.linspace(-90, 90, 4001), torch.tensor([torch.nan])])
    out, _ = ops.causal_conv1d(x[:, None].repeat(1, 20), torch.ones(20, 1), isa=isa)
    expected = (x.double() * torch.sigmoid(x.double()))[:, None].repeat(1, 20)
    torch.testing.assert_close(out.double(), expected, rtol=2**-20, atol=2e-36, equal_nan=True)


BAD_CALLS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "x-dims": (
        {"x": torch.zeros(4)},
        ValueError,
        "x: expected shape [num_tokens, num_channels], got [4]",
    ),
    "x-dtype": (
        {"x": torch.zeros(4, 6).double()},
        TypeError,
        "x: expected float32, bfloat16 or float16, got float64",
    ),
    "x-stride": (
        {"x": torch.zeros(6, 4).T},
        ValueError,
        "x: expected a contiguous last dimension (stride 1), got stride 4",
    ),
    "weight": (
        {"weight": torch.zeros(5, 4)},
        ValueError,
        "weight: expected shape [6, width] (the channels of x), got [5, 4]",
    ),
    "width": (
        {"weight": torch.zeros(6, 17)},
        ValueError,
        "weight: expected a width of 1 to 16, got 17",
    ),
    "weight-dtype": (
        {"weight": torch.zeros(6, 4).half()},
        TypeError,
        "weight: expected float32 like x, got float16",
    ),
    "bias": (
        {"bias": torch.zeros(5)},
        ValueError,
        "bias: expected shape [6] (the channels of x), got [5]",
    ),
    "state": (
        {"state": torch.zeros(1, 6, 4)},
        ValueError,
        ("state: expected shape [1, 6, 3] (sequences, channels, width - 1), got [1, 6, 4]"),
    ),
    "out": (
        {"out": torch.zeros(4, 5)},
        ValueError,
        "out: expected shape [4, 6] (like x), got [4, 5]",
    ),
    "cu": (
        {"cu_seqlens": [0, 5]},
        ValueError,
        "cu_seqlens[1]: expected the 4 tokens there are, got 5",
    ),
    "activation": (
        {"activation": "relu"},
        ValueError,
        "activation: expected 'silu' or None, got 'relu'",
    ),
    "x-list": ({"x": [[1.0]]}, TypeError, "x: expected a numpy array or a torch tensor, got list"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_arguments(name: str) -> None:
    changes, error, message = BAD_CALLS[name]
    given: dict[str, Any] = {"x": torch.zeros(4, 6), "weight": torch.zeros(6, 4)}
    with pytest.raises(error) as caught:
        ops.causal_conv1d(**given | changes)
    assert str(caught.value) == message
