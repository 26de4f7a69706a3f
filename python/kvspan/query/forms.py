"""The nodes of spnl's format beyond messages, joins and generate.

``repeat``, ``map`` and ``zip`` stand for several nodes, ``monad`` and ``print`` for none, and
``augment`` for what a retriever finds; rules and the planner put those in their places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from kvspan.query.checks import (
    check_count,
    check_max_tokens,
    check_model,
    check_temperature,
    check_text,
    raise_if,
)
from kvspan.query.extensions import Retrieve
from kvspan.query.nodes import NODES, Generate, Node, Path, Text, must_be, settings_text
from kvspan.query.traverse import transform


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Repeat(Node):
    """``n`` independent samples of one generate, each run with a seed of its own."""

    n: int
    sample: Generate
    origin: Path | None = None
    kind: ClassVar[str] = "repeat"

    def __post_init__(self) -> None:
        raise_if(check_count(self.n, "the n of repeat", 0))
        must_be(self.sample, Generate, "what repeat repeats", "a g node")
        self._seal()

    @property
    def children(self) -> tuple[Node, ...]:
        return (self.sample,)

    def with_children(self, children: Sequence[Node]) -> Node:
        (only,) = children
        return Repeat(self.n, only, self.origin)  # type: ignore[arg-type]  # checked there

    def child_path(self, path: Path, index: int) -> Path:
        return path.child("repeat")

    def own_fields(self) -> tuple[Any, ...]:
        return (self.n,)

    def builder_call(self) -> tuple[str, str]:
        return f"repeat({self.n}, ", ")"


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Map(Node):
    """One generate per input, each a user message."""

    model: str
    inputs: tuple[str, ...]
    max_tokens: int | None = None
    temperature: float | None = None
    origin: Path | None = None
    kind: ClassVar[str] = "map"

    def __post_init__(self) -> None:
        if not isinstance(self.inputs, tuple):
            object.__setattr__(self, "inputs", tuple(self.inputs))
        raise_if(
            check_model(self.model)
            or check_max_tokens(self.max_tokens)
            or check_temperature(self.temperature)
        )
        for index, text in enumerate(self.inputs):
            raise_if(check_text(text, f"input {index} of map"))
        if isinstance(self.temperature, int):
            object.__setattr__(self, "temperature", float(self.temperature))
        self._seal()

    def own_fields(self) -> tuple[Any, ...]:
        return (self.model, self.inputs, self.max_tokens, self.temperature)

    def builder_call(self) -> tuple[str, str]:
        settings = settings_text(self.max_tokens, self.temperature)
        return f"map_({self.model!r}, {list(self.inputs)!r}{settings}", ")"


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Zip(Node):
    """Pairs: the nth item of ``first`` beside the nth item of ``second``."""

    first: Node
    second: Node
    origin: Path | None = None
    kind: ClassVar[str] = "zip"

    def __post_init__(self) -> None:
        must_be(self.first, Node, "the first of zip", "a query node")
        must_be(self.second, Node, "the second of zip", "a query node")
        self._seal()

    @property
    def children(self) -> tuple[Node, ...]:
        return (self.first, self.second)

    def with_children(self, children: Sequence[Node]) -> Node:
        first, second = children
        return Zip(first, second, self.origin)

    def child_path(self, path: Path, index: int) -> Path:
        return path.child("zip").child(("first", "second")[index])

    def builder_call(self) -> tuple[str, str]:
        return "zip_(", ")"


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Monad(Node):
    """Run for its effect on the cache; what it answers is dropped."""

    effect: Node
    kind: ClassVar[str] = "monad"

    def __post_init__(self) -> None:
        must_be(self.effect, Node, "the value of monad", "a query node")
        self._seal()

    @property
    def children(self) -> tuple[Node, ...]:
        return (self.effect,)

    def with_children(self, children: Sequence[Node]) -> Node:
        return Monad(*children)

    def child_path(self, path: Path, index: int) -> Path:
        return path.child("monad")


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Print(Node):
    """A line to show when the run gets here. No part of any prompt or answer."""

    text: str
    origin: Path | None = None
    kind: ClassVar[str] = "print"

    def __post_init__(self) -> None:
        raise_if(check_text(self.text, "the text of print"))
        self._seal()

    def own_fields(self) -> tuple[Any, ...]:
        return (self.text,)

    def builder_call(self) -> tuple[str, str]:
        return f"print_({self.text!r}", ")"


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Augment(Node):
    """The fragments of one document that a retriever finds for ``body`` (R).

    content: the document, text or bytes.
    """

    embedding_model: str
    body: Node
    name: str
    content: str | bytes
    origin: Path | None = None
    kind: ClassVar[str] = "augment"

    def __post_init__(self) -> None:
        raise_if(check_text(self.embedding_model, "the embedding_model of augment"))
        raise_if(check_text(self.name, "the name of the document"))
        must_be(self.body, Node, "the body of augment", "a query node")
        if not isinstance(self.content, bytes):
            raise_if(check_text(self.content, "the text of the document"))
        self._seal()

    @property
    def children(self) -> tuple[Node, ...]:
        return (self.body,)

    def with_children(self, children: Sequence[Node]) -> Node:
        (only,) = children
        return replace(self, body=only)

    def child_path(self, path: Path, index: int) -> Path:
        return path.child("augment").child("body")

    def own_fields(self) -> tuple[Any, ...]:
        return (self.embedding_model, self.name, type(self.content).__name__, self.content)

    def builder_call(self) -> tuple[str, str]:
        return f"augment({self.embedding_model!r}, ", f", ({self.name!r}, {self.content!r}))"


_FORMS = (Repeat, Map, Zip, Monad, Print, Augment)
# Every node by its key in a file; `kvspan.query.extensions` has those below the versioned key.
KINDS: dict[str, type[Node]] = {**NODES, **{cls.kind: cls for cls in _FORMS}}


def has_text(root: Node) -> bool:
    """Whether a model has anything to read: text, or what is still to be retrieved or answered."""
    stack = [root]
    while stack:
        item = stack.pop()
        if isinstance(item, Text):
            if item.text:
                return True
        elif isinstance(item, (Generate, Augment, Retrieve)):
            return True
        elif not isinstance(item, (Monad, Print)):
            stack.extend(reversed(item.children))
    return False


def mark_origins(root: Node) -> Node:
    """Note where it stands on every node that does something, before rules move it."""

    def mark(node: Node, path: Path) -> Node:
        if isinstance(node, (Generate, Repeat, Map, Zip, Print, Augment, Retrieve)):
            return replace(node, origin=path)
        return node

    return transform(root, mark)
