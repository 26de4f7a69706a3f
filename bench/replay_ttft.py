"""Time to first token of a hybrid model after a cached prefix: Tail-Replay against full prefill.

A Qwen3.5-type model of about 30M random parameters in float32 (12 layers: three times LA LA LA FA).
For each length m a prompt of m tokens and a suffix of 64 runs on an empty cache (full prefill),
then the same m tokens with other suffixes on the cache of the first: replaying 5% of them from a
zero state, and exactly from a checkpoint. All ratios are of one run, on the same threads.

Then the ablation that arXiv 2608.30310 does not give: groups one after the other or side by side,
and of each group's last layer all of it, all but its FFN, or its state alone.

    python bench/replay_ttft.py                     # 8,192, 16,384 and 32,768 matched tokens
    python bench/replay_ttft.py --lengths 1024 --full-repeats 1
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import processor
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from kvspan.engine import GenerateRequest, GenerateResult
from kvspan.hybrid.engine import HybridEngine
from kvspan.hybrid.replay import LastLayer, ReplayOptions
from kvspan.layout import layout_from_tokens

BLOCK = 16
SUFFIX = 64
SHORT = 70  # exact replays end so far before a checkpoint: nearly a whole interval after another
VOCAB = 4096
NEVER = 2**31 - 1  # an end-of-text id that no model draws
LAST: dict[LastLayer, str] = {
    "full": "nothing skipped",
    "mixer": "FFN skipped",
    "state": "state alone",
}
TARGETS = {8192: 3.0, 16384: 6.0, 32768: 9.0}  # full prefill over a replay of 5%
CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 65536,
    "tie_word_embeddings": True,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.25,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}


class _Bytes:
    """Stands in for a tokenizer where prompts are tokens already."""

    chat_template = None
    bos_token_id = eos_token_id = unk_token_id = None
    all_special_ids: tuple[int, ...] = ()
    all_special_tokens: tuple[str, ...] = ()

    def __call__(self, text: str | list[str], **_: object) -> _Bytes:
        rows = [list(t.encode()) for t in ([text] if isinstance(text, str) else text)]
        self.input_ids = rows[0] if isinstance(text, str) else rows
        return self

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(chr(i % 96 + 32) for i in ids)


def make_model() -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**CONFIG)).float().eval()
    model.generation_config.eos_token_id = NEVER
    return model


class Bench:
    """One engine, whose prompts all start with the same tokens."""

    def __init__(self, tokens: int, interval: int, gib: float) -> None:
        self.rng = np.random.default_rng(tokens)
        self.prefix = self.rng.integers(5, VOCAB, tokens)
        self.engine = HybridEngine(
            make_model(),
            _Bytes(),  # type: ignore[arg-type]
            name="bench",
            block_size=BLOCK,
            kv_cache_gib=gib,
            checkpoint_interval=interval,
        )

    def ask(
        self, replay: str, options: ReplayOptions | None = None, short: int = 0
    ) -> GenerateResult:
        """The prefix, less its last `short` tokens, and a suffix of its own."""
        self.engine.set_replay(replay)
        self.engine.cache.options = options or ReplayOptions()
        ids = np.concatenate(
            [self.prefix[: len(self.prefix) - short], self.rng.integers(5, VOCAB, SUFFIX)]
        )
        request = GenerateRequest(prompt=(), max_tokens=1, temperature=0.0, scope="full")
        return self.engine.run_layout(layout_from_tokens(ids, (), BLOCK, "full"), request)

    def full(self) -> GenerateResult:
        self.engine.clear_cache()
        result = self.ask("exact")
        assert result.usage.cached_tokens == 0
        return result


def seconds(results: list[GenerateResult], part: str) -> dict[str, float]:
    values = [float(getattr(r.timings, part)) for r in results]
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def measure(tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    figures: dict[str, Any] = {"tokens": tokens}
    bench = Bench(tokens, args.interval, args.kv_cache_gib)
    with bench.engine:
        full = [bench.full() for _ in range(args.full_repeats)]
        exact = [bench.ask("exact", short=SHORT) for _ in range(args.repeats + 1)][1:]
    bench = Bench(tokens, 0, args.kv_cache_gib)
    with bench.engine:
        full.append(bench.full())
        tail = [bench.ask(f"ratio:{args.ratio}") for _ in range(args.repeats + 1)][1:]
        ablation = {}
        variants = [(s, last) for s in (False, True) for last in LAST]
        runs: dict[Any, list[GenerateResult]] = {variant: [] for variant in variants}
        for _ in range(args.repeats):  # turn by turn
            for side, last in variants:
                options = ReplayOptions(side_by_side=side, last=last)
                runs[side, last].append(bench.ask(f"ratio:{args.ratio}", options))
        for (side, last), results in runs.items():
            name = f"{'side by side' if side else 'serial'}, {LAST[last]}"
            ablation[name] = {
                "restore": seconds(results, "prepare"),
                "ttft": seconds(results, "ttft"),
            }
    for result in (*exact, *tail):
        assert result.usage.cached_tokens >= tokens - SHORT
    for name, results in (("full", full), ("tail", tail), ("exact", exact)):
        figures[name] = seconds(results, "ttft")
        figures[f"{name} restore"] = seconds(results, "prepare")
    figures["replay"] = tail[-1].reuse.replay
    figures["exact replay"] = exact[-1].reuse.replay
    figures["speedup"] = figures["full"]["median"] / figures["tail"]["median"]
    figures["exact speedup"] = figures["full"]["median"] / figures["exact"]["median"]
    figures["ablation"] = ablation
    return figures


def show(figures: dict[str, Any], ratio: float) -> None:
    tokens = figures["tokens"]
    target = TARGETS.get(tokens)
    print(f"\n{tokens:,} matched tokens, suffix {SUFFIX}")
    print(f"  {'':28}{'TTFT':>9}  {'spread':>17}  {'restore':>9}  {'full / this':>11}")
    for name, label in (
        ("full", "full prefill"),
        ("tail", f"replay {ratio:.0%}"),
        ("exact", "exact, 1 checkpoint back"),
    ):
        t = figures[name]
        over = figures["full"]["median"] / t["median"]
        wanted = f"  (target {target:g})" if name == "tail" and target else ""
        print(
            f"  {label:28}{t['median']:8.3f}s  {t['min']:7.3f}-{t['max']:.3f} s  "
            f"{figures[f'{name} restore']['median']:8.3f}s  {over:10.1f}x{wanted}"
        )
    base = figures["ablation"]["serial, nothing skipped"]["restore"]["median"]
    print(f"  {'ablation, replay ' + format(ratio, '.0%'):28}{'TTFT':>9}  {'':17}  {'restore':>9}")
    for name, row in figures["ablation"].items():
        restore = row["restore"]["median"]
        print(
            f"    {name:26}{row['ttft']['median']:8.3f}s  {'':17}  {restore:8.3f}s  "
            f"{1 - restore / base:+10.0%} of the restore saved"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--lengths", type=int, nargs="+", default=list(TARGETS), help="matched tokens")
    add("--ratio", type=float, default=0.05, help="replayed part (default 0.05)")
    add("--interval", type=int, default=1024, help="tokens between checkpoints (default 1024)")
    add("--repeats", type=int, default=5, help="turns of what is quick (default 5)")
    add("--full-repeats", type=int, default=2, help="full prefills beside the one for the cache")
    add("--kv-cache-gib", type=float, default=2.0)
    add("--threads", type=int, default=torch.get_num_threads())
    add("--json", type=Path, metavar="FILE", help="also write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = make_model()
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters / 1e6:.1f}M parameters, float32, {args.threads} threads")
    del model
    start = time.perf_counter()
    rows = []
    for tokens in args.lengths:
        rows.append(measure(tokens, args))
        show(rows[-1], args.ratio)
    if args.json:
        report = {
            "machine": f"{platform.machine()} {processor()}",
            "torch": torch.__version__,
            "threads": args.threads,
            "parameters": parameters,
            "suffix": SUFFIX,
            "ratio": args.ratio,
            "seconds": time.perf_counter() - start,
            "lengths": rows,
        }
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    missed = [r for r in rows if r["speedup"] < TARGETS.get(r["tokens"], 0)]
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
