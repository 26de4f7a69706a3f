"""Moving blocks against memcpy (torch's and numpy's copies), torch's own rotation and a NumPy loop.

All move the same bytes: those read and written. memcpy copies whole pools in one piece, the others
move scattered blocks, all layers, with the same number of threads. The paper (Span Queries, arXiv
2511.02749) reports 500 tokens/ms (500 k tokens/s) on a GPU for an 8B model: the last case gives
that figure for this machine, keys rotated and values copied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvspan import ops
from peers.frame import Bench, num_cpus

NUM_LAYERS, NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM = 8, 256, 16, 8, 128
DELTA = 12_345
TARGETS = {"kvspan copy + rotate": 0.7, "kvspan in place": 0.6}


def run(bench: Bench) -> None:
    try:
        import torch
    except ImportError:
        bench.missing("copy + rotate", "everything", "torch is not installed")
        return
    random = np.random.default_rng(0)
    src, dst = (random.permutation(NUM_BLOCKS) for _ in range(2))
    deltas = np.full(NUM_BLOCKS, DELTA)
    freq = 10_000.0 ** (-torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM)
    inv_freq = [freq.float()] * NUM_LAYERS
    angle = DELTA * freq
    shape = (NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    before = torch.get_num_threads()
    try:
        for threads in sorted({1, num_cpus()}):
            torch.set_num_threads(threads)
            float8 = (torch.float8_e4m3fn, torch.float8_e5m2)
            for dtype in (torch.bfloat16, torch.float16, torch.float32, *float8):
                keys = [torch.randn(shape).to(dtype) for _ in range(NUM_LAYERS)]
                out = [torch.empty_like(k) for k in keys]
                num_bytes = 2 * sum(k.nbytes for k in keys)
                contestants: dict[str, Callable[[], object]] = {
                    "torch copy_": lambda a=out, b=keys: [
                        x.copy_(y) for x, y in zip(a, b, strict=True)
                    ],
                    "kvspan copy + rotate": lambda a=out, b=keys, n=threads: ops.rerope_layers(
                        b, a, [], [], src, dst, deltas, inv_freq, num_threads=n
                    ),
                    "kvspan in place": lambda b=keys, n=threads: ops.rerope_layers(
                        b, b, [], [], src, src, deltas, inv_freq, num_threads=n
                    ),
                    "kvspan copy_blocks": lambda a=out, b=keys, n=threads: [
                        ops.copy_blocks(y, x, src, dst, num_threads=n)
                        for x, y in zip(a, b, strict=True)
                    ],
                }
                if threads == 1 and dtype == torch.float32:
                    arrays = [(x.numpy(), y.numpy()) for x, y in zip(out, keys, strict=True)]
                    contestants["np.copyto"] = lambda p=arrays: [np.copyto(x, y) for x, y in p]
                    contestants["NumPy loop"] = lambda p=arrays: numpy_loop(p, src, dst, angle)
                if dtype not in float8:
                    at = torch.from_numpy(src), torch.from_numpy(dst)
                    contestants["torch rotate"] = lambda a=out, b=keys, i=at: torch_rotate(
                        b, a, *i, angle.cos().float(), angle.sin().float()
                    )
                bench.compare(
                    f"{str(dtype).removeprefix('torch.')}, {threads} thread(s)",
                    contestants,
                    baseline="torch copy_",
                    num_bytes=num_bytes,
                    targets=TARGETS,
                )
            for dtype in float8:
                for head_dim, is_neox in ((64, True), (HEAD_DIM, False), (64, False)):
                    other_rows(bench, torch, dtype, head_dim, is_neox, threads)
        llama_8b(bench, torch, before)
    finally:
        torch.set_num_threads(before)


def other_rows(
    bench: Bench, torch: Any, dtype: Any, head_dim: int, is_neox: bool, threads: int
) -> None:
    """8-bit rows of another length, or whose pairs are neighbours: as many bytes as above."""
    num_blocks = NUM_BLOCKS * HEAD_DIM // head_dim
    random = np.random.default_rng(0)
    src, dst = (random.permutation(num_blocks) for _ in range(2))
    deltas = np.full(num_blocks, DELTA)
    inv_freq = [(10_000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)).float()] * NUM_LAYERS
    shape = (num_blocks, BLOCK_SIZE, NUM_KV_HEADS, head_dim)
    keys = [torch.randn(shape).to(dtype) for _ in range(NUM_LAYERS)]
    out = [torch.empty_like(k) for k in keys]
    pairs = "" if is_neox else ", interleaved"
    bench.compare(
        f"{str(dtype).removeprefix('torch.')}, heads of {head_dim}{pairs}, {threads} thread(s)",
        {
            "torch copy_": lambda: [x.copy_(y) for x, y in zip(out, keys, strict=True)],
            "kvspan copy + rotate": lambda: ops.rerope_layers(
                keys, out, [], [], src, dst, deltas, inv_freq,
                is_neox=is_neox, num_threads=threads,
            ),
            "kvspan in place": lambda: ops.rerope_layers(
                keys, keys, [], [], src, src, deltas, inv_freq,
                is_neox=is_neox, num_threads=threads,
            ),
        },
        baseline="torch copy_",
        num_bytes=2 * sum(k.nbytes for k in keys),
        targets=TARGETS,
    )  # fmt: skip


def llama_8b(bench: Bench, torch: Any, num_threads: int) -> None:
    """Tokens per second of an 8B-class model's cache: 32 layers, 8 KV heads of 128, bfloat16."""
    num_blocks = 64
    shape = (num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    pools = [[torch.randn(shape).bfloat16() for _ in range(32)] for _ in range(4)]
    keys, values, keys_out, values_out = pools
    blocks, deltas = np.arange(num_blocks), np.full(num_blocks, DELTA)
    inv_freq = [(500_000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)).float()] * 32
    bench.compare(
        f"8B-class model, {num_blocks * BLOCK_SIZE} tokens, keys and values",
        {
            "torch copy_": lambda: [
                x.copy_(y)
                for x, y in zip([*keys_out, *values_out], [*keys, *values], strict=True)
            ],
            "kvspan": lambda: ops.rerope_layers(
                keys, keys_out, values, values_out, blocks, blocks, deltas, inv_freq,
                num_threads=num_threads,
            ),
            "kvspan in place": lambda: ops.rerope_layers(
                keys, keys, values, values, blocks, blocks, deltas, inv_freq,
                num_threads=num_threads,
            ),
        },
        baseline="torch copy_",
        items=num_blocks * BLOCK_SIZE,
        unit="tokens",
        num_bytes=2 * sum(t.nbytes for t in [*keys, *values]),
    )  # fmt: skip


def torch_rotate(keys: Any, out: Any, src: Any, dst: Any, cos: Any, sin: Any) -> None:
    """What a model's own rotary code would do: gather, rotate in float32, scatter."""
    half = HEAD_DIM // 2
    for k, o in zip(keys, out, strict=True):
        x = k[src].float()
        a, b = x[..., :half], x[..., half:]
        rotated = x.new_empty(x.shape)
        rotated[..., :half] = a * cos - b * sin
        rotated[..., half:] = b * cos + a * sin
        o[dst] = rotated.to(o.dtype)


def numpy_loop(pairs: Any, src: Any, dst: Any, angle: Any) -> None:
    """A loop over blocks in NumPy, as a first version would have it."""
    cos, sin = angle.cos().float().numpy(), angle.sin().float().numpy()
    half = HEAD_DIM // 2
    for out, keys in pairs:
        for s, d in zip(src, dst, strict=True):
            a, b = keys[s, ..., :half], keys[s, ..., half:]
            out[d, ..., :half] = a * cos - b * sin
            out[d, ..., half:] = b * cos + a * sin
