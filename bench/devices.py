"""Moving an 8B-class model's cache on a device, against the device's own copies of the same bytes.

    python bench/devices.py --json out.json          # on a GPU
    python bench/devices.py --device cpu --tokens 1024

32 layers of 8 KV heads of 128 dimensions, blocks of 16 tokens in random order. The paper (Span
Queries, arXiv 2511.02749) reports 500 tokens/ms on a GPU for such a model, keys and values. A
sample is several calls on one stream and the wait for the last; copies are whole pools at a time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from peers.frame import Bench, machine
from peers.rerope import torch_rotate

from kvspan import ops
from kvspan.host import CopyQueue

NUM_LAYERS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM = 32, 16, 8, 128
DELTA = 12_345
CALLS = 10  # of a sample
Pools = list[torch.Tensor]
Moves = tuple[np.ndarray, np.ndarray, np.ndarray]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tokens", type=int, default=16_384, help="moved (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=9, help="samples of each (default 9)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every sample here")
    args = parser.parse_args()
    if args.tokens < BLOCK_SIZE:
        parser.error(f"--tokens: expected at least {BLOCK_SIZE}, got {args.tokens}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device cuda: torch finds no device; of kvspan: {ops.cuda_status()}")
    bench = Bench(repeats=args.repeats, section=args.device)
    num_blocks = args.tokens // BLOCK_SIZE
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float32):
        move_cache(bench, args.device, dtype, num_blocks)
    host_copies(bench, args.device, num_blocks)
    print(bench.table())
    seconds = next(row.median for row in bench.rows if row.name == "kvspan, keys and values")
    tokens_per_ms = num_blocks * BLOCK_SIZE * CALLS / seconds / 1e3
    print(f"8B-class model, bfloat16: {tokens_per_ms:,.0f} tokens/ms (the paper: 500)")
    if args.json:
        device = torch.cuda.get_device_name() if args.device == "cuda" else "the host"
        rows = [{**row.__dict__, "median": row.median} for row in bench.rows]
        results = {
            "machine": machine() | {"device": device, "torch": torch.__version__},
            "tokens_per_ms": tokens_per_ms,
            "rows": rows,
        }
        args.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0


def repeated(call: Callable[[], object], device: str) -> Callable[[], None]:
    """What a sample of the bench times."""

    def run() -> None:
        for _ in range(CALLS):
            call()
        if device == "cuda":
            torch.cuda.synchronize()

    return run


def move_cache(bench: Bench, device: str, dtype: torch.dtype, num_blocks: int) -> None:
    shape = (num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)

    def pools() -> Pools:
        return [torch.randn(shape, device=device).to(dtype) for _ in range(NUM_LAYERS)]

    keys, values, keys_out, values_out = pools(), pools(), pools(), pools()
    random = np.random.default_rng(0)
    src, dst = random.permutation(num_blocks), random.permutation(num_blocks)
    deltas = np.full(num_blocks, DELTA)
    freq = (500_000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)).float()
    stream = torch.cuda.current_stream().cuda_stream if device == "cuda" else 0

    def copy(outs: Pools, ins: Pools) -> None:
        for out, pool in zip(outs, ins, strict=True):
            out.copy_(pool)

    def move(k_in: Pools, k_out: Pools, v_in: Pools, v_out: Pools, to: np.ndarray) -> None:
        ops.rerope_layers(
            k_in, k_out, v_in, v_out, src, to, deltas, [freq] * NUM_LAYERS, stream=stream
        )

    def blocks() -> None:
        for out, pool in zip(keys_out, keys, strict=True):
            ops.copy_blocks(pool, out, src, dst, stream=stream)

    key_bytes = 2 * sum(k.nbytes for k in keys) * CALLS
    name = f"{str(dtype).removeprefix('torch.')}, {num_blocks * BLOCK_SIZE} tokens, {CALLS} times"
    cases: list[tuple[str, dict[str, Callable[[], object]], int]] = [
        (
            "keys and values",
            {
                "copy_": lambda: copy([*keys_out, *values_out], [*keys, *values]),
                "kvspan, keys and values": lambda: move(keys, keys_out, values, values_out, dst),
            },
            2 * key_bytes,
        ),
        (
            "keys",
            {
                "copy_": lambda: copy(keys_out, keys),
                "kvspan, keys": lambda: move(keys, keys_out, [], [], dst),
                "kvspan, keys in place": lambda: move(keys, keys, [], [], src),
                "kvspan copy_blocks": blocks,
            },
            key_bytes,
        ),
    ]
    if dtype is torch.bfloat16:
        at = torch.from_numpy(src).to(device), torch.from_numpy(dst).to(device)
        angle = (DELTA * freq.double()).to(device)
        cases[1][1]["torch rotate"] = lambda: torch_rotate(
            keys, keys_out, *at, angle.cos().float(), angle.sin().float()
        )
    for what, calls, num_bytes in cases:
        ours = [contestant for contestant in calls if contestant.startswith("kvspan,")]
        bench.compare(
            f"{name}, {what}",
            {contestant: repeated(call, device) for contestant, call in calls.items()},
            baseline="copy_",
            items=num_blocks * BLOCK_SIZE * CALLS,
            unit="tokens",
            num_bytes=num_bytes,
            targets=dict.fromkeys(ours, 0.8) if device == "cuda" else {},
        )


def host_copies(bench: Bench, device: str, num_blocks: int) -> None:
    """Blocks of one pool to page-locked memory and back, by a copy queue."""
    is_cuda = device == "cuda"
    pool = torch.randn(num_blocks, 1 << 15, device=device).bfloat16()
    host = torch.empty(pool.shape, dtype=pool.dtype, pin_memory=is_cuda)
    order = np.random.default_rng(0).permutation(num_blocks)
    with CopyQueue(device) as queue:
        for what, src, dst, pairs in (
            ("device to host", pool, host, ([(pool, order)], [host])),
            ("host to device", host, pool, ([host], [(pool, order)])),
        ):
            calls: dict[str, Callable[[], object]] = {
                "copy_": lambda a=dst, b=src: a.copy_(b, non_blocking=True),
                "CopyQueue": lambda p=pairs, q=queue: q.submit(*p).wait(),
            }
            bench.compare(
                f"{what}, {num_blocks} blocks of 64 KiB, {CALLS} times",
                {name: repeated(call, device) for name, call in calls.items()},
                baseline="copy_",
                num_bytes=pool.nbytes * CALLS,
            )


if __name__ == "__main__":
    raise SystemExit(main())
