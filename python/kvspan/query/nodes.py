"""The query tree: frozen nodes, and the traversals that everything else is written with.

Queries may be nested thousands deep, so nothing here recurses: ``fold``, ``rebuild`` and ``walk``
keep their own stacks, equality compares with a stack, and every node computes its hash once, from
the hashes its children already have. All of them cost time linear in the number of nodes.

A node used twice in a tree counts twice: it stands at two paths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar, TypeVar

from kvspan.errors import UsageError

T = TypeVar("T")

# spnl holds max_tokens in 32 bits; a larger value could not be read back by it.
MAX_MAX_TOKENS = 2**31 - 1
REMEMBERED_DEPTH = 64  # every so many steps down, a path remembers its text


class Path:
    """A JSON path as a chain of steps, turned into text only when somebody reads it.

    A tree of n nodes and depth d would otherwise cost n*d characters of paths. Some steps of a
    deep path remember their text, so that the next path through them need not join it anew.

    >>> str(ROOT.child("g").child("input").child("cross").child(2))
    '$.g.input.cross[2]'
    >>> str(ROOT.child("odd key"))
    "$['odd key']"
    """

    __slots__ = ("depth", "parent", "step", "text")

    def __init__(self, parent: Path | None, step: str | int) -> None:
        self.parent = parent
        self.step = step
        self.text: str | None = None
        self.depth: int = 0 if parent is None else parent.depth + 1

    def child(self, step: str | int) -> Path:
        return Path(self, step)

    def __str__(self) -> str:
        below: list[Path] = []
        path = self
        while path.parent is not None and path.text is None:
            below.append(path)
            path = path.parent
        text = path.text or str(path.step)
        parts: list[str] = []
        for path in reversed(below):
            parts.append(_step_text(path.step))
            if not path.depth % REMEMBERED_DEPTH:
                text += "".join(parts)
                parts.clear()
                path.text = text
        return text + "".join(parts)

    def __repr__(self) -> str:
        return f"<Path {self}>"


@lru_cache(maxsize=4096)
def _step_text(step: str | int) -> str:
    if isinstance(step, int):
        return f"[{step}]"
    plain = step.isascii() and step.replace("-", "_").isidentifier()
    return f".{step}" if plain else f"[{step!r}]"


ROOT = Path(None, "$")


class Node:
    """Any node of a query. Immutable, hashable, compared by content.

    kind: the node's key in JSON. children: the nodes below it, in order.
    """

    __slots__ = ("_hash",)
    kind: ClassVar[str]
    _hash: int

    @property
    def children(self) -> tuple[Node, ...]:
        return ()

    def with_children(self, children: Sequence[Node]) -> Node:
        """A copy of this node over other children."""
        return self

    def child_path(self, path: Path, index: int) -> Path:
        """JSON path of child ``index`` of this node, which itself stands at ``path``."""
        return path.child(self.kind).child(index)

    def own_fields(self) -> tuple[Any, ...]:
        """What makes this node equal to another, its children aside."""
        return ()

    def _seal(self) -> None:
        # Children are complete by now, so their hashes are cached: no recursion.
        parts = (self.kind, self.own_fields(), tuple(child._hash for child in self.children))
        object.__setattr__(self, "_hash", hash(parts))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Node):
            return NotImplemented
        stack: list[tuple[Node, Node]] = [(self, other)]
        while stack:
            a, b = stack.pop()
            if a is b:
                continue
            if (
                a._hash != b._hash
                or a.kind != b.kind
                or a.own_fields() != b.own_fields()
                or len(a.children) != len(b.children)
            ):
                return False
            stack.extend(zip(a.children, b.children, strict=True))
        return True

    def builder_call(self) -> tuple[str, str]:
        """The builder call that makes this node: what stands before its children, and after."""
        return f"{self.kind}(", ")"

    def __repr__(self) -> str:
        """The builder call that makes this node."""
        parts: list[str] = []
        stack: list[Node | str] = [self]
        while stack:
            item = stack.pop()
            if isinstance(item, str):
                parts.append(item)
            else:
                opening, closing = item.builder_call()
                parts.append(opening)
                stack.append(closing)
                for index, child in reversed(list(enumerate(item.children))):
                    stack += [child] if index == 0 else [child, ", "]
        return "".join(parts)

    def _repr_html_(self) -> str:
        """As a notebook shows it."""
        from kvspan.notebook import query_html

        return query_html(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """As IPython shows it in a terminal: a large query as its first lines."""
        from kvspan.notebook import query_text

        printer.text(query_text(self))

    # An immutable tree is its own copy; pickling goes through JSON text because pickle recurses.
    def __copy__(self) -> Node:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Node:
        return self

    def __reduce__(self) -> tuple[Callable[[str], Node], tuple[str]]:
        from kvspan.query.read import from_json
        from kvspan.query.write import to_json

        return from_json, (to_json(self),)


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Text(Node):
    """A message. text: any Unicode text; empty messages are dropped by the optimizer."""

    text: str

    def __post_init__(self) -> None:
        if problem := check_text(self.text, f"the text of {self.kind}"):
            raise problem
        self._seal()

    def own_fields(self) -> tuple[Any, ...]:
        return (self.text,)

    def builder_call(self) -> tuple[str, str]:
        return f"{self.kind}({self.text!r}", ")"


class User(Text):
    """What the user says (U)."""

    __slots__ = ()
    kind = "user"


class System(Text):
    """Standing instructions (S)."""

    __slots__ = ()
    kind = "system"


class Assistant(Text):
    """What a model said (A); every generate leaves one in its place."""

    __slots__ = ()
    kind = "assistant"


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Join(Node):
    """A node with any number of children, none included."""

    items: tuple[Node, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.items, tuple):
            object.__setattr__(self, "items", tuple(self.items))
        for index, item in enumerate(self.items):
            if not isinstance(item, Node):
                raise UsageError(
                    f"child {index} of {self.kind} is not a query node",
                    expected="a node",
                    found=describe(item),
                )
        self._seal()

    @property
    def children(self) -> tuple[Node, ...]:
        return self.items

    def with_children(self, children: Sequence[Node]) -> Node:
        return type(self)(tuple(children))


class Seq(Join):
    """Ordered; what its children generate is generated one after another."""

    __slots__ = ()
    kind = "seq"


class Par(Join):
    """Ordered result; what its children generate may be generated at the same time."""

    __slots__ = ()
    kind = "par"


class Cross(Join):
    """Ordered join: later children depend on earlier ones."""

    __slots__ = ()
    kind = "cross"


class Plus(Join):
    """Commutative join: children are independent of each other, and each is one movable span."""

    __slots__ = ()
    kind = "plus"


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Generate(Node):
    """A model call (G) over one input.

    model: ``provider/name``, a folder, or a name the engine knows.
    max_tokens: at most this many new tokens. None and 0 both leave it to the engine, and stay
        distinct in the tree so that files survive a round trip (0 is what spnl writes).
    temperature: finite, 0 or more; 0 is greedy. None takes the default of the run.
    origin: where the node stood in the query the user wrote.
    kept, plain: what the rules of ``kvspan.query.engines`` decided: whether its answer is a span
        with the KV it was generated with, and whether the spans of its prompt are plain text.
    The last three are not part of its content.
    """

    model: str
    input: Node
    max_tokens: int | None = None
    temperature: float | None = None
    origin: Path | None = field(default=None)
    kept: bool = False
    plain: bool = False
    kind: ClassVar[str] = "g"

    def __post_init__(self) -> None:
        if not isinstance(self.input, Node):
            raise UsageError(
                "the input of g is not a query node",
                expected="one node",
                found=describe(self.input),
            )
        problem = (
            check_model(self.model)
            or check_max_tokens(self.max_tokens)
            or check_temperature(self.temperature)
        )
        if problem:
            raise problem
        if isinstance(self.temperature, int):
            object.__setattr__(self, "temperature", float(self.temperature))
        self._seal()

    @property
    def children(self) -> tuple[Node, ...]:
        return (self.input,)

    def with_children(self, children: Sequence[Node]) -> Node:
        (only,) = children
        return replace(self, input=only)

    def child_path(self, path: Path, index: int) -> Path:
        return path.child("g").child("input")

    def own_fields(self) -> tuple[Any, ...]:
        return (self.model, self.max_tokens, self.temperature)

    def builder_call(self) -> tuple[str, str]:
        return f"g({self.model!r}, ", settings_text(self.max_tokens, self.temperature) + ")"


def settings_text(max_tokens: int | None, temperature: float | None) -> str:
    """The last arguments of a builder call."""
    text = "" if max_tokens is None else f", max_tokens={max_tokens}"
    return text + ("" if temperature is None else f", temperature={temperature}")


NODES: dict[str, type[Text] | type[Join] | type[Generate]] = {
    cls.kind: cls for cls in (User, System, Assistant, Seq, Par, Cross, Plus, Generate)
}


def describe(value: object) -> str:
    """A value as an error message shows it: JSON's words, shortened.

    >>> describe(True), describe([1, 2]), describe("hi"), describe(None), describe({})
    ('true', 'an array of 2', "'hi'", 'null', 'an empty object')
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        # Python refuses to print integers of more than a few thousand digits.
        return (
            repr(value) if isinstance(value, float) or value.bit_length() < 256 else "a huge number"
        )
    if isinstance(value, str):
        return repr(value if len(value) <= 40 else value[:37] + "...")
    if isinstance(value, dict):
        if not value:
            return "an empty object"
        keys = [repr(str(key)[:40]) for key in list(value)[:4]]
        more = ", ..." if len(value) > 4 else ""
        return f"an object with {'key' if len(value) == 1 else 'keys'} {', '.join(keys)}{more}"
    if isinstance(value, (list, tuple)):
        return f"an array of {len(value)}" if value else "an empty array"
    return f"a value of type {type(value).__name__}"


