"""Key rotation against the float64 twin: every dtype, pairing, layout and instruction set."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvspan import ops, reference
from kvspan.rope_scaling import inverse_frequencies
from rerope_checks import (
    DTYPES,
    ISAS,
    assert_rotated,
    assert_same_bits,
    dtype_name,
    inv_freq_of,
    poison,
    random_keys,
    take,
)

MOVES = ([0, 5, 2, 2, 1, 3], [4, 0, 2, 5, 1, 6], [1_000_000, -3, 0, -1_000_000, 17, 1])


def nhd(keys: torch.Tensor) -> torch.Tensor:
    return keys


def hnd(keys: torch.Tensor) -> torch.Tensor:
    """The same keys in a pool [num_blocks, num_kv_heads, block_size, head_dim]."""
    return keys.transpose(1, 2).contiguous().transpose(1, 2)


def fused(keys: torch.Tensor) -> torch.Tensor:
    """The first half of rows that hold a key and a value, as vLLM's GPU pools do."""
    return torch.cat([keys, torch.zeros_like(keys)], dim=-1)[..., : keys.shape[-1]]


def odd(keys: torch.Tensor) -> torch.Tensor:
    """Strides that no vector width divides."""
    b, n, h, d = keys.shape
    strides = (n * (h * (d + 3) + 1) + 5, h * (d + 3) + 1, d + 3, 1)
    out = torch.zeros(b * strides[0], dtype=keys.dtype).as_strided((b, n, h, d), strides)
    return out.copy_(keys)


LAYOUTS = [nhd, hnd, fused, odd]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"),
    [(128, 128), (128, 64), (256, 192), (64, 16), (80, 30), (6, 2)],
    ids=["all", "64of128", "192of256", "16of64", "30of80", "2of6"],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_matches_the_twin(
    dtype: torch.dtype,
    head_dim: int,
    rotary_dim: int,
    is_neox: bool,
    layout: Callable[[torch.Tensor], torch.Tensor],
    isa: str,
) -> None:
    k_src = layout(random_keys(6, 4, 3, head_dim, dtype=dtype))
    k_dst = poison(layout(random_keys(8, 4, 3, head_dim, dtype=dtype)))
    before, untouched = k_src.clone(), take(k_dst, [3, 7])
    src, dst, deltas = MOVES
    inv_freq = inv_freq_of(rotary_dim)
    ops.rerope(k_src, k_dst, src, dst, deltas, inv_freq, is_neox=is_neox, isa=isa)
    assert_rotated(take(before, src), take(k_dst, dst), deltas, inv_freq, is_neox)
    assert_same_bits(k_src, before)
    assert_same_bits(take(k_dst, [3, 7]), untouched)


@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_every_isa_gives_the_same_bits(dtype: torch.dtype, is_neox: bool) -> None:
    k = random_keys(4, 5, 2, 100, dtype=dtype)
    k[0, 0, 0, :4] = torch.tensor([math.inf, -math.inf, 0.0, -0.0]).to(dtype)
    results = []
    for isa in ops.vector_isas():
        out = torch.zeros_like(k)
        ops.rerope(
            k, out, [0, 1, 2, 3], [3, 2, 1, 0], [9, -99, 999, 12345], inv_freq_of(70),
            is_neox=is_neox, isa=isa,
        )  # fmt: skip
        results.append(out.float().nan_to_num(nan=7.0))
    for result in results[1:]:
        assert_same_bits(result, results[0])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_in_place(dtype: torch.dtype, isa: str) -> None:
    k = random_keys(5, 4, 2, 64, dtype=dtype)
    before = k.clone()
    ops.rerope(k, k, [1, 3, 0], [1, 3, 4], [5, -70_000, 8], inv_freq_of(48), isa=isa)
    moved = take(before, [1, 3, 0])
    assert_rotated(moved, take(k, [1, 3, 4]), [5, -70_000, 8], inv_freq_of(48), True)
    assert_same_bits(take(k, [0, 2]), take(before, [0, 2]))


@pytest.mark.parametrize("scale", [1e-7, 1e-3, 1.0, 300.0])
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_magnitudes_down_to_denormals(dtype: torch.dtype, isa: str, scale: float) -> None:
    k = (random_keys(3, 4, 2, 64, dtype=torch.float32) * scale).to(dtype)
    out = poison(torch.empty_like(k))
    ops.rerope(k, out, [0, 1, 2], [0, 1, 2], [3, 1000, -7], inv_freq_of(64), isa=isa)
    assert_rotated(k, out, [3, 1000, -7], inv_freq_of(64), True)


