"""The packed CPU layouts against the code of vLLM that writes them."""

from __future__ import annotations

import pytest
import torch
from vllm.platforms import current_platform

from kvspan import ops, reference

ISAS = [
    ("vec", torch.float32),
    ("vec", torch.bfloat16),
    ("vec", torch.float16),
    ("vec16", torch.float32),
    ("vec16", torch.bfloat16),
    ("amx", torch.bfloat16),
    ("vec", torch.float8_e4m3fn),
    ("vec", torch.float8_e5m2),
]
FLOAT8 = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}
NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM = 5, 64, 3, 64


def vllm_cache(keys: torch.Tensor, values: torch.Tensor, isa: str) -> torch.Tensor:
    """A layer's cache as vLLM's CPU attention fills it; keys, values: NHD blocks."""
    from vllm._custom_ops import cpu_attn_reshape_and_cache

    current_platform.import_kernels()
    shape = (NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_DIM)
    kept_as = FLOAT8.get(keys.dtype, "auto")
    # 8-bit floats are integers to vLLM, which makes them of a model's bfloat16.
    cache = torch.zeros(shape, dtype=torch.uint8 if keys.dtype in FLOAT8 else keys.dtype)
    halves = cache.view(NUM_BLOCKS, NUM_KV_HEADS, 2 * BLOCK_SIZE, HEAD_DIM).chunk(2, dim=2)
    slots = torch.arange(NUM_BLOCKS * BLOCK_SIZE)
    rows = [(x.bfloat16() if x.dtype in FLOAT8 else x).flatten(0, 1) for x in (keys, values)]
    cpu_attn_reshape_and_cache(*rows, *halves, slots, isa, 1.0, 1.0, kept_as)
    return cache.view(keys.dtype)


def same_numbers(a: torch.Tensor, b: torch.Tensor) -> bool:
    """vLLM writes 8-bit floats without negative zeros."""
    return torch.equal(a.float(), b.float())


@pytest.mark.parametrize(("isa", "dtype"), ISAS, ids=lambda x: str(x).removeprefix("torch."))
def test_packed_as_vllm_packs(isa: str, dtype: torch.dtype) -> None:
    layout = "cpu_amx" if isa == "amx" else "cpu_vec"
    generator = torch.Generator().manual_seed(0)
    shape = (NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    keys, values = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    cache = vllm_cache(keys, values, isa)
    assert same_numbers(cache, reference.pack_cpu(keys, values, layout))

    # Moving blocks of the cache is writing moved keys to it.
    inv_freq = (10_000.0 ** (-torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM)).float()
    src, dst, deltas = [0, 3, 4], [1, 2, 4], [1000, -7, 12]
    ops.rerope(cache, cache, src, dst, deltas, inv_freq, layout=layout)
    ops.rerope(keys, keys, src, dst, deltas, inv_freq)
    ops.copy_blocks(values, values, src, dst)
    assert same_numbers(cache, vllm_cache(keys, values, isa))
