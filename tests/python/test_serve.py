"""The server through the official client, its queries, spans and metrics."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import kvspan as kv
from kvspan.engine import GenerateRequest
from kvspan.engine.local import LocalEngine
from kvspan.engine.openai import OpenAIEngine
from kvspan.query.prompt import Message, Span
from serving import CHAT, ServerProcess, events

TEXT = {"model": "tiny", "prompt": "w1 w2", "max_tokens": 4}
PASSAGES = [" ".join(f"w{(7 * d + i) % 150}" for i in range(30)) for d in range(5)]


@pytest.fixture(scope="module")
def local(tiny_folder: Path) -> Iterator[LocalEngine]:
    with LocalEngine.open(str(tiny_folder), kv_cache_gib=0.02) as engine:
        yield engine


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def request(*prompt: Message | Span, **options: Any) -> GenerateRequest:
    return GenerateRequest(prompt=prompt, **{"temperature": 1.0, "max_tokens": 6, **options})


def test_chat(client: openai.OpenAI, local: LocalEngine) -> None:
    messages: Any = [
        {"role": "developer", "content": "w5"},
        {"role": "user", "content": "w1 w2"},
        {"role": "assistant", "content": [{"type": "text", "text": "w9"}]},
        {"role": "user", "content": "w3"},
    ]
    result = client.chat.completions.create(
        model="tiny", messages=messages, max_completion_tokens=6, seed=7, user="me", top_p=1
    )
    parts = [("system", "w5"), ("user", "w1 w2"), ("assistant", "w9"), ("user", "w3")]
    expected = local.run(request(*(Message(*part) for part in parts), seed=7))  # type: ignore[arg-type]
    (choice,) = result.choices
    assert choice.message.content == expected.text and choice.message.role == "assistant"
    assert choice.finish_reason == "length" and result.object == "chat.completion"
    assert result.usage is not None
    assert result.usage.prompt_tokens == expected.usage.prompt_tokens
    assert (result.usage.completion_tokens, result.model) == (6, "tiny")
    again = client.chat.completions.create(
        model="other", messages=messages, max_tokens=6, seed=7, temperature=0.0, n=1
    )
    assert again.usage is not None and again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens == 16
    assert again.model == "other"


def test_choices_differ_and_the_first_is_what_one_would_be(client: openai.OpenAI) -> None:
    several = client.chat.completions.create(**CHAT, n=5, seed=3)
    texts = [choice.message.content for choice in several.choices]
    assert [choice.index for choice in several.choices] == list(range(5)) and len(set(texts)) > 1
    assert client.chat.completions.create(**CHAT, seed=3).choices[0].message.content == texts[0]
    assert several.usage is not None
    assert (several.usage.prompt_tokens, several.usage.completion_tokens) == (7, 20)
    other = client.chat.completions.create(**CHAT, n=5)
    assert [choice.message.content for choice in other.choices] != texts


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("chat", [True, False])
def test_a_stream_is_the_answer_in_pieces(client: openai.OpenAI, chat: bool, n: int) -> None:
    api: Any = client.chat.completions if chat else client.completions
    body = {**(CHAT if chat else TEXT), "max_tokens": 12, "seed": 5, "n": n}
    whole = api.create(**body)
    chunks = list(api.create(**body, stream=True, stream_options={"include_usage": True}))
    texts, reasons = [""] * n, [None] * n
    for chunk in chunks[:-1]:
        assert chunk.id == chunks[0].id and chunk.usage is None
        for choice in chunk.choices:
            assert reasons[choice.index] is None
            texts[choice.index] += (choice.delta.content if chat else choice.text) or ""
            reasons[choice.index] = choice.finish_reason
    assert texts == [c.message.content if chat else c.text for c in whole.choices]
    assert reasons == ["length"] * n and len(chunks) > 4 * n
    assert not chunks[-1].choices
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 12 * n
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert all(chunk.usage is None for chunk in api.create(**body, stream=True))


def test_asynchronous_clients(server: ServerProcess) -> None:
    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            whole = await client.chat.completions.create(**CHAT, seed=1)
            text = ""
            async for chunk in await client.chat.completions.create(**CHAT, seed=1, stream=True):
                text += chunk.choices[0].delta.content or ""
            assert text == whole.choices[0].message.content
            assert [model.id async for model in client.models.list()] == ["tiny", "other"]

    asyncio.run(run())


def test_completions(client: openai.OpenAI, local: LocalEngine) -> None:
    result = client.completions.create(model="tiny", prompt=["w1 w2", "w3"], seed=2)
    expected = [local.run(request(Message("user", text), chat=False, scope="full", seed=2,
                                  max_tokens=16)) for text in ("w1 w2", "w3")]  # fmt: skip
    assert [choice.text for choice in result.choices] == [one.text for one in expected]
    assert result.usage is not None and result.usage.prompt_tokens == 3 + 2  # with <bos>
    ids = local.encoder.encode((Message("user", "w1 w2"),), "full", chat=False).token_ids.tolist()
    for prompt in (ids, [ids]):
        tokens = client.completions.create(model="tiny", prompt=prompt, seed=2)
        assert tokens.choices[0].text == expected[0].text


def test_spans_in_any_order(client: openai.OpenAI, local: LocalEngine) -> None:
    def ask(order: list[int], **extension: Any) -> Any:
        parts: list[Any] = [
            {"type": "text", "text": PASSAGES[i], "kvspan": {"span": True}} for i in order
        ]
        parts.append({"type": "text", "text": "w77", "kvspan": {"span": False}})
        return client.chat.completions.create(
            model="tiny",
            messages=[{"role": "system", "content": "w1"}, {"role": "user", "content": parts}],
            max_tokens=8,
            temperature=0,
            extra_body={"kvspan": {"report": True, **extension}},
        )

    def reuse(answer: Any) -> dict[str, Any]:
        return dict(answer.choices[0].model_extra["kvspan"]["reuse"])

    first, moved = ask([0, 1, 2]), ask([2, 0, 1])
    assert reuse(first)["prepared_tokens"] == reuse(moved)["span_tokens"] == 3 * 32
    assert reuse(moved)["reused_tokens"] == 3 * 32 and reuse(moved)["prepared_tokens"] == 0
    spans = [Span((Message("user", PASSAGES[i]),)) for i in (2, 0, 1)]
    prompt = (Message("system", "w1"), *spans, Message("user", "w77"))
    for answer, options in (
        (moved, {}),
        (ask([2, 0, 1], placement="parallel"), {"placement": "parallel"}),
        (ask([2, 0, 1], scope="isolated", salt="me"), {"scope": "isolated"}),
        (ask([2, 0, 1], scope="full"), {"scope": "full"}),
    ):
        expected = local.run(request(*prompt, temperature=0.0, max_tokens=8, **options))
        assert answer.choices[0].message.content == expected.text
    assert reuse(ask([2, 0, 1], salt="another"))["reused_tokens"] == 0


def test_stop_texts(client: openai.OpenAI) -> None:
    body = {**CHAT, "max_tokens": 40, "seed": 11}
    text = client.chat.completions.create(**body).choices[0].message.content or ""
    stop = text.split()[20]
    expected = text[: text.index(stop)]
    for value in (stop, ["never", stop]):
        cut = client.chat.completions.create(**body, stop=value)
        assert cut.choices[0].message.content == expected
        assert cut.choices[0].finish_reason == "stop"
    pieces = list(client.chat.completions.create(**body, stop=stop, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in pieces) == expected


QUERY = {"g": {"model": "spnl/tiny", "max_tokens": 5, "input": {"cross": [
    {"system": "w1"}, {"plus": [{"user": text} for text in PASSAGES]}, {"plus": [
        {"g": {"model": "tiny", "max_tokens": 3, "input": {"user": word}}} for word in ("w2", "w3")
    ]}, {"user": "w4"}]}}}  # fmt: skip
TWO = {
    "plus": [{"g": {"model": "tiny", "max_tokens": 5, "input": {"user": w}}} for w in ("w1", "w2")]
}


@pytest.mark.parametrize("query", [QUERY, TWO, {"user": "w1 w2"}], ids=["nested", "two", "chat"])
def test_queries(server: ServerProcess, local: LocalEngine, query: Any) -> None:
    url = "/v1/query/execute?seed=4&temperature=0.9&max_tokens=7"
    reply = server.post(url, query)
    expected = kv.run(
        kv.loads(json.dumps(query)),
        engine=local,
        model="tiny",
        seed=4,
        temperature=0.9,
        max_tokens=7,
    )
    assert reply.status == 200, reply.data
    assert [c["message"]["content"] for c in reply.json["choices"]] == expected.answers
    assert reply.json["kvspan"]["result"] == expected.to_obj()["result"]
    calls = reply.json["kvspan"]["calls"]
    assert [(c["path"], c["text"]) for c in calls] == [
        (c.path, c.result.text) for c in expected.calls
    ]
    assert reply.json["usage"]["completion_tokens"] == expected.usage.completion_tokens
    chunks = events(server.post(url + "&stream=true", query).data)
    texts = [""] * len(expected.answers)
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == expected.answers and len(chunks) > 5
    assert chunks[-1]["kvspan"]["answers"] == expected.answers


def test_our_own_engine_for_servers(server: ServerProcess, local: LocalEngine) -> None:
    query = kv.loads(json.dumps(QUERY))
    with OpenAIEngine("tiny", base_url=f"{server.url}/v1") as engine:
        assert [model["id"] for model in engine.models()] == ["tiny", "other"]
        pieces: list[str] = []
        for _ in range(2):
            result = kv.run(
                query, engine=engine, temperature=0, on_text=lambda path, text: pieces.append(text)
            )
        plain = request(
            Message("user", "w1 w2"), chat=False, scope="full", stop=("w9",), seed=2**33
        )
        assert asyncio.run(engine.generate(plain)).usage.prompt_tokens == 3
    expected = kv.run(query, engine=local, scope="full", temperature=0)
    assert result.answers == expected.answers and result.usage.cached_tokens > 0
    assert result.usage.prompt_tokens == expected.usage.prompt_tokens
    (reason,) = {reason for fired in result.trace for reason in fired.reasons}
    assert "takes plain prompts only" in reason
    assert len(pieces) > 5


def test_fifty_requests_at_once(server: ServerProcess) -> None:
    def body(number: int) -> Any:
        parts = [{"type": "text", "text": PASSAGES[i % 5], "kvspan": {"span": True}}
                 for i in (number, number + 2)]  # fmt: skip
        parts.append({"type": "text", "text": f"w{number}"})
        return {"model": "tiny", "messages": [{"role": "user", "content": parts}], "seed": number,
                "max_tokens": 10}  # fmt: skip

    async def run() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0
        ) as client:

            async def ask(number: int) -> str:
                if number % 2:
                    whole = await client.chat.completions.create(**body(number))
                    return whole.choices[0].message.content or ""
                stream = await client.chat.completions.create(**body(number), stream=True)
                return "".join([c.choices[0].delta.content or "" async for c in stream])

            together = await asyncio.gather(*(ask(number) for number in range(50)))
            assert together == [await ask(number) for number in range(50)]

    asyncio.run(run())
    assert server.metric("kvspan_pool_blocks", state="in_use") == 0


def test_metrics_and_health(server: ServerProcess) -> None:
    names = ("prompt_tokens", "cached_prompt_tokens", "completion_tokens", "span_tokens_looked_up",
             "span_tokens_hit", "span_tokens_moved", "span_tokens_prepared")  # fmt: skip

    def values() -> list[float]:
        return [server.metric(f"kvspan_{name}_total") for name in names]

    def requests(status: str) -> float:
        return server.metric("kvspan_requests_total", endpoint="/v1/query/execute", status=status)

    before, counted, count = values(), requests("200"), server.metric("kvspan_ttft_seconds_count")
    reply = server.post("/v1/query/execute?salt=metrics", QUERY)
    calls = reply.json["kvspan"]["calls"]
    usage, reuse = reply.json["usage"], [call["reuse"] for call in calls]
    expected = [usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"],
                usage["completion_tokens"]]  # fmt: skip
    for name in ("span_tokens", "reused_tokens", "moved_tokens", "prepared_tokens"):
        expected.append(sum(one[name] for one in reuse))
    assert [new - old for new, old in zip(values(), before, strict=True)] == expected
    assert expected[3] > 5 * 32 and requests("200") == counted + 1
    assert server.metric("kvspan_ttft_seconds_count") == count + len(calls)
    states = {s: server.metric("kvspan_pool_blocks", state=s) for s in ("in_use", "cached", "free")}
    assert states["in_use"] == 0 and states["cached"] > 5 and states["free"] > 0
    health = server.get("/health")
    assert (health.status, health.json) == (200, {"status": "ok"})
