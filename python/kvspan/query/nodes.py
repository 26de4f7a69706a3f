"""The query tree: frozen nodes, and the paths at which they stand.

Queries may be nested thousands deep, so nothing here recurses: equality compares with a stack, and
every node computes its hash once, from the hashes its children already have. What walks over trees
is in ``kvspan.query.traverse``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

from kvspan.errors import UsageError
from kvspan.query.checks import (
    check_max_tokens,
    check_model,
    check_temperature,
    check_text,
    describe,
)

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
    origin: Path | None = None
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


def must_be(node: object, cls: type[Node], what: str, expected: str) -> None:
    """Raise UsageError for a child of another kind. what: its name in the message."""
    if not isinstance(node, cls):
        found = node.kind if isinstance(node, Node) else describe(node)
        raise UsageError(f"{what} is not {expected}", expected=expected, found=found)


NODES: dict[str, type[Text] | type[Join] | type[Generate]] = {
    cls.kind: cls for cls in (User, System, Assistant, Seq, Par, Cross, Plus, Generate)
}
