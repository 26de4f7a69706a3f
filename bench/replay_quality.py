"""What Tail-Replay costs in quality, on the small trained hybrid of tests/fixtures/tiny_hybrid.

The embedded engine reads contexts that go on differently after token m, restores the recurrent
states at m by each policy, and the tokens after m are read with them: held-out text (error of the
states, KL to the full prefill, top-1 agreement) and recall (exact match of answers). In `recall`
what the answer needs of the state was said up to 32 tokens before m, in `far` at a quarter of the
context before it.

    python bench/replay_quality.py [--lengths 500 1000 2000 4000] [--json] [--plot FILE.png]
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from kvspan.engine import GenerateRequest
from kvspan.engine.sequence import CacheDomain, Sequence
from kvspan.extras import importing
from kvspan.hybrid.engine import HybridEngine
from kvspan.hybrid.prefill import HybridPrefill
from kvspan.hybrid.rows import Rows
from kvspan.hybrid.state import RecurrentState
from kvspan.layout import layout_from_tokens

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import tiny_hybrid_task as task  # noqa: E402  found by the path above

MODEL = ROOT / "tests/fixtures/tiny_hybrid"
POLICIES = ("zero", "ratio:0.05", "ratio:0.10", "ratio:0.25", "bounded:1e-3", "exact")
NEAREST, NEAR = 1, 32
QUESTIONS = 8
KEYS = 24  # records in a context, 72 values
SUFFIX = 64
CHECKPOINT_INTERVAL = 1024
BLOCK = 16


@dataclass
class Judge:
    """The model twice: in the engine, which restores, and plain, which reads on from the states."""

    engine: HybridEngine
    plain: Any

    @staticmethod
    def load(folder: Path) -> Judge:
        def model() -> Any:
            return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

        engine = HybridEngine(
            model(),
            AutoTokenizer.from_pretrained(folder),
            name="tiny",
            kv_cache_gib=0.25,
            checkpoint_interval=CHECKPOINT_INTERVAL,
        )
        return Judge(engine, model())

    @torch.no_grad()
    def prefill(self, ids: Tensor) -> Any:
        """transformers' cache of ids [B, T]: the states to be restored, and the KV."""
        cache = DynamicCache(config=self.plain.config)
        self.plain.model(ids, cache=cache, use_cache=True)
        return cache

    @torch.no_grad()
    def read_on(self, ids: Tensor, cache: Any) -> Tensor:
        """Logits [B, T, V] of ids after what is in the cache, which is left as it is."""
        logits: Tensor = self.plain(ids, cache=copy.deepcopy(cache), use_cache=True).logits
        return logits.float()

    def donate(self, prefix: list[int], rng: random.Random) -> None:
        """Have the engine read a prompt that leaves the prefix behind at its end."""
        other = [rng.randrange(task.FIRST_KEY) for _ in range(BLOCK)]
        layout = layout_from_tokens(np.asarray(prefix + other), [], BLOCK, "full")
        self.engine.run_layout(layout, GenerateRequest(prompt=(), max_tokens=1, scope="full"))

    @torch.no_grad()
    def restored(self, tokens: list[int], length: int, policy: str) -> tuple[RecurrentState, Any]:
        """The state that a request for these tokens has after ``length`` of them, which the engine
        has read before, and the request's record."""
        engine = self.engine
        engine.set_replay(policy)
        layout = layout_from_tokens(np.asarray(tokens), [], BLOCK, "full")
        domain, device = CacheDomain(engine.name, ""), self.plain.device
        prefill = HybridPrefill(Sequence(layout, "sequential", domain, 1, device), engine.cache)
        prefill.admit()
        try:
            if prefill.match.tokens != length:
                raise RuntimeError(f"matched {prefill.match.tokens} tokens, expected {length}")
            next(prefill.run())
            state, at = prefill.state, prefill.state.position
            if at < length:  # an exact restore ends on a grid; the rest is computed with the suffix
                engine.runner.run(
                    Rows.tight(at, length),
                    prefill.seq.tokens,
                    prefill.seq.slots,
                    state,
                    write_from=length,
                )
            return state, prefill.reuse.replay
        finally:
            prefill.release()

    def with_states(self, cache: Any, states: list[RecurrentState]) -> Any:
        """A copy of the cache with these states, one for each sequence of the batch."""
        cache = copy.deepcopy(cache)
        for number, layer in enumerate(self.engine.runner.map.linear):
            target = cache.layers[layer]
            conv = torch.stack([state.conv[number] for state in states])
            target.conv_states[0][..., -conv.shape[-1] :] = conv
            target.recurrent_states[0].copy_(torch.stack([state.ssm[number] for state in states]))
        return cache

    def errors(self, exact: Any, other: Any) -> list[float]:
        """Of each LA layer: the distance of its states, relative to the norm of the exact ones."""
        found = []
        for layer in self.engine.runner.map.linear:
            truth = exact.layers[layer].recurrent_states[0]
            error = other.layers[layer].recurrent_states[0] - truth
            found.append(float(error.norm() / truth.norm()))
        return found


