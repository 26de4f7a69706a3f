"""The engine for OpenAI-compatible servers, against a server that fails in all the usual ways."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import kvspan as kv
from faulty_server import FaultyServer, Handler, Step, answer, error
from kvspan.engine import GenerateRequest, GenerateResult
from kvspan.engine import openai as engine_module
from kvspan.engine.openai import OpenAIEngine
from kvspan.engine.openai_errors import EngineStatusError
from kvspan.errors import KvspanError, UsageError
from kvspan.query.prompt import Message, Span

DOCS = (Span((Message("user", "a"),)), Span((Message("user", "b"), Message("user", "c"))))
BACKOFF = engine_module.backoff
PROMPT = (Message("system", "s"), *DOCS, Message("user", "q"))


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVSPAN_API_KEY", "OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(engine_module, "backoff", lambda attempt: 0.0)
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.001)


@contextmanager
def serving(*script: Step, models: tuple[str, ...] = ("M",), **options: Any) -> Iterator[Any]:
    with (
        FaultyServer(*script, models=models) as server,
        OpenAIEngine("M", base_url=server.url, **options) as engine,
    ):
        yield server, engine


def ask(engine: OpenAIEngine, stream: bool = False, **fields: Any) -> GenerateResult:
    request = GenerateRequest(**{"prompt": PROMPT, "temperature": 0.0, **fields})
    pieces: list[str] = []
    result = asyncio.run(engine.generate(request, pieces.append if stream else None))
    assert not stream or "".join(pieces) == result.text
    return result


def bodies(server: FaultyServer) -> list[dict[str, Any]]:
    return [body for _, _, body in server.requests]


both = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@both
def test_an_answer(stream: bool) -> None:
    with serving(answer("hello")) as (server, engine):
        result = ask(engine, stream, max_tokens=5, stop=("x",))
    assert result.text == "hello" and result.finish_reason == "stop"
    assert result.usage == kv.engine.Usage(7, 2, 4)
    (path, _, body), = server.requests  # fmt: skip
    assert path == "/v1/chat/completions"
    assert body["messages"] == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a\n\nb\n\nc\n\nq"},
    ]
    assert (body["model"], body["max_tokens"], body["stop"]) == ("M", 5, ["x"])
    assert body["temperature"] == 0 and "seed" not in body
    (note,) = result.reuse.notes
    assert note.startswith("spans sent as plain text") and server.url in note


@both
def test_a_completion(stream: bool) -> None:
    with serving(answer("hello", "length")) as (server, engine):
        prompt = (Message("user", "once"),)
        result = ask(engine, stream, chat=False, prompt=prompt, temperature=1.0, seed=2**40 + 3)
    assert result.text == "hello" and result.finish_reason == "length" and not result.reuse.notes
    (path, _, body), = server.requests  # fmt: skip
    assert path == "/v1/completions"
    assert (body["prompt"], body["temperature"], body["seed"]) == ("once", 1.0, 3)


@both
@pytest.mark.parametrize("status", [429, 500, 502, 503])
def test_asks_again_after_a_passing_failure(status: int, stream: bool) -> None:
    with serving(error(status), error(status), answer("hello"), max_retries=2) as (server, engine):
        result = ask(engine, stream)
    assert result.text == "hello" and len(server.requests) == 3
    assert "answered at attempt 3" in result.reuse.notes


@both
@pytest.mark.parametrize("status", [400, 401, 404, 429, 500])
def test_a_lasting_failure_names_the_status(status: int, stream: bool) -> None:
    with (
        serving(error(status, "the reason"), max_retries=2) as (server, engine),
        pytest.raises(EngineStatusError, match=f"HTTP {status} from {server.url}: the reason") as e,
    ):
        ask(engine, stream)
    assert e.value.status == status
    assert len(server.requests) == (3 if status in (429, 500) else 1)
    assert ("KVSPAN_API_KEY" in str(e.value)) == (status == 401)


@both
def test_a_server_that_is_silent(stream: bool) -> None:
    release = threading.Event()

    def hang(handler: Handler) -> None:
        release.wait(30)

    with serving(hang, timeout=0.2, max_retries=1) as (server, engine):
        with pytest.raises(KvspanError, match=r"no answer within 0\.2 s in 2 attempts"):
            ask(engine, stream)
        assert len(server.requests) == 2
        release.set()


def test_a_stream_that_falls_silent() -> None:
    release = threading.Event()

    def hang(handler: Handler) -> None:
        handler.start_stream()
        handler.delta("he")
        release.wait(30)

    with serving(hang, timeout=0.2) as (_, engine):
        with pytest.raises(KvspanError, match=r"the stream broke: .*[Tt]ime"):
            ask(engine, True)
        release.set()


def test_no_server_at_all() -> None:
    with FaultyServer() as server:
        url = server.url
    with (
        OpenAIEngine("M", base_url=url, max_retries=0) as engine,
        pytest.raises(KvspanError, match=f"{url}: no connection: ConnectError"),
    ):
        ask(engine)
    with (
        OpenAIEngine("M", base_url=url, max_retries=1) as engine,
        pytest.raises(KvspanError, match=f"{url}: no connection in 2 attempts: ConnectError"),
    ):
        ask(engine)


def cut_after(*pieces: str) -> Step:
    def step(handler: Handler) -> None:
        handler.start_stream()
        for piece in pieces:
            handler.delta(piece)
        handler.cut()

    return step


def end_after(*pieces: str) -> Step:
    """Ends in good order, but says nowhere that the answer is complete."""

    def step(handler: Handler) -> None:
        handler.start_stream()
        for piece in pieces:
            handler.delta(piece)
        handler.chunk(b"")

    return step


@pytest.mark.parametrize("broken", [cut_after, end_after])
def test_a_dropped_stream(broken: Any) -> None:
    with serving(broken(), answer("hello"), max_retries=1) as (server, engine):
        result = ask(engine, True)
        assert result.text == "hello"
        assert "the stream broke once before it began" in result.reuse.notes
    # What has been handed on cannot be taken back, so it is not asked for again.
    with serving(broken("he"), answer("hello")) as (server, engine):
        with pytest.raises(KvspanError, match="the stream broke: "):
            ask(engine, True)
        assert len(server.requests) == 1


MALFORMED = {
    "not JSON": lambda h: h.send(200, b'{"choices": [', content_type="application/json"),
    "a page": lambda h: h.send(200, b"<html>hi</html>", content_type="text/html"),
    "no choices": lambda h: h.send(200, {"object": "x"}),
    "empty choices": lambda h: h.send(200, {"choices": []}),
    "an array": lambda h: h.send(200, [1]),
}


@pytest.mark.parametrize("step", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_answer(step: Step) -> None:
    with (
        serving(step) as (server, engine),
        pytest.raises(KvspanError, match=f"{server.url}: the answer is not what the protocol says"),
    ):
        ask(engine)


def test_malformed_and_failing_streams() -> None:
    def garbage(handler: Handler) -> None:
        handler.start_stream()
        handler.chunk(b"data: {nonsense\n\n")

    def fails(handler: Handler) -> None:
        handler.start_stream()
        handler.delta("he")
        handler.event({"error": {"message": "out of blocks", "code": 500}})

    with serving(garbage, fails) as (server, engine):
        with pytest.raises(KvspanError, match="the answer is not what the protocol says: JSON"):
            ask(engine, True)
        with pytest.raises(KvspanError, match=f"{server.url}: out of blocks"):
            ask(engine, True)


def test_fields_that_a_server_does_not_know() -> None:
    def picky(handler: Handler) -> None:
        words = {
            "max_tokens": "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens'.",
            "stream_options": "Unknown field stream_options",
            "seed": "Extra inputs are not permitted: seed",
        }
        for name, message in words.items():
            if name in handler.body:
                error(400, message)(handler)
                return
        answer("hello")(handler)

    with serving(picky) as (server, engine):
        result = ask(engine, True, max_tokens=3, temperature=1.0)
        assert result.text == "hello" and len(server.requests) == 4
        assert bodies(server)[-1]["max_completion_tokens"] == 3
        assert any("takes no seed" in note for note in result.reuse.notes)
        ask(engine, True, max_tokens=3, temperature=1.0)  # by now it is known
        assert len(server.requests) == 5
    with (
        serving(error(400, "max_tokens is too large: unsupported")) as (server, engine),
        pytest.raises(EngineStatusError, match="too large"),
    ):
        ask(engine, max_tokens=3)


def test_calls_at_a_time_are_limited() -> None:
    gate = threading.Semaphore(0)

    def slow(handler: Handler) -> None:
        gate.acquire(timeout=30)
        answer("hello")(handler)

    with serving(slow, max_concurrency=3) as (server, engine):

        async def many() -> list[GenerateResult]:
            request = GenerateRequest(prompt=PROMPT, temperature=0.0)
            tasks = [asyncio.ensure_future(engine.generate(request)) for _ in range(12)]
            while server.most < 3:
                await asyncio.sleep(0.005)
            for _ in range(12):
                gate.release()
            return await asyncio.gather(*tasks)

        assert len(asyncio.run(many())) == 12
        assert server.most == 3 and len(server.requests) == 12


def test_cancelling_hangs_up() -> None:
    def endless(handler: Handler) -> None:
        handler.start_stream()
        while True:
            handler.delta("x" * 1000)

    with serving(endless) as (server, engine):

        async def cancel() -> None:
            started = asyncio.Event()
            request = GenerateRequest(prompt=PROMPT)
            task = asyncio.ensure_future(engine.generate(request, lambda text: started.set()))
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(cancel())
        assert server.left.wait(10)


def test_one_engine_serves_any_number_of_event_loops() -> None:
    with serving(answer("hello")) as (_, engine):
        assert [ask(engine, i % 2 == 1).text for i in range(4)] == ["hello"] * 4
    with pytest.raises(KvspanError, match="closed"):
        ask(engine)


@pytest.mark.parametrize(
    "models, asked, sent",
    [
        (("M",), "openai/M", "M"),
        (("openai/M", "M"), "openai/M", "openai/M"),
        (("M",), "spnl/M", "M"),
        (("X",), "spnl/M", "spnl/M"),
        (("X",), "meta/M", "meta/M"),
    ],
)
def test_model_names(models: tuple[str, ...], asked: str, sent: str) -> None:
    with serving(models=models) as (server, engine):
        ask(engine, model=asked)
        assert [entry["id"] for entry in engine.models()] == list(models)
    assert bodies(server)[0]["model"] == sent


def test_the_key_is_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "second")
    with serving() as (server, engine):
        ask(engine)
    monkeypatch.setenv("KVSPAN_API_KEY", "first")
    monkeypatch.setenv("OPENAI_BASE_URL", server.url)
    with serving() as (again, _), OpenAIEngine("M", base_url=again.url) as engine:
        ask(engine)
    keys = [headers["authorization"] for s in (server, again) for _, headers, _ in s.requests]
    assert keys == ["Bearer second", "Bearer first"]
    with OpenAIEngine("M") as engine:
        assert engine.url == server.url


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "no API key for https://api.openai.com/v1; expected one in KVSPAN_API_KEY or"),
        ({"base_url": "localhost:8000"}, "bad base URL; expected http"),
        ({"base_url": "http://x", "timeout": 0}, "bad timeout"),
        ({"base_url": "http://x", "max_retries": -1}, "bad max_retries"),
        ({"base_url": "http://x", "max_concurrency": 0}, "bad max_concurrency"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        kv.open_engine("M", kind="openai", **options)


def test_a_query_over_a_server() -> None:
    def echo(handler: Handler) -> None:
        answer(handler.body["messages"][-1]["content"].upper())(handler)

    with serving(echo) as (_, engine):
        inner = [kv.g("M", f"part {i}", temperature=0) for i in range(3)]
        result = kv.run(kv.g("M", kv.cross(kv.plus(inner), "all"), temperature=0), engine=engine)
        assert result.usage.prompt_tokens == 4 * 7
    assert result.answers == ["PART 0\n\nPART 1\n\nPART 2\n\nALL"]
    assert not any(call.result.reuse.notes for call in result.calls)
    (fired,) = [fired for fired in result.trace if fired.rule == "plain_prompts"]
    assert fired.reasons == (f"M: {engine.capabilities().reason}",)


def test_waiting_doubles_with_jitter() -> None:
    for attempt in range(1, 9):
        waits = [BACKOFF(attempt) for _ in range(50)]
        most = min(8.0, 0.5 * 2**attempt)
        assert most / 2 <= min(waits) < max(waits) <= most
