"""The rewrite rules that depend on what the engines can do with spans.

They change no node's content: a generate remembers what was decided, for the plan and for
``explain``, as it remembers where it was written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvspan.query.context import Context
from kvspan.query.extensions import Options
from kvspan.query.forms import Monad
from kvspan.query.nodes import Generate, Node, Path, Plus
from kvspan.query.traverse import each, fold, kinds_in


@dataclass(frozen=True)
class _Reader:
    """The generate in whose prompt a node stands, and what holds for its call."""

    model: str
    scope: str
    salt: str


# Gets a generate with what holds for its own call, who reads its answer, and whether in a span.
_Change = Callable[[Generate, _Reader, "_Reader | None", bool], Generate]


def distribute_plus(query: Node, context: Context) -> Node:
    """An inner generate in a plus is one reusable span: its output, anchored by its own input.

    So the KV of the output stays what it was when it was generated, wherever the outer prompt
    puts it. Only where the engine of both can do so, and spans are anchored.

    >>> from kvspan.query.builders import g, plus
    >>> query = distribute_plus(g("M", plus(g("M", "a"), "b")), Context())
    >>> query.kept, query.input.items[0].kept
    (False, True)
    """

    def change(node: Generate, own: _Reader, reader: _Reader | None, in_span: bool) -> Generate:
        kept = (
            in_span
            and context.nested != "text"
            and reader is not None
            and reader.scope == "anchored"
            and reader.salt == own.salt
            and context.same_engine(reader.model, own.model)
            and context.can(reader.model).answers
        )
        return node if node.kept == kept else replace(node, kept=kept)

    return _changed(query, context, change)


def plain_prompts(query: Node, context: Context) -> Node:
    """Where an engine has no spans, prompts are plain: the spans of a plus are text in order.

    >>> from kvspan.engine import Capabilities
    >>> from kvspan.query.builders import g, plus
    >>> none = Capabilities(spans=False, reason="a server", max_tokens=0, block_size=0)
    >>> plain_prompts(g("M", plus("a")), Context(capabilities=lambda model: none)).plain
    True
    """
    asks = [node for node in each(query) if isinstance(node, Generate)]
    able = all(context.can(model).spans for model in {node.model for node in asks})
    if able and not any(node.plain for node in asks):
        return query
    spans = _nodes_with_spans(query)

    def change(node: Generate, own: _Reader, reader: _Reader | None, in_span: bool) -> Generate:
        plain = not context.can(own.model).spans and id(node.input) in spans
        return node if node.plain == plain else replace(node, plain=plain)

    return _changed(query, context, change)


def reasons(query: Node, context: Context) -> tuple[str, ...]:
    """Why prompts are plain: of each model that gets some, what its engine says."""
    models = dict.fromkeys(
        node.model for node in each(query) if isinstance(node, Generate) and node.plain
    )
    return tuple(f"{model}: {context.can(model).reason}" for model in models)


def _changed(query: Node, context: Context, change: _Change) -> Node:
    if not {"plus", "g"} <= kinds_in(query):
        return query
    results: list[Node] = []
    # A node with the options around it, who reads it, and whether it stands in a span. Then how
    # many of the last results are its children; -1: not opened yet.
    stack: list[tuple[Node, str, str, _Reader | None, bool, int]]
    stack = [(query, context.scope, "", None, False, -1)]
    while stack:
        node, scope, salt, reader, in_span, waiting = stack.pop()
        if waiting >= 0:
            below = results[len(results) - waiting :]
            del results[len(results) - waiting :]
            same = all(a is b for a, b in zip(node.children, below, strict=True))
            node = node if same else node.with_children(below)
            if isinstance(node, Generate):
                node = change(node, _Reader(node.model, scope, salt), reader, in_span)
            results.append(node)
            continue
        children = node.children
        if not children:
            results.append(node)
            continue
        stack.append((node, scope, salt, reader, in_span, len(children)))
        if isinstance(node, Options):
            said = node.said()
            scope, salt = said.get("scope", scope), said.get("salt", salt)
        elif isinstance(node, Generate):
            reader, in_span = _Reader(node.model, scope, salt), False
        elif isinstance(node, Monad):
            reader, in_span = None, False
        elif isinstance(node, Plus):
            in_span = True
        stack.extend((c, scope, salt, reader, in_span, -1) for c in reversed(children))
    return results[0]


def _nodes_with_spans(query: Node) -> set[int]:
    """Ids of the nodes that have a plus in what they say themselves, generates aside."""
    found: set[int] = set()

    def combine(node: Node, below: list[bool], path: Path) -> bool:
        if isinstance(node, Plus) or any(below):
            found.add(id(node))
            return not isinstance(node, (Generate, Monad))
        return False

    fold(query, combine)
    return found
