"""How soon a judge starts to answer over drafts that were generated just before.

Three ways, each with the same drafts: their KV kept from when they were generated and moved (what
kvspan does), computed again from an empty cache, and ordinary full attention with prefix caching.
Prints the time to the judge's first token and how much of the drafts was read from the cache.

    python bench/nested.py [--model demo] [--fan-out 24] [--tokens 64] [--runs 3] [--json]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys

import torch

from kvspan import cross, g, open_engine, plus, repeat, run, system
from kvspan.engine import GenerateRequest, GenerateResult
from kvspan.engine.local import LocalEngine
from kvspan.executor import RunResult
from kvspan.query.nodes import Generate, Node
from kvspan.query.plan import make_plan
from kvspan.query.prompt import to_prompt

WRITER = "You write short stories. Every story has a beginning, a middle and an end."
JUDGE = "You read several stories and say which of them is the best, and why it is."


def judged(fan_out: int, tokens: int) -> Node:
    story = cross(system(WRITER), "Write a story about a lighthouse that is moved by its keeper.")
    drafts = repeat(fan_out, g("M", story, max_tokens=tokens, temperature=0.8))
    judge = cross(system(JUDGE), plus(drafts), "Which story is the best?")
    return g("M", judge, max_tokens=1, temperature=0)


def judge_again(engine: LocalEngine, result: RunResult, scope: str) -> GenerateResult:
    """The judge over the same drafts, from an empty cache."""
    engine.clear_cache()
    judge = make_plan(result.query).calls[-1].node
    assert isinstance(judge, Generate)
    answers = [(call.result.text, call.result.answer) for call in result.calls[:-1]]
    prompt = to_prompt(judge.input, "$", answers)
    return engine.run(GenerateRequest(prompt, max_tokens=1, temperature=0.0, scope=scope))  # type: ignore[arg-type]


def measure(engine: LocalEngine, query: Node, seed: int) -> dict[str, float]:
    """Seconds to the judge's first token, and tokens."""
    engine.clear_cache()
    result = run(query, engine=engine, seed=seed)
    drafts, kept = result.calls[:-1], result.calls[-1].result
    again = judge_again(engine, result, "anchored")
    full = judge_again(engine, result, "full")
    return {
        "kept": kept.timings.ttft,
        "again": again.timings.ttft,
        "full": full.timings.ttft,
        "generated": sum(call.result.usage.completion_tokens for call in drafts),
        "reused": kept.reuse.answer_reused_tokens,
        "prompt": kept.usage.prompt_tokens,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--fan-out", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    engine = open_engine(args.model, block_size=args.block_size)
    assert isinstance(engine, LocalEngine)
    query = judged(args.fan_out, args.tokens)
    with engine:
        runs = [measure(engine, query, seed) for seed in range(args.runs)]
    found = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    if args.json:
        machine = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
        options = {name: value for name, value in vars(args).items() if name != "json"}
        print(json.dumps({"machine": machine, "options": options, **found}, indent=2))
        return 0
    print(f"{args.fan_out} drafts of {args.tokens} tokens, {found['prompt']:.0f} prompt tokens")
    print(f"read from the cache: {found['reused'] / found['generated']:.1%} of what was generated")
    for name, what in (("kept", "kept and moved"), ("again", "computed again"), ("full", "full")):
        times = found[name] / found["kept"]
        print(f"{what:15} {found[name]:8.3f} s to the judge's first token  {times:5.1f}x")
    return 0


if __name__ == "__main__":
    sys.exit(main())
