"""State-only replay of a layer by kvspan, transformers' torch fallback and vLLM's CPU operator.

On a GPU (``--device cuda``) flash-linear-attention's chunk kernel takes the place of vLLM's.

The sizes are Qwen3.5-4B's linear-attention layers: 16 key heads, 32 value heads, 128 x 128. All
contestants get the same bfloat16 keys and values and take turns, so that all meet the same noise;
a peer that is not installed gets a line that says so. Run it in the environment that has vLLM::

    python bench/gated_delta_peers.py --threads 1 --json out.json

vLLM's and transformers' operators also compute the outputs, which they cannot leave out: that is
what a replay through them costs. kvspan's own outputs are timed too. The second table is kvspan's
state-only time over the number of tokens: a cost that is linear in tokens has one rate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peers.frame import machine

from kvspan import ops

NUM_KEY_HEADS, NUM_VALUE_HEADS, DIM = 16, 32, 128
TOKENS = 1600
FLA = "flash-linear-attention"
TARGETS = {"transformers (torch)": 3.0, "vLLM (CPU operator)": 1.2, FLA: 1.5}

Contestants = dict[str, Callable[[], object]]


def make_inputs(num_tokens: int, device: str) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    keys = (num_tokens, NUM_KEY_HEADS, DIM)
    inputs = {
        "q": torch.randn(keys, generator=random).bfloat16(),
        "k": torch.randn(keys, generator=random).bfloat16(),
        "v": torch.randn(num_tokens, NUM_VALUE_HEADS, DIM, generator=random).bfloat16(),
        "g": -0.1 * torch.rand(num_tokens, NUM_VALUE_HEADS, generator=random),
        "beta": torch.rand(num_tokens, NUM_VALUE_HEADS, generator=random),
    }
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def kvspan_calls(x: dict[str, torch.Tensor], threads: int) -> Contestants:
    state = x["g"].new_empty(1, NUM_VALUE_HEADS, DIM, DIM)
    out = torch.empty_like(x["v"])
    stream = torch.cuda.current_stream().cuda_stream if state.is_cuda else 0
    how: dict[str, Any] = {"num_threads": threads, "stream": stream}
    rest = {name: x[name] for name in ("k", "v", "g", "beta")}
    return {
        "kvspan state only": lambda: ops.gated_delta_state(**rest, final_state=state, **how),
        "kvspan state + output": lambda: ops.gated_delta(**x, out=out, final_state=state, **how),
    }


def transformers_call(x: dict[str, torch.Tensor]) -> Contestants:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    return {
        "transformers (torch)": lambda: torch_chunk_gated_delta_rule(
            *repeated(x), output_final_state=True, use_qk_l2norm_in_kernel=True
        )
    }


def fla_call(x: dict[str, torch.Tensor]) -> Contestants:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    inputs = repeated(x)
    return {
        FLA: lambda: chunk_gated_delta_rule(
            *inputs, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
    }


def repeated(x: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """A batch of one, in order; not all versions repeat keys for their value heads themselves."""
    group = NUM_VALUE_HEADS // NUM_KEY_HEADS
    q, k = (x[name].repeat_interleave(group, dim=1) for name in ("q", "k"))
    return [tensor[None] for tensor in (q, k, x["v"], x["g"], x["beta"])]


def vllm_call(x: dict[str, torch.Tensor]) -> Contestants:
    # As vllm/model_executor/layers/mamba/ops/cpu/gdn_attention.py calls it.
    from vllm import _custom_ops

    state = torch.zeros(1, NUM_VALUE_HEADS, DIM, DIM)
    bounds = torch.tensor([0, len(x["k"])], dtype=torch.int32)
    slot = torch.zeros(1, dtype=torch.int32)
    beta = x["beta"].bfloat16()[None]

    def run() -> object:
        state.zero_()
        return _custom_ops.chunk_gated_delta_rule_cpu(
            query=x["q"][None],
            key=x["k"][None],
            value=x["v"][None],
            g=x["g"][None],
            beta=beta,
            initial_state=state,
            output_final_state=True,
            cu_seqlens=bounds,
            head_first=False,
            use_qk_l2norm_in_kernel=True,
            initial_state_indices=slot,
        )

    run()
    return {"vLLM (CPU operator)": run}


def measure(calls: Contestants, repeats: int) -> dict[str, list[float]]:
    """Seconds of each call, all of them taking turns, after one that does not count."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if turn:
                samples[name].append(time.perf_counter() - start)
    return samples


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1, help="of every contestant (default 1)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--repeats", type=int, default=9, help="samples of each (default 9)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every sample here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    before = machine()

    x = make_inputs(TOKENS, args.device)
    calls = kvspan_calls(x, args.threads)
    missing = []
    peers = {"transformers (torch)": transformers_call}
    peers |= {"vLLM (CPU operator)": vllm_call} if args.device == "cpu" else {FLA: fla_call}
    for name, make in peers.items():
        try:
            calls |= make(x)
        except (ImportError, AttributeError, RuntimeError) as error:
            missing.append(f"{name}: not here ({str(error).splitlines()[0]})")
    samples = measure(calls, args.repeats)
    ours = statistics.median(samples["kvspan state only"])
    heads = f"{NUM_KEY_HEADS}/{NUM_VALUE_HEADS} heads of {DIM}"
    print(f"{TOKENS} tokens, {heads}, bfloat16, {args.device}, {args.threads} thread(s)")
    columns = (
        f"{'median ms':>10}{'min':>9}{'max':>9}{'k tokens/s':>12}{'kvspan is':>11}{'target':>8}"
    )
    print(f"{'':24}{columns}")
    for name, seconds in samples.items():
        median = statistics.median(seconds)
        target = f">= {TARGETS[name]:g}x" if name in TARGETS else ""
        print(
            f"{name:24}{median * 1e3:10.2f}{min(seconds) * 1e3:9.2f}{max(seconds) * 1e3:9.2f}"
            f"{TOKENS / median / 1e3:12.1f}{median / ours:10.2f}x{target:>8}"
        )
    for line in missing:
        print(line)

    lengths: Contestants = {}
    for tokens in (1, 64, 400, 1600, 6400):
        call = kvspan_calls(make_inputs(tokens, args.device), args.threads)["kvspan state only"]
        lengths[str(tokens)] = call
    by_length = measure(lengths, args.repeats)
    print(f"\n{'tokens':>8}{'median ms':>12}{'us/token':>11}")
    for name, seconds in by_length.items():
        median = statistics.median(seconds)
        print(f"{name:>8}{median * 1e3:12.3f}{median / int(name) * 1e6:11.2f}")

    print(
        f"\n{before['processor']} ({ops.vector_isas()[0]}), {before['cpus']} CPUs, "
        f"load {before['load_average']}"
    )
    if args.json:
        results = {"machine": before, "threads": args.threads, "seconds": samples}
        args.json.write_text(json.dumps(results | {"by_tokens": by_length}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
