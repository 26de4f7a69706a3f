"""Retrieval as a rule: what is retrieved is prepared first, and read as the spans of a plus.

How fragments are found is none of the query's business: a ``Retriever`` is handed in, that of
``kvspan.retrieve`` where a run brings none of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvspan.errors import KvspanError, UsageError
from kvspan.query.checks import describe
from kvspan.query.extensions import Retrieve
from kvspan.query.forms import Augment, Map, Monad, Print
from kvspan.query.nodes import ROOT, Cross, Generate, Node, Path, Plus, Text, User
from kvspan.query.traverse import fold, kinds_in

if TYPE_CHECKING:
    from kvspan.query.context import Context

_RETRIEVES = (Augment, Retrieve)

# File or folder of each corpus, by the name that queries call it.
CorpusPaths = Mapping[str, "str | os.PathLike[str]"]


@dataclass(frozen=True)
class Corpus:
    """What to search: a document that came with the query, or a corpus known by its name.

    content: the document's text or bytes; None where ``name`` is all there is.
    embedding_model, limit: what the query asks for, if it does.
    """

    name: str
    content: str | bytes | None = None
    embedding_model: str | None = None
    limit: int | None = None


class Retriever(Protocol):
    """Finds fragments."""

    def retrieve(self, query: str, corpus: Corpus) -> Sequence[str]:
        """The texts of the fragments of ``corpus`` that fit ``query``, the best one first.

        Raises KvspanError or UsageError where it cannot.
        """
        ...


def retrieves(query: Node) -> bool:
    """Whether anything is to be retrieved."""
    return not kinds_in(query).isdisjoint(("augment", "retrieve"))


def retriever_for(
    query: Node, retriever: Retriever | None, corpora: CorpusPaths | None
) -> Retriever | None:
    """The retriever of a run: the one that it was given, or the default one if one is needed."""
    if retriever is not None:
        if corpora:
            raise UsageError(
                "corpora are for the default retriever", expected="corpora or a retriever",
                found="both",
            )  # fmt: skip
        return retriever
    if not corpora and not retrieves(query):
        return None
    from kvspan.retrieve.corpora import as_retriever

    return as_retriever(corpora)


def desugar_retrieval(query: Node, context: Context) -> Node:
    """Retrieved fragments are the spans of a plus, prepared before anything reads them.

    >>> from kvspan.query.builders import cross, from_corpus, g
    >>> from kvspan.query.context import Context
    >>> class Shelf:
    ...     def retrieve(self, query, corpus):
    ...         return ["bees", "clocks"]
    >>> query = g("M", cross(from_corpus("town", "who?"), "who?"))
    >>> desugar_retrieval(query, Context(retriever=Shelf()))  # doctest: +NORMALIZE_WHITESPACE
    g('M', cross(cross(monad(plus(g('M', plus(user('bees')), max_tokens=1, temperature=0.0),
                                  g('M', plus(user('clocks')), max_tokens=1, temperature=0.0))),
                       plus(user('bees'), user('clocks'))),
                 user('who?')))
    """
    retriever = context.retriever
    if retriever is None or not retrieves(query):
        return query
    found: dict[tuple[str, Corpus], tuple[str, ...]] = {}
    places = _places(query)
    innermost = {id(node) for node, _, _ in places}
    queue: Iterator[tuple[Node, Generate | None, Path]] = iter(places)
    anchors: dict[int, tuple[Text, ...] | None] = {}

    def parts(node: Node) -> list[Node]:
        same, asker, path = next(queue)
        assert same is node
        text, corpus = _query_text(node, path), _corpus(node)
        if (text, corpus) not in found:
            found[text, corpus] = _ask(retriever, text, corpus, path)
        fragments = found[text, corpus]
        spans = Plus(tuple(User(fragment) for fragment in fragments))
        useless = context.scope == "full" or (asker and not context.can(asker.model).spans)
        if asker is None or useless or not fragments:
            return [spans]
        if id(asker) not in anchors:
            anchors[id(asker)] = _anchor(asker)
        anchor = anchors[id(asker)]
        if anchor is None:
            return [spans]
        place = node.child_path(path, 0).parent or path
        calls = tuple(
            Generate(
                asker.model,
                Cross((*anchor, Plus((User(text),)))) if anchor else Plus((User(text),)),
                max_tokens=1,
                temperature=0.0,
                origin=place.child("fragments").child(index),
            )
            for index, text in enumerate(fragments)
        )
        return [Monad(Plus(calls)), spans]

    def combine(node: Node, below: list[list[Node]], path: Path) -> list[Node]:
        if id(node) in innermost:
            return parts(node)
        old = node.children
        if isinstance(node, Plus):
            children = [part for some in below for part in some]
        else:
            children = [some[0] if len(some) == 1 else Cross(tuple(some)) for some in below]
        same = len(old) == len(children) and all(a is b for a, b in zip(old, children, strict=True))
        return [node if same else node.with_children(children)]

    (root, *rest) = fold(query, combine, into=lambda node: id(node) not in innermost)
    return Cross((root, *rest)) if rest else root


def _places(query: Node) -> list[tuple[Node, Generate | None, Path]]:
    """Every innermost retrieval with the generate that reads it, in document order."""
    outer: set[int] = set()

    def has_retrieval(node: Node, below: list[bool], path: Path) -> bool:
        if any(below) and isinstance(node, _RETRIEVES):
            outer.add(id(node))
        return any(below) or isinstance(node, _RETRIEVES)

    fold(query, has_retrieval)
    places: list[tuple[Node, Generate | None, Path]] = []
    stack: list[tuple[Node, Generate | None, Path]] = [(query, None, ROOT)]
    while stack:
        node, asker, path = stack.pop()
        if isinstance(node, _RETRIEVES) and id(node) not in outer:
            places.append((node, asker, node.origin or path))
            continue
        if isinstance(node, _RETRIEVES):
            asker = None  # what is retrieved to search with is read by no model
        elif isinstance(node, Generate):
            asker = node
        children = node.children
        for index in range(len(children) - 1, -1, -1):
            stack.append((children[index], asker, node.child_path(path, index)))
    return places


def _anchor(asker: Generate) -> tuple[Text, ...] | None:
    """The messages before the first span of a generate's input; None if not all are known yet."""
    anchor: list[Text] = []
    stack: list[Node] = [asker.input]
    while stack:
        node = stack.pop()
        if isinstance(node, (Plus, *_RETRIEVES)):
            break
        if isinstance(node, Text):
            anchor.append(node)
        elif not isinstance(node, (Monad, Print)):
            if isinstance(node, (Generate, Map)):
                return None
            stack.extend(reversed(node.children))
    return tuple(anchor)