@dataclass
class Restores:
    """Contexts ids [B, T], cut at ``length``: the cache of a full prefill, and by policy the cache
    with restored states and the tails of the groups, largest of the batch."""

    ids: Tensor
    length: int
    full: Any
    by_policy: dict[str, tuple[Any, list[int]]]


def restore_all(judge: Judge, ids: Tensor, length: int, rng: random.Random) -> Restores:
    full = judge.prefill(ids[:, :length])
    states: dict[str, list[RecurrentState]] = {policy: [] for policy in POLICIES}
    tails: dict[str, list[int]] = {}
    for tokens in ids.tolist():
        judge.engine.clear_cache()
        judge.donate(tokens[:length], rng)
        for policy in POLICIES:
            state, record = judge.restored(tokens, length, policy)
            states[policy].append(state)
            found = [group["replayed_tokens"] for group in record["groups"]]
            known = tails.setdefault(policy, found)
            tails[policy] = [max(pair) for pair in zip(known, found, strict=True)]
    caches = {policy: (judge.with_states(full, states[policy]), tails[policy]) for policy in states}
    return Restores(ids, length, full, caches)


def recall_batch(
    source: bytes, length: int, far: bool, size: int, rng: random.Random
) -> tuple[Tensor, list[int]]:
    """Contexts [size, length + 3 * QUESTIONS] to be resumed at ``length``, and the places of the
    answers (the same in all)."""
    rows = []
    for _ in range(size):
        distance = length // 4 if far else rng.randint(NEAREST, NEAR)
        context = task.resumed_context(source, KEYS, length, distance, QUESTIONS, rng)
        rows.append(context.tokens)
    return torch.tensor(rows), context.answers


def text_batch(source: bytes, length: int, size: int, rng: random.Random) -> Tensor:
    starts = (rng.randrange(len(source) - length - SUFFIX) for _ in range(size))
    return torch.tensor([list(source[at : at + length + SUFFIX]) for at in starts])


def judge_recall(judge: Judge, restores: Restores, answers: list[int]) -> dict[str, float]:
    """Share of exact answers by policy; ``full``: with the cache of the prefill itself."""
    ids, length = restores.ids, restores.length
    asked = [at - 1 - length for at in answers]
    caches = {"full": restores.full}
    caches |= {policy: cache for policy, (cache, _) in restores.by_policy.items()}
    shares = {}
    for name, cache in caches.items():
        answered = judge.read_on(ids[:, length:], cache)[:, asked].argmax(-1)
        shares[name] = (answered == ids[:, answers]).float().mean().item()
    return shares


