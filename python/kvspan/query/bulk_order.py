"""The order of many queries: those that share fragments run close in time."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from kvspan.query.nodes import Generate, Node, Plus, Text
from kvspan.query.traverse import content_keys, each


def fragment_keys(query: Node) -> frozenset[bytes]:
    """Keys of the spans of a query's prompts, each with the anchor it stands after.

    Spans of equal text after different anchors share nothing, so their keys differ.

    >>> from kvspan.query.builders import cross, g, plus
    >>> asked = (("s", "1"), ("s", "2"), ("t", "1"))
    >>> a, b, c = (g("M", cross(s, plus("x", "y"), q)) for s, q in asked)
    >>> len(fragment_keys(a)), fragment_keys(a) == fragment_keys(b)
    (2, True)
    >>> fragment_keys(a) & fragment_keys(c)
    frozenset()
    """
    keys: set[bytes] = set()
    digests = content_keys(query, plus_as_set=True)
    for node in each(query):
        if isinstance(node, Generate):
            anchor, spans = _spans(node, digests)
            # Half of each digest is plenty to tell fragments apart, and a window holds many.
            keys.update(anchor[:16] + digest[:16] for digest in spans)
    return frozenset(keys)


def _spans(asker: Generate, digests: dict[int, bytes]) -> tuple[bytes, list[bytes]]:
    anchor = hashlib.sha256(asker.model.encode())
    spans: list[bytes] = []
    stack: list[Node] = [asker.input]
    while stack:
        node = stack.pop()
        if isinstance(node, Plus):
            spans += [digests[id(child)] for child in node.items if not isinstance(child, Generate)]
        elif isinstance(node, Text):
            if not spans:
                anchor.update(digests[id(node)])
        elif not isinstance(node, Generate):
            stack.extend(reversed(node.children))
    return anchor.digest(), spans


def greedy_order(fragments: Sequence[frozenset[bytes]]) -> list[int]:
    """Indexes in the order to run: next is always the one that shares most with the one before.

    Of equals the first in the caller's order; where nothing is shared, the first that is left.

    >>> a, b, c = b"a", b"b", b"c"
    >>> greedy_order([frozenset({a}), frozenset({b}), frozenset({a, c}), frozenset({b})])
    [0, 2, 1, 3]
    """
    holders: dict[bytes, set[int]] = {}
    for index, keys in enumerate(fragments):
        for key in keys:
            holders.setdefault(key, set()).add(index)
    order: list[int] = []
    done = [False] * len(fragments)
    first_left = 0
    current: int | None = None
    while len(order) < len(fragments):
        shared: dict[int, int] = {}
        if current is not None:
            for key in fragments[current]:
                for index in holders[key]:
                    shared[index] = shared.get(index, 0) + 1
        if shared:
            current = min(shared, key=lambda index: (-shared[index], index))
        else:
            while done[first_left]:
                first_left += 1
            current = first_left
        done[current] = True
        order.append(current)
        for key in fragments[current]:
            holders[key].discard(current)
    return order
