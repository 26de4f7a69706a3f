"""POST /v1/query/execute: a span query as JSON, its options in the URL.

The answer is a chat completion object with one choice for each answer of the query, in document
order; ``kvspan`` beside the choices holds the result, which is a query again, and every call. In a
stream each piece of an answer is a chunk, and ``kvspan`` comes with the last one. That is what
spnl's client reads; of a ``map`` it expects a text completion object, and gets one.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvspan.engine import PLACEMENTS, SCOPES
from kvspan.errors import UsageError
from kvspan.executor import arun, plan_query
from kvspan.query.context import NESTED, ORDERS
from kvspan.query.extensions import Options, Reduce
from kvspan.query.forms import Map, Repeat
from kvspan.query.nodes import Generate, Node, Path
from kvspan.query.plan import Call, Plan
from kvspan.query.read import loads
from kvspan.query.traverse import fold
from kvspan.serve.answers import ChatShape, Emit, Envelope, Job, TextShape, usage_of
from kvspan.serve.errors import APIError, UnknownModelError
from kvspan.serve.service import Service

if TYPE_CHECKING:
    from kvspan.retrieve.corpora import Corpora


def query(service: Service, body: bytes, options: Sequence[tuple[str, str]]) -> Job:
    """What the request asks for. options: of the URL, as they stand there, see OPTIONS.

    Raises APIError for an option that is unknown, that is given twice, or whose value is wrong.
    """
    settings = service.settings
    values: dict[str, Any] = {}
    for name, text in options:
        if name in values:
            raise APIError(
                400,
                f"{name}: expected the option once; found it twice",
                code="invalid_value",
                param=name,
            )
        values[name] = _option(name, text)
    stream = values.pop("stream", False)
    values.setdefault("seed", random.getrandbits(53))

    async def run(emit: Emit) -> dict[str, Any]:
        tree, plan = await asyncio.to_thread(_read, body, service)
        shape = _shape_for(tree)
        answer = _Stream(plan, shape, settings.names[0], emit) if stream else None
        result = await arun(
            tree,
            engine=service,
            model=settings.names[0],
            on_text=answer.on_text if answer else None,
            max_concurrency=settings.max_calls,
            retriever=settings.retriever or _documents(),
            **values,
        )
        by_id = {call.id: call.result for call in result.calls}
        found = [by_id[id] for id in result.answer_ids]
        usages = [call.result.usage for call in result.calls]
        more = {"usage": usage_of(usages, usages), "kvspan": result.to_obj()}
        if answer:
            answer.finish([(one.text, one.finish_reason) for one in found], more)
            return {}
        choices = [shape.complete(i, one.text, one.finish_reason) for i, one in enumerate(found)]
        return Envelope(shape, settings.names[0])(shape.whole, choices, **more)

    return Job(1, stream, run)


@functools.cache
def _documents() -> Corpora:
    """Of a server without corpora: for queries that bring their documents along."""
    from kvspan.retrieve.corpora import Corpora

    return Corpora()


def _shape_for(tree: Node) -> ChatShape | TextShape:
    while isinstance(tree, Options):
        (tree,) = tree.children
    return TextShape() if isinstance(tree, Map) else ChatShape()


def _read(body: bytes, service: Service) -> tuple[Node, Plan]:
    """The query and its plan. All models it names have to be served here."""
    settings = service.settings
    tree = loads(body, format="json")
    _check_size(count_calls(tree), settings.max_query_calls)
    plan, _ = plan_query(tree, settings.names[0], retriever=settings.retriever or _documents())
    _check_size(len(plan.calls), settings.max_query_calls)  # retrieval has added calls
    for call in plan.calls:
        try:
            service.check_model(call.node.model)
        except UnknownModelError as error:
            error.path = f"{call.path}.g.model"
            raise
    return tree, plan


def _check_size(calls: int, most: int) -> None:
    if calls > most:
        raise APIError(
            400,
            f"the query is too large: expected at most {most} generate calls; found {calls}",
            code="invalid_value",
        )


def count_calls(tree: Node) -> int:
    """Generate calls of a query, before anything is written out: a repeat may say any number.

    >>> count_calls(loads('(repeat 1000000 (g "M" (user "hi")))', format="lisp"))
    1000000
    """

    def combine(node: Node, below: list[int], path: Path) -> int:
        if isinstance(node, Repeat):
            return node.n * sum(below)
        if isinstance(node, Map):
            return len(node.inputs)
        return sum(below) + isinstance(node, (Generate, Reduce))

    return fold(tree, combine)


class _Stream:
    """The chunks of a query's answers; what its inner calls say is not among them."""

    def __init__(self, plan: Plan, shape: ChatShape | TextShape, model: str, emit: Emit) -> None:
        self.emit = emit
        self.shape = shape
        self.envelope = Envelope(self.shape, model)
        self.sent: dict[int, str] = {}
        steps = [plan.steps[id] for id in plan.answers]
        self.index_of = {
            step.path: index for index, step in enumerate(steps) if isinstance(step, Call)
        }

    def on_text(self, path: str, text: str) -> None:
        if (index := self.index_of.get(path)) is not None:
            self._send_text(index, text)

    def finish(self, answers: list[tuple[str, str]], more: dict[str, Any]) -> None:
        for index, (text, reason) in enumerate(answers):
            self._send_text(index, text.removeprefix(self.sent.get(index, "")))
            self._send(self.shape.last(index, reason))
        self.emit(self.envelope(self.shape.part, [], **more))

    def _send_text(self, index: int, text: str) -> None:
        if index not in self.sent:
            self.sent[index] = ""
            self._send(self.shape.first(index))
        if text:
            self.sent[index] += text
            self._send(self.shape.piece(index, text))

    def _send(self, choice: dict[str, Any] | None) -> None:
        if choice:
            self.emit(self.envelope(self.shape.part, [choice]))


def _word(words: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(f"one of {', '.join(words)}")
        return text

    return parse


def _flag(text: str) -> bool:
    return _word(("true", "false", "1", "0"))(text.lower()) in ("true", "1")


def _number(kind: type[int] | type[float], words: str) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            return kind(text)
        except ValueError:
            raise ValueError(words) from None

    return parse


# Of the URL; everything but `stream` is an option of kvspan.run, which checks its value.
OPTIONS: dict[str, Callable[[str], Any]] = {
    "stream": _flag,
    "seed": _number(int, "a whole number"),
    "temperature": _number(float, "a number, 0 or more"),
    "max_tokens": _number(int, "a whole number"),
    "scope": _word(SCOPES),
    "placement": _word(PLACEMENTS),
    "order": _word(ORDERS),
    "nested": _word(NESTED),
    "salt": str,
}


def _option(name: str, text: str) -> Any:
    if name not in OPTIONS:
        raise APIError(
            400,
            f"{name}: unknown option of the URL; expected one of {', '.join(OPTIONS)}",
            code="unknown_parameter",
            param=name,
        )
    try:
        return OPTIONS[name](text)
    except UsageError:
        raise
    except ValueError as error:
        raise APIError(
            400, f"{name}: expected {error}; found {text[:40]!r}", code="invalid_value", param=name
        ) from None
