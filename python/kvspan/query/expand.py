"""What ``repeat``, ``map`` and ``zip`` stand for, written out.

    repeat(2, g)           -> par(g, g), each sample with an origin, and so a seed, of its own
    map(M, [a, b])         -> par(g(M, a), g(M, b))
    zip(par(a, b), cross(c, d)) -> par(par(a, c), par(b, d))

As children of a plus they are children of that plus themselves: every sample is a span.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvspan.errors import UsageError
from kvspan.query.extensions import Reduce
from kvspan.query.forms import Map, Repeat, Zip, mark_origins
from kvspan.query.nodes import ROOT, Generate, Join, Node, Par, Path, Plus, User
from kvspan.query.traverse import each, fold, kinds_in, transform

# Nested repeats multiply; beyond this many nodes a query is a mistake.
MAX_NODES = 1_000_000

_Moved = dict[int, Path]  # origins by id, and what they become inside of one sample


def expand(query: Node) -> Node:
    """A query of messages, joins and generates (and whatever needs no writing out).

    >>> from kvspan.query.builders import g, map_, plus, repeat
    >>> expand(plus(repeat(2, g("M", "a")), map_("M", ["b"])))
    plus(g('M', user('a')), g('M', user('a')), g('M', user('b')))
    """
    return strip_reduce(pair(unroll(query)))


def strip_reduce(query: Node) -> Node:
    """A reduce that nobody split is its judge over all spans."""
    if "reduce" not in kinds_in(query):
        return query
    return transform(query, lambda node, path: node.judge if isinstance(node, Reduce) else node)


def unroll(query: Node) -> Node:
    """Write out every repeat and map.

    Samples of one generate share their nodes but for the generates, whose origins tell them apart.
    """

    def stands_for_more(node: Node) -> bool:
        return isinstance(node, (Repeat, Map))

    if kinds_in(query).isdisjoint({"repeat", "map"}):
        return query
    found = [node for node in each(query) if stands_for_more(node)]
    if any(node.origin is None for node in found):  # type: ignore[attr-defined]
        query = mark_origins(query)
    made = 0

    def too_much(node: Node) -> UsageError:
        return UsageError(
            "repeat and map multiply to too much",
            path=str(node.origin or ROOT),  # type: ignore[attr-defined]
            expected=f"at most {MAX_NODES:,} nodes",
            found="more",
        )

    def samples(node: Repeat | Map, moved: _Moved) -> list[tuple[Node, _Moved]]:
        origin = node.origin or ROOT
        place = _rebase(origin, moved).child(node.kind)
        if isinstance(node, Map):
            places = [place.child("inputs").child(index) for index in range(len(node.inputs))]
            return [
                (Generate(node.model, User(text), node.max_tokens, node.temperature, path), {})
                for text, path in zip(node.inputs, places, strict=True)
            ]
        if node.n > MAX_NODES:
            raise too_much(node)
        key = id(node.sample.origin)
        return [(node.sample, {key: place.child(index)}) for index in range(node.n)]

    results: list[Node] = []
    # A node to open with what its origins become, or what to make of the last results.
    stack: list[tuple[Node, _Moved] | tuple[int, Callable[[list[Node]], Node]]] = []
    stack.append((query, {}))
    while stack:
        first, second = stack.pop()
        if isinstance(first, int):
            below = results[len(results) - first :]
            del results[len(results) - first :]
            results.append(second(below))  # type: ignore[operator]
            continue
        node, moved = first, second
        assert isinstance(moved, dict)
        made += 1
        if made > MAX_NODES:
            raise too_much(found[0])
        children: list[tuple[Node, _Moved]] = []
        make: Callable[[list[Node]], Node]
        if stands_for_more(node):
            assert isinstance(node, (Repeat, Map))
            children, make = samples(node, moved), lambda below: Par(tuple(below))
        else:
            for child in node.children:
                if isinstance(node, Plus) and stands_for_more(child):
                    children += samples(child, moved)  # type: ignore[arg-type]
                else:
                    children.append((child, moved))
            make = _maker(node, moved)
        stack.append((len(children), make))
        stack.extend(reversed(children))
    return results[0]


def _maker(node: Node, moved: _Moved) -> Callable[[list[Node]], Node]:
    def make(below: list[Node]) -> Node:
        old = node.children
        same = len(old) == len(below) and all(a is b for a, b in zip(old, below, strict=True))
        new = node if same else node.with_children(below)
        if moved and isinstance(new, (Generate, Repeat, Map)) and new.origin is not None:
            return replace(new, origin=_rebase(new.origin, moved))
        return new

    return make


def _rebase(path: Path, moved: _Moved) -> Path:
    """``path`` below the new place of its sample. ``moved`` remembers what was asked before."""
    steps: list[Path] = []
    base: Path | None = path
    while base is not None and id(base) not in moved:
        steps.append(base)
        base = base.parent
    if base is None:
        return path
    new = moved[id(base)]
    for step in reversed(steps):
        new = moved[id(step)] = new.child(step.step)
    return new


def pair(query: Node) -> Node:
    """Write out every zip. Raises UsageError where its two sides are of different lengths.

    >>> from kvspan.query.builders import par, plus, zip_
    >>> pair(zip_(par("a", "b"), par("c", "d")))
    par(par(user('a'), user('c')), par(user('b'), user('d')))
    >>> pair(plus("x", zip_("a", "c")))
    plus(user('x'), par(user('a'), user('c')))
    """
    if "zip" not in kinds_in(query):
        return query

    def combine(node: Node, below: list[Node], path: Path) -> Node:
        if isinstance(node, Zip):
            return _pairs(below, node.origin or path)
        old = node.children
        if isinstance(node, Plus) and any(isinstance(child, Zip) for child in old):
            flat: list[Node] = []
            for child, new in zip(old, below, strict=True):
                flat += new.children if isinstance(child, Zip) else (new,)
            return node.with_children(flat)
        same = all(a is b for a, b in zip(old, below, strict=True))
        return node if same else node.with_children(below)

    return fold(query, combine)


def _pairs(sides: Sequence[Node], path: Path) -> Node:
    first, second = (side.children if isinstance(side, Join) else (side,) for side in sides)
    if len(first) != len(second):
        raise UsageError(
            "the two sides of zip are of different lengths",
            path=str(path.child("zip")),
            expected=f"{len(first)} in second, as in first",
            found=str(len(second)),
        )
    return Par(tuple(Par(items) for items in zip(first, second, strict=True)))
