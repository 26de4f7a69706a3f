"""Hybrid models on vLLM: the first request that parts from a cached prompt, kvspan and stock.

Runs where vLLM is installed. Two engines of the same settings (mode "align", prefix caching on,
eager, bfloat16, each in a process of its own, asked turn by turn): stock vLLM, and vLLM with
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
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from machine import processor
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig
from vllm_turns import Remote, in_turns, summary

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
        self.generator = torch.Generator()

    def tokens(self, count: int) -> list[int]:
        """Other ones each time."""
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

    def hits(self, seed: int) -> list[dict[str, int]]:
        self.generator.manual_seed(seed)
        rows = []
        for length, shared, unique in HITS:
            for m in shared:
                self.forget()
                base = self.tokens(length)
                self.ask([base + self.tokens(unique)])
                _, (cached,) = self.ask([base[:m] + self.tokens(unique)])
                rows.append({"shared": m, "prompt": m + unique, "cached": cached})
        return rows

    def ttft(self, length: int, seed: int) -> dict[str, tuple[float, int]]:
        """(seconds, cached tokens) by policy.

        Of requests that part at a token of their own, each the first to do so.
        """
        self.generator.manual_seed(seed)
        self.forget()
        base = self.tokens(length)
        self.ask([base + self.tokens(SUFFIX)])
        found = {}
        for i, policy in enumerate(self.policies):
            m = length - 37 - 101 * i
            seconds, (cached,) = self.ask([base[:m] + self.tokens(SUFFIX)], 1, policy)
            found[policy or "stock"] = (seconds, cached)
        return found

    def ordinary(self, seed: int) -> float:
        """Seconds for 8 prompts of 1,024 tokens and 32 tokens of answer; nothing shared."""
        self.generator.manual_seed(seed)
        prompts = [self.tokens(1024) for _ in range(8)]
        time.sleep(0.5)  # until the other engine's threads no longer spin
        return self.ask(prompts, 32)[0]


def measure(folder: str, args: argparse.Namespace) -> dict[str, Any]:
    """The figures of both engines."""
    longest = max(*args.lengths, 4096) + 1024
    stock, kvspan = (
        Remote(args.threads, Engine, folder, own, longest, args.decay) for own in (False, True)
    )
    hits = in_turns(stock, kvspan, 1, "hits")
    for engine in (stock, kvspan):  # warm
        engine("ordinary", 10**6)
    ordinary = in_turns(stock, kvspan, args.rounds, "ordinary")
    ttft: list[dict[str, Any]] = []
    for length in args.lengths:
        found = in_turns(stock, kvspan, args.repeats, "ttft", length)
        for rounds in found.values():
            for policy in rounds[0]:
                times = summary([one[policy][0] for one in rounds])
                ttft.append(
                    {"tokens": length, "policy": policy, "cached": rounds[0][policy][1], **times}
                )
                print(f"  {length:6d} {policy:12s} {times['median']:8.3f} s", flush=True)
    stock.close()
    kvspan.close()
    return {
        "hits": {name: rounds[0] for name, rounds in hits.items()},
        "ordinary_s": ordinary,
        "ttft_s": ttft,
    }


def report(figures: dict[str, Any]) -> None:
    """Prints tables, and puts the ratios into the figures."""
    print("\nFirst request that parts: cached tokens\n  shared  of prompt   stock  kvspan")
    for a, b in zip(figures["hits"]["stock"], figures["hits"]["kvspan"], strict=True):
        print(f"  {a['shared']:6d}  {a['prompt']:9d}  {a['cached']:6d}  {b['cached']:6d}")
    rows = figures["ttft_s"]
    base = {row["tokens"]: row["median"] for row in rows if row["policy"] == "stock"}
    print(
        "\nTime to first token\n  tokens  policy        cached   seconds   stock / kvspan   target"
    )
    for row in rows:
        row["ratio"] = base[row["tokens"]] / row["median"]
        print(
            f"  {row['tokens']:6d}  {row['policy']:12s}  {row['cached']:6d}  {row['median']:8.3f}"
            f"  {row['ratio']:14.2f}x  {TARGETS.get(row['tokens'], 0.0):6.1f}x"
        )
    seconds = figures["ordinary_s"]
    if not seconds["stock"]:
        return
    ratios = [b / a for a, b in zip(seconds["stock"], seconds["kvspan"], strict=True)]
    figures["ordinary_time_of_stock"] = summary(ratios)
    print(
        f"\nOrdinary requests: kvspan takes {statistics.median(ratios):.3f} of stock's time, pairs "
        f"{min(ratios):.3f} to {max(ratios):.3f} (target: a median of 1.02 at most)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 16384, 32768])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=40, help="of ordinary requests")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument(
        "--decay", action="store_true", help="keep decays, and replay within a bound, too"
    )
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--machine", default=processor(), help="its name, for the file")
    args = parser.parse_args()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    if importlib.util.find_spec("torchvision") is None:
        sys.path.append(str(STUBS))  # which a process that is spawned begins with
        paths = [str(STUBS), os.environ.get("PYTHONPATH")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    with tempfile.TemporaryDirectory() as folder:
        parameters = make_model(folder)
        figures = measure(folder, args)
    report(figures)
    if args.json:
        figures = {
            "machine": args.machine, "threads": args.threads, "parameters": parameters, **figures
        }  # fmt: skip
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
