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
from kvspan.engine import Capabilities, GenerateRequest
from kvspan.executor import RunResult
from kvspan.query.forms import has_text
from kvspan.query.nodes import Generate, Node
from kvspan.query.optimizer import MAX_PASSES, RULES, Context, optimize
from kvspan.query.plan import Call, make_plan
from kvspan.query.prompt import Message, Prompt, Span
from kvspan.query.read import from_yaml
from kvspan.query.retrieval import Corpus
from kvspan.query.traverse import has_generate, walk
from query_strategies import queries, runnable_queries

HEADS = ("rules", "nested", "order", "kept", "plain")
# What the engines of the model P and of all others can do.
NO_SPANS = Capabilities(spans=False, reason="it is plain", max_tokens=0, block_size=0)
ALL = replace(NO_SPANS, spans=True, answers=True, reason="")
FIXTURES = sorted((Path(__file__).parents[1] / "fixtures" / "optimizer").glob("*.yaml"))


class Words:
    """A retriever whose fragments are the words of the query, with the corpus in front."""

    def retrieve(self, query: str, corpus: Corpus) -> list[str]:
        return [f"{corpus.name}: {word}" for word in query.split()]


@pytest.mark.parametrize("file", FIXTURES, ids=lambda file: file.stem)
def test_fixture(file: Path) -> None:
    before, after = file.read_text(encoding="utf-8").split("\n---\n")
    heads: dict[str, list[str]] = {}
    for line in before.splitlines():
        name, found, words = line.removeprefix("# ").partition(":")
        if line.startswith("# ") and found and name in HEADS:
            heads[name] = words.split()
    done = optimize(
        from_yaml(before),
        default_model="default/model",
        retriever=Words(),
        nested=heads.get("nested", ["answer"])[0],  # type: ignore[arg-type]
        order=heads.get("order", ["canonical"])[0],  # type: ignore[arg-type]
        capabilities=lambda model: NO_SPANS if model == "P" else ALL,
    )
    assert done.query == from_yaml(after)
    assert [fired.rule for fired in done.trace] == heads["rules"]
    asks = [node for _, node in walk(done.query) if isinstance(node, Generate)]
    for name in ("kept", "plain"):
        if name in heads or not done.trace:
            marked = [str(node.origin) for node in asks if getattr(node, name)]
            assert marked == heads.get(name, [])


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
    assume(has_generate(query) or has_text(query))  # the rest is refused
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
def test_plain_prompts_are_the_spans_in_order(query: Node) -> None:
    """An engine without spans gets the same messages, all of a span's as the user's."""
    with_spans, calls = _run(query, text_answer, order="pinned")
    plain, plain_calls = _run(query, text_answer, order="pinned", can=NO_SPANS)
    assert plain.answers == with_spans.answers
    flat = [
        (path, tuple(m for p in prompt for m in getattr(p, "messages", (p,))), seed)
        for path, prompt, seed in calls
    ]
    assert [(path, texts(p), seed) for path, p, seed in plain_calls] == [
        (path, texts(p), seed) for path, p, seed in flat
    ]
    assert not any(isinstance(part, Span) for _, prompt, _ in plain_calls for part in prompt)
    fired = [fired for fired in plain.trace if fired.rule == "plain_prompts"]
    assert bool(fired) == any(isinstance(p, Span) for _, prompt, _ in calls for p in prompt)
    assert all(": it is plain" in reason for f in fired for reason in f.reasons)


def text_answer(request: GenerateRequest) -> str:
    """Like digest_answer, but blind to roles and spans."""
    every = [m.text for p in request.prompt for m in getattr(p, "messages", (p,))]
    return digest_answer(replace(request, prompt=tuple(Message("user", t) for t in every)))


def texts(prompt: Prompt) -> list[str]:
    return [part.text for part in prompt if isinstance(part, Message)]


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
    engine = FakeEngine(answer, ticks=0, can=settings.pop("can", ALL))  # type: ignore[arg-type]
    try:
        with pytest.MonkeyPatch.context() as patch:
            inner = {"rules": settings.pop("rules")} if "rules" in settings else {}
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
