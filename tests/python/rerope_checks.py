"""What the tests of key rotation share: keys, frequencies, and how far a result may be off."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvspan import ops, reference

ISAS = ops.vector_isas()
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, *FLOAT8]
# Half a unit in the last place of the storage type, relative to the value.
STORAGE_EPS = {
    torch.float32: 2.0**-24,
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
    torch.float8_e4m3fn: 2.0**-4,
    torch.float8_e5m2: 2.0**-3,
}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def inv_freq_of(rotary_dim: int, theta: float = 10_000.0) -> torch.Tensor:
    return (theta ** (-torch.arange(0, rotary_dim, 2).double() / rotary_dim)).float()


def random_keys(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Sets every bit, NaN in every type of float; the same tensor."""
    reference.bits_of(tensor).fill_(-1)
    return tensor


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    a, b = actual.contiguous(), expected.contiguous()
    different = (reference.bits_of(a) != reference.bits_of(b)).nonzero()
    if len(different):
        at = tuple(different[0].tolist())
        raise AssertionError(f"first difference at {at}: {a[at].item()} and {b[at].item()}")


def take(pool: torch.Tensor, blocks: Sequence[int]) -> torch.Tensor:
    return reference.bits_of(pool)[list(blocks)].view(pool.dtype)


def assert_rotated(
    keys: torch.Tensor,
    rotated: torch.Tensor,
    deltas: Sequence[int] | Sequence[Sequence[int]],
    inv_freq: torch.Tensor,
    is_neox: bool,
    axes: Sequence[int] | None = None,
    rotary_offset: int = 0,
) -> None:
    """Rotated dimensions to rounding, all others bit for bit. Both [num_moves, ...]."""
    dtype = keys.dtype
    dims = slice(rotary_offset, rotary_offset + 2 * len(inv_freq))
    expected = reference.rotate(
        keys, deltas, inv_freq, is_neox=is_neox, axes=axes, rotary_offset=rotary_offset
    )[..., dims]
    x = keys[..., dims].double().abs()
    if is_neox:
        partner = x.roll(len(inv_freq), -1)
    else:
        partner = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    # float32 cosines, products and sum; then one rounding to the storage type, which below its
    # smallest normal number has an absolute error. The 8-bit types saturate.
    if dtype in FLOAT8:
        largest = torch.finfo(dtype).max
        expected = expected.clamp(-largest, largest)
    smallest = torch.finfo(dtype).smallest_normal
    bound = 2.0**-23 * (x + partner) + STORAGE_EPS[dtype] * expected.abs().clamp(min=smallest)
    # The rounding acts on the float32 result, which may lie across a rounding boundary.
    bound = bound * (1 + 2.0**-10)
    error = (rotated[..., dims].double() - expected).abs()
    worst = (error - bound).argmax()
    assert (error <= bound).all(), (
        f"error {error.flatten()[worst]:.3e}, bound {bound.flatten()[worst]:.3e}"
    )
    assert_same_bits(rotated[..., : dims.start], keys[..., : dims.start])
    assert_same_bits(rotated[..., dims.stop :], keys[..., dims.stop :])
    for move, delta in enumerate(deltas):
        if not any(delta if isinstance(delta, Sequence) else (delta,)):
            assert_same_bits(rotated[move], keys[move])