def _query_text(node: Node, path: Path) -> str:
    texts: list[str] = []
    stack: list[Node] = list(node.children)
    while stack:
        item = stack.pop()
        if isinstance(item, Text):
            texts.append(item.text)
        elif isinstance(item, (Generate, Map)):
            raise UsageError(
                f"what {node.kind} is to search for asks a model",
                path=str(path),
                expected="messages (run the inner query first and put its answer here)",
                found="a generate",
            )
        elif not isinstance(item, (Monad, Print)):
            stack.extend(reversed(item.children))
    return "\n\n".join(text for text in texts if text)


def _corpus(node: Node) -> Corpus:
    if isinstance(node, Augment):
        return Corpus(node.name, node.content, node.embedding_model)
    assert isinstance(node, Retrieve)
    return Corpus(node.corpus, None, node.embedding_model, node.limit)


def _ask(retriever: Retriever, text: str, corpus: Corpus, path: Path) -> tuple[str, ...]:
    try:
        fragments = tuple(retriever.retrieve(text, corpus))
    except KvspanError as error:
        error.path = error.path or str(path)
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise KvspanError(f"retrieval failed: {reason}", path=str(path)) from error
    for fragment in fragments:
        if not isinstance(fragment, str):
            raise KvspanError(
                f"the retriever returned {describe(fragment)}; expected strings", path=str(path)
            )
    return tuple(fragment for fragment in fragments if fragment)
