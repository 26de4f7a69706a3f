"""Hybrid models on vLLM: the first request that parts from a cached prompt, kvspan and stock.

Runs where vLLM is installed. Two engines of the same settings (mode "align", prefix caching on,
eager, bfloat16, each in a process of its own, one after the other): stock vLLM, and vLLM with
kvspan's connector.

hits: cached tokens of the first request that shares some tokens with one before it.
ttft: its time to first token, a model of about 30M random parameters. Kvspan answers exactly (from
    the nearest recurrent state that was kept) and, where asked, after a replay of 5%.
ordinary: seconds for prompts that share nothing, to the last of their tokens.

    python bench/vllm_hybrid.py                             # 8,192, 16,384 and 32,768 tokens
    python bench/vllm_hybrid.py --lengths 2048 --repeats 1  # a quick look
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

STUBS = Path(__file__).parent.parent / "tests/vllm/stubs"
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
VOCAB = 4096
SUFFIX = 64
HITS = ((2000, (255, 777, 1531, 1999), 60), (420, (200, 333, 419), 60), (1500, (1500,), 700))
TARGETS = {8192: 3.0, 16384: 5.0, 32768: 8.0}


def make_model(folder: str) -> int:
    """About 30M random parameters: three times LA LA LA FA. Returns their number."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=VOCAB,
        hidden_size=384,
        intermediate_size=1280,
        num_hidden_layers=12,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=65536,
        tie_word_embeddings=True,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_num_key_heads=3,
        linear_num_value_heads=6,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e6,
            "partial_rotary_factor": 0.25,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
    )
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


class Engine:
    """vLLM, stock or with kvspan. decay: which then keeps decays, for replay within a bound."""

    def __init__(self, folder: str, kvspan: bool, longest: int, decay: bool = False) -> None:
        from vllm import LLM

        options: dict[str, Any] = {}
        if kvspan:
            options["kv_transfer_config"] = {
                "kv_connector": "KvspanConnector",
                "kv_connector_module_path": "kvspan.vllm.connector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"decay": decay},
            }
        self.llm = LLM(
            folder,
            dtype="bfloat16",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=longest,
            max_num_batched_tokens=2048,
            max_num_seqs=16,
            enable_prefix_caching=True,
            disable_log_stats=True,
            **options,
        )
        self.kvspan = kvspan
        self.policies: tuple[str | None, ...] = ("exact", "ratio:0.05") if kvspan else (None,)
        if kvspan and decay:
            self.policies += ("bounded:1e-3",)
        self.generator = torch.Generator().manual_seed(1)

    def tokens(self, count: int) -> list[int]:
        """Other ones each time; the same ones for both engines."""
        return torch.randint(1, VOCAB, (count,), generator=self.generator).tolist()

    def ask(
        self, prompts: Sequence[list[int]], max_tokens: int = 1, replay: str | None = None
    ) -> tuple[float, list[int]]:
        """(seconds, cached tokens of each)."""
        from vllm import SamplingParams

        extra = {"kv_transfer_params": {"kvspan": {"replay": replay}}} if replay else None
        params = SamplingParams(
            max_tokens=max_tokens, temperature=0, detokenize=False, ignore_eos=True,
            extra_args=extra,
        )  # fmt: skip
        start = time.perf_counter()
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
        return time.perf_counter() - start, [o.num_cached_tokens or 0 for o in outputs]

    def forget(self) -> None:
        self.llm.reset_prefix_cache()
        if self.kvspan:
            core = self.llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
            core.scheduler.connector.reset_cache()


def hits(engine: Engine) -> list[dict[str, int]]:
    rows = []
    for length, shared, unique in HITS:
        for m in shared:
            engine.forget()
            base = engine.tokens(length)
            engine.ask([base + engine.tokens(unique)])
            _, (cached,) = engine.ask([base[:m] + engine.tokens(unique)])
            rows.append({"shared": m, "prompt": m + unique, "cached": cached})
    return rows


