"""Query trees from Python.

    g("demo", cross(system("Answer in one word."), plus(docs), user("Who built the bridge?")))

Wherever a node is expected, a plain string is a user message: that is what people mean by it, and
``system`` and ``assistant`` have to be said. The joins take children one by one, or iterables of
children (lists, generators), or both; an iterable is spliced in where it stands.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvspan.errors import UsageError
from kvspan.query.checks import describe
from kvspan.query.extensions import Options, Reduce, Retrieve
from kvspan.query.forms import Augment, Map, Monad, Print, Repeat, Zip
from kvspan.query.nodes import Assistant, Cross, Generate, Node, Par, Plus, Seq, System, User

NodeLike = Node | str
Children = NodeLike | Iterable[NodeLike]


def user(text: str) -> User:
    """A user message."""
    return User(text)


def system(text: str) -> System:
    """A system message."""
    return System(text)


def assistant(text: str) -> Assistant:
    """An assistant message, for example an earlier answer."""
    return Assistant(text)


def seq(*children: Children) -> Seq:
    """Ordered; generates in it run one after another.

    >>> seq("a", ["b", system("c")])
    seq(user('a'), user('b'), system('c'))
    """
    return Seq(_children("seq", children))


def par(*children: Children) -> Par:
    """Ordered result; generates in it may run at the same time."""
    return Par(_children("par", children))


def cross(*children: Children) -> Cross:
    """Ordered join: later children depend on earlier ones."""
    return Cross(_children("cross", children))


def plus(*children: Children) -> Plus:
    """Commutative join: every child is an independent span, computed once and reused anywhere.

    >>> plus(f"passage {n}" for n in range(2))
    plus(user('passage 0'), user('passage 1'))
    """
    return Plus(_children("plus", children))


def g(
    model: str,
    input: NodeLike,
    max_tokens: int | None = None,
    temperature: float | None = None,
) -> Generate:
    """Ask ``model`` to continue ``input``.

    max_tokens: at most this many new tokens; None or 0 leaves it to the engine.
    temperature: 0 is greedy; None takes the run's default.
    Raises UsageError on a wrong type or an impossible number.

    >>> g("demo", "hi", max_tokens=5)
    g('demo', user('hi'), max_tokens=5)
    """
    if isinstance(input, (list, tuple)):
        raise UsageError(
            "the input of g is one node: wrap several in cross(...) or seq(...)",
            expected="one node",
            found=describe(input),
        )
    return Generate(model, _node("g", input), max_tokens, temperature)


def repeat(n: int, sample: Generate) -> Repeat:
    """``n`` independent samples of one generate.

    >>> repeat(3, g("demo", "draft"))
    repeat(3, g('demo', user('draft')))
    """
    return Repeat(n, sample)


def map_(
    model: str,
    inputs: Iterable[str],
    max_tokens: int | None = None,
    temperature: float | None = None,
) -> Map:
    """Ask ``model`` to continue each of ``inputs``, which are texts of user messages."""
    if isinstance(inputs, (str, bytes)):
        raise UsageError(
            "the inputs of map are not a list", expected="a list of texts", found=describe(inputs)
        )
    return Map(model, tuple(inputs), max_tokens, temperature)


def zip_(first: NodeLike, second: NodeLike) -> Zip:
    """Pairs of the items of two joins of the same length (or of map and repeat)."""
    return Zip(_node("zip", first), _node("zip", second))


def monad(effect: NodeLike) -> Monad:
    """Run ``effect`` for what it leaves in the cache, and drop its answers."""
    return Monad(_node("monad", effect))


def print_(text: str) -> Print:
    """Show a line when the run gets here."""
    return Print(text)


def augment(embedding_model: str, body: NodeLike, doc: tuple[str, str | bytes]) -> Augment:
    """The fragments of a document, given as (name, content), that fit ``body``."""
    name, content = doc
    return Augment(embedding_model, _node("augment", body), name, content)


def from_corpus(
    corpus: str, query: NodeLike, limit: int | None = None, embedding_model: str | None = None
) -> Retrieve:
    """The fragments of a named corpus that fit ``query``."""
    return Retrieve(corpus, _node("retrieve", query), limit, embedding_model)


def reduce(judge: Generate, k: int, *, closed: bool = True) -> Reduce:
    """Declare that ``judge`` may be run as a tree of judges over ``k`` spans each.

    judge: a generate with one plus in its input, over the spans to be judged. The declaration says
        that its answer to some of them can stand in their place in the next round.
    closed: False takes the declaration back: one call over all spans.

    >>> reduce(g("demo", cross(system("Take the best."), plus("a", "b", "c"))), 2)
    reduce(g('demo', cross(system('Take the best.'), plus(user('a'), user('b'), user('c')))), 2)
    """
    return Reduce(judge, k, closed)


def options(
    query: NodeLike,
    *,
    scope: str | None = None,
    placement: str | None = None,
    salt: str | None = None,
    order: str | None = None,
) -> Options:
    """How to run every generate in ``query``: see ``kvspan.run``; order: canonical or pinned."""
    return Options(_node("options", query), scope, placement, salt, order)


def _node(parent: str, value: object) -> Node:
    if isinstance(value, Node):
        return value
    if isinstance(value, str):
        return User(value)
    raise UsageError(
        f"cannot put this into {parent}",
        expected="a node or a string (a user message)",
        found=describe(value),
    )


def _children(parent: str, values: tuple[Children, ...]) -> tuple[Node, ...]:
    out: list[Node] = []
    for value in values:
        # bytes and dicts are iterable too, and never meant as lists of nodes.
        if isinstance(value, Iterable) and not isinstance(value, (Node, str, bytes, dict)):
            out.extend(_node(parent, item) for item in value)
        else:
            out.append(_node(parent, value))
    return tuple(out)
