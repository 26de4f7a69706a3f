"""8-bit caches: scales cancel, results saturate, drift over many moves stays within its bound."""

from __future__ import annotations

import math

import pytest
import torch

from kvspan import ops, reference
from rerope_checks import FLOAT8, ISAS, STORAGE_EPS, dtype_name, inv_freq_of, poison, take

# Half the smallest subnormal number: the absolute part of a rounding error.
HALF_SMALLEST = {torch.float8_e4m3fn: 2.0**-10, torch.float8_e5m2: 2.0**-17}
INV_FREQ = inv_freq_of(64)


def cache(dtype: torch.dtype, scale: torch.Tensor | float, spread: float = 1.0) -> torch.Tensor:
    """Normal keys as a cache of that scale holds them, [6, 8, 4, 64]."""
    x = torch.randn(6, 8, 4, 64, generator=torch.Generator().manual_seed(3)).double() * spread
    return reference.quantize(x, scale, dtype)


SCALES = {
    "one": 1.0,
    "tensor": 0.0173,
    "head": torch.tensor([0.5, 0.031, 0.0125, 7.0], dtype=torch.float64)[:, None],
}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("dtype", FLOAT8, ids=dtype_name)
def test_scales_cancel(dtype: torch.dtype, scale: torch.Tensor | float, isa: str) -> None:
    """Dequantise, rotate, quantise with the same scale: what rotating the stored numbers gives."""
    q = cache(dtype, scale)
    out = poison(torch.empty_like(q))
    src, dst, deltas = [0, 1, 2, 3], [5, 4, 3, 2], [7, -1000, 123_456, 7]
    ops.rerope(q, out, src, dst, deltas, INV_FREQ, isa=isa)
    x = reference.dequantize(take(q, src), scale)
    exact = reference.rotate(x, deltas, INV_FREQ) / scale
    largest = torch.finfo(dtype).max
    exact = exact.clamp(-largest, largest)
    error = (take(out, dst).double() - exact).abs()
    bound = (STORAGE_EPS[dtype] * exact.abs()).clamp(min=HALF_SMALLEST[dtype])
    assert (error <= bound * (1 + 2**-15)).all()
    expected = reference.quantize(exact, 1.0, dtype)
    different = reference.bits_of(take(out, dst)) != reference.bits_of(expected)
    assert different.float().mean() < 1e-3  # float32 and float64 on two sides of a boundary


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FLOAT8, ids=dtype_name)
def test_saturates_at_the_range_s_edge(dtype: torch.dtype, isa: str) -> None:
    """A pair (m, m) turned by 45 degrees has a component sqrt(2) m: it becomes m."""
    m = torch.finfo(dtype).max
    pairs = torch.tensor([(m, m), (-m, -m), (m, -m), (m / 2, m / 2), (m, 0.0)]).to(dtype)
    k = pairs.view(5, 1, 1, 2)
    out = poison(torch.empty_like(k))
    blocks = list(range(5))
    eighth = torch.tensor([math.pi / 4])
    ops.rerope(k, out, blocks, blocks, [1] * 5, eighth, isa=isa)
    rows = out.float().flatten(1)
    assert rows[:3].tolist() == [[0.0, m], [0.0, -m], [m, 0.0]]
    # Pairs no longer than m fit: nothing is cut.
    nearest = torch.tensor([m / math.sqrt(2)]).to(dtype).item()
    assert rows[3].tolist() == [0.0, nearest]
    assert rows[4].tolist() == [nearest, nearest]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FLOAT8, ids=dtype_name)
def test_nan_and_infinity(dtype: torch.dtype, isa: str) -> None:
    k = torch.tensor([math.nan, 1.0, 2.0, 3.0]).to(dtype).view(1, 1, 1, 4)
    out = torch.zeros_like(k)
    ops.rerope(k, out, [0], [0], [1], torch.ones(2), is_neox=False, isa=isa)
    assert out.float().flatten().isnan().tolist() == [True, True, False, False]
    if dtype == torch.float8_e5m2:
        k = torch.tensor([math.inf, 1.0]).to(dtype).view(1, 1, 1, 2)
        ops.rerope(k, out[..., :2], [0], [0], [1], torch.ones(1), isa=isa)
        assert out.float().flatten()[:2].tolist() == [57344.0, 57344.0]


@pytest.mark.parametrize("spread", [0.001, 1.0, 50.0])
@pytest.mark.parametrize("dtype", FLOAT8, ids=dtype_name)
def test_drift_over_many_moves(dtype: torch.dtype, spread: float) -> None:
    """Field case 12. Bound of rerope.h: ((1 + u)^n - 1) (|pair| + sqrt(2) d / u) after n moves."""
    u, d = STORAGE_EPS[dtype], HALF_SMALLEST[dtype]
    q = cache(dtype, 1.0, spread)
    start, total = q.double(), 0
    lengths = torch.hypot(start[..., :32], start[..., 32:])
    blocks = list(range(6))
    for n in range(1, 17):
        delta = (-1) ** n * (37 * n + 5)
        total += delta
        ops.rerope(q, q, blocks, blocks, [delta] * 6, INV_FREQ)
        off = q.double() - reference.rotate(start, [total] * 6, INV_FREQ)
        drift = torch.hypot(off[..., :32], off[..., 32:])
        bound = ((1 + u) ** n - 1) * (lengths + math.sqrt(2) * d / u)
        assert (drift <= bound * (1 + 1e-6)).all(), f"after {n} moves"
        if spread == 1.0:
            # Far inside the bound, errors add up as a random walk does: measured 0.37 u sqrt(n).
            relative = float(off.norm() / start.norm())
            assert 0.3 * u * math.sqrt(n) < relative < 0.42 * u * math.sqrt(n), (n, relative / u)


@pytest.mark.parametrize("dtype", FLOAT8, ids=dtype_name)
def test_one_move_rounds_once(dtype: torch.dtype) -> None:
    """Moved from its pristine block a key is off by one rounding, however far it went."""
    q = cache(dtype, 1.0)
    errors = []
    for delta in (1, 1000, 1_000_000):
        out = torch.empty_like(q)
        ops.rerope(q, out, [0], [0], [delta], INV_FREQ)
        exact = reference.rotate(q[:1].double(), [delta], INV_FREQ)
        errors.append(float((out[:1].double() - exact).norm() / exact.norm()))
    assert max(errors) < 0.5 * STORAGE_EPS[dtype]
