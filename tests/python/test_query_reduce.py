"""What reduce does when it is run: a tree of judges."""

from __future__ import annotations

import pytest

from fakes import FakeEngine
from kvspan import (
    UsageError,
    cross,
    g,
    plus,
    reduce,
    repeat,
    run,
    system,
)
from kvspan.query.optimizer import optimize
from kvspan.query.plan import make_plan
from test_query_forms import short


def rounds(query) -> list[list[str]]:
    """Paths of the judges of a plan, by the round they can run in."""
    plan = make_plan(optimize(query).query)
    found: dict[int, int] = {}
    out: list[list[str]] = []
    for call in plan.calls:
        found[call.id] = 1 + max((found[id] for id in call.inputs), default=-1)
        out += [[] for _ in range(found[call.id] + 1 - len(out))]
        out[found[call.id]].append(call.path)
    return out


def judge(width: int):
    return g("J", cross(system("best?"), plus(f"c{n}" for n in range(width)), "which?"))


@pytest.mark.parametrize(
    ("width", "k", "expected"),
    [
        (8, 2, [4, 2, 1]),
        (9, 2, [4, 2, 1, 1]),
        (7, 2, [3, 2, 1]),
        (3, 2, [1, 1]),
        (2, 2, [1]),
        (1, 2, [1]),
        (10, 3, [3, 1, 1]),
        (27, 3, [9, 3, 1]),
        (4, 5, [1]),
    ],
)
def test_a_declared_reduction_is_a_tree(width: int, k: int, expected: list[int]) -> None:
    tree = rounds(reduce(judge(width), k))
    assert [len(calls) for calls in tree] == expected
    assert tree[-1] == ["$['kvspan/v1'].reduce"]
    assert len({path for calls in tree for path in calls}) == sum(expected)


def test_every_candidate_is_judged_once_and_no_judge_reads_more_than_k() -> None:
    engine = FakeEngine(short)
    run(reduce(judge(11), 3), engine=engine)
    spans = [[s.messages[0] for s in r.prompt[1:-1]] for r in engine.requests]
    assert all(1 < len(read) <= 3 for read in spans)
    first = [m.text for read in spans for m in read if m.role == "user"]
    assert sorted(first) == sorted(f"c{n}" for n in range(11))
    assert all(
        r.prompt[0].text == "best?" and r.prompt[-1].text == "which?" for r in engine.requests
    )


def test_nothing_is_split_without_the_declaration() -> None:
    assert rounds(judge(8)) == [["$"]]
    assert rounds(reduce(judge(8), 2, closed=False)) == [["$['kvspan/v1'].reduce"]]


def test_samples_are_judged_in_a_tree_too() -> None:
    query = reduce(g("J", plus(repeat(8, g("M", "write")))), 2)
    assert [len(calls) for calls in rounds(query)] == [8, 4, 2, 1]
    assert len(run(query, engine=FakeEngine(), max_concurrency=2).calls) == 15


@pytest.mark.parametrize(
    ("inner", "found"),
    [(cross("a"), "none"), (cross(plus("a"), plus("b")), "more than one")],
)
def test_a_judge_reads_one_plus(inner, found: str) -> None:
    with pytest.raises(UsageError) as caught:
        run(reduce(g("J", cross(inner, "q")), 2), engine=FakeEngine())
    assert str(caught.value) == (
        "$['kvspan/v1'].reduce.g.input: the judge of a reduction has to read the spans of one "
        f"plus; expected one plus in its input; found {found}"
    )