def check_text(text: object, what: str) -> UsageError | None:
    """The error with a text, if any. what: the text's name in the message."""
    if not isinstance(text, str):
        return UsageError(f"{what} is not a string", expected="a string", found=describe(text))
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            return UsageError(
                f"{what} is not valid Unicode",
                expected="text without lone surrogates",
                found=f"U+{ord(text[error.start]):04X} at character {error.start + 1}",
            )
    return None


def check_model(model: object) -> UsageError | None:
    """The error with a model's name, if any."""
    if model == "":
        return UsageError("the model of g is empty", expected="a model's name", found="''")
    return check_text(model, "the model of g")


def check_max_tokens(value: object) -> UsageError | None:
    """The error with this ``max_tokens``, if any."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if value is None or (whole and 0 <= value <= MAX_MAX_TOKENS):  # type: ignore[operator]
        return None
    return UsageError(
        "max_tokens is not a token count",
        expected=f"a whole number from 0 to {MAX_MAX_TOKENS} (0: the engine's default) or null",
        found=describe(value),
    )


def check_temperature(value: object) -> UsageError | None:
    """The error with this ``temperature``, if any."""
    if value is None:
        return None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            if math.isfinite(value) and value >= 0:
                return None
        except OverflowError:  # an integer no float can hold
            pass
    return UsageError(
        "temperature is out of range",
        expected="a finite number, 0 or more, or null",
        found=describe(value),
    )


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
