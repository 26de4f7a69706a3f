"""Rewrite rules: fixture pairs, the fixpoint, and that they keep the meaning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import assume, given

from fakes import FakeEngine, digest_answer, prompt_text
from kvspan import KvspanError, UsageError, cross, executor, g, plus, run, seq, system, user
from kvspan.engine import GenerateRequest
from kvspan.executor import RunResult
from kvspan.query.forms import has_generate
from kvspan.query.nodes import Generate, Node, walk
from kvspan.query.optimizer import MAX_PASSES, RULES, Context, optimize
from kvspan.query.plan import Call, Message, make_plan
from kvspan.query.read import from_yaml
from kvspan.query.retrieval import Corpus
from query_strategies import queries, runnable_queries

FIXTURES = sorted((Path(__file__).parents[1] / "fixtures" / "optimizer").glob("*.yaml"))


class Words:
    """A retriever whose fragments are the words of the query, with the corpus in front."""

    def retrieve(self, query: str, corpus: Corpus) -> list[str]:
        return [f"{corpus.name}: {word}" for word in query.split()]


@pytest.mark.parametrize("file", FIXTURES, ids=lambda file: file.stem)
def test_fixture(file: Path) -> None:
    before, after = file.read_text(encoding="utf-8").split("\n---\n")
    heads = {}
    for line in before.splitlines():
        name, found, words = line.removeprefix("# ").partition(":")
        if line.startswith("# ") and found and name in ("rules", "native", "nested", "order"):
            heads[name] = words.split()
    done = optimize(
        from_yaml(before),
        default_model="default/model",
        retriever=Words(),
        native=frozenset(heads.get("native", [])),
        nested=heads.get("nested", ["answer"])[0],
        order=heads.get("order", ["canonical"])[0],
    )
    assert done.query == from_yaml(after)
    assert [fired.rule for fired in done.trace] == heads["rules"]


def test_every_rule_has_a_fixture_and_a_doctest() -> None:
    fired = {
        word
        for file in FIXTURES
        for line in file.read_text(encoding="utf-8").splitlines()
        if line.startswith("# rules:")
        for word in line.split()[2:]
    }
    assert fired == {rule.__name__ for rule in RULES}
    assert all(">>>" in (rule.__doc__ or "") for rule in RULES)


@given(queries)
def test_a_fixpoint_is_reached(query: Node) -> None:
    once = optimize(query, default_model="M").query
    again = optimize(once, default_model="M")
    assert again.query == once
    assert again.trace == ()
    for rule in RULES:
        assert rule(once, Context("M")) is once


@given(runnable_queries)
def test_rules_keep_every_prompt_of_a_pinned_run(query: Node) -> None:
    """Run with every rule and with none: the same calls, the same answers."""
    plain, calls = _run(_explicit(query), digest_answer, rules=())
    rewritten, rewritten_calls = _run(query, digest_answer, order="pinned")
    assert rewritten.answers == plain.answers
    assert rewritten_calls == calls


@given(runnable_queries)
def test_rules_keep_the_meaning_in_any_order(query: Node) -> None:
    """Spans may move: the same answers from a model that reads them as a set."""
    plain, _ = _run(_explicit(query), set_answer, rules=())
    rewritten, _ = _run(query, set_answer)
    assert rewritten.answers == plain.answers


@given(runnable_queries)
def test_native_engines_get_the_same_calls(query: Node) -> None:
    native = frozenset({"map", "repeat"})
    plain, calls = _run(query, digest_answer, order="pinned")
    gathered, gathered_calls = _run(query, digest_answer, order="pinned", native=native)
    assert gathered.answers == plain.answers
    assert gathered_calls == calls


@given(runnable_queries)
def test_inner_answers_do_not_change_with_what_is_read_of_them(query: Node) -> None:
    """Plus distribution: calls that read no answer are the same, and the others read more."""
    plain, calls = _run(query, digest_answer, order="pinned")
    _, whole_calls = _run(query, digest_answer, order="pinned", nested="whole")
    leaves = {call.path for call in plain_leaves(plain)}
    assert [c for c in whole_calls if c[0] in leaves] == [c for c in calls if c[0] in leaves]
    assert [path for path, *_ in whole_calls] == [path for path, *_ in calls]


def plain_leaves(result: RunResult) -> list[Call]:
    return [call for call in make_plan(result.query).calls if not call.inputs]


def set_answer(request: GenerateRequest) -> str:
    """Like digest_answer, but blind to the order of messages."""
    words = sorted(prompt_text((m,)) for p in request.prompt for m in getattr(p, "messages", (p,)))
    return digest_answer(replace(request, prompt=(Message("user", " ".join(words)),)))


def _explicit(query: Node) -> Node:
    return query if has_generate(query) else g("M", query)


def _run(query: Node, answer: Callable[[GenerateRequest], str], **settings: object):
    engine = FakeEngine(answer, ticks=0)
    try:
        with pytest.MonkeyPatch.context() as patch:
            inner = {name: settings.pop(name) for name in ("rules", "native") if name in settings}
            patch.setattr(executor, "optimize", partial(optimize, **inner))
            model = None if has_generate(query) else "M"
            result = run(query, engine=engine, model=model, **settings)
    except UsageError:
        assume(False)
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
    assert fired.tree == g("M", cross("a", "b"))
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
