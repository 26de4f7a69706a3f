"""The linear-attention operations as torch sees them: schemas, fakes, compiled without breaks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvspan.torch_ops  # noqa: F401  (registers torch.ops.kvspan)
from kvspan import ops

BOUNDS = torch.tensor([0, 3, 70])


def tensors() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=random)

    return {
        "q": normal(70, 1, 8).bfloat16(),
        "k": normal(70, 1, 8).bfloat16(),
        "v": normal(70, 2, 16).bfloat16(),
        "g": -normal(70, 2).abs(),
        "beta": normal(70, 2).sigmoid(),
        "state": normal(2, 2, 8, 16),
        "x": normal(70, 24).bfloat16(),
        "weight": normal(24, 4).bfloat16(),
        "bias": normal(24).bfloat16(),
        "conv": normal(2, 24, 3).bfloat16(),
    }


def calls() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Operator and arguments; fresh tensors every time."""
    op, t = torch.ops.kvspan, tensors()
    core = (t["k"], t["v"], t["g"], t["beta"])
    out = torch.zeros_like(t["v"])
    conv_out = torch.zeros_like(t["x"])
    return {
        "gated_delta_": (op.gated_delta_, (t["q"], *core, out, t["state"], BOUNDS)),
        "gated_delta_fresh": (
            op.gated_delta_,
            (t["q"], *core, out, t["state"][:1].mT.contiguous(), None, False, "vk", False, 0.5),
        ),
        "gated_delta_state_": (op.gated_delta_state_, (*core, t["state"], BOUNDS)),
        "causal_conv1d_": (
            op.causal_conv1d_,
            (t["x"], t["weight"], t["bias"], conv_out, t["conv"], BOUNDS),
        ),
        "causal_conv1d_plain": (
            op.causal_conv1d_,
            (t["x"], t["weight"], None, conv_out, t["conv"][:1].clone(), None, False),
        ),
    }


@pytest.mark.parametrize("name", calls())
def test_opcheck(name: str) -> None:
    operator, args = calls()[name]
    torch.library.opcheck(operator, args)


def test_schemas_say_what_is_written() -> None:
    written = {
        "gated_delta_": ["out", "state"],
        "gated_delta_state_": ["state"],
        "causal_conv1d_": ["out", "state"],
    }
    for name, expected in written.items():
        schema = getattr(torch.ops.kvspan, name).default._schema
        found = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
        assert found == expected, name
        assert not schema.returns


def layer(t: dict[str, torch.Tensor]) -> torch.Tensor:
    """A layer's operations, each of which depends on the one before."""
    op = torch.ops.kvspan
    mixed, out = torch.empty_like(t["x"]), torch.empty_like(t["v"])
    op.causal_conv1d_(t["x"] * 2, t["weight"], t["bias"], mixed, t["conv"], BOUNDS)
    k = t["k"] + mixed[:, None, :8]
    rest = (t["v"], t["g"], t["beta"])
    op.gated_delta_(t["q"], k, *rest, out, t["state"], BOUNDS)
    op.gated_delta_state_(k, *rest, t["state"], BOUNDS)
    return out.float().relu() + t["state"].sum()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_without_graph_breaks(backend: str) -> None:
    torch._dynamo.reset()
    plain, traced = tensors(), tensors()
    expected = layer(plain)
    found = torch.compile(layer, fullgraph=True, backend=backend)(traced)
    torch.testing.assert_close(found, expected)
    assert torch.equal(traced["state"], plain["state"])
    assert torch.equal(traced["conv"], plain["conv"])


def test_same_bits_as_the_operations() -> None:
    t = tensors()
    inputs = [t[name] for name in ("q", "k", "v", "g", "beta")]
    out, state = torch.empty_like(t["v"]), t["state"].clone()
    torch.ops.kvspan.gated_delta_(*inputs, out, state, BOUNDS)
    expected = ops.gated_delta(*inputs, initial_state=t["state"], cu_seqlens=BOUNDS)
    assert torch.equal(out, expected[0])
    assert torch.equal(state, expected[1])


def test_errors_are_those_of_the_operations() -> None:
    t = tensors()
    with pytest.raises(ValueError, match=r"g: expected shape \[70, 2\]"):
        torch.ops.kvspan.gated_delta_state_(t["k"], t["v"], t["g"].T, t["beta"], t["state"], BOUNDS)
