"""Rewrite rules: fixture pairs, the fixpoint, and that they keep the meaning."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from hypothesis import assume, given, settings

from fakes import FakeEngine
from kvspan import KvspanError, UsageError, cross, executor, g, plus, run, seq, system, user
from kvspan.query.nodes import Generate, Node, has_generate, walk
from kvspan.query.optimizer import MAX_PASSES, RULES, Context, optimize
from kvspan.query.plan import make_plan
from kvspan.query.read import from_yaml
from query_strategies import queries

FIXTURES = sorted((Path(__file__).parents[1] / "fixtures" / "optimizer").glob("*.yaml"))


@pytest.mark.parametrize("file", FIXTURES, ids=lambda file: file.stem)
def test_fixture(file: Path) -> None:
    before, after = file.read_text(encoding="utf-8").split("\n---\n")
    (rules,) = (line[8:].split() for line in before.splitlines() if line.startswith("# rules:"))
    done = optimize(from_yaml(before), default_model="default/model")
    assert done.query == from_yaml(after)
    assert [fired.rule for fired in done.trace] == rules


def test_every_rule_has_a_fixture_and_a_doctest() -> None:
    text = "\n".join(file.read_text(encoding="utf-8") for file in FIXTURES)
    for rule in RULES:
        assert f"# rules: {rule.__name__}\n" in text
        assert ">>>" in (rule.__doc__ or "")


@given(queries)
def test_a_fixpoint_is_reached(query: Node) -> None:
    once = optimize(query, default_model="M").query
    again = optimize(once, default_model="M")
    assert again.query == once
    assert again.trace == ()
    for rule in RULES:
        assert rule(once, Context("M")) is once


@settings(deadline=None)
@given(queries)
def test_rules_keep_the_meaning(query: Node) -> None:
    """Run with every rule and with none: the same calls, the same answers."""
    chat = not has_generate(query)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(executor, "optimize", partial(optimize, rules=()))
            plain, calls = _run(g("M", query) if chat else query)
    except UsageError:
        assume(False)
    rewritten, rewritten_calls = _run(query)
    assert rewritten.answers == plain.answers
    assert rewritten_calls == calls


def _run(query: Node):
    engine = FakeEngine(ticks=0)
    result = run(query, engine=engine, model=None if has_generate(query) else "M")
    # Answers of the fake are never empty, so no prompt can become empty on the way.
    return result, sorted(
        (request.path, request.prompt, request.seed) for request in engine.requests
    )


def test_origins_are_paths_in_the_query_as_written() -> None:
    query = seq("a", seq("", seq(g("M", "x"), g("M", seq("", g("M", "y"))))))
    rewritten = optimize(query).query
    origins = [str(node.origin) for _, node in walk(rewritten) if isinstance(node, Generate)]
    assert origins == [
        "$.seq[1].seq[1].seq[0]",
        "$.seq[1].seq[1].seq[1]",
        "$.seq[1].seq[1].seq[1].g.input.seq[1]",
    ]
    assert [call.path for call in make_plan(rewritten).calls] == [
        origins[0],
        origins[2],
        origins[1],
    ]


def test_origins_start_anew_with_every_query() -> None:
    inner = optimize(plus(g("M", "a"), g("M", "a"))).query
    paths = [call.path for call in make_plan(optimize(cross(inner, inner)).query).calls]
    assert len(set(paths)) == 4


def test_trace_says_what_happened() -> None:
    (fired,) = optimize(g("M", cross("a", "", "b"))).trace
    assert (fired.rule, fired.number, fired.before, fired.after) == ("drop_empty", 1, 5, 4)
    assert fired.does.startswith("Children of joins")


def test_a_chat_needs_a_model() -> None:
    with pytest.raises(UsageError) as caught:
        optimize(cross(system("s"), "q"))
    assert str(caught.value) == (
        "$: the query asks no model anything; expected a g node, or a default model (--model); "
        "found only messages under cross"
    )


def test_rules_that_never_settle_are_stopped() -> None:
    def flip(query: Node, context: Context) -> Node:
        return user("b") if query == user("a") else user("a")

    with pytest.raises(KvspanError, match=f"did not settle in {MAX_PASSES} passes: flip"):
        optimize(user("a"), rules=(flip,))
