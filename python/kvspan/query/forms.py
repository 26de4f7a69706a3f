"""The nodes beyond messages, joins and generate, and the ones that are kvspan's own.

``repeat``, ``map`` and ``zip`` stand for several nodes, ``monad`` and ``print`` for none, and
``augment`` for what a retriever finds; rules and the planner put those in their places. ``reduce``,
``options`` and ``retrieve`` are extensions: in files they stand under one versioned key,
``kvspan/v1``, so that a file without that key is a plain spnl file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from kvspan.errors import UsageError
from kvspan.query.nodes import (
    MAX_MAX_TOKENS,
    NODES,
    Generate,
    Node,
    Path,
    check_max_tokens,
    check_model,
    check_temperature,
    check_text,
    describe,
    each,
    kinds_in,
    settings_text,
    transform,
)

EXTENSION = "kvspan/v1"
SCOPE_WORDS = ("anchored", "isolated", "full")
PLACEMENT_WORDS = ("sequential", "parallel")
ORDER_WORDS = ("canonical", "pinned")


def _must_be(node: object, cls: type[Node], what: str, expected: str) -> None:
    if not isinstance(node, cls):
        found = node.kind if isinstance(node, Node) else describe(node)
        raise UsageError(f"{what} is not {expected}", expected=expected, found=found)


def _raise(problem: UsageError | None) -> None:
    if problem:
        raise problem


def check_count(value: object, what: str, least: int) -> UsageError | None:
    """The error with a whole number, if any."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if whole and least <= value <= MAX_MAX_TOKENS:  # type: ignore[operator]
        return None
    return UsageError(
        f"{what} is not a count",
        expected=f"a whole number from {least} to {MAX_MAX_TOKENS}",
        found=describe(value),
    )


def check_flag(value: object, what: str) -> UsageError | None:
    """The error with true or false, if any."""
    if isinstance(value, bool):
        return None
    return UsageError(f"{what} is neither true nor false", expected="true or false",
                      found=describe(value))  # fmt: skip


def check_word(value: object, what: str, words: Sequence[str]) -> UsageError | None:
    """The error with one of a few words (or None), if any."""
    if value is None or (isinstance(value, str) and value in words):
        return None
    return UsageError(f"unknown {what}", expected=" or ".join(words), found=describe(value))


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Repeat(Node):
    """``n`` independent samples of one generate, each run with a seed of its own."""

    n: int
    sample: Generate
    origin: Path | None = field(default=None)
    kind: ClassVar[str] = "repeat"

    def __post_init__(self) -> None:
        _raise(check_count(self.n, "the n of repeat", 0))
        _must_be(self.sample, Generate, "what repeat repeats", "a g node")
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
    origin: Path | None = field(default=None)
    kind: ClassVar[str] = "map"

    def __post_init__(self) -> None:
        if not isinstance(self.inputs, tuple):
            object.__setattr__(self, "inputs", tuple(self.inputs))
        _raise(
            check_model(self.model)
            or check_max_tokens(self.max_tokens)
            or check_temperature(self.temperature)
        )
        for index, text in enumerate(self.inputs):
            _raise(check_text(text, f"input {index} of map"))
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
    kind: ClassVar[str] = "zip"

    def __post_init__(self) -> None:
        _must_be(self.first, Node, "the first of zip", "a query node")
        _must_be(self.second, Node, "the second of zip", "a query node")
        self._seal()

    @property
    def children(self) -> tuple[Node, ...]:
        return (self.first, self.second)

    def with_children(self, children: Sequence[Node]) -> Node:
        return Zip(*children)

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
        _must_be(self.effect, Node, "the value of monad", "a query node")
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
    kind: ClassVar[str] = "print"

    def __post_init__(self) -> None:
        _raise(check_text(self.text, "the text of print"))
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
    kind: ClassVar[str] = "augment"

    def __post_init__(self) -> None:
        _raise(check_text(self.embedding_model, "the embedding_model of augment"))
        _raise(check_text(self.name, "the name of the document"))
        _must_be(self.body, Node, "the body of augment", "a query node")
        if not isinstance(self.content, bytes):
            _raise(check_text(self.content, "the text of the document"))
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


