"""The rewrite rules that change which prompts there are, or in what order their spans stand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from kvspan.errors import UsageError
from kvspan.query.context import Context, SpanHistory
from kvspan.query.extensions import Options, Reduce, Retrieve
from kvspan.query.forms import Augment, Map, Monad, Print
from kvspan.query.nodes import ROOT, Cross, Generate, Node, Path, Plus, Text
from kvspan.query.traverse import content_keys, each, fold, kinds_in, transform

_Key = tuple[Any, ...]
ROUNDS = "rounds"  # the step in the origin of a call that a reduction was split into


def split_reduce(query: Node, context: Context) -> Node:
    """A declared reduction over more than k spans is a tree of reductions over k at a time.

    >>> from kvspan.query.builders import g, plus, reduce
    >>> split_reduce(reduce(g("M", plus("a", "b", "c")), 2), Context())
    g('M', plus(g('M', plus(user('a'), user('b'))), user('c')))
    """
    if "reduce" not in kinds_in(query):
        return query
    return transform(
        query, lambda node, path: _tree(node, path) if isinstance(node, Reduce) else node
    )


def _tree(node: Reduce, path: Path) -> Node:
    if not node.closed:
        return node.judge
    judge = node.judge
    origin = judge.origin or path
    plus, put = _only_plus(judge, origin)
    effects = tuple(item for item in plus.items if isinstance(item, (Monad, Print)))
    spans = [item for item in plus.items if not isinstance(item, (Monad, Print))]
    number = 0
    while len(spans) > node.k:
        number += 1
        round_: list[Node] = []
        for start in range(0, len(spans), node.k):
            group = tuple(spans[start : start + node.k])
            if len(group) == 1:
                round_ += group  # nobody to be compared with: it goes on to the next round
                continue
            place = origin.child(ROUNDS).child(number - 1).child(len(round_))
            round_.append(replace(judge, input=put(effects + group), origin=place))
            effects = ()
        spans = round_
    return replace(judge, input=put(effects + tuple(spans)))


def _only_plus(judge: Generate, origin: Path) -> tuple[Plus, Callable[[tuple[Node, ...]], Node]]:
    """The plus in a judge's input, and how to make the input with other children in it."""
    found: list[tuple[Plus, list[tuple[Node, int]]]] = []
    stack: list[tuple[Node, list[tuple[Node, int]]]] = [(judge.input, [])]
    # Above the plus there are only joins and options, and no more than one branch is ever kept.
    while stack and len(found) < 2:
        node, above = stack.pop()
        if isinstance(node, Plus):
            found.append((node, above))
        elif not isinstance(node, (Generate, Monad, Print, Augment, Retrieve)):
            for index in range(len(node.children) - 1, -1, -1):
                child = node.children[index]
                if child.children or isinstance(child, Plus):
                    stack.append((child, [*above, (node, index)]))
    if len(found) != 1:
        raise UsageError(
            "the judge of a reduction has to read the spans of one plus",
            path=str(origin.child("g").child("input")),
            expected="one plus in its input",
            found="none" if not found else "more than one",
        )
    plus, above = found[0]

    def put(children: tuple[Node, ...]) -> Node:
        new: Node = Plus(children)
        for node, index in reversed(above):
            items = list(node.children)
            items[index] = new
            new = node.with_children(items)
        return new

    return plus, put


def keep_inputs(query: Node, context: Context) -> Node:
    """An inner generate is read together with what it read, both as one child of the plus.

    Only on request (``nested="whole"``): outer generates then read the inner inputs as well.

    >>> from kvspan.query.builders import g, plus
    >>> keep_inputs(g("M", plus(g("M", "a"))), Context(nested="whole"))
    g('M', plus(cross(user('a'), g('M', user('a')))))
    """
    if context.nested != "whole":
        return query

    inside = _inside_generates(query)

    def combine(node: Node, below: list[Node], path: Path) -> Node:
        same = all(a is b for a, b in zip(node.children, below, strict=True))
        if isinstance(node, Plus) and id(node) in inside:
            children = [_whole(new) for new in below]
            same = all(a is b for a, b in zip(node.children, children, strict=True))
            below = children
        return node if same else node.with_children(below)

    return fold(query, combine)


def _whole(node: Node) -> Node:
    # What asks models itself would ask them twice if it were written twice, and the judges of a
    # reduction must not see again what the round before has judged.
    if not isinstance(node, Generate) or _asks(node.input) or _in_rounds(node):
        return node
    return Cross((node.input, node))


def _asks(node: Node) -> bool:
    return any(isinstance(item, (Generate, Map)) for item in each(node))


def _in_rounds(node: Generate) -> bool:
    above = node.origin and node.origin.parent and node.origin.parent.parent
    return bool(above and above.step == ROUNDS)


def _inside_generates(query: Node) -> dict[int, Node]:
    """The nodes that stand in the input of a generate, by id."""
    inside: dict[int, Node] = {}
    stack = [(query, False)]
    while stack:
        node, is_inside = stack.pop()
        if is_inside:
            inside[id(node)] = node
        below = is_inside or isinstance(node, Generate)
        stack.extend((child, below) for child in node.children)
    return inside


