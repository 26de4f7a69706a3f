"""The tree itself: equality, hashing, traversal, builders, and depth."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvspan
from kvspan import UsageError, assistant, cross, g, par, plus, reduce, repeat, seq, system, user
from kvspan.query.forms import mark_origins
from kvspan.query.nodes import Generate, Node, Plus, Text, User
from kvspan.query.optimizer import optimize
from kvspan.query.plan import make_plan
from kvspan.query.prompt import Message, Span, to_prompt
from kvspan.query.read import from_json, from_yaml
from kvspan.query.traverse import count_nodes, fold, rebuild, transform, walk
from kvspan.query.write import to_json, to_yaml
from query_strategies import deep_joins, deep_query, queries, wide_query


@given(queries)
def test_repr_is_the_builder_call(query: Node) -> None:
    names = {
        name: getattr(kvspan, name)
        for name in ("user", "system", "assistant", "seq", "par", "cross", "plus", "g")
    }
    assert eval(repr(query), names) == query


@given(queries, queries)
def test_equality_is_equality_of_content(a: Node, b: Node) -> None:
    assert (a == b) == (to_json(a) == to_json(b))
    assert a != b or hash(a) == hash(b)
    assert a != to_json(a)


@given(queries)
def test_copies_are_equal(query: Node) -> None:
    assert copy.deepcopy(query) is query
    assert pickle.loads(pickle.dumps(query)) == query


@given(queries)
def test_walk_gives_paths_into_the_json(query: Node) -> None:
    for path, node in walk(query):
        # "$.g.input.plus[0]" walks the very objects that JSON has.
        steps: list[str | int] = []
        at = path
        while at.parent is not None:
            steps.append(at.step)
            at = at.parent
        value = kvspan.query.write.to_obj(query)
        for step in reversed(steps):
            value = value[step]
        assert value == kvspan.query.write.to_obj(node)


@given(queries)
def test_traversals_that_change_nothing_return_the_same_object(query: Node) -> None:
    assert transform(query, lambda node, path: node) is query
    assert rebuild(query, lambda node: node.children) is query
    assert mark_origins(query) == query


@given(queries)
def test_fold_goes_from_the_leaves_up_and_from_left_to_right(query: Node) -> None:
    order: list[str] = []
    fold(query, lambda node, below, path: order.append(str(path)))

    def postorder(path: str, node: Node) -> list[str]:
        found: list[str] = []
        for index, child in enumerate(node.children):
            step = ".g.input" if isinstance(node, Generate) else f".{node.kind}[{index}]"
            found += postorder(path + step, child)
        return [*found, path]

    assert order == postorder("$", query)


def test_nodes_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        user("a").text = "b"  # type: ignore[misc]
    with pytest.raises(AttributeError):
        plus("a").items = ()  # type: ignore[misc]


def test_nodes_of_other_kinds_differ() -> None:
    same_text = [user("a"), system("a"), assistant("a")]
    same_items = [seq("a"), par("a"), cross("a"), plus("a")]
    assert len(set(same_text)) == 3
    assert len(set(same_items)) == 4
    assert g("M", "a") != g("M", "a", max_tokens=0)
    assert g("M", "a", temperature=1) == g("M", "a", temperature=1.0)


def test_builders_take_strings_and_iterables() -> None:
    built = cross(system("s"), plus(f"doc {n}" for n in range(2)), ["q", user("r")])
    assert built == cross(system("s"), plus(user("doc 0"), user("doc 1")), user("q"), user("r"))
    assert plus() == Plus(())
    assert g("M", "hi").input == user("hi")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: plus(3), "cannot put this into plus; expected a node or a string"),
        (lambda: plus([["a"]]), "found an array of 1"),
        (lambda: cross({"user": "a"}), "found an object with key 'user'"),
        (lambda: user(3), "the text of user is not a string; expected a string; found 3"),
        (lambda: user("\ud800"), "not valid Unicode"),
        (lambda: g("", "a"), "the model of g is empty"),
        (lambda: g(None, "a"), "the model of g is not a string; expected a string; found null"),
        (lambda: g("M", ["a", "b"]), "wrap several in cross(...) or seq(...)"),
        (lambda: g("M", None), "found null"),
        (lambda: g("M", "a", max_tokens=-1), "max_tokens is not a token count"),
        (lambda: g("M", "a", max_tokens=True), "found true"),
        (lambda: g("M", "a", max_tokens=2**31), "found 2147483648"),
        (lambda: g("M", "a", max_tokens=5.0), "found 5.0"),
        (lambda: g("M", "a", temperature=-0.1), "temperature is out of range"),
        (lambda: g("M", "a", temperature=float("nan")), "found nan"),
        (lambda: g("M", "a", temperature=float("inf")), "found inf"),
        (lambda: g("M", "a", temperature=10**400), "found a huge number"),
        (lambda: g("M", "a", temperature="0"), "found '0'"),
    ],
)
def test_impossible_nodes_are_refused(build, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        build()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("query", [deep_query(2000), deep_joins(2000)], ids=["calls", "joins"])
def test_two_thousand_levels(query: Node) -> None:
    text = to_json(query)
    again = from_json(text)
    assert again == query and hash(again) == hash(query)
    assert again != from_json(text.replace("innermost", "other"))
    assert repr(query).count("(") > 2000
    assert pickle.loads(pickle.dumps(query)) == query
    assert from_json(to_json(query, indent=2)) == query
    assert from_yaml(to_yaml(query)) == query
    rewritten = optimize(query).query
    plan = make_plan(rewritten)
    assert len(plan.calls) == sum(isinstance(node, Generate) for _, node in walk(query))
    first = plan.calls[0].node
    assert len(to_prompt(first.input)) >= 1


def calls_made(work: Callable[[], object]) -> int:
    """How many functions ``work`` calls: a clock that no other process disturbs."""
    count = 0

    def tick(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(tick)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


SHAPES = ["wide", "shuffled", "samples", "reduction"]
SHAPES += ["plus chain", "cross chain", "seq of generates"]


@pytest.mark.parametrize("shape", SHAPES)
def test_cost_is_linear(shape: str) -> None:
    def build(size: int) -> Node:
        if shape == "wide":
            return wide_query(size)
        if shape == "shuffled":
            return g("M", plus(f"{n * 7919 % size}" for n in range(size)))
        if shape == "samples":
            return g("M", plus(repeat(size // 2, g("M", "a"))))
        if shape == "reduction":
            return reduce(g("M", plus(g("M", f"{n}") for n in range(size // 4))), 2)
        if shape == "seq of generates":
            half = [g("M", f"{n}") for n in range(size // 2)]
            return g("M", seq(plus(half), plus(half)))
        query: Node = User("end")
        for n in range(size):
            query = (plus if shape == "plus chain" else cross)(f"{n}", query)
        return g("M", query)

    def cost(size: int) -> int:
        text = to_json(build(size))

        def work() -> None:
            optimized = optimize(from_json(text)).query
            plan = make_plan(optimized)
            if len(plan.calls) == 1:
                to_prompt(plan.calls[0].node.input)
            to_json(optimized)

        return calls_made(work)

    small, large = cost(500), cost(4_000)
    assert large < 8.5 * small


def test_ten_thousand_spans() -> None:
    query = from_json(to_json(wide_query(10_000)))
    plan = make_plan(optimize(query).query)
    prompt = to_prompt(plan.calls[0].node.input)
    assert len(prompt) == 10_002
    assert prompt[1] == Span((Message("user", "passage 0\nof several lines"),))


@settings(max_examples=20)
@given(st.lists(st.text(max_size=5), max_size=20))
def test_count_nodes(texts: list[str]) -> None:
    query = plus([g("M", text) if text else cross() for text in texts])
    leaves = fold(query, lambda node, below, path: isinstance(node, Text) + sum(below))
    assert count_nodes(query) == 1 + len(texts) + leaves


def test_import_is_quick_and_loads_nothing_heavy() -> None:
    check = (
        "import sys, time; start = time.perf_counter(); import kvspan;"
        "print(time.perf_counter() - start);"
        "print([name for name in ('torch', 'numpy', 'yaml', 'transformers', 'asyncio')"
        " if name in sys.modules]);"
        "assert kvspan.user('a') and callable(kvspan.run) and 'torch' not in sys.modules;"
        "assert set(kvspan.__all__) <= set(dir(kvspan))"
    )
    seconds = []
    for _ in range(3):  # the best of three: other processes may be busy
        out = subprocess.run(
            [sys.executable, "-c", check], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        assert out[1] == "[]"
        seconds.append(float(out[0]))
    assert min(seconds) < 0.3


def test_unknown_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'usr'"):
        kvspan.usr  # noqa: B018
