"""torch.ops.kvspan on every device present: checked, compiled, captured in CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvspan.torch_ops  # noqa: F401  (registers torch.ops.kvspan)
from devices import DEVICES, captured
from kvspan import reference_gated_delta
from rerope_checks import assert_rotated, assert_same_bits, inv_freq_of, random_keys, take

SRC, DST, DELTAS = torch.tensor([0, 3]), torch.tensor([2, 1]), torch.tensor([7, -1000])
INV_FREQ = inv_freq_of(16)
BOUNDS = torch.tensor([0, 3, 70])
OPS = torch.ops.kvspan


def pool(device: str, seed: int = 0) -> torch.Tensor:
    return random_keys(4, 8, 2, 16, dtype=torch.bfloat16, seed=seed).to(device)


def linear(device: str) -> dict[str, torch.Tensor]:
    """What a layer of linear attention takes, 70 tokens of two sequences."""
    random = torch.Generator().manual_seed(0)

    def normal(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(size, generator=random).to(device, dtype)

    return {
        "q": normal(70, 1, 8),
        "k": normal(70, 1, 8),
        "v": normal(70, 2, 16),
        "g": -normal(70, 2, dtype=torch.float32).abs(),
        "beta": normal(70, 2, dtype=torch.float32).sigmoid(),
        "state": normal(2, 2, 8, 16, dtype=torch.float32),
        "x": normal(70, 24),
        "weight": normal(24, 4),
        "bias": normal(24),
        "conv": normal(2, 24, 3),
    }


def calls(device: str) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    pools, t = [pool(device, seed) for seed in range(4)], linear(device)
    core = (t["k"], t["v"], t["g"], t["beta"])
    out, conv_out = torch.zeros_like(t["v"]), torch.zeros_like(t["x"])
    moves = (SRC, DST, DELTAS)
    return {
        "rerope": (OPS.rerope, (pools[0], pools[1], *moves, INV_FREQ)),
        "rerope_": (OPS.rerope_, (pools[0], *moves, INV_FREQ)),
        "rerope_layers_": (
            OPS.rerope_layers_,
            (pools[:2], pools[2:], *moves, [INV_FREQ] * 2, [True, False]),
        ),
        "copy_blocks": (OPS.copy_blocks, (pools[0], pools[1], SRC, DST)),
        "copy_blocks_": (OPS.copy_blocks_, (pools[0], SRC, DST)),
        "gated_delta_": (OPS.gated_delta_, (t["q"], *core, out, t["state"], BOUNDS)),
        "gated_delta_state_": (OPS.gated_delta_state_, (*core, t["state"], BOUNDS)),
        "causal_conv1d_": (
            OPS.causal_conv1d_,
            (t["x"], t["weight"], t["bias"], conv_out, t["conv"], BOUNDS),
        ),
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", calls("cpu"))
def test_opcheck(name: str, device: str) -> None:
    operator, args = calls(device)[name]
    torch.library.opcheck(operator, args)


def layer(pool: torch.Tensor, other: torch.Tensor, t: dict[str, torch.Tensor]) -> torch.Tensor:
    """Operations among torch's own, each of which depends on the one before."""
    pool.mul_(2)
    OPS.rerope(pool, other, SRC, DST, DELTAS, INV_FREQ)
    OPS.rerope_layers_([pool, other], [], SRC, DST, DELTAS, [INV_FREQ, INV_FREQ], [True, False])
    OPS.copy_blocks_(other, DST, SRC)
    mixed, out = torch.empty_like(t["x"]), torch.empty_like(t["v"])
    OPS.causal_conv1d_(t["x"] * 2, t["weight"], t["bias"], mixed, t["conv"], BOUNDS)
    OPS.gated_delta_(
        t["q"], t["k"] + mixed[:, None, :8], t["v"], t["g"], t["beta"], out, t["state"], BOUNDS
    )
    return out.float().relu() + other.float().sum()


@pytest.mark.parametrize("device", DEVICES)
def test_compiled(device: str) -> None:
    torch._dynamo.reset()
    plain = pool(device), pool(device, 1), linear(device)
    traced = pool(device), pool(device, 1), linear(device)
    expected = layer(*plain)
    # As models on GPUs are compiled; for the CPU it takes too long.
    backend = "aot_eager" if device == "cpu" else "inductor"
    compiled: Any = torch.compile(layer, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(*traced), expected, rtol=1e-2, atol=1e-2)
    assert_same_bits(traced[0].cpu(), plain[0].cpu())
    assert_same_bits(traced[1].cpu(), plain[1].cpu())
    torch.testing.assert_close(traced[2]["state"], plain[2]["state"], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("device", DEVICES)
def test_captured_moves_are_repeated_on_what_is_there_then(device: str) -> None:
    keys, values, out = pool(device), pool(device, 1), torch.zeros_like(pool(device))

    def step() -> None:
        OPS.rerope(keys, out, SRC, DST, DELTAS, INV_FREQ)
        OPS.copy_blocks_(values, SRC, DST)

    replay = captured(step, device)
    for seed in (5, 6):
        new_keys, new_values = pool("cpu", seed), pool("cpu", seed + 10)
        keys.copy_(new_keys)
        values.copy_(new_values)
        out.zero_()
        replay()
        moved = take(out.cpu(), DST.tolist())
        assert_rotated(take(new_keys, SRC.tolist()), moved, DELTAS.tolist(), INV_FREQ, True)
        assert_same_bits(take(values.cpu(), DST.tolist()), take(new_values, SRC.tolist()))


@pytest.mark.parametrize("device", DEVICES)
def test_captured_linear_attention(device: str) -> None:
    """A state that every replay takes on from where the one before has left it."""
    t, twin = linear(device), linear("cpu")
    mixed, out = torch.zeros_like(t["x"]), torch.zeros_like(t["v"])

    def step() -> None:
        OPS.causal_conv1d_(t["x"], t["weight"], t["bias"], mixed, t["conv"], BOUNDS)
        OPS.gated_delta_(t["q"], t["k"], t["v"], t["g"], t["beta"], out, t["state"], BOUNDS)

    replay = captured(step, device)
    for name in ("conv", "state"):
        t[name].copy_(twin[name])
    doubles = {name: tensor.double() for name, tensor in twin.items()}
    core = [doubles[name] for name in ("q", "k", "v", "g", "beta")]
    for _ in range(2):
        replay()
        expected, doubles["state"] = reference_gated_delta.gated_delta(
            *core, initial_state=doubles["state"], cu_seqlens=BOUNDS
        )
        expected_mixed, doubles["conv"] = reference_gated_delta.causal_conv1d(
            doubles["x"], doubles["weight"], doubles["bias"],
            state=doubles["conv"], cu_seqlens=BOUNDS,
        )  # fmt: skip
        pairs = [(out, expected), (mixed, expected_mixed)]
        pairs += [(t[name], doubles[name]) for name in ("state", "conv")]
        for found, wanted in pairs:
            torch.testing.assert_close(
                found.cpu().double(), wanted, rtol=1e-2, atol=1e-2 * float(wanted.abs().max())
            )