@pytest.mark.parametrize("isa", ISAS)
def test_float16_overflow_and_nan(isa: str) -> None:
    """60000 rotated by 45 degrees exceeds float16; NaN and infinity pass through."""
    k = torch.zeros(1, 1, 1, 8, dtype=torch.float16)
    k[0, 0, 0] = torch.tensor([60000.0, math.nan, math.inf, 1.0, -60000.0, 1.0, 1.0, 2.0])
    out = torch.zeros_like(k)
    ops.rerope(k, out, [0], [0], [1], torch.full((4,), math.pi / 4), isa=isa)
    row = out[0, 0, 0]
    assert row[0] == math.inf
    assert row[[1, 5]].isnan().all()
    assert row[[2, 6]].isinf().all()
    assert row[[3, 7]].isfinite().all()


def test_rotations_add_up() -> None:
    """Moving by a and then by b is moving by a + b: what repositioning rests on."""
    k = random_keys(1, 4, 2, 64, dtype=torch.float32)
    inv_freq = inv_freq_of(64)
    once, half, twice = (torch.empty_like(k) for _ in range(3))
    ops.rerope(k, once, [0], [0], [123_456], inv_freq)
    ops.rerope(k, half, [0], [0], [100_000], inv_freq)
    ops.rerope(half, twice, [0], [0], [23_456], inv_freq)
    torch.testing.assert_close(twice, once, rtol=0, atol=2e-6)


SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 4096},
}


@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"), [(128, 128), (128, 64), (256, 192)], ids=["all", "64", "192"]
)
@pytest.mark.parametrize("rope_type", SCALINGS)
@pytest.mark.parametrize("attention_factor", [1.0, 1.1386], ids=["", "mscale"])
def test_reposition_is_recompute(
    head_dim: int,
    rotary_dim: int,
    is_neox: bool,
    rope_type: str,
    attention_factor: float,
) -> None:
    """A key rotated to p and moved by delta is the key rotated to p + delta (field case 7)."""
    parameters = {"rope_type": rope_type, "rope_theta": 500_000.0, **SCALINGS[rope_type]}
    inv_freq = inverse_frequencies(parameters, rotary_dim)
    raw = random_keys(1, 16, 2, head_dim, dtype=torch.float32).double()
    raw[..., :rotary_dim] *= attention_factor

    def at(first_position: int) -> torch.Tensor:
        """[1, 16, 2, head_dim] with token i at first_position + i, in float64."""
        tokens = raw[0].unsqueeze(1)
        positions = [first_position + i for i in range(16)]
        return reference.rotate(tokens, positions, inv_freq, is_neox=is_neox).transpose(0, 1)

    k, moved = at(300).float(), torch.empty(1, 16, 2, head_dim)
    ops.rerope(k, moved, [0], [0], [4096 - 300], inv_freq, is_neox=is_neox)
    torch.testing.assert_close(moved, at(4096).float(), rtol=0, atol=4e-6)
    assert_same_bits(moved[..., rotary_dim:], k[..., rotary_dim:])


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_threads_and_unsorted_deltas(num_threads: int) -> None:
    k = random_keys(50, 4, 2, 32, dtype=torch.float32)
    deltas = [(i * 37) % 11 - 5 for i in range(50)]
    src, dst = list(range(50)), [(i * 7) % 50 for i in range(50)]
    out = torch.full_like(k, float("nan"))
    ops.rerope(k, out, src, dst, deltas, inv_freq_of(32), num_threads=num_threads)
    assert_rotated(k, out[dst], deltas, inv_freq_of(32), True)


def test_numpy() -> None:
    k = random_keys(3, 4, 2, 16, dtype=torch.float32)
    out = np.full((3, 4, 2, 16), np.nan, dtype=np.float32)
    read_only = k.numpy().copy()
    read_only.setflags(write=False)
    ops.rerope(read_only, out, np.array([2]), np.array([0]), np.array([9]), inv_freq_of(16).numpy())
    assert_rotated(k[[2]], torch.from_numpy(out)[[0]], [9], inv_freq_of(16), True)


def call(**changes: Any) -> None:
    arguments: dict[str, Any] = {
        "k_src": torch.zeros(4, 2, 3, 8),
        "k_dst": torch.zeros(4, 2, 3, 8),
        "src_blocks": [0, 1],
        "dst_blocks": [2, 3],
        "deltas": [5, 6],
        "inv_freq": torch.ones(4),
    }
    ops.rerope(**(arguments | changes))


