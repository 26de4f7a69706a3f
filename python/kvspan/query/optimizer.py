"""Rewrite rules, applied in order until none changes anything, with a trace for ``explain``.

A rule is a function from a tree to a tree that means the same; it returns the very object it was
given when it has nothing to do. The rules:

    desugar_chat   a query that asks nothing -> a generate over it, with the default model
    drop_empty     empty messages and joins in a join -> gone
    flatten_plus   plus in plus -> one plus
    flatten_seq    seq in seq -> one seq
    flatten_cross  cross at the end of a cross -> one cross
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvspan.errors import KvspanError, UsageError
from kvspan.query.nodes import (
    Cross,
    Generate,
    Join,
    Node,
    Path,
    Plus,
    Seq,
    Text,
    count_nodes,
    has_generate,
    mark_origins,
    rebuild,
    transform,
)

# Every rule shrinks the tree or applies once, so two passes do; a rule that never settles is a bug.
MAX_PASSES = 20


@dataclass(frozen=True)
class Context:
    """What rules may know besides the tree. default_model: for queries that name none."""

    default_model: str | None = None


Rule = Callable[[Node, Context], Node]


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

    return transform(query, drop)


def _is_empty(node: Node) -> bool:
    if isinstance(node, Text):
        return not node.text
    return isinstance(node, Join) and not node.items


def flatten_plus(query: Node, context: Context) -> Node:
    """Spans of a plus in a plus are spans of the outer one.

    >>> from kvspan.query.builders import plus
    >>> flatten_plus(plus("a", plus("b", plus("c")), "d"), Context())
    plus(user('a'), user('b'), user('c'), user('d'))
    """
    return rebuild(query, lambda node: _flat(node, Plus))


def flatten_seq(query: Node, context: Context) -> Node:
    """A seq in a seq keeps its place in the order.

    >>> from kvspan.query.builders import seq
    >>> flatten_seq(seq("a", seq("b", "c"), "d"), Context())
    seq(user('a'), user('b'), user('c'), user('d'))
    """
    return rebuild(query, lambda node: _flat(node, Seq))


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

    return rebuild(query, expand)


RULES: tuple[Rule, ...] = (desugar_chat, drop_empty, flatten_plus, flatten_seq, flatten_cross)


@dataclass(frozen=True)
class Fired:
    """One application of a rule that changed the tree. before, after: numbers of nodes."""

    rule: str
    does: str
    number: int
    before: int
    after: int


@dataclass(frozen=True)
class Optimized:
    """The rewritten query and what was done to it, in order."""

    query: Node
    trace: tuple[Fired, ...]


def optimize(
    query: Node, *, default_model: str | None = None, rules: Sequence[Rule] = RULES
) -> Optimized:
    """Apply rules in order, again and again until nothing changes.

    Generates remember where they stood in ``query`` (``Generate.origin``).
    Raises UsageError if the query asks nothing and there is no default model.
    """
    context = Context(default_model)
    query = mark_origins(query)
    trace: list[Fired] = []
    for number in range(1, MAX_PASSES + 1):
        changed = False
        for rule in rules:
            new = rule(query, context)
            if new is not query:
                does = (rule.__doc__ or "").partition("\n")[0]
                name = getattr(rule, "__name__", "rule")
                trace.append(Fired(name, does, number, count_nodes(query), count_nodes(new)))
                query, changed = new, True
        if not changed:
            return Optimized(query, tuple(trace))
    raise KvspanError(
        f"rewrite rules did not settle in {MAX_PASSES} passes: {trace[-1].rule} still fires"
    )
