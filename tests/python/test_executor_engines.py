"""Which engines a run opens, asks and closes."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from fakes import FakeEngine
from kvspan import (
    UsageError,
    arun,
    executor,
    g,
    plus,
    run,
    seq,
)
from kvspan.engine import Capabilities
from kvspan.query.nodes import Node
from kvspan.query.prompt import Span

NO_SPANS = Capabilities(spans=False, reason="plain", max_tokens=0, block_size=0)


@pytest.mark.parametrize("use", ["run", "arun"])
def test_one_engine_per_model_opened_first_and_closed_last(use: str) -> None:
    opened: dict[str, FakeEngine] = {}

    def opener(model: str) -> FakeEngine:
        opened[model] = FakeEngine(answer=lambda request: f"{model} on {request.model}")
        return opened[model]

    def go(query: Node, **options: object):
        if use == "run":
            return run(query, open=opener, **options)
        return asyncio.run(arun(query, open=opener, **options))

    query = g("A", plus(g("B", "x"), g("A", "y"), g("B", "z")))
    assert go(query).answers == ["A on A"]
    assert {name: len(engine.requests) for name, engine in opened.items()} == {"B": 2, "A": 2}
    assert all(engine.closed == 1 for engine in opened.values())
    opened.clear()
    assert go(query, model="C").answers == ["C on C"]
    assert list(opened) == ["C"]


def test_a_model_that_cannot_be_opened_is_placed_in_the_query() -> None:
    opened: list[FakeEngine] = []

    def opener(model: str) -> FakeEngine:
        if model == "B":
            raise UsageError("model B: not found")
        opened.append(FakeEngine())
        return opened[-1]

    with pytest.raises(UsageError) as caught:
        run(seq(g("A", "x"), g("B", "y")), open=opener)
    assert str(caught.value) == "$.seq[1].g.model: model B: not found"
    assert [engine.closed for engine in opened] == [1]
    assert opened[0].requests == []
    with pytest.raises(UsageError, match=r"^model B: not found$"):
        run(g("A", "x"), open=opener, model="B")


def test_keeping_going_without_the_engine_of_one_model() -> None:
    opened: dict[str, FakeEngine] = {}
    tried: list[str] = []

    def opener(model: str) -> FakeEngine:
        tried.append(model)
        if model.startswith("bad"):
            raise UsageError(f"model {model}: not found")
        opened[model] = FakeEngine(answer=lambda request: model)
        return opened[model]

    query = seq(g("bad", "x"), g("A", plus(g("bad", "y"), "z")), g("A", "w"), g("bad2", "v"))
    records: list[dict] = []
    result = run(query, open=opener, keep_going=True, on_audit=records.append)
    assert (result.answers, tried) == (["A"], ["bad", "A", "bad2"])
    assert opened["A"].closed == 1 and len(opened["A"].requests) == 1
    assert [str(failure.message) for failure in result.failures] == [
        "$.seq[0].g.model: model bad: not found",
        "$.seq[1].g.input.plus[0].g.model: model bad: not found",
        "$.seq[1]: not run: it reads the answer of $.seq[1].g.input.plus[0], which failed",
        "$.seq[3].g.model: model bad2: not found",
    ]
    assert sum("error" in record for record in records) == 3
    # Where no model can be opened there is nothing to go on with.
    with pytest.raises(UsageError, match=r"^\$\.seq\[0\]\.g\.model: model bad: not found$"):
        run(seq(g("bad", "x"), g("bad2", "v")), open=opener, keep_going=True)


def test_large_queries_are_planned_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop goes on while a query is rewritten, planned and answered, engines opened or not."""
    loops: list[bool] = []
    plan_query = executor.plan_query

    def noted(*args: Any, **options: Any) -> Any:
        loops.append(threading.current_thread() is threading.main_thread())
        return plan_query(*args, **options)

    monkeypatch.setattr(executor, "plan_query", noted)
    engine = FakeEngine(ticks=0, can=NO_SPANS)
    query = g("M", plus(f"w{n}" for n in range(3)))
    asyncio.run(arun(query, engine=engine))
    assert loops == [False]
    asyncio.run(arun(query, open=lambda model: engine))
    assert loops == [False] * 3  # once more when the engine is known to have no spans


def test_engines_that_are_opened_are_asked_what_they_can_do() -> None:
    engines = {"A": FakeEngine(ticks=0), "B": FakeEngine(ticks=0, can=NO_SPANS)}
    spans = plus("x", g("A", "w"))
    query = seq(g("A", spans), g("B", spans))
    result = run(query, open=engines.__getitem__)
    (fired,) = [fired for fired in result.trace if fired.rule == "plain_prompts"]
    assert fired.reasons == ("B: plain",)
    prompts = {request.path: request.prompt for e in engines.values() for request in e.requests}
    assert any(isinstance(part, Span) for part in prompts["$.seq[0]"])
    assert not any(isinstance(part, Span) for part in prompts["$.seq[1]"])
    kept = {r.path: r.keep_answer for e in engines.values() for r in e.requests}
    assert kept["$.seq[0].g.input.plus[1]"] and not kept["$.seq[1].g.input.plus[1]"]
