"""The rewrite rules that keep every prompt as it is: sugar, empty nodes, nesting, repetition.

A rule is a function from a tree to a tree that means the same; it returns the very object it was
given when it has nothing to do.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvspan.errors import UsageError
from kvspan.query import expand
from kvspan.query.context import Context
from kvspan.query.extensions import Options
from kvspan.query.forms import Monad, has_text
from kvspan.query.nodes import Cross, Generate, Join, Node, Path, Plus, Seq, Text
from kvspan.query.prompt import nothing_to_read
from kvspan.query.traverse import each, has_generate, kinds_in, rebuild, transform


def desugar_chat(query: Node, context: Context) -> Node:
    """A query without a generate asks the default model to go on from it.

    >>> from kvspan.query.builders import cross, system
    >>> desugar_chat(cross(system("s"), "q"), Context("M"))
    g('M', cross(system('s'), user('q')))
    """
    if has_generate(query):
        return query
    if not context.default_model:
        raise UsageError(
            "the query asks no model anything",
            path="$",
            expected="a g node, or a default model (--model)",
            found=f"only messages under {query.kind}",
        )
    if not has_text(query):
        raise nothing_to_read("$", "empty query: it has no text")
    return Generate(context.default_model, query)


def drop_empty(query: Node, context: Context) -> Node:
    """Children of joins that hold no text and ask nothing contribute nothing.

    >>> from kvspan.query.builders import cross, plus
    >>> drop_empty(cross("a", "", plus("", cross())), Context())
    cross(user('a'))
    """

    def drop(node: Node, path: Path) -> Node:
        if not isinstance(node, Join):
            return node
        kept = tuple(child for child in node.items if not _is_empty(child))
        return node if len(kept) == len(node.items) else node.with_children(kept)

    # Children only become empty by dropping what is in them, so the leaves tell.
    if not any(_is_empty(node) for node in each(query)):
        return query
    return transform(query, drop)


def _is_empty(node: Node) -> bool:
    while isinstance(node, (Monad, Options)):
        (node,) = node.children
    if isinstance(node, Text):
        return not node.text
    return isinstance(node, Join) and not node.items


def flatten_plus(query: Node, context: Context) -> Node:
    """Spans of a plus in a plus are spans of the outer one.

    >>> from kvspan.query.builders import plus
    >>> flatten_plus(plus("a", plus("b", plus("c")), "d"), Context())
    plus(user('a'), user('b'), user('c'), user('d'))
    """
    return rebuild(query, lambda node: _flat(node, Plus)) if _nested(query, Plus) else query


def flatten_seq(query: Node, context: Context) -> Node:
    """A seq in a seq keeps its place in the order.

    >>> from kvspan.query.builders import seq
    >>> flatten_seq(seq("a", seq("b", "c"), "d"), Context())
    seq(user('a'), user('b'), user('c'), user('d'))
    """
    return rebuild(query, lambda node: _flat(node, Seq)) if _nested(query, Seq) else query


def _nested(query: Node, cls: type[Join]) -> bool:
    return cls.kind in kinds_in(query) and any(
        isinstance(node, cls) and any(isinstance(child, cls) for child in node.items)
        for node in each(query)
    )


def _flat(node: Node, cls: type[Join]) -> Sequence[Node]:
    if not isinstance(node, cls) or not any(isinstance(child, cls) for child in node.items):
        return node.children
    flat: list[Node] = []
    stack: list[Node] = [node]
    while stack:
        item = stack.pop()
        if isinstance(item, cls):
            stack.extend(reversed(item.items))
        else:
            flat.append(item)
    return flat


def flatten_cross(query: Node, context: Context) -> Node:
    """A cross that ends in a cross is one cross.

    >>> from kvspan.query.builders import cross
    >>> flatten_cross(cross("a", cross("b", cross("c", "d"))), Context())
    cross(user('a'), user('b'), user('c'), user('d'))
    """

    def expand(node: Node) -> Sequence[Node]:
        if not isinstance(node, Cross) or not node.items or not isinstance(node.items[-1], Cross):
            return node.children
        flat: list[Node] = list(node.items)
        while flat and isinstance(flat[-1], Cross):
            flat.extend(flat.pop().children)
        return flat

    return rebuild(query, expand) if _nested(query, Cross) else query


def unroll(query: Node, context: Context) -> Node:
    """Samples of a repeat and inputs of a map are generates: no engine takes them as they are.

    >>> from kvspan.query.builders import plus, repeat, g
    >>> unroll(plus(repeat(2, g("M", "a"))), Context())
    plus(g('M', user('a')), g('M', user('a')))
    """
    return expand.unroll(query)


def pair_zip(query: Node, context: Context) -> Node:
    """A zip is its pairs.

    >>> from kvspan.query.builders import par, zip_
    >>> pair_zip(zip_(par("a", "b"), par("c", "d")), Context())
    par(par(user('a'), user('c')), par(user('b'), user('d')))
    """
    return expand.pair(query)