def read_only_array() -> np.ndarray[Any, Any]:
    array = np.zeros((4, 2, 3, 8), np.float32)
    array.setflags(write=False)
    return array


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"k_src": torch.zeros(4, 48)}, ValueError,
         r"k_src: expected shape \[num_blocks, .*, num_kv_heads, head_dim\], got \[4, 48\]"),
        ({"k_dst": torch.zeros(4, 3, 2, 8)}, ValueError,
         r"k_dst: expected blocks of the same shape as k_src \[4, 2, 3, 8\], got \[4, 3, 2, 8\]"),
        ({"k_dst": torch.zeros(4, 2, 3, 8).half()}, TypeError,
         "k_dst: expected float32 like k_src, got float16"),
        ({"k_src": torch.zeros(4, 2, 3, 8).double()}, TypeError,
         "k_src: expected float32, bfloat16, float16, float8_e4m3fn or float8_e5m2, got float64"),
        ({"k_src": torch.zeros(4, 2, 8, 3).transpose(2, 3)}, ValueError,
         r"k_src: expected a contiguous last dimension \(stride 1\), got stride 3"),
        ({"k_dst": torch.zeros(4, 1, 3, 8).expand(4, 2, 3, 8)}, ValueError,
         "k_dst: expected distinct elements, got a dimension expanded from size 1 to 2"),
        ({"k_dst": read_only_array()}, ValueError,
         "k_dst: expected a writable tensor, got a read-only one"),
        ({"src_blocks": [0, 4]}, ValueError,
         r"src_blocks\[1\]: expected a block in \[0, 4\) of k_src, got 4"),
        ({"dst_blocks": [-1, 2]}, ValueError,
         r"dst_blocks\[0\]: expected a block in \[0, 4\) of k_dst, got -1"),
        ({"dst_blocks": [2, 2]}, ValueError,
         "dst_blocks: expected distinct blocks, got block 2 at both 0 and 1"),
        ({"dst_blocks": [2]}, ValueError, r"dst_blocks: expected \[2\] like src_blocks, got \[1\]"),
        ({"deltas": [1]}, ValueError, r"deltas: expected \[2\] like src_blocks, got \[1\]"),
        ({"inv_freq": torch.ones(5)}, ValueError,
         r"inv_freq: expected at most \(head_dim - rotary_offset\) / 2 = 4 frequencies, got 5"),
        ({"inv_freq": torch.ones(4).double()}, TypeError,
         "inv_freq: expected float32, got float64"),
        ({"inv_freq": torch.ones(8)[::2]}, ValueError,
         "inv_freq: expected contiguous elements, got stride 2"),
        ({"inv_freq": torch.tensor([1.0, math.nan])}, ValueError,
         r"inv_freq\[1\]: expected a finite number, got nan"),
        ({"num_threads": -1}, ValueError,
         r"num_threads: expected 0 \(automatic\) or more, got -1"),
        ({"isa": "sse9"}, ValueError,
         "isa: expected auto, baseline, avx2, avx512 or avx512_vbmi, got 'sse9'"),
        ({"k_src": [[1.0]]}, TypeError,
         "k_src: expected a numpy array or a tensor with DLPack support, got list"),
        ({"deltas": [0.5, 1.0]}, TypeError, "deltas: expected int64, got float64"),
    ],
)  # fmt: skip
def test_bad_arguments(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(**changes)


def test_without_frequencies_keys_are_copied() -> None:
    k = random_keys(4, 2, 3, 8, dtype=torch.bfloat16)
    out = torch.full_like(k, float("nan"))
    ops.rerope(k, out, [0, 1, 2], [2, 3, 0], [7, 0, -7], torch.ones(0))
    assert_same_bits(out[[2, 3, 0]], k[[0, 1, 2]])
    assert out[1].isnan().all()


def test_dependent_moves_within_a_tensor_are_refused() -> None:
    k = torch.zeros(4, 2, 3, 8)
    with pytest.raises(ValueError, match="block 1 is read by move 1 and written by move 0; order"):
        call(k_src=k, k_dst=k, src_blocks=[0, 1], dst_blocks=[1, 2])
    call(src_blocks=[0, 1], dst_blocks=[1, 2])  # two tensors: no conflict
