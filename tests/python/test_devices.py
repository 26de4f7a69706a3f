"""Moving blocks on every device present, against the twins in float64: what aligned and unaligned
rows, many moves and layers, plans and copies of a queue come to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from devices import DEVICES, stream_of
from kvspan import ops, reference
from kvspan.host import CopyQueue, HostTier
from rerope_checks import (
    DTYPES,
    assert_rotated,
    assert_same_bits,
    dtype_name,
    inv_freq_of,
    poison,
    random_keys,
    take,
)

SRC, DST = [0, 5, 2, 2, 1, 3], [4, 0, 2, 5, 1, 6]
DELTAS = [1_000_000, -3, 0, -1_000_000, 17, 1]


def nhd(keys: torch.Tensor) -> torch.Tensor:
    return keys


def hnd(keys: torch.Tensor) -> torch.Tensor:
    return keys.transpose(1, 2).contiguous().transpose(1, 2)


def fused(keys: torch.Tensor) -> torch.Tensor:
    return torch.cat([keys, keys], dim=-1)[..., : keys.shape[-1]]


def odd(keys: torch.Tensor) -> torch.Tensor:
    """One element off 16 bytes, and strides that they do not divide."""
    b, n, h, d = keys.shape
    strides = (n * (h * (d + 3) + 1) + 5, h * (d + 3) + 1, d + 3, 1)
    out = torch.zeros(b * strides[0] + 1, dtype=keys.dtype, device=keys.device)
    return out.as_strided(keys.shape, strides, 1).copy_(keys)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", [nhd, hnd, fused, odd])
@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_rerope(
    dtype: torch.dtype,
    is_neox: bool,
    layout: Callable[[torch.Tensor], torch.Tensor],
    device: str,
) -> None:
    for head_dim, rotary_dim, offset in ((128, 128, 0), (96, 64, 32), (80, 30, 0), (6, 2, 1)):
        keys = random_keys(7, 4, 3, head_dim, dtype=dtype)
        k_src = layout(keys.to(device, copy=True))
        k_dst = poison(layout(torch.zeros(8, 4, 3, head_dim, dtype=dtype, device=device)))
        before = k_dst.cpu().clone()
        inv_freq = inv_freq_of(rotary_dim)
        options: dict[str, Any] = {
            "is_neox": is_neox, "rotary_offset": offset, "stream": stream_of(device),
        }  # fmt: skip
        ops.rerope(k_src, k_dst, SRC, DST, DELTAS, inv_freq, **options)
        moved = take(k_dst.cpu(), DST)
        rotation = (DELTAS, inv_freq, is_neox, None, offset)
        assert_rotated(take(keys, SRC), moved, *rotation)
        assert_same_bits(k_src.cpu(), keys)
        assert_same_bits(take(k_dst.cpu(), [3, 7]), take(before, [3, 7]))
        ops.rerope(k_src, k_src, DST, DST, DELTAS, inv_freq, **options)
        in_place = k_src.cpu()
        assert_rotated(take(keys, DST), take(in_place, DST), *rotation)
        assert_same_bits(take(in_place, [3]), take(keys, [3]))


@pytest.mark.parametrize("device", DEVICES)
def test_axes(device: str) -> None:
    """M-RoPE, with more moves than one launch holds."""
    count = 300
    keys = random_keys(count, 2, 2, 64, dtype=torch.bfloat16)
    out = poison(torch.empty_like(keys, device=device))
    axes = [i % 3 for i in range(32)]
    deltas = np.random.default_rng(0).integers(-1000, 1000, (count, 3))
    dst = np.random.default_rng(1).permutation(count)
    ops.rerope(
        keys.to(device), out, np.arange(count), dst, deltas, inv_freq_of(64),
        axes=axes, stream=stream_of(device),
    )  # fmt: skip
    assert_rotated(keys, out.cpu()[dst], deltas.tolist(), inv_freq_of(64), True, axes)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value_dim", [64, 63], ids=["values-along", "values-apart"])
def test_layers(value_dim: int, device: str) -> None:
    """More layers than one launch holds, one of them without rotation, one of other frequencies."""
    layers = 50
    keys = [random_keys(8, 4, 2, 64, dtype=torch.bfloat16, seed=i) for i in range(layers)]
    values = [random_keys(8, 4, 2, value_dim, dtype=torch.bfloat16, seed=-i) for i in range(layers)]
    freqs = [inv_freq_of(64, 1e6 if i == 7 else 1e4) for i in range(layers)]
    freqs[3] = torch.empty(0)
    pools = [t.to(device, copy=True) for t in keys], [t.to(device, copy=True) for t in values]
    outs = [[poison(torch.empty_like(t)) for t in tensors] for tensors in pools]
    src, dst, deltas = [0, 3, 5], [5, 1, 7], [7, 0, -1000]
    ops.rerope_layers(
        pools[0], outs[0], pools[1], outs[1], src, dst, deltas, freqs, stream=stream_of(device)
    )
    for layer in range(layers):
        moved, source = take(outs[0][layer].cpu(), dst), take(keys[layer], src)
        if layer == 3:
            assert_same_bits(moved, source)
        else:
            assert_rotated(source, moved, deltas, freqs[layer], True)
        assert_same_bits(take(outs[1][layer].cpu(), dst), take(values[layer], src))
        assert reference.bits_of(take(outs[1][layer].cpu(), [0, 2])).eq(-1).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("row", [1, 2, 3, 12, 16, 40])
@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "int64"])
def test_copy_blocks(dtype: str, row: int, device: str) -> None:
    count = 300
    src = torch.arange(count * 3 * 2 * row).to(getattr(torch, dtype)).reshape(count, 3, 2, row)
    order = np.random.default_rng(0).permutation(count)
    for layout in (nhd, hnd, odd):
        out = layout(torch.zeros_like(src, device=device))
        pool = layout(src.to(device, copy=True))
        ops.copy_blocks(pool, out, np.arange(count), order, stream=stream_of(device))
        assert torch.equal(out.cpu()[order], src)
        blocks = np.arange(count // 2)
        ops.copy_blocks(pool, pool, blocks, blocks + count // 2, stream=stream_of(device))
        assert torch.equal(pool.cpu()[blocks + count // 2], src[blocks])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("host_blocks", [0, 3], ids=["scratch", "staged"])
def test_plans(host_blocks: int, device: str) -> None:
    """Cycles, through a scratch block and through the host."""
    src, dst, deltas = [0, 1, 2, 3, 4, 6], [1, 2, 0, 4, 3, 6], [5, 0, -9, 100, 1, 8]
    plan = ops.plan_moves(
        src, dst, deltas, [] if host_blocks else [7], host_blocks=host_blocks, num_layers=2
    )
    assert bool(plan.stats.num_staged) == bool(host_blocks)
    keys = [random_keys(8, 4, 2, 32, dtype=torch.float8_e4m3fn, seed=i) for i in range(2)]
    values = [random_keys(8, 4, 2, 24, dtype=torch.float16, seed=i) for i in range(2)]
    pools = [t.to(device, copy=True) for t in keys], [t.to(device, copy=True) for t in values]
    ops.run_plan(plan, *pools, [inv_freq_of(32)] * 2, stream=stream_of(device))
    for layer in range(2):
        moved = take(pools[0][layer].cpu(), dst)
        assert_rotated(take(keys[layer], src), moved, deltas, inv_freq_of(32), True)
        expected = reference.move_blocks(values[layer], src, dst)
        assert torch.equal(pools[1][layer].cpu()[:7], expected[:7])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chunk_bytes", [1000, 1 << 20])
def test_copy_queue(chunk_bytes: int, device: str) -> None:
    """Out of pools into page-locked memory and back, ordered behind and before the stream."""
    is_cuda = device != "cpu"
    stream: Any = torch.cuda.Stream(device) if is_cuda else 0
    blocks = np.array([4, 0, 9, 3])
    pools = [layout(random_keys(10, 4, 3, 40, dtype=torch.bfloat16).to(device))
             for layout in (nhd, hnd, odd)]  # fmt: skip
    expected = [2 * pool.cpu() for pool in pools]
    nbytes = sum(4 * pool[0].numel() * 2 for pool in pools)
    with (
        HostTier(1 << 18, page_bytes=1 << 12, page_locked=is_cuda) as tier,
        CopyQueue(device, chunk_bytes=chunk_bytes) as queue,
        torch.cuda.stream(stream if is_cuda else None),
    ):
        if is_cuda:
            stream.wait_stream(torch.cuda.default_stream(device))
        for pool in pools:
            pool.mul_(2)
        reservation = tier.reserve(b"span", nbytes, cost=1)
        assert reservation is not None
        taken = queue.submit([(pool, blocks) for pool in pools], reservation.pages, after=stream)
        assert taken.wait() is True
        reservation.commit()
        for pool in pools:
            pool.zero_()
        view = tier.view(b"span")
        assert view is not None
        back = queue.submit(view.pages, [(pool, blocks) for pool in pools], after=stream)
        for chunk in range(1, back.num_chunks + 1):
            assert back.wait_on_stream(stream, chunk) is True
        doubled = [pool * 2 for pool in pools]  # on the stream, behind the copies
        assert back.wait() is True
        view.release()
        assert queue.stats()["bytes_done"] == 2 * nbytes
        for pool, twice in zip(pools, expected, strict=True):
            after = torch.zeros_like(twice)
            after[blocks] = twice[blocks]
            assert torch.equal(pool.cpu(), after)
        for found, twice in zip(doubled, expected, strict=True):
            assert torch.equal(found.cpu()[blocks], 2 * twice[blocks])


@pytest.mark.parametrize("device", DEVICES)
def test_an_error_is_told_once(device: str) -> None:
    """A call that works does not report what another one did wrong."""
    queue = CopyQueue(device)
    queue.close()
    with pytest.raises(ValueError, match="this copy queue is closed"):
        queue.submit([np.zeros(1)], [np.zeros(1)])
    locked = np.zeros(1 << 16, np.uint8)
    if device != "cpu":
        first = HostTier(1 << 16, memory=locked, page_locked=True)
        with pytest.raises(RuntimeError, match="cudaErrorHostMemoryAlreadyRegistered"):
            HostTier(1 << 16, memory=locked, page_locked=True)
        first.close()
    pool = torch.arange(8.0, device=device).reshape(4, 2)
    ops.copy_blocks(pool, pool, [0], [1], stream=stream_of(device))
    assert pool.cpu()[1].tolist() == [0.0, 1.0]
