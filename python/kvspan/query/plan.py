"""What is to be run: the DAG of generate calls, and what each has to wait for.

A plan is plain data and a different thing from the tree it was made from: the tree says what the
answer is made of, the plan says which calls there are and in what order they may go.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvspan.errors import UsageError
from kvspan.query.expand import expand
from kvspan.query.extensions import Options, Retrieve
from kvspan.query.forms import Augment, Monad, Print, has_text
from kvspan.query.nodes import (
    ROOT,
    Assistant,
    Cross,
    Generate,
    Join,
    Node,
    Par,
    Path,
    Seq,
)
from kvspan.query.prompt import nothing_to_read
from kvspan.query.traverse import fold


@dataclass(frozen=True)
class Call:
    """One generate call.

    id: its index in Plan.steps.
    place: where the generate stands in the query as it was written.
    node: the generate; generates below it stand for answers still to come.
    inputs: ids of the calls whose answers go into this one's input, in document order.
    after: ids of further steps that have to be over first, because a seq or cross says so, or a
        monad in the input.
    dropped: whether it is run for its effect on the cache only (it stands in a monad).
    options: what the options nodes around it say; the innermost counts.
    """

    id: int
    place: Path
    node: Generate
    inputs: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    dropped: bool = False
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return str(self.place)

    @property
    def waits_for(self) -> tuple[int, ...]:
        return self.inputs + self.after


@dataclass(frozen=True)
class Barrier:
    """Runs nothing: the point at which several calls are over, so that others can wait for one id.

    Without it a seq of two joins of n calls would need n*n edges.
    """

    id: int
    after: tuple[int, ...]

    @property
    def waits_for(self) -> tuple[int, ...]:
        return self.after


@dataclass(frozen=True)
class Say:
    """A line to show."""

    id: int
    path: str
    text: str
    after: tuple[int, ...] = ()

    @property
    def waits_for(self) -> tuple[int, ...]:
        return self.after


Step = Call | Barrier | Say


@dataclass(frozen=True, repr=False)
class Plan:
    """The steps of a query, each after all it waits for.

    query: the tree it was made from. answers: ids of the calls that stand in no other call's
    input, in document order; their answers are the query's.
    """

    query: Node
    steps: tuple[Step, ...]
    answers: tuple[int, ...]

    @property
    def calls(self) -> tuple[Call, ...]:
        return tuple(step for step in self.steps if isinstance(step, Call))

    def __repr__(self) -> str:
        """In one line, however large it is."""
        calls, answers = len(self.calls), len(self.answers)
        return f"<Plan: {calls} calls, {answers} of them answers>"

    def _repr_html_(self) -> str:
        """As a notebook shows it."""
        from kvspan.notebook import plan_html

        return plan_html(self)

    def to_obj(self) -> dict[str, Any]:
        """The plan as JSON values."""
        calls = [
            {
                "id": call.id,
                "path": call.path,
                "model": call.node.model,
                "max_tokens": call.node.max_tokens,
                "temperature": call.node.temperature,
                "inputs": list(call.inputs),
                "after": list(call.after),
                **({"dropped": True} if call.dropped else {}),
                **({"kept": True} if call.node.kept else {}),
                **({"plain": True} if call.node.plain else {}),
                **({"options": dict(call.options)} if call.options else {}),
            }
            for call in self.calls
        ]
        barriers = [
            {"id": step.id, "after": list(step.after)}
            for step in self.steps
            if isinstance(step, Barrier)
        ]
        obj: dict[str, Any] = {"calls": calls, "barriers": barriers, "answers": list(self.answers)}
        lines = [
            {"id": step.id, "path": step.path, "text": step.text, "after": list(step.after)}
            for step in self.steps
            if isinstance(step, Say)
        ]
        return {**obj, "lines": lines} if lines else obj


def make_plan(query: Node) -> Plan:
    """The calls of a query and what each waits for. Raises UsageError on an empty generate.

    repeat, map and zip are written out first. A call waits for the calls in its input. In a seq or
    a cross, the calls of a child wait for those of the children before it; in a par or a plus they
    do not.

    >>> from kvspan.query.builders import g, par, seq
    >>> plan = make_plan(g("M", seq(par(g("M", "a"), g("M", "b")), g("M", "c"))))
    >>> for step in plan.steps:
    ...     print(step.id, getattr(step, "path", "-"), step.waits_for)
    0 $.g.input.seq[0].par[0] ()
    1 $.g.input.seq[0].par[1] ()
    2 - (0, 1)
    3 $.g.input.seq[1] (2,)
    4 $ (0, 1, 3)
    """
    query = expand(query)
    asks = _nodes_that_ask(query)
    steps: list[Step] = []
    # An entry is a node to open, or what to do once others are done. A node comes with its path,
    # the step to wait for, the options around it, and the lists that its calls go into: that of
    # the call above (None in a monad), and that of the barrier after.
    outer: list[int] = []
    stack: list[tuple[Any, ...]] = [("open", query, ROOT, [None], {}, outer, [])]
    while stack:
        what, *entry = stack.pop()
        if what == "open":
            node, path, start, said, answers, ending = entry
            if isinstance(node, Generate):
                inputs: list[int] = []
                waits: list[int] = []
                stack.append(("call", node, path, start, said, inputs, waits, answers, ending))
                if not has_text(node.input):
                    where = (node.origin or path).child("g").child("input")
                    raise nothing_to_read(str(where))
                if id(node.input) in asks:
                    below = node.child_path(path, 0)
                    stack.append(("open", node.input, below, start, said, inputs, waits))
                continue
            if isinstance(node, Print):
                before = () if start[0] is None else (start[0],)
                steps.append(Say(len(steps), str(node.origin or path), node.text, before))
                ending.append(len(steps) - 1)
                continue
            if isinstance(node, (Augment, Retrieve)):
                raise UsageError(
                    f"{node.kind} needs a retriever, and none was given",
                    path=str(node.origin or path),
                    expected="a run with a retriever",
                    found="none",
                )
            if isinstance(node, Options):
                said = {**said, **node.said()}
            elif isinstance(node, Monad):
                answers = None
            children = [
                (child, node.child_path(path, index))
                for index, child in enumerate(node.children)
                if id(child) in asks
            ]
            if not isinstance(node, (Seq, Cross)):
                for child, child_path in reversed(children):
                    stack.append(("open", child, child_path, start, said, answers, ending))
                continue
            todo: list[tuple[Any, ...]] = []
            for nth, (child, child_path) in enumerate(children):
                last = nth == len(children) - 1
                done: list[int] = ending if last else []
                todo.append(("open", child, child_path, start, said, answers, done))
                if not last:
                    start = [None]
                    todo.append(("barrier", done, start))
            stack.extend(reversed(todo))
        elif what == "call":
            node, path, start, said, inputs, waits, answers, ending = entry
            known = set(inputs)
            after = tuple(id for id in waits if id not in known)
            if not waits and not inputs and start[0] is not None:
                after = (start[0],)
            place = node.origin or path
            options = {name: word for name, word in said.items() if name != "order"}
            dropped = answers is None
            steps.append(Call(len(steps), place, node, tuple(inputs), after, dropped, options))
            if answers is not None:
                answers.append(len(steps) - 1)
            ending.append(len(steps) - 1)
        else:
            done, start = entry
            if len(done) > 1:
                steps.append(Barrier(len(steps), tuple(done)))
                done = [len(steps) - 1]
            start[0] = done[0]
    return Plan(query, tuple(steps), tuple(outer))


def _nodes_that_ask(query: Node) -> set[int]:
    """Ids of the nodes that are or hold something to be done."""
    found: set[int] = set()

    def combine(node: Node, below: list[bool], path: Path) -> bool:
        asks = isinstance(node, (Generate, Print, Augment, Retrieve)) or any(below)
        if asks:
            found.add(id(node))
        return asks

    fold(query, combine)
    return found


def put_answers(node: Node, answers: Iterable[str | None]) -> Node:
    """Put answers in the place of the outermost generates, in document order, as assistant nodes.

    Where the answer is None the generate stays. Monads and prints leave nothing behind.

    >>> from kvspan.query.builders import g, monad, plus
    >>> put_answers(plus(g("M", "a"), "b", monad(g("M", "x")), g("M", g("M", "c"))), ["x", "y"])
    plus(assistant('x'), user('b'), assistant('y'))
    """
    texts: Iterator[str | None] = iter(answers)

    def answer(item: Node, below: list[Node], path: Path) -> Node:
        if isinstance(item, Generate):
            text = next(texts)
            return item if text is None else Assistant(text)
        if isinstance(item, (Monad, Print)):
            return Par(())
        old = item.children
        kept = [
            new
            for before, new in zip(old, below, strict=True)
            if not (isinstance(item, Join) and isinstance(before, (Monad, Print)))
        ]
        same = len(kept) == len(old) and all(a is b for a, b in zip(old, kept, strict=True))
        return item if same else item.with_children(kept)

    return fold(node, answer, into=lambda item: not isinstance(item, (Generate, Monad)))
