"""Walking over query trees, and making others of them.

Queries may be nested thousands deep, so nothing here recurses: every function keeps its own stack.
All of them cost time linear in the number of nodes. A node used twice in a tree counts twice: it
stands at two paths.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from kvspan.query.nodes import ROOT, Node, Path

T = TypeVar("T")


def walk(root: Node) -> Iterator[tuple[Path, Node]]:
    """Every node with its path, parents before children, in document order."""
    stack = [(ROOT, root)]
    while stack:
        path, node = stack.pop()
        yield path, node
        children = node.children
        for index in range(len(children) - 1, -1, -1):
            stack.append((node.child_path(path, index), children[index]))


def each(root: Node) -> Iterator[Node]:
    """Every node, parents before children, in document order; ``walk`` without the paths."""
    stack = [root]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(reversed(node.children))


_last_kinds: tuple[Node, frozenset[str]] | None = None


def kinds_in(root: Node) -> frozenset[str]:
    """The kinds of all nodes. Remembered for the tree that was asked about last."""
    global _last_kinds
    last = _last_kinds
    if last is None or last[0] is not root:
        last = _last_kinds = (root, frozenset({node.kind for node in each(root)}))
    return last[1]


def fold(
    root: Node,
    combine: Callable[[Node, list[T], Path], T],
    into: Callable[[Node], bool] = lambda node: True,
) -> T:
    """Reduce a tree from the leaves up, children from left to right.

    combine: gets a node, the results of its children, and its path.
    into: whether to go below a node; where it says no, combine gets no results.

    >>> from kvspan.query.builders import cross, user
    >>> fold(cross("a", cross("b", "c")), lambda node, below, path: 1 + sum(below))
    5
    """
    results: list[T] = []
    stack: list[tuple[Node, Path, int]] = [(root, ROOT, -1)]  # -1: not opened yet
    while stack:
        node, path, waiting = stack.pop()
        if waiting >= 0:
            below = results[len(results) - waiting :]
            del results[len(results) - waiting :]
            results.append(combine(node, below, path))
            continue
        children = node.children if into(node) else ()
        stack.append((node, path, len(children)))
        for index in range(len(children) - 1, -1, -1):
            stack.append((children[index], node.child_path(path, index), -1))
    return results[0]


def transform(
    root: Node,
    change: Callable[[Node, Path], Node],
    into: Callable[[Node], bool] = lambda node: True,
) -> Node:
    """Replace nodes from the leaves up. What does not change stays the same object.

    change: gets a node whose children have been replaced already, and its path in ``root``.
    """

    def combine(node: Node, below: list[Node], path: Path) -> Node:
        if any(new is not old for new, old in zip(below, node.children, strict=False)):
            node = node.with_children(below)
        return change(node, path)

    return fold(root, combine, into)


def rebuild(root: Node, expand: Callable[[Node], Sequence[Node]]) -> Node:
    """Replace child lists from the root down: ``expand`` says which children a node is to have.

    Unlike ``transform`` this can splice a chain of nested joins in one go, at linear cost. Where
    ``expand`` returns ``node.children`` itself all the way down, the same object comes back.
    """
    results: list[Node] = []
    stack: list[tuple[Node, int]] = [(root, -1)]
    while stack:
        node, waiting = stack.pop()
        if waiting >= 0:
            below = results[len(results) - waiting :]
            del results[len(results) - waiting :]
            old = node.children
            same = len(old) == len(below) and all(a is b for a, b in zip(old, below, strict=True))
            results.append(node if same else node.with_children(below))
            continue
        children = expand(node)
        stack.append((node, len(children)))
        stack.extend((child, -1) for child in reversed(children))
    return results[0]


def count_nodes(root: Node) -> int:
    """Number of nodes."""
    return sum(1 for _ in each(root))


def has_generate(root: Node) -> bool:
    """Whether the tree asks a model anything."""
    return not kinds_in(root).isdisjoint(("g", "map"))


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
