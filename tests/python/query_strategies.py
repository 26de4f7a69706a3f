"""Random queries for property tests, and two shapes that break recursive code."""

from __future__ import annotations

from hypothesis import strategies as st

from kvspan.query.builders import cross, g, plus, seq
from kvspan.query.checks import MAX_MAX_TOKENS
from kvspan.query.extensions import (
    ORDER_WORDS,
    PLACEMENT_WORDS,
    SCOPE_WORDS,
    Options,
    Reduce,
    Retrieve,
)
from kvspan.query.forms import Augment, Map, Monad, Print, Repeat, Zip
from kvspan.query.nodes import Assistant, Cross, Generate, Node, Par, Plus, Seq, System, User

# All of Unicode but lone surrogates, with what YAML finds difficult more often than by chance.
_awkward = st.sampled_from(
    [
        *("", " ", "\n", "\n\n a", "a\n", " lead", "trail ", "\t", "\r", "a\r\nb", "\x85"),
        *("\u2028", "\ufeff", "null", "~", "yes", "3", "1e5", "0x1", "- a", "a: b", "# c", "'"),
        *('"', "|", "é", "🦜", "\x00", "\x7f", "%", "@", "2024-01-01", "<<", "=", "?", "*x"),
        *("&x", "!t", "\\", "a #b", ": "),
    ]
)
_characters = st.characters(blacklist_categories=["Cs"])
texts = st.one_of(
    _awkward, st.text(_characters, max_size=30), st.lists(_awkward, max_size=4).map("".join)
)
messages = st.builds(lambda cls, text: cls(text), st.sampled_from([User, System, Assistant]), texts)
_models = st.one_of(st.just("M"), st.text(_characters, min_size=1, max_size=8))
_max_tokens = st.none() | st.integers(0, MAX_MAX_TOKENS)
_temperatures = st.none() | st.floats(0, allow_nan=False, allow_infinity=False)


def _grow(children: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    joins = st.builds(
        lambda cls, items: cls(tuple(items)),
        st.sampled_from([Seq, Par, Cross, Plus]),
        st.lists(children, max_size=4),
    )
    return st.one_of(
        joins, joins, st.builds(Generate, _models, children, _max_tokens, _temperatures)
    )


queries = st.recursive(messages, _grow, max_leaves=12)


def _grow_all(children: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    generates = st.builds(Generate, _models, children, _max_tokens, _temperatures)
    inputs = st.lists(texts, max_size=3).map(tuple)
    counts = st.integers(0, 4)
    words = [st.sampled_from([None, *w]) for w in (SCOPE_WORDS, PLACEMENT_WORDS, ORDER_WORDS)]
    return st.one_of(
        _grow(children),
        st.builds(Repeat, counts, generates),
        st.builds(Map, _models, inputs, _max_tokens, _temperatures),
        st.builds(Zip, children, children),
        st.builds(Monad, children),
        st.builds(Print, texts),
        st.builds(Augment, texts, children, texts, st.one_of(texts, st.binary(max_size=4))),
        st.builds(Reduce, generates, st.integers(2, 5), st.booleans()),
        st.builds(Options, children, words[0], words[1], st.none() | texts, words[2]),
        st.builds(Retrieve, texts, children, st.none() | st.integers(1, 9), st.none() | texts),
    )


# Every node of the language; ``queries`` has those that need nothing but a model.
all_queries = st.recursive(messages, _grow_all, max_leaves=12)


def _grow_runnable(children: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    generates = st.builds(Generate, st.sampled_from(["M", "N"]), children)
    return st.one_of(
        _grow(children),
        st.builds(lambda items: Generate("J", Plus(tuple(items))), st.lists(children, max_size=4)),
        st.builds(Repeat, st.integers(0, 3), generates),
        st.builds(Map, st.just("M"), st.lists(texts, max_size=3).map(tuple)),
        st.builds(lambda a, b: Zip(Par((a, b)), Plus((b, a))), children, children),
        st.builds(Monad, children),
        st.builds(Print, texts),
        st.builds(Options, children, st.sampled_from([None, *SCOPE_WORDS])),
    )


# What needs nothing but a model. A reduction is another query once it is split, so none here.
runnable_queries = st.recursive(messages, _grow_runnable, max_leaves=12)


def deep_query(depth: int) -> Node:
    """Generates in crosses in generates..."""
    query: Node = User("innermost")
    for level in range(depth):
        query = g("M", query) if level % 2 else cross(f"level {level}", query)
    return g("M", query)


def deep_joins(depth: int) -> Node:
    """One generate over a join in a join in a join, of changing kinds."""
    query: Node = User("innermost")
    for level in range(depth):
        query = (cross, plus, seq)[level // 5 % 3]("x", query)
    return g("M", query)


def wide_query(spans: int) -> Node:
    """One generate over many spans."""
    passages = plus(f"passage {n}\nof several lines" for n in range(spans))
    return g("M", cross(System("s"), passages, User("q")))
