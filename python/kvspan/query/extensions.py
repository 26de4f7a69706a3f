"""The nodes that are kvspan's own: ``reduce``, ``options`` and ``retrieve``.

In files they stand under one versioned key, ``kvspan/v1``, so that a file without that key is a
plain spnl file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from kvspan.query.checks import check_count, check_flag, check_text, check_word, raise_if
from kvspan.query.nodes import Generate, Node, Path, must_be

EXTENSION = "kvspan/v1"

SCOPE_WORDS = ("anchored", "isolated", "full")

PLACEMENT_WORDS = ("sequential", "parallel")

ORDER_WORDS = ("canonical", "pinned")


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
        must_be(self.judge, Generate, "the judge of reduce", "a g node")
        raise_if(check_count(self.k, "the k of reduce", 2) or check_flag(self.closed, "closed"))
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


class _OfAQuery(_Own):
    """A dataclass with one child, its ``query``."""

    __slots__ = ()
    query: Node

    @property
    def children(self) -> tuple[Node, ...]:
        return (self.query,)

    def with_children(self, children: Sequence[Node]) -> Node:
        (only,) = children
        return replace(self, query=only)  # type: ignore[type-var]  # subclasses are dataclasses

    def child_path(self, path: Path, index: int) -> Path:
        return self._own_path(path).child("query")


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Options(_OfAQuery):
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
        must_be(self.query, Node, "the query of options", "a query node")
        raise_if(
            check_word(self.scope, "scope", SCOPE_WORDS)
            or check_word(self.placement, "placement", PLACEMENT_WORDS)
            or check_word(self.order, "order", ORDER_WORDS)
            or (None if self.salt is None else check_text(self.salt, "the salt of options"))
        )
        self._seal()

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
class Retrieve(_OfAQuery):
    """The fragments that a retriever finds for ``query`` in a corpus it knows by name (R).

    limit: how many at the most. embedding_model: for retrievers that use one.
    """

    corpus: str
    query: Node
    limit: int | None = None
    embedding_model: str | None = None
    origin: Path | None = None
    kind: ClassVar[str] = "retrieve"

    def __post_init__(self) -> None:
        must_be(self.query, Node, "the query of retrieve", "a query node")
        raise_if(check_text(self.corpus, "the corpus of retrieve"))
        if self.limit is not None:
            raise_if(check_count(self.limit, "the limit of retrieve", 1))
        if self.embedding_model is not None:
            raise_if(check_text(self.embedding_model, "the embedding_model of retrieve"))
        self._seal()

    def own_fields(self) -> tuple[Any, ...]:
        return (self.corpus, self.limit, self.embedding_model)

    def builder_call(self) -> tuple[str, str]:
        text = "" if self.limit is None else f", limit={self.limit}"
        if self.embedding_model is not None:
            text += f", embedding_model={self.embedding_model!r}"
        return f"from_corpus({self.corpus!r}, ", f"{text})"


# Every node by its key below the versioned one.
EXTENSION_KINDS: dict[str, type[Node]] = {cls.kind: cls for cls in (Reduce, Options, Retrieve)}