def judge_text(judge: Judge, restores: Restores) -> dict[str, dict[str, Any]]:
    """By policy: relative errors of the states, KL to the full prefill in nats, top-1 agreement and
    cross entropy of the suffix, and the tail of each group."""
    suffix = restores.ids[:, restores.length :]
    full = judge.read_on(suffix, restores.full)
    truth = full.log_softmax(-1)
    rows = {}
    for policy, (cache, tails) in restores.by_policy.items():
        errors = judge.errors(restores.full, cache)
        logits = judge.read_on(suffix, cache)
        guess = logits.log_softmax(-1)
        rows[policy] = {
            "tails": tails,
            "state_error": sum(errors) / len(errors),
            "state_error_max": max(errors),
            "kl": (truth.exp() * (truth - guess)).sum(-1).mean().item(),
            "top1": (logits.argmax(-1) == full.argmax(-1)).float().mean().item(),
            "cross_entropy": torch.nn.functional.cross_entropy(
                guess[:, :-1].flatten(0, 1), suffix[:, 1:].flatten()
            ).item(),
        }
    return rows


def measure(judge: Judge, source: bytes, length: int, size: int, seed: int) -> dict[str, Any]:
    """Everything at one length: ``size`` contexts of each kind."""
    rng = random.Random(f"{seed}/{length}")
    shares = []
    for far in (False, True):
        ids, answers = recall_batch(source, length, far, size, rng)
        shares.append(judge_recall(judge, restore_all(judge, ids, length, rng), answers))
    near, far_away = shares
    texts = text_batch(source, length, size, rng)
    rows = judge_text(judge, restore_all(judge, texts, length, rng))
    for name, row in rows.items():
        row |= {"recall": near[name], "recall_far": far_away[name]}
        row["recall_kept"] = near[name] / near["full"] if near["full"] else 0.0
    full = {"recall": near["full"], "recall_far": far_away["full"]}
    return {"full": full, "policies": rows}


def table(results: dict[int, dict[str, Any]]) -> str:
    head = f"{'m':>5} {'policy':13} {'tail':>12} {'S error':>8} {'worst':>8} {'KL':>8} {'top-1':>6}"
    lines = [f"{head} {'recall':>7} {'kept':>6} {'far':>6}"]
    for length, result in results.items():
        full = result["full"]
        recall, far = full["recall"], full["recall_far"]
        lines.append(f"{length:>5} {'full prefill':57} {recall:8.1%} {'':6} {far:6.1%}")
        for name, row in result["policies"].items():
            tail = "/".join(map(str, row["tails"]))
            lines.append(
                f"{length:>5} {name:13} {tail:>12} {row['state_error']:8.1e} "
                f"{row['state_error_max']:8.1e} {row['kl']:8.1e} {row['top1']:6.1%} "
                f"{row['recall']:7.1%} {row['recall_kept']:6.1%} {row['recall_far']:6.1%}"
            )
    return "\n".join(lines)


def plot(results: dict[int, dict[str, Any]], path: Path) -> None:
    """KL and recall over m, one line a policy."""
    with importing("bench"):
        from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    lengths = list(results)
    for name in POLICIES:
        rows = [result["policies"][name] for result in results.values()]
        left.plot(lengths, [max(row["kl"], 1e-9) for row in rows], marker="o", label=name)
        right.plot(lengths, [100 * row["recall"] for row in rows], marker="o", label=name)
    full = [100 * result["full"]["recall"] for result in results.values()]
    right.plot(lengths, full, "k--", label="full prefill")
    left.set(xlabel="tokens reused", ylabel="KL to full prefill, nats", yscale="log")
    right.set(xlabel="tokens reused", ylabel="recall, % exact", ylim=(0, 102))
    right.legend(fontsize="small")
    figure.savefig(path, dpi=150)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, default=MODEL, help="a folder; default: the fixture")
    parser.add_argument("--lengths", type=int, nargs="+", default=[500, 1000, 2000, 4000])
    parser.add_argument("--contexts", type=int, default=32, help="of each kind and length")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw KL and recall into FILE")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    judge, source = Judge.load(args.model), task.text(held_out=True)
    results, began = {}, time.monotonic()
    for length in args.lengths:
        results[length] = measure(judge, source, length, args.contexts, args.seed)
    if args.plot:
        plot(results, args.plot)
    if args.json:
        out = {
            "machine": platform.machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "contexts": args.contexts,
            "seconds": time.monotonic() - began,
            "lengths": results,
        }
        print(json.dumps(out, indent=2))
    else:
        print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