class _Own(Node):
    """A node of kvspan's own, under the versioned key."""

    __slots__ = ()

    def _own_path(self, path: Path) -> Path:
        return path.child(EXTENSION).child(self.kind)


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Reduce(_Own):
    """A judge over the spans of a plus that may be run as a tree of judges over ``k`` spans each.

    closed: the declaration that makes it so: the judge's answers can be judged like the spans they
        stand for. Without it the judge is one call over all spans.
    """

    judge: Generate
    k: int
    closed: bool = True
    kind: ClassVar[str] = "reduce"

    def __post_init__(self) -> None:
        _must_be(self.judge, Generate, "the judge of reduce", "a g node")
        _raise(check_count(self.k, "the k of reduce", 2) or check_flag(self.closed, "closed"))
        self._seal()

    @property
    def children(self) -> tuple[Node, ...]:
        return (self.judge,)

    def with_children(self, children: Sequence[Node]) -> Node:
        (only,) = children
        return Reduce(only, self.k, self.closed)  # type: ignore[arg-type]  # checked there

    def child_path(self, path: Path, index: int) -> Path:
        return self._own_path(path)

    def own_fields(self) -> tuple[Any, ...]:
        return (self.k, self.closed)

    def builder_call(self) -> tuple[str, str]:
        return "reduce(", f", {self.k}" + ("" if self.closed else ", closed=False") + ")"


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Options(_Own):
    """How every generate below is to be run; the innermost node that says something counts.

    scope, placement, salt: as for ``kvspan.run``, which they override.
    order: "pinned" keeps the children of every plus below in the order they are written in.
    """

    query: Node
    scope: str | None = None
    placement: str | None = None
    salt: str | None = None
    order: str | None = None
    kind: ClassVar[str] = "options"

    def __post_init__(self) -> None:
        _must_be(self.query, Node, "the query of options", "a query node")
        _raise(
            check_word(self.scope, "scope", SCOPE_WORDS)
            or check_word(self.placement, "placement", PLACEMENT_WORDS)
            or check_word(self.order, "order", ORDER_WORDS)
            or (None if self.salt is None else check_text(self.salt, "the salt of options"))
        )
        self._seal()

    @property
    def children(self) -> tuple[Node, ...]:
        return (self.query,)

    def with_children(self, children: Sequence[Node]) -> Node:
        (only,) = children
        return replace(self, query=only)

    def child_path(self, path: Path, index: int) -> Path:
        return self._own_path(path).child("query")

    def own_fields(self) -> tuple[Any, ...]:
        return (self.scope, self.placement, self.salt, self.order)

    def said(self) -> dict[str, str]:
        """The options that are set."""
        words = {
            "scope": self.scope,
            "placement": self.placement,
            "salt": self.salt,
            "order": self.order,
        }
        return {name: word for name, word in words.items() if word is not None}

    def builder_call(self) -> tuple[str, str]:
        return "options(", "".join(f", {k}={v!r}" for k, v in self.said().items()) + ")"


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Retrieve(_Own):
    """The fragments that a retriever finds for ``query`` in a corpus it knows by name (R).

    limit: how many at the most. embedding_model: for retrievers that use one.
    """

    corpus: str
    query: Node
    limit: int | None = None
    embedding_model: str | None = None
    kind: ClassVar[str] = "retrieve"

    def __post_init__(self) -> None:
        _must_be(self.query, Node, "the query of retrieve", "a query node")
        _raise(check_text(self.corpus, "the corpus of retrieve"))
        if self.limit is not None:
            _raise(check_count(self.limit, "the limit of retrieve", 1))
        if self.embedding_model is not None:
            _raise(check_text(self.embedding_model, "the embedding_model of retrieve"))
        self._seal()

    @property
    def children(self) -> tuple[Node, ...]:
        return (self.query,)

    def with_children(self, children: Sequence[Node]) -> Node:
        (only,) = children
        return replace(self, query=only)

    def child_path(self, path: Path, index: int) -> Path:
        return self._own_path(path).child("query")

    def own_fields(self) -> tuple[Any, ...]:
        return (self.corpus, self.limit, self.embedding_model)

    def builder_call(self) -> tuple[str, str]:
        text = "" if self.limit is None else f", limit={self.limit}"
        if self.embedding_model is not None:
            text += f", embedding_model={self.embedding_model!r}"
        return f"from_corpus({self.corpus!r}, ", f"{text})"


_FORMS = (Repeat, Map, Zip, Monad, Print, Augment)
_EXTENSIONS = (Reduce, Options, Retrieve)
# Every node by its key in a file: in a query, and below the versioned key.
KINDS: dict[str, type[Node]] = {**NODES, **{cls.kind: cls for cls in _FORMS}}
EXTENSION_KINDS: dict[str, type[Node]] = {cls.kind: cls for cls in _EXTENSIONS}


def has_generate(root: Node) -> bool:
    """Whether the tree asks a model anything."""
    return not kinds_in(root).isdisjoint(("g", "map"))


def mark_origins(root: Node) -> Node:
    """Note on every node that asks a model where it stands, before rules move it."""

    def mark(node: Node, path: Path) -> Node:
        if isinstance(node, (Generate, Repeat, Map)):
            return replace(node, origin=path)
        return node

    return transform(root, mark)


def content_keys(root: Node, *, plus_as_set: bool = False) -> dict[int, bytes]:
    """A digest of the content of every node, by ``id``; equal trees have equal digests.

    Unlike ``hash`` it is the same in every process, so that orders made from it are.
    plus_as_set: whether the children of a plus count in whatever order they stand.
    """
    keys: dict[int, bytes] = {}
    for node in reversed(list(each(root))):
        if id(node) in keys:
            continue
        below = [keys[id(child)] for child in node.children]
        if plus_as_set and node.kind == "plus":
            below.sort()
        own = repr((node.kind, node.own_fields(), len(below))).encode()
        keys[id(node)] = hashlib.sha256(own + b"".join(below)).digest()
    return keys
