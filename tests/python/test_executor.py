"""Running queries on a fake engine: order, concurrency, seeds, failure, cancellation, closure."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

import pytest
from hypothesis import assume, given, settings

from fakes import FakeEngine, prompt_text
from kvspan import (
    KvspanError,
    UsageError,
    arun,
    assistant,
    cross,
    g,
    par,
    plus,
    run,
    seq,
    system,
)
from kvspan.engine import GenerateRequest
from kvspan.executor import derive_seed
from kvspan.query.nodes import Node
from kvspan.query.read import from_json
from kvspan.query.traverse import has_generate
from kvspan.query.write import dump_json
from query_strategies import deep_query, queries


def echo(request: GenerateRequest) -> str:
    return f"<{prompt_text(request.prompt)}>"


def test_an_answer_and_its_record() -> None:
    engine = FakeEngine(answer=echo)
    query = g("M", cross(system("s"), plus("a", "b"), "q"), max_tokens=7, temperature=0.0)
    result = run(query, engine=engine, seed=3, scope="isolated", placement="parallel", salt="t")
    assert result.answers == ["<s:s [u:a] [u:b] u:q>"]
    assert result.result == assistant("<s:s [u:a] [u:b] u:q>")
    (request,) = engine.requests
    assert (request.model, request.max_tokens, request.temperature) == ("M", 7, 0.0)
    assert (request.scope, request.placement, request.salt) == ("isolated", "parallel", "t")
    assert (request.path, request.seed) == ("$", derive_seed(3, "$"))
    (call,) = result.calls
    assert call.result.text == result.answers[0]
    assert result.usage.prompt_tokens == 4 and result.usage.cached_tokens == 2
    assert engine.closed == 0  # it was handed in


def test_inner_answers_become_assistant_messages() -> None:
    engine = FakeEngine(answer=echo)
    result = run(g("M", seq("judge", plus(g("M", "a"), g("M", "b")))), engine=engine)
    assert result.answers == ["<u:judge [a:<u:a>] [a:<u:b>]>"]
    assert [call.path for call in result.calls] == [
        "$.g.input.seq[1].plus[0]",
        "$.g.input.seq[1].plus[1]",
        "$",
    ]


def test_the_outcome_is_a_query_again() -> None:
    engine = FakeEngine(answer=lambda request: "ok")
    first = run(cross(system("s"), "q", g("M", cross(system("s"), "q"))), engine=engine)
    assert first.result == cross(system("s"), "q", assistant("ok"))
    assert first.answers == ["ok"]
    run(g("M", cross(first.result, "go on")), engine=engine)
    assert prompt_text(engine.requests[-1].prompt) == "s:s u:q a:ok u:go on"


@settings(deadline=None)
@given(queries)
def test_every_outcome_is_a_query_without_generates(query: Node) -> None:
    assume(has_generate(query))
    try:
        result = run(query, engine=FakeEngine(ticks=0))
    except UsageError:
        assume(False)
    assert not has_generate(result.result)
    assert from_json(dump_json(result.to_obj()["result"])) == result.result


def test_a_chat_goes_to_the_default_model() -> None:
    engine = FakeEngine(answer=echo)
    assert run(cross(system("s"), "q"), engine=engine, model="M").answers == ["<s:s u:q>"]
    with pytest.raises(UsageError, match="the query asks no model anything"):
        run(cross(system("s"), "q"), engine=engine)


@pytest.mark.parametrize("join", [par, plus], ids=["par", "plus"])
def test_independent_calls_run_side_by_side(join: Callable[..., Node]) -> None:
    engine = FakeEngine()
    run(join(g("M", str(n)) for n in range(10)), engine=engine, max_concurrency=4)
    assert engine.most == 4
    starts = [path for event, path in engine.events if event == "start"]
    assert starts == [f"$.{join().kind}[{n}]" for n in range(10)]  # in document order


@pytest.mark.parametrize("join", [seq, cross], ids=["seq", "cross"])
def test_ordered_calls_run_one_after_another(join: Callable[..., Node]) -> None:
    engine = FakeEngine()
    run(join(par(g("M", "a"), g("M", "b")), g("M", "c"), g("M", "d")), engine=engine)
    kind = join().kind
    firsts = {f"$.{kind}[0].par[0]", f"$.{kind}[0].par[1]"}
    assert engine.most == 2
    assert {path for _, path in engine.events[:4]} == firsts
    assert engine.events[4:] == [
        ("start", f"$.{kind}[1]"),
        ("end", f"$.{kind}[1]"),
        ("start", f"$.{kind}[2]"),
        ("end", f"$.{kind}[2]"),
    ]


def test_answers_do_not_depend_on_concurrency() -> None:
    query = par(g("M", plus(g("M", f"{n}"), g("M", f"{n}"))) for n in range(6))
    runs = [run(query, engine=FakeEngine(), max_concurrency=n, seed=5) for n in (1, 3, 50)]
    assert runs[0].answers == runs[1].answers == runs[2].answers


def test_seeds_come_from_the_run_and_the_path() -> None:
    query = plus(g("M", "same"), g("M", "same"))
    again = [run(query, engine=FakeEngine(), seed=seed).answers for seed in (0, 0, 1)]
    assert again[0] == again[1] != again[2]
    assert again[0][0] != again[0][1]
    # What stands around a generate moves its path, empty text beside it does not move the plan.
    assert run(plus(g("M", "same"), ""), engine=FakeEngine()).answers == again[0][:1]
    # Pinned: a change would silently change everybody's samples.
    assert derive_seed(0, "$") == PINNED_SEED
    assert all(0 <= derive_seed(n, "$") < 2**63 for n in (-1, 0, 2**200))


PINNED_SEED = 6981803043608607093


def test_defaults_fill_what_the_query_leaves_open() -> None:
    def sent(query: Node, **options: object) -> tuple[float | None, int | None]:
        engine = FakeEngine()
        run(query, engine=engine, **options)
        return engine.requests[0].temperature, engine.requests[0].max_tokens

    assert sent(g("M", "a")) == (0.6, None)
    assert sent(g("M", "a", max_tokens=0)) == (0.6, None)
    assert sent(g("M", "a"), temperature=0, max_tokens=9) == (0.0, 9)
    assert sent(g("M", "a", max_tokens=0), max_tokens=9) == (0.6, 9)
    assert sent(g("M", "a", 5, 0.0), temperature=1.0, max_tokens=9) == (0.0, 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scope": "wide"}, "unknown scope; expected anchored or isolated or full; found 'wide'"),
        ({"placement": "x"}, "unknown placement; expected sequential or parallel; found 'x'"),
        ({"seed": 1.5}, "bad seed; expected a whole number; found 1.5"),
        ({"salt": None}, "bad salt; expected a string; found null"),
        ({"temperature": -1}, "temperature is out of range"),
        ({"max_tokens": -1}, "max_tokens is not a token count"),
        ({"max_concurrency": 0}, "max_concurrency is not a count; expected a whole number from 1 "),
        ({"max_concurrency": "4"}, "max_concurrency is not a count"),
        ({"model": ""}, "bad model; expected a model's name, or None; found ''"),
        ({"model": 5}, "bad model; expected a model's name, or None; found 5"),
        ({"foo": 1}, "unknown option 'foo'; expected one of engine, open, on_text, model, seed, "),
        ({"temprature": 0}, "unknown option 'temprature' (did you mean temperature?); expec"),
        ({"engin": None}, "unknown option 'engin' (did you mean engine?); expected one of"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    engine = FakeEngine()
    with pytest.raises(UsageError) as caught:
        run(g("M", "a"), engine=engine, **options)
    assert str(caught.value).startswith(message)
    assert engine.requests == []


def test_what_is_not_a_query() -> None:
    with pytest.raises(UsageError, match="not a query; expected a query node; found 'text'"):
        run("text", engine=FakeEngine())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"^\$.plus\[1\].g.input: empty generate"):
        run(plus(g("M", "a"), g("M", cross())), engine=FakeEngine())


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (KvspanError("the pool is full"), KvspanError, "$.par[1]: the pool is full"),
        (KvspanError("no", path="$.par[1].g.input"), KvspanError, "$.par[1].g.input: no"),
        (UsageError("long", found="9"), UsageError, "$.par[1]: long; found 9"),
        (
            RuntimeError("bang\nsecond line"),
            KvspanError,
            "$.par[1]: generate failed: RuntimeError: ",
        ),
        (asyncio.CancelledError(), KvspanError, "$.par[1]: the engine cancelled the call"),
    ],
    ids=["failure", "failure that names the path", "usage", "bug", "cancelled by the engine"],
)
def test_failure_names_the_path_and_cancels_the_rest(
    error: BaseException, kind: type[Exception], message: str
) -> None:
    class Failing(FakeEngine):
        async def generate(self, request, on_text=None):
            if request.path == "$.par[1]":
                raise error
            self.gate = asyncio.Event()  # never opens
            return await super().generate(request, on_text)

    engine = Failing()
    with pytest.raises(kind) as caught:
        run(par(g("M", str(n)) for n in range(4)), engine=engine)
    assert type(caught.value) is kind
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
    assert engine.running == 0
    cancelled = {path for event, path in engine.events if event == "cancel"}
    assert cancelled == {path for event, path in engine.events if event == "start"}


def test_of_several_failures_the_first_in_the_plan_is_reported() -> None:
    def fail(request: GenerateRequest) -> str:
        raise KvspanError("no")

    for _ in range(3):
        with pytest.raises(KvspanError, match=r"^\$.par\[0\]: no$"):
            run(par(g("M", str(n)) for n in range(8)), engine=FakeEngine(answer=fail))


def test_nothing_is_started_after_a_failure() -> None:
    def fail(request: GenerateRequest) -> str:
        raise KvspanError("no")

    engine = FakeEngine(answer=fail)
    with pytest.raises(KvspanError):
        run(g("M", seq(g("M", "a"), g("M", "b"))), engine=engine)
    assert [request.path for request in engine.requests] == ["$.g.input.seq[0]"]


def test_empty_answers_leave_nothing_to_read() -> None:
    engine = FakeEngine(answer=lambda request: "")
    assert run(g("M", "a"), engine=engine).result == assistant("")
    assert run(g("M", cross("q", g("M", "a"))), engine=engine).answers == [""]
    with pytest.raises(KvspanError) as caught:
        run(g("M", plus(g("M", "a"))), engine=engine)
    assert not isinstance(caught.value, UsageError)
    assert str(caught.value) == "$.g.input: every answer it was to read came back empty"


def test_cancelling_the_run_cancels_every_call() -> None:
    engine = FakeEngine()

    async def main() -> None:
        engine.gate = asyncio.Event()
        task = asyncio.create_task(arun(par(g("M", str(n)) for n in range(5)), engine=engine))
        while engine.running < 5:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
    assert engine.running == 0
    assert sum(event == "cancel" for event, _ in engine.events) == 5


def test_run_inside_an_event_loop_says_what_to_do() -> None:
    async def main() -> None:
        assert (await arun(g("M", "a"), engine=FakeEngine(answer=echo))).answers == ["<u:a>"]
        with pytest.raises(UsageError, match=r"use await arun\(...\)"):
            run(g("M", "a"), engine=FakeEngine())

    asyncio.run(main())


def test_text_comes_as_it_is_made() -> None:
    pieces: list[tuple[str, str]] = []
    engine = FakeEngine(answer=lambda request: f"{len(request.prompt)}.")
    run(g("M", cross("a", g("M", "b"))), engine=engine, on_text=lambda *piece: pieces.append(piece))
    assert pieces == [("$.g.input.cross[1]", c) for c in "1."] + [("$", c) for c in "2."]


def test_a_listener_that_fails_ends_the_run() -> None:
    class Gone(Exception):
        pass

    def on_text(path: str, text: str) -> None:
        raise Gone

    engine = FakeEngine()
    with pytest.raises(Gone):
        run(par(g("M", "a"), g("M", "b")), engine=engine, on_text=on_text)
    assert engine.running == 0


def test_result_as_json() -> None:
    obj = run(seq(g("M", "a"), "b"), engine=FakeEngine(answer=echo), seed=1).to_obj()
    assert obj["answers"] == ["<u:a>"] and obj["answer_ids"] == [0]
    assert obj["result"] == {"seq": [{"assistant": "<u:a>"}, {"user": "b"}]}
    assert obj["usage"] == {"prompt_tokens": 1, "completion_tokens": 5, "cached_tokens": 0}
    (call,) = obj["calls"]
    assert call["path"] == "$.seq[0]" and call["text"] == "<u:a>"
    assert call["timings"]["ttft"] == 0.25 and call["reuse"]["moved_tokens"] == 2
    dump_json(obj)


def test_a_large_result_has_a_short_repr() -> None:
    result = run(g("M", plus(g("M", str(n)) for n in range(50))), engine=FakeEngine(ticks=0))
    assert re.fullmatch(r"<RunResult: 1 answer, 51 calls, \d+\.\d\d s>", repr(result))


def test_a_thousand_calls_deep() -> None:
    result = run(deep_query(2000), engine=FakeEngine(ticks=0, answer=lambda request: "a"))
    assert len(result.calls) == 1001
    assert result.result == assistant("a")


def test_many_calls_side_by_side() -> None:
    engine = FakeEngine(ticks=1, answer=lambda request: "a")
    result = run(g("M", plus(g("M", str(n)) for n in range(2000))), engine=engine)
    assert len(engine.requests[-1].prompt) == 2000
    assert engine.most == 16
    assert result.answers == ["a"]
