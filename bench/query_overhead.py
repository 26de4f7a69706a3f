"""What kvspan itself costs before a model runs: parse, rewrite, plan, lay out.

Prints seconds of CPU time (median of the runs) for queries of 10,000 and 20,000 nodes of several
shapes, and the growth from one to the other. The layout uses a whitespace tokenizer, so that
what is measured is kvspan and not a tokenizer.

    python bench/query_overhead.py [--runs 5] [--json]
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable

from kvspan import cross, g, plus, reduce, repeat, system, user
from kvspan.layout import PromptEncoder
from kvspan.query.nodes import Node
from kvspan.query.optimizer import optimize
from kvspan.query.plan import make_plan
from kvspan.query.prompt import to_prompt
from kvspan.query.read import from_json
from kvspan.query.write import to_json


class Whitespace:
    """A tokenizer: one token per word."""

    chat_template = None
    bos_token_id = eos_token_id = unk_token_id = None
    all_special_ids: tuple[int, ...] = ()
    all_special_tokens: tuple[str, ...] = ()

    def __call__(self, text: str | list[str], **_: object) -> Whitespace:
        rows = [text] if isinstance(text, str) else text
        ids = [[len(word) for word in row.split(" ")] for row in rows]
        self.input_ids = ids[0] if isinstance(text, str) else ids
        return self


def words(rng: random.Random, count: int) -> str:
    return " ".join(f"{rng.random():.4f}" for _ in range(count))


def passages(size: int) -> Node:
    rng = random.Random(0)
    return g("M", cross(system("s"), plus(words(rng, 8) for _ in range(size - 4)), "q"))


def judge(size: int) -> Node:
    rng = random.Random(0)
    drafts = (g("M", words(rng, 8)) for _ in range(size // 2))
    return g("J", cross(system("s"), plus(drafts), "q"))


def reduction(size: int) -> Node:
    # After the rule has split it, it has about ``size`` nodes.
    rng = random.Random(0)
    drafts = (g("M", words(rng, 8)) for _ in range(size // 7))
    return reduce(g("J", cross(system("s"), plus(drafts), "q")), 2)


def deep(size: int) -> Node:
    """Reductions in reductions, of about ``size`` nodes once they are split."""
    query: Node = user("innermost")
    for level in range(size // 12):
        query = reduce(g("J", cross(system("s"), plus(query, f"a {level}", "b"), "q")), 2)
    return query


def samples(size: int) -> Node:
    return g("J", plus(repeat(size // 2, g("M", "write"))))


SHAPES: dict[str, Callable[[int], Node]] = {
    "passages": passages,
    "judge": judge,
    "reduction": reduction,
    "samples": samples,
    "deep": deep,
}


def measure(query: Node) -> dict[str, float]:
    """CPU seconds of each stage."""
    text = to_json(query)
    encoder = PromptEncoder(Whitespace(), 16)  # type: ignore[arg-type]
    marks = [time.process_time()]
    read = from_json(text)
    marks.append(time.process_time())
    rewritten = optimize(read).query
    marks.append(time.process_time())
    plan = make_plan(rewritten)
    marks.append(time.process_time())
    for call in plan.calls:
        answers = [("a b c", None)] * len(call.inputs)
        encoder.encode(to_prompt(call.node.input, call.path, answers))
    marks.append(time.process_time())
    names = ("parse", "rewrite", "plan", "layout")
    stages = {name: marks[i + 1] - marks[i] for i, name in enumerate(names)}
    return {**stages, "all": marks[-1] - marks[0]}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    out: dict[str, dict[str, dict[str, float]]] = {}
    for name, build in SHAPES.items():
        for size in (10_000, 20_000):
            query = build(size)
            runs = [measure(query) for _ in range(args.runs)]
            stages = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            out.setdefault(name, {})[str(size)] = stages
    if args.json:
        print(json.dumps({"machine": platform.platform(), "seconds": out}, indent=2))
        return 0
    head = "  ".join(f"{stage:>7}" for stage in ("parse", "rewrite", "plan", "layout", "all"))
    print(f"{'shape':11} {'nodes':>6}  {head}")
    for name, sizes in out.items():
        for size, stages in sizes.items():
            print(f"{name:11} {size:>6}  " + "  ".join(f"{stages[s]:7.3f}" for s in stages))
        growth = sizes["20000"]["all"] / sizes["10000"]["all"]
        print(f"{'':11} growth x{growth:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
