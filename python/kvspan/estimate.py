"""What a plan will cost before it runs: calls, rounds, tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvspan.query.nodes import Generate, Node, Text
from kvspan.query.plan import Call, Plan

# Where no tokenizer counts: English text has about this many characters to a token.
CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True)
class Estimate:
    """The cost of a plan.

    calls: model calls. rounds: calls on the longest chain of calls that wait for each other, so the
    time of a run with unlimited concurrency is that of ``rounds`` calls.
    prompt_tokens: of all calls; inner answers count with their max_tokens, where they have one.
    new_tokens: at most; None where a generate sets no max_tokens.
    counted: whether a tokenizer counted the prompts, or their characters were.
    """

    calls: int
    rounds: int
    prompt_tokens: int
    new_tokens: int | None
    counted: bool

    def __str__(self) -> str:
        """As one line.

        >>> str(Estimate(7, 3, 1200, 63, False))
        '7 calls in 3 rounds, about 1,200 prompt tokens, at most 63 new tokens'
        """
        plural = "" if self.calls == 1 else "s"
        rounds = f"{self.rounds:,} round{'' if self.rounds == 1 else 's'}"
        prompt = f"{'' if self.counted else 'about '}{self.prompt_tokens:,} prompt tokens"
        new = "new tokens unbounded"
        if self.new_tokens is not None:
            new = f"at most {self.new_tokens:,} new tokens"
        return f"{self.calls:,} call{plural} in {rounds}, {prompt}, {new}"

    def to_obj(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def estimate(
    plan: Plan, counts: Sequence[int | None] = (), *, max_tokens: int | None = None
) -> Estimate:
    """Estimate a plan.

    counts: tokens of the prompt of every call, without the answers it reads; where there is none,
        characters are counted. max_tokens: of generates that set none.

    >>> from kvspan.query.builders import g, plus, reduce
    >>> from kvspan.query.optimizer import optimize
    >>> from kvspan.query.plan import make_plan
    >>> query = reduce(g("M", plus(f"candidate {n}" for n in range(8)), max_tokens=9), 2)
    >>> str(estimate(make_plan(optimize(query).query)))
    '7 calls in 3 rounds, about 86 prompt tokens, at most 63 new tokens'
    """
    calls = plan.calls
    bounds = {call.id: call.node.max_tokens or max_tokens or None for call in calls}
    depth: dict[int, int] = {}
    for step in plan.steps:
        before = max((depth[id] for id in step.waits_for), default=0)
        depth[step.id] = before + isinstance(step, Call)
    known = list(counts) + [None] * (len(calls) - len(counts))
    prompt = sum(
        count if count is not None else _tokens(call.node.input)
        for call, count in zip(calls, known, strict=True)
    )
    prompt += sum(bounds[id] or 0 for call in calls for id in call.inputs)
    bounded = all(bounds.values())
    return Estimate(
        calls=len(calls),
        rounds=max(depth.values(), default=0),
        prompt_tokens=prompt,
        new_tokens=sum(bound or 0 for bound in bounds.values()) if bounded else None,
        counted=bool(calls) and all(count is not None for count in known),
    )


def _tokens(node: Node) -> int:
    """About as many tokens as a prompt has, without the answers that go into it."""
    characters = 0
    stack = [node]
    while stack:
        item = stack.pop()
        if isinstance(item, Text):
            characters += len(item.text) + CHARACTERS_PER_TOKEN
        elif not isinstance(item, Generate):
            stack.extend(item.children)
    return -(-characters // CHARACTERS_PER_TOKEN)
