"""``kvspan demo``: the same questions with nothing reused and with every passage's KV reused.

For each question the passages stand in another order, as a retriever would bring them. It is
answered with full attention from an empty cache, then as a span query: the first one finds the
cache empty and prepares all passages, the others find them and move them to their new places. At
the end some questions are asked again with an empty cache, to prove that answers do not depend on
what was in it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import resource
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvspan.cli_options import flags_named
from kvspan.demo.model import is_demo_model
from kvspan.demo.passages import DemoData, Question, first_line, load
from kvspan.engine import PLACEMENTS, GenerateRequest, GenerateResult, Placement, open_engine
from kvspan.errors import KvspanError
from kvspan.extras import engine_extra, importing
from kvspan.progress import ProgressBars
from kvspan.query.builders import cross, plus, system, user
from kvspan.query.prompt import to_prompt

if TYPE_CHECKING:
    from kvspan.engine.local import LocalEngine

DEFAULT_QUESTIONS = 8
PROOF_QUESTIONS = 2
LEAST_QUESTIONS = PROOF_QUESTIONS + 1  # the first finds no passage in the cache and proves nothing
MAX_TOKENS = 10  # the longest accepted answer and a little more
FULL, COLD, WARM, PROOF = "no reuse", "spans, first", "spans, warm", "proof"
MODES = (FULL, COLD, WARM)
WIDTH = 99  # columns of a line
TOLERANCE = 1e-4  # of log-probabilities between a warm and an empty cache, in float32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from kvspan.cli_options import add_block_size, add_machine_options, model_name, whole

    parser.add_argument(
        "--model",
        type=model_name,
        default="demo",
        metavar="ID_OR_PATH",
        help="any decoder transformers can load (default: Gemma-3-270M from kvspan[demo])",
    )
    parser.add_argument(
        "--questions",
        type=whole(LEAST_QUESTIONS, len(load().questions)),
        default=DEFAULT_QUESTIONS,
        metavar="N",
        help=f"how many to ask, {LEAST_QUESTIONS} to {len(load().questions)} "
        f"(default: %(default)s)",
    )
    parser.add_argument(
        "--placement",
        choices=PLACEMENTS,
        default="sequential",
        help="sequential rotates cached keys to new positions, parallel moves nothing",
    )
    add_block_size(parser)
    add_machine_options(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


@dataclass(frozen=True)
class Asked:
    """One question, answered."""

    question: Question
    mode: str  # one of MODES, or PROOF
    right: bool
    result: GenerateResult

    def to_obj(self) -> dict[str, Any]:
        return {
            "question": self.question.question,
            "mode": self.mode,
            "answer": first_line(self.result.text),
            "right": self.right,
            "timings": asdict(self.result.timings),
            "reuse": asdict(self.result.reuse),
            "usage": asdict(self.result.usage),
        }


@dataclass(frozen=True)
class Proof:
    """A warm answer against the same prompt from an empty cache."""

    question: str
    same_tokens: bool
    max_abs_delta: float  # of the first answer token's log-probabilities

    @property
    def holds(self) -> bool:
        return self.same_tokens and self.max_abs_delta <= TOLERANCE


class Demo:
    """Asks the questions of one run. say: gets every line of text as it is known."""

    def __init__(
        self, engine: LocalEngine, data: DemoData, placement: Placement, say: Callable[[str], None]
    ) -> None:
        self.engine = engine
        self.data = data
        self.placement = placement
        self.say = say
        self.asked: list[Asked] = []
        self.proofs: list[Proof] = []

    async def ask(self, question: Question, order: list[int], mode: str) -> Asked:
        passages = [user(self.data.passages[i].text) for i in order]
        query = cross(system(self.data.system), plus(passages), user(question.text))
        result = await self.engine.generate(
            GenerateRequest(
                prompt=to_prompt(query),
                max_tokens=MAX_TOKENS,
                temperature=0.0,
                scope="full" if mode == FULL else "anchored",
                placement=self.placement,
                return_logprobs=True,
            )
        )
        asked = Asked(question, mode, question.is_right(result.text), result)
        self.asked.append(asked)
        return asked

    async def run(self, questions: tuple[Question, ...]) -> None:
        rng = random.Random(0)
        orders = [
            rng.sample(range(len(self.data.passages)), len(self.data.passages)) for _ in questions
        ]
        # All questions without reuse come first: emptying the cache would throw the spans away.
        self.say("\n1. No reuse: full attention over everything, from an empty cache")
        for question, order in zip(questions, orders, strict=True):
            self.engine.clear_cache()
            self._show(await self.ask(question, order, FULL))
        self.say("\n2. Span queries: each passage's KV is computed once, and reused at any place")
        self.engine.clear_cache()
        warm = []
        for i, (question, order) in enumerate(zip(questions, orders, strict=True)):
            asked = await self.ask(question, order, WARM if i else COLD)
            self._show(asked)
            warm.append(asked)
        self.say("\n3. Proof: the same prompts from an empty cache give the same answers")
        for i in range(len(questions) - PROOF_QUESTIONS, len(questions)):
            self.engine.clear_cache()
            again = await self.ask(questions[i], orders[i], PROOF)
            self._prove(questions[i], warm[i].result, again.result)

    def _show(self, asked: Asked) -> None:
        reuse = asked.result.reuse
        note = ""
        if asked.mode != FULL:
            note = f"  [{reuse.reused_tokens} of {reuse.span_tokens} passage tokens reused]"
        mark = "ok   " if asked.right else "WRONG"
        answer = _cut(first_line(asked.result.text), WIDTH - 20 - len(note))
        self.say(_cut(f"   {asked.result.timings.ttft:7.3f} s  {asked.question.question}"))
        self.say(f"{'':14}{mark} {answer}{note}")

    def _prove(self, question: Question, warm: GenerateResult, cold: GenerateResult) -> None:
        assert warm.first_logprobs is not None and cold.first_logprobs is not None
        if cold.reuse.reused_tokens or not warm.reuse.reused_tokens:
            raise KvspanError(
                f"demo: expected a warm answer that reused spans and a cold one that did not, got "
                f"{warm.reuse.reused_tokens} and {cold.reuse.reused_tokens} reused tokens"
            )
        proof = Proof(
            question.question,
            warm.token_ids == cold.token_ids,
            float(abs(warm.first_logprobs - cold.first_logprobs).max()),
        )
        self.proofs.append(proof)
        tokens = "same tokens" if proof.same_tokens else "OTHER TOKENS"
        self.say(_cut(f"   {question.question}"))
        self.say(f"   {tokens}, log-probabilities differ by at most {proof.max_abs_delta:.1e}")

    def summary(self) -> dict[str, Any]:
        modes = {}
        for mode in MODES:
            answers = [asked for asked in self.asked if asked.mode == mode]
            modes[mode] = {
                "asked": len(answers),
                "right": sum(asked.right for asked in answers),
                "ttft": statistics.median(asked.result.timings.ttft for asked in answers),
            }
        return {
            "modes": modes,
            "warm_speedup": modes[FULL]["ttft"] / modes[WARM]["ttft"],
            "right_full": modes[FULL]["right"],
            "right_spans": modes[COLD]["right"] + modes[WARM]["right"],
            "proof_holds": all(proof.holds for proof in self.proofs),
            "max_abs_delta": max(proof.max_abs_delta for proof in self.proofs),
            "peak_memory_bytes": _peak_memory_bytes(),
        }


def main(args: argparse.Namespace) -> int:
    """Run the demo. 0: the answers did not depend on the cache; 1: they did."""
    data = load()
    say: Callable[[str], None] = _silent if args.json else _print
    with importing(engine_extra(args.model)):
        import torch
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    threads = int(torch.get_num_threads())
    what = "Gemma-3-270M" if is_demo_model(args.model) else args.model
    say(f"kvspan demo: {what}, float32, {threads} CPU threads")
    if is_demo_model(args.model):
        say("The weights are under Google's Gemma Terms of Use; they are no part of kvspan.")
    with ProgressBars() as progress:
        with flags_named():
            engine = open_engine(
                args.model,
                block_size=args.block_size,
                kv_cache_gib=args.kv_cache_gib,
                dtype="float32",  # the proof is about equality, and half precision rounds it away
                progress=progress,
            )
        try:
            spans = engine.capabilities()
            if not spans.spans:
                raise KvspanError(f"demo: {args.model} cannot reuse spans: {spans.reason}")
            demo = Demo(engine, data, args.placement, say)  # type: ignore[arg-type]
            say(
                f"{len(data.passages)} passages of invented facts, in another order for every "
                f"question.\nShown: time to first token (TTFT), the question, the answer."
            )
            asyncio.run(demo.run(data.questions[: args.questions]))
        finally:
            engine.close()
    summary = demo.summary()
    if args.json:
        report = {
            "model": args.model,
            "machine": {"cpu": platform.machine(), "threads": threads},
            "placement": args.placement,
            "block_size": args.block_size,
            "summary": summary,
            "proofs": [asdict(proof) for proof in demo.proofs],
            "asked": [asked.to_obj() for asked in demo.asked],
        }
        print(json.dumps(report, indent=1))
    else:
        _print_summary(summary)
    if not summary["proof_holds"]:
        raise KvspanError(
            f"demo: the proof failed: an answer depends on the cache (log-probabilities differ by "
            f"up to {summary['max_abs_delta']:.1e}, allowed are {TOLERANCE:.0e})"
        )
    return 0


def _print_summary(summary: dict[str, Any]) -> None:
    print(f"\n{'':20}{'median TTFT':>12}{'right answers':>16}")
    for mode, row in summary["modes"].items():
        right = f"{row['right']} of {row['asked']}"
        print(f"{mode:20}{row['ttft']:10.3f} s{right:>16}")
    print(
        f"\nWith passages reused the first token comes {summary['warm_speedup']:.1f} times sooner. "
        f"Peak memory {summary['peak_memory_bytes'] / 2**30:.1f} GiB."
    )


def _peak_memory_bytes() -> int:
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024  # Linux counts in KiB


def _cut(text: str, width: int = WIDTH) -> str:
    """The beginning of a text that is too long for its line."""
    return text if len(text) <= width else f"{text[: width - 3]}..."


def _print(line: str) -> None:
    # Not through the progress bars' stream: they are gone by the time a line is complete.
    print(line, flush=True)


def _silent(line: str) -> None:
    pass