def order_spans(query: Node, context: Context) -> Node:
    """Spans of a prompt stand in the order of their content, so that equal sets are equal prompts.

    Not with ``order="pinned"``, be it for the run or by an options node.

    >>> from kvspan.query.builders import g, plus
    >>> order_spans(g("M", plus("b", "a")), Context())
    g('M', plus(user('a'), user('b')))
    """
    if not {"plus", "g"} <= kinds_in(query):
        return query
    keys = _keys(query, context)
    if all(_new_order(node, keys) is None for node, _ in _sortable(query, context)):
        return query
    results: list[Node] = []
    # A node with what holds for it: whether it stands in a prompt, and whether order is pinned.
    # Then how many of the last results are its children; -1: not opened yet.
    stack: list[tuple[Node, bool, bool, int]] = [(query, False, context.order == "pinned", -1)]
    while stack:
        node, inside, pinned, waiting = stack.pop()
        if waiting >= 0:
            below = results[len(results) - waiting :]
            del results[len(results) - waiting :]
            same = all(a is b for a, b in zip(node.children, below, strict=True))
            if inside and not pinned and (order := _new_order(node, keys)) is not None:
                below, same = [below[index] for index in order], False
            results.append(node if same else node.with_children(below))
            continue
        stack.append((node, inside, pinned, len(node.children)))
        inside, pinned = _below(node, inside, pinned)
        stack.extend((child, inside, pinned, -1) for child in reversed(node.children))
    return results[0]


def moves(query: Node, context: Context) -> tuple[tuple[Path, list[int]], ...]:
    """What ``order_spans`` does: of each plus it changes, the path and the spans' old indexes.

    >>> from kvspan.query.builders import g, plus
    >>> moves(g("M", plus("b", "c", "a")), Context())
    ((<Path $.g.input.plus>, [2, 0, 1]),)
    """
    keys = _keys(query, context)
    orders = ((path, _new_order(node, keys)) for node, path in _sortable(query, context))
    return tuple((path.child("plus"), order) for path, order in orders if order is not None)


def _keys(query: Node, context: Context) -> dict[int, _Key]:
    keys = span_keys(query)
    if context.order != "recent" or context.history is None:
        return keys
    never, places = (1, 0), context.history.places
    return {id: (key[0], places.get(key[-1], never), *key[1:]) for id, key in keys.items()}


def note_spans(query: Node, history: SpanHistory) -> None:
    """Note the spans of every prompt of a rewritten query."""
    keys = span_keys(query)
    for plus, _ in _sortable(query, Context()):
        history.note([keys[id(child)][-1] for child in plus.items])


def _new_order(node: Node, keys: dict[int, _Key]) -> list[int] | None:
    """Old indexes of a plus' children in their new order; None if they have it already."""
    if not isinstance(node, Plus):
        return None
    children = [keys[id(child)] for child in node.items]
    order = sorted(range(len(children)), key=children.__getitem__)
    return None if order == list(range(len(children))) else order


def _below(node: Node, inside: bool, pinned: bool) -> tuple[bool, bool]:
    """What holds for the children of a node: standing in a prompt, and pinned."""
    if isinstance(node, Options) and node.order is not None:
        pinned = node.order == "pinned"
    # What a monad asks for stands in no prompt.
    return isinstance(node, Generate) or (inside and not isinstance(node, Monad)), pinned


def _sortable(query: Node, context: Context) -> Iterator[tuple[Plus, Path]]:
    """Every plus in a prompt whose order is not pinned."""
    stack: list[tuple[Node, Path, bool, bool]]
    stack = [(query, ROOT, False, context.order == "pinned")]
    while stack:
        node, path, inside, pinned = stack.pop()
        if isinstance(node, Plus) and inside and not pinned:
            yield node, path
        inside, pinned = _below(node, inside, pinned)
        children = node.children
        for index in range(len(children) - 1, -1, -1):
            child = children[index]
            if child.children:  # a leaf has no plus in it
                stack.append((child, node.child_path(path, index), inside, pinned))


_last_keys: tuple[Node, dict[int, _Key]] | None = None


def span_keys(query: Node) -> dict[int, _Key]:
    """What the children of a plus are sorted by, for every node, by id.

    Effects come first, then the first text of a node counts, then a digest of all it holds. The
    order of a plus inside of a node does not change its place. Remembered for the last query.
    """
    global _last_keys
    last = _last_keys
    if last is None or last[0] is not query:
        last = _last_keys = (query, _span_keys(query))
    return last[1]


def _span_keys(query: Node) -> dict[int, _Key]:
    digests = content_keys(query, plus_as_set=True)
    leads: dict[int, str] = {}
    keys: dict[int, _Key] = {}
    for node in reversed(list(each(query))):
        if isinstance(node, Text):
            lead = node.text
        else:
            texts = [leads[id(child)] for child in node.children]
            lead = next(filter(None, sorted(texts) if isinstance(node, Plus) else texts), "")
        leads[id(node)] = lead
        keys[id(node)] = (not isinstance(node, (Monad, Print)), lead, digests[id(node)])
    return keys