def ttft(engine: Engine, lengths: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """Seconds of requests that part at a token of their own, each the first to do so."""
    rows: list[dict[str, Any]] = []
    policies = engine.policies
    for length in lengths:
        times: dict[str | None, list[float]] = {policy: [] for policy in policies}
        hit: dict[str | None, int] = {}
        for _ in range(repeats):
            engine.forget()
            base = engine.tokens(length)
            engine.ask([base + engine.tokens(SUFFIX)])
            for i, policy in enumerate(policies):
                m = length - 37 - 101 * i
                seconds, (cached,) = engine.ask([base[:m] + engine.tokens(SUFFIX)], 1, policy)
                times[policy].append(seconds)
                hit[policy] = cached
        for policy in policies:
            rows.append({
                "tokens": length,
                "policy": policy or "stock",
                "cached": hit[policy],
                "median_s": statistics.median(times[policy]),
                "min_s": min(times[policy]),
                "max_s": max(times[policy]),
            })  # fmt: skip
            print(
                f"  {length:6d} {policy or 'stock':12s} {rows[-1]['median_s']:8.3f} s", flush=True
            )
    return rows


def ordinary(engine: Engine, rounds: int) -> list[float]:
    """Seconds of rounds of 8 prompts of 1,024 tokens and 32 tokens of answer; nothing shared."""
    engine.forget()
    engine.ask([engine.tokens(1024) for _ in range(8)], 32)
    return [engine.ask([engine.tokens(1024) for _ in range(8)], 32)[0] for _ in range(rounds)]


def run(folder: str, kvspan: bool, args: argparse.Namespace) -> dict[str, Any]:
    """One engine's figures."""
    import vllm

    engine = Engine(folder, kvspan, max(*args.lengths, 4096) + 1024, args.decay)
    return {
        "vllm": vllm.__version__,
        "threads": torch.get_num_threads(),
        "hits": hits(engine),
        "ordinary_s": ordinary(engine, args.rounds),
        "ttft": ttft(engine, args.lengths, args.repeats),
    }


def run_apart(folder: str, engine: str) -> dict[str, Any]:
    """`run` in a process of its own."""
    print(engine, flush=True)
    environment = {**ENVIRONMENT, **os.environ}
    if importlib.util.find_spec("torchvision") is None:
        paths = [str(STUBS), environment.get("PYTHONPATH")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    figures = Path(folder) / f"{engine}.json"
    command = [sys.executable, __file__, *sys.argv[1:], "--engine", engine, "--model", folder]
    subprocess.run([*command, "--json", str(figures)], env=environment, check=True)
    return dict(json.loads(figures.read_text()))


def report(stock: dict[str, Any], own: dict[str, Any]) -> list[dict[str, Any]]:
    print("\nFirst request that parts: cached tokens\n  shared  of prompt   stock  kvspan")
    for a, b in zip(stock["hits"], own["hits"], strict=True):
        print(f"  {a['shared']:6d}  {a['prompt']:9d}  {a['cached']:6d}  {b['cached']:6d}")
    base = {row["tokens"]: row for row in stock["ttft"]}
    print(
        "\nTime to first token\n  tokens  policy        cached   seconds   stock / kvspan   target"
    )
    ratios = []
    for row in (*stock["ttft"], *own["ttft"]):
        ratio = base[row["tokens"]]["median_s"] / row["median_s"]
        target = TARGETS.get(row["tokens"], 0.0)
        ratios.append({"tokens": row["tokens"], "policy": row["policy"], "ratio": ratio})
        print(
            f"  {row['tokens']:6d}  {row['policy']:12s}  {row['cached']:6d}  {row['median_s']:8.3f}"
            f"  {ratio:14.2f}x  {target:6.1f}x"
        )
    ordinary = statistics.median(own["ordinary_s"]) / statistics.median(stock["ordinary_s"])
    print(f"\nOrdinary requests: kvspan takes {ordinary:.3f} of stock's time (target 1.02 at most)")
    ratios.append({"policy": "ordinary", "time_of_stock": ordinary})
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 16384, 32768])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5, help="of ordinary requests")
    parser.add_argument(
        "--decay", action="store_true", help="keep decays, and replay within a bound, too"
    )
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--machine", default=platform.machine(), help="its name, for the file")
    parser.add_argument("--engine", choices=("stock", "kvspan"), help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        args.json.write_text(json.dumps(run(args.model, args.engine == "kvspan", args)))
        return
    with tempfile.TemporaryDirectory() as folder:
        parameters = make_model(folder)
        stock, own = (run_apart(folder, engine) for engine in ("stock", "kvspan"))
    ratios = report(stock, own)
    if args.json:
        figures = {
            "machine": args.machine,
            "parameters": parameters,
            "stock": stock,
            "kvspan": own,
            "ratios": ratios,
        }
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
