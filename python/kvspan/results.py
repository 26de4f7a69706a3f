"""What a run gives back: answers, the record of every call, and what failed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from kvspan.engine import GenerateResult, Placement, Scope, Usage
from kvspan.query.nodes import Node
from kvspan.query.optimizer import Fired
from kvspan.query.write import to_obj


@dataclass(frozen=True)
class CallResult:
    """One generate call as it was made, and what came back.

    dropped: whether it was run for its effect on the cache only.
    """

    id: int
    path: str
    model: str
    seed: int
    temperature: float
    max_tokens: int | None
    result: GenerateResult
    dropped: bool = False

    def to_obj(self) -> dict[str, Any]:
        """As JSON values. Times are seconds, counts are tokens."""
        return {
            "id": self.id,
            "path": self.path,
            "model": self.model,
            "seed": self.seed,
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            "text": self.result.text,
            "finish_reason": self.result.finish_reason,
            "usage": asdict(self.result.usage),
            "timings": asdict(self.result.timings),
            "reuse": asdict(self.result.reuse),
            **({"dropped": True} if self.dropped else {}),
        }


@dataclass(frozen=True)
class Failure:
    """A call that did not give an answer, in a run that keeps going.

    message: why, with the path in front. cause: path of the failed call whose answer it was to
    read or to wait for; None if it failed itself.
    """

    id: int
    path: str
    message: str
    cause: str | None = None

    def to_obj(self) -> dict[str, Any]:
        """As JSON values."""
        obj = {"id": self.id, "path": self.path, "message": self.message}
        return {**obj, "cause": self.cause} if self.cause is not None else obj


@dataclass(frozen=True)
class Line:
    """What a print node said. path: where it stands in the query."""

    path: str
    text: str


@dataclass(frozen=True, repr=False)
class RunResult:
    """The outcome of a query.

    result: the query with an assistant node in the place of every outermost generate; a generate
        that failed stays as it is, so that the result can be run again.
    answers, answer_ids: the texts of those and the ids of their calls, in document order.
    calls: every call that was made, inner ones included, in the order of the plan.
    failures: calls without an answer; empty unless the run was to keep going.
    lines: what print nodes said, in the order of the plan.
    query, trace: the query after rewriting, and the rules that did it. seconds: wall time.
    """

    result: Node
    answers: list[str]
    answer_ids: list[int]
    calls: list[CallResult]
    query: Node
    trace: tuple[Fired, ...]
    seed: int
    scope: Scope
    placement: Placement
    seconds: float
    failures: list[Failure] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)

    def __repr__(self) -> str:
        """In one line, however large it is."""
        found = [("answer", len(self.answers)), ("call", len(self.calls))]
        if self.failures:
            found.append(("failure", len(self.failures)))
        words = [f"{count} {name}{'' if count == 1 else 's'}" for name, count in found]
        return f"<RunResult: {', '.join(words)}, {self.seconds:.2f} s>"

    def _repr_html_(self) -> str:
        """As a notebook shows it."""
        from kvspan.notebook import result_html

        return result_html(self)

    @property
    def usage(self) -> Usage:
        """Tokens of all calls together."""
        total = Usage()
        for call in self.calls:
            total.prompt_tokens += call.result.usage.prompt_tokens
            total.completion_tokens += call.result.usage.completion_tokens
            total.cached_tokens += call.result.usage.cached_tokens
        return total

    def to_obj(self) -> dict[str, Any]:
        """As JSON values; nested as deeply as the query is, so write it with ``dump_json``."""
        return {
            "answers": self.answers,
            "answer_ids": self.answer_ids,
            "result": to_obj(self.result),
            "usage": asdict(self.usage),
            "seconds": self.seconds,
            "seed": self.seed,
            "scope": self.scope,
            "placement": self.placement,
            "calls": [call.to_obj() for call in self.calls],
            **({"failures": [f.to_obj() for f in self.failures]} if self.failures else {}),
            **({"lines": [asdict(line) for line in self.lines]} if self.lines else {}),
        }
