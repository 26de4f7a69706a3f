"""All layers in one call: the bits of one call a layer, whatever the layers have in common."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvspan import ops
from rerope_checks import (
    ISAS,
    assert_rotated,
    assert_same_bits,
    inv_freq_of,
    poison,
    random_keys,
    take,
)

# (num_kv_heads, head_dim, value_dim, rotary_dim, theta, is_neox, dtype): two thetas as in Gemma-3,
# a layer without rotation, an interleaved one, other shapes and types.
LAYERS = [
    (2, 32, 32, 32, 1e4, True, torch.bfloat16),
    (2, 32, 32, 32, 1e6, True, torch.bfloat16),
    (2, 32, 24, 0, 0.0, True, torch.bfloat16),
    (2, 32, 32, 32, 1e4, True, torch.bfloat16),
    (2, 32, 32, 32, 1e4, False, torch.bfloat16),
    (3, 40, 8, 20, 1e4, True, torch.float32),
    (2, 32, 32, 32, 1e4, True, torch.float8_e4m3fn),
]
SRC, DST = [3, 0, 7, 5, 1], [2, 6, 4, 8, 9]
DELTAS = [11, -400, 0, 11, 70_000]
FREQS = [inv_freq_of(layer[3], layer[4]) if layer[3] else torch.empty(0) for layer in LAYERS]
IS_NEOX = [layer[5] for layer in LAYERS]


def pools(seed: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    keys, values = [], []
    for i, (heads, head_dim, value_dim, *_, dtype) in enumerate(LAYERS):
        keys.append(random_keys(10, 4, heads, head_dim, dtype=dtype, seed=seed + i))
        values.append(random_keys(10, 4, heads, value_dim, dtype=dtype, seed=seed - i))
    return keys, values


def expect_moved(layer: int, source: torch.Tensor, result: torch.Tensor) -> None:
    if LAYERS[layer][3]:
        moved = (take(source, SRC), take(result, DST), DELTAS, FREQS[layer], IS_NEOX[layer])
        assert_rotated(*moved)
    else:
        assert_same_bits(take(result, DST), take(source, SRC))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("num_threads", [1, 2, 3, 7])
def test_between_pools(num_threads: int, isa: str) -> None:
    keys, values = pools(100)
    keys_out = [poison(torch.empty_like(k)) for k in keys]
    values_out = [poison(torch.empty_like(v)) for v in values]
    ops.rerope_layers(
        keys, keys_out, values, values_out, SRC, DST, DELTAS, FREQS,
        is_neox=IS_NEOX, num_threads=num_threads, isa=isa,
    )  # fmt: skip
    untouched = [0, 1, 3, 5, 7]
    for layer in range(len(LAYERS)):
        expect_moved(layer, keys[layer], keys_out[layer])
        assert_same_bits(take(values_out[layer], DST), take(values[layer], SRC))
        for out in (keys_out[layer], values_out[layer]):
            assert_same_bits(take(out, untouched), poison(torch.empty_like(take(out, untouched))))
        alone = poison(torch.empty_like(keys[layer]))
        ops.rerope(
            keys[layer], alone, SRC, DST, DELTAS, FREQS[layer], is_neox=IS_NEOX[layer], isa=isa
        )
        assert_same_bits(keys_out[layer], alone)


@pytest.mark.parametrize("num_threads", [1, 4])
def test_within_pools(num_threads: int) -> None:
    keys, values = pools(200)
    before = [k.clone() for k in keys], [v.clone() for v in values]
    ops.rerope_layers(
        keys, keys, values, values, SRC, DST, DELTAS, FREQS,
        is_neox=IS_NEOX, num_threads=num_threads,
    )  # fmt: skip
    for layer in range(len(LAYERS)):
        expect_moved(layer, before[0][layer], keys[layer])
        assert_same_bits(take(values[layer], DST), take(before[1][layer], SRC))
        assert_same_bits(take(keys[layer], SRC), take(before[0][layer], SRC))


def test_in_place_values_stay() -> None:
    """Source and destination the same block: keys rotate, values are not touched."""
    keys, values = pools(300)
    before = [k.clone() for k in keys], [v.clone() for v in values]
    blocks, deltas = [4, 0, 9], [5, 0, -123]
    ops.rerope_layers(keys, keys, values, values, blocks, blocks, deltas, FREQS, is_neox=IS_NEOX)
    for layer, freq in enumerate(FREQS):
        assert_same_bits(values[layer], before[1][layer])
        source, result = take(before[0][layer], blocks), take(keys[layer], blocks)
        if len(freq):
            assert_rotated(source, result, deltas, freq, IS_NEOX[layer])
        else:
            assert_same_bits(result, source)


def test_more_moves_than_deltas_and_many_layers() -> None:
    """A table per delta is shared by all blocks of a span, in any order of moves."""
    generator = torch.Generator().manual_seed(1)
    keys = [random_keys(64, 2, 1, 16, dtype=torch.float32, seed=i) for i in range(30)]
    out = [torch.full_like(k, float("nan")) for k in keys]
    dst = torch.randperm(64, generator=generator).tolist()
    deltas = torch.randint(-3, 4, (64,), generator=generator).tolist()
    freqs = [inv_freq_of(16, 1e4 if i % 3 else 1e6) for i in range(30)]
    ops.rerope_layers(keys, out, [], [], list(range(64)), dst, deltas, freqs, num_threads=5)
    for i in range(30):
        assert_rotated(keys[i], out[i][dst], deltas, freqs[i], True)


def call(**changes: Any) -> None:
    arguments: dict[str, Any] = {
        "k_src": [torch.zeros(4, 2, 3, 8)] * 2,
        "k_dst": [torch.zeros(4, 2, 3, 8) for _ in range(2)],
        "v_src": [torch.zeros(4, 2, 3, 6)] * 2,
        "v_dst": [torch.zeros(4, 2, 3, 6) for _ in range(2)],
        "src_blocks": [0, 1],
        "dst_blocks": [2, 3],
        "deltas": [5, 6],
        "inv_freq": [torch.ones(4)] * 2,
    }
    ops.rerope_layers(**(arguments | changes))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"k_dst": [torch.zeros(4, 2, 3, 8)]}, ValueError,
         "k_dst: expected one per layer, 2 like k_src, got 1"),
        ({"inv_freq": [torch.ones(4)] * 3}, ValueError,
         "inv_freq: expected one per layer, 2 like k_src, got 3"),
        ({"is_neox": [True]}, ValueError, "is_neox: expected one per layer, 2 like k_src, got 1"),
        ({"v_src": [torch.zeros(4, 2, 3, 6)]}, ValueError,
         "v_src: expected none or one per layer, 2 like k_src, got 1"),
        ({"v_dst": []}, ValueError,
         r"v_dst\[0\]: expected values both to read and to write, or neither"),
        ({"k_src": [torch.zeros(4, 2, 3, 8), torch.zeros(5, 2, 3, 8)]}, ValueError,
         r"k_src\[1\]: expected 4 blocks like k_src\[0\], got 5"),
        ({"v_dst": [torch.zeros(4, 2, 3, 6), torch.zeros(3, 2, 3, 6)]}, ValueError,
         r"v_dst\[1\]: expected 4 blocks like k_dst\[1\], got 3"),
        ({"v_dst": [torch.zeros(4, 2, 3, 6), torch.zeros(4, 2, 3, 7)]}, ValueError,
         r"v_dst\[1\]: expected blocks of the same shape as v_src\[1\] \[4, 2, 3, 6\]"),
        ({"k_dst": [torch.zeros(4, 2, 3, 8), torch.zeros(4, 2, 3, 8).half()]}, TypeError,
         r"k_dst\[1\]: expected float32 like k_src\[1\], got float16"),
        ({"inv_freq": [torch.ones(4), torch.ones(5)]}, ValueError,
         r"inv_freq\[1\]: expected at most .* = 4 frequencies, got 5"),
        ({"inv_freq": [torch.ones(4), torch.tensor([1.0, float("nan")])]}, ValueError,
         r"inv_freq\[1\]\[1\]: expected a finite number, got nan"),
        ({"k_src": [torch.zeros(4, 2, 3, 8), "no tensor"]}, TypeError,
         r"k_src\[1\]: expected a numpy array or a tensor with DLPack support, got str"),
        ({"k_src": [], "k_dst": [], "v_src": [], "v_dst": [], "inv_freq": []}, ValueError,
         "k_src: expected at least one layer, got none"),
        ({"src_blocks": [0, 4]}, ValueError,
         r"src_blocks\[1\]: expected a block in \[0, 4\) of k_src\[0\], got 4"),
    ],
)  # fmt: skip
def test_bad_arguments(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(**changes)


def test_one_layer_within_its_pool_makes_moves_dependent() -> None:
    shared = torch.zeros(4, 2, 3, 8)
    with pytest.raises(ValueError, match="block 1 is read by move 1 and written by move 0"):
        call(
            k_src=[torch.zeros(4, 2, 3, 8), shared],
            k_dst=[torch.zeros(4, 2, 3, 8), shared],
            dst_blocks=[1, 2],
        )
