"""vLLM's own server with kvspan in it: queries, marked parts, layouts, what ends requests early."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from http_server import BLOCK, KEY, VllmProcess, save_chat_model
from server_requests import PASSAGES, chat, completion, layout_of, prompt, query

import kvspan as kv
from kvspan.engine import GenerateRequest
from kvspan.engine.local import LocalEngine
from kvspan.parentheses import Parentheses
from serving import events
from test_serve_errors import WRONG
from tiny_models import VOCAB

MARKS = Parentheses(0, VOCAB, VOCAB + 1, VOCAB + 2)
QUERY_ERRORS = {name: wrong for name, wrong in WRONG.items() if wrong[0].startswith("query/")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[VllmProcess]:
    marks = f"{MARKS.pad},{MARKS.start},{MARKS.sibling},{MARKS.end}"
    options = {"parentheses": marks, "host_gib": "0.0625", "VLLM_SERVER_DEV_MODE": "1"}
    with VllmProcess(folder, **options) as process:
        yield process


@pytest.fixture(scope="module")
def local(folder: Path) -> Iterator[LocalEngine]:
    """What kvspan's own server runs: the answers have to be the same."""
    with LocalEngine.open(str(folder), kv_cache_gib=0.02, block_size=BLOCK) as engine:
        yield engine


@pytest.fixture
def client(server: VllmProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


TWO = {"plus": [query(*PASSAGES[:2]), query(*PASSAGES[1:3], question="w5")]}


@pytest.mark.parametrize("asked", [query(*PASSAGES[:3]), TWO, {"user": "w1 w2"}],
                         ids=["one", "two", "chat"])  # fmt: skip
def test_queries(server: VllmProcess, local: LocalEngine, asked: Any) -> None:
    url = "/v1/query/execute?temperature=0&max_tokens=7"
    reply = server.post(url, asked)
    expected = kv.run(
        kv.loads(json.dumps(asked)), engine=local, model="tiny", temperature=0, max_tokens=7
    )
    assert reply.status == 200, reply.data
    assert [c["message"]["content"] for c in reply.json["choices"]] == expected.answers
    assert reply.json["kvspan"]["result"] == expected.to_obj()["result"]
    assert reply.json["usage"]["completion_tokens"] == expected.usage.completion_tokens
    chunks = events(server.post(url + "&stream=true", asked).data)
    texts = [""] * len(expected.answers)
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == expected.answers and len(chunks) > 5
    calls = chunks[-1]["kvspan"]["calls"]
    for call, same in zip(calls, expected.calls, strict=True):
        reuse, size = call["reuse"], same.result.reuse.span_tokens
        assert (reuse["span_tokens"], reuse["reused_tokens"]) == (size, size)
        assert reuse["notes"] == [] and reuse["computed_tokens"] <= 2 * BLOCK
        cached = call["usage"]["prompt_tokens"] - reuse["computed_tokens"]
        assert call["usage"]["cached_tokens"] == cached


@pytest.mark.parametrize("wrong", QUERY_ERRORS.values(), ids=QUERY_ERRORS)
def test_what_is_wrong_with_a_query_is_said_in_the_same_words(
    server: VllmProcess, wrong: Any
) -> None:
    path, body, status, code, param, message = wrong
    reply = server.post(f"/v1/{path}", body)
    assert (reply.status, reply.error["code"], reply.error["param"]) == (status, code, param)
    assert message in reply.error["message"]


def test_only_with_the_key(server: VllmProcess) -> None:
    for path in ("/v1/query/execute", "/v1/chat/completions"):
        assert server.post(path, query("w1"), authorization="Bearer wrong").status == 401
    assert server.get("/v1/query/execute").status == 405


@pytest.mark.parametrize(
    "extension",
    [{}, {"scope": "isolated", "salt": "me"}, {"scope": "full"}, {"placement": "parallel"}],
    ids=str,
)
def test_marked_parts_of_a_chat(
    client: openai.OpenAI, local: LocalEngine, extension: dict[str, Any]
) -> None:
    for order in ([0, 1, 2], [2, 0, 1]):
        more = {"kvspan": {"report": True, **extension}}
        answer = client.chat.completions.create(**chat(order), extra_body=more)
        options = {"temperature": 0.0, "max_tokens": 8, **extension}
        expected = local.run(GenerateRequest(prompt(order), **options))
        # vLLM puts the blank between prompt and answer in front of the answer.
        assert (answer.choices[0].message.content or "").lstrip(" ") == expected.text
        usage, reuse = answer.usage, answer.choices[0].model_extra["kvspan"]["reuse"]
        assert usage.prompt_tokens == expected.usage.prompt_tokens
        assert reuse["span_tokens"] == expected.reuse.span_tokens and reuse["notes"] == []
        assert reuse["reused_tokens"] + reuse["prepared_tokens"] == reuse["span_tokens"]
    if extension.get("scope") != "full":  # the second order finds what the first one prepared
        assert reuse["prepared_tokens"] == 0 and reuse["span_hits"] == 3
        assert usage.prompt_tokens_details.cached_tokens >= reuse["span_tokens"]


def test_reports_in_streams(client: openai.OpenAI) -> None:
    body = chat([3, 0], system="w44", stream=True)
    for prepared in (128, 0):
        *_, last = client.chat.completions.create(**body, extra_body={"kvspan": {"report": True}})
        reuse = last.choices[0].model_extra["kvspan"]["reuse"]
        assert (reuse["span_tokens"], reuse["prepared_tokens"]) == (128, prepared)
        assert any("in a stream" in note for note in reuse["notes"])


def test_salts_of_ordinary_requests(client: openai.OpenAI) -> None:
    body: Any = {"model": "tiny", "prompt": " ".join(f"w{i}" for i in range(3 * BLOCK)),
                 "max_tokens": 1}  # fmt: skip
    cached = []
    for salt in ("", "a", "a", "b", ""):
        answer = client.completions.create(**body, extra_body={"kvspan": {"salt": salt}})
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached == [0, 0, 3 * BLOCK, 0, 3 * BLOCK]


def test_the_first_request_is_not_said_to_have_hit_the_cache(client: openai.OpenAI) -> None:
    asked = chat([0, 2, 1], system="w33", stream=True, stream_options={"include_usage": True})
    counts = []
    for _ in range(2):
        *chunks, last = client.chat.completions.create(**asked)
        counts.append(last.usage.prompt_tokens_details.cached_tokens)
        text = "".join(c.choices[0].delta.content or "" for c in chunks)
        assert text == client.chat.completions.create(
            **chat([0, 2, 1], system="w33")
        ).choices[0].message.content  # fmt: skip
    assert counts[0] == 0 and counts[1] > 100


def test_what_vllm_itself_offers_goes_with_marked_parts(client: openai.OpenAI) -> None:
    several = client.chat.completions.create(
        **chat([1, 0], n=3, logprobs=True, top_logprobs=2, seed=1) | {"temperature": 1.0}
    )
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in several.choices}) > 1
    assert all(len(choice.logprobs.content) == 8 for choice in several.choices)


MARKED_WRONG: dict[str, tuple[Any, str]] = {
    "tools": ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    "template": ({"chat_template": "{{ 1 }}"}, "chat_template"),
    "scope": ({"kvspan": {"scope": "x"}}, "kvspan.scope"),
    "option": ({"kvspan": {"spans": 1}}, "kvspan.spans"),
    "twice": (
        {"kv_transfer_params": {"kvspan": {"spans": [[0, 32]]}}},
        "kv_transfer_params.kvspan",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), MARKED_WRONG.values(), ids=MARKED_WRONG)
def test_what_is_wrong_with_marked_parts_is_said(
    server: VllmProcess, fields: Any, param: str
) -> None:
    reply = server.post("/v1/chat/completions", chat([0], **fields))
    assert (reply.status, reply.error["param"]) == (400, param)


@pytest.mark.parametrize("name", ["bad mark", "span of the system"])
def test_bad_marks_are_refused_as_by_the_local_server(server: VllmProcess, name: str) -> None:
    path, body, status, code, param, message = WRONG[name]
    reply = server.post(f"/v1/{path}", body)
    assert (reply.status, reply.error["code"], reply.error["param"]) == (status, code, param)
    assert message in reply.error["message"]


def test_layouts_are_prepared_by_the_server(server: VllmProcess, local: LocalEngine) -> None:
    for order in ([0, 1, 2], [2, 1, 0], [1, 1]):
        layout = layout_of(order)
        reply = server.post("/v1/completions", completion(layout, kvspan={"report": True}))
        assert reply.status == 200, reply.data
        (choice,) = reply.json["choices"]
        expected = local.run_layout(layout, GenerateRequest((), temperature=0.0, max_tokens=6))
        assert choice["text"].strip() == expected.text.strip()
        assert reply.json["kv_transfer_params"]["kvspan"]["fallback"] == ""
        cached = reply.json["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == layout.num_tokens - choice["kvspan"]["reuse"]["computed_tokens"]
    assert choice["kvspan"]["reuse"]["span_hits"] == 2 and cached > layout.num_tokens - 2 * BLOCK


def test_layouts_of_prompts_that_vllm_tokenizes(server: VllmProcess) -> None:
    words = " ".join(f"w{i % 150}" for i in range(4 * BLOCK + 5))
    params = {"kvspan": {"spans": [[BLOCK, 2 * BLOCK], [2 * BLOCK, 4 * BLOCK]]}}
    body = {"model": "tiny", "prompt": words, "max_tokens": 2, "kv_transfer_params": params}
    messages = [{"role": "user", "content": words}]
    for path, asked in (
        ("/v1/completions", body),
        ("/v1/chat/completions", {**body, "messages": messages}),
    ):
        reply = server.post(path, asked)
        assert reply.status == 200, reply.data
        audit = reply.json["kv_transfer_params"]["kvspan"]
        assert (audit["fallback"], audit["span_tokens"]) == ("", 3 * BLOCK)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"spans": [[0, 5]]}, "multiples of 32"),
        ({"spans": "all"}, "a list of [start, end]"),
        ({"span": [[0, 32]], "spans": [[0, 32]]}, "unknown field (did you mean spans?)"),
        ([], "expected an object"),
    ],
    ids=str,
)
def test_layouts_that_make_no_sense(server: VllmProcess, params: Any, words: str) -> None:
    body = completion(layout_of([0]), kv_transfer_params={"kvspan": params})
    reply = server.post("/v1/completions", body)
    assert reply.status == 400 and words in reply.error["message"]
    reply = server.post("/v1/completions", {**completion(layout_of([0])), "prompt": ["w1", "w2"]})
    assert (reply.status, reply.error["param"]) == (400, "prompt")


def test_parenthesised_prompts(server: VllmProcess) -> None:
    layout = layout_of([2, 0])
    segments = [layout.token_ids[lo:hi].tolist() for _, lo, hi in layout.segments()]
    anchor, *spans, suffix = segments
    marked = MARKS.encode(anchor, spans, suffix, BLOCK)
    plain = MARKS.decode(marked, BLOCK)
    assert plain is not None and len(plain.spans) == 2
    body = {"model": "tiny", "prompt": marked, "max_tokens": 6, "temperature": 0}
    reply = server.post("/v1/completions", {**body, "kvspan": {"report": True}})
    same = server.post("/v1/completions", completion(plain))
    assert reply.json["choices"][0]["text"] == same.json["choices"][0]["text"]
    assert reply.json["choices"][0]["kvspan"]["reuse"]["spans"] == 2
    reply = server.post("/v1/completions", {**body, "prompt": marked[: -len(suffix) - 1]})
    assert reply.status == 400 and "has no end token" in reply.error["message"]


def test_evicted_spans_are_prepared_again(server: VllmProcess) -> None:
    """The server takes them to be there still; the request waits until they really are."""
    layout = layout_of([1, 0, 2], seed=6)
    first = server.post("/v1/completions", completion(layout))
    server.until_idle()
    assert server.post("/reset_prefix_cache?reset_external=true", {}).status == 200
    again = server.post("/v1/completions", completion(layout, kvspan={"report": True}))
    assert again.json["choices"][0]["text"] == first.json["choices"][0]["text"]
    assert again.json["kv_transfer_params"]["kvspan"]["fallback"] == ""
    reuse = again.json["choices"][0]["kvspan"]["reuse"]
    assert reuse["prepared_tokens"] == reuse["span_tokens"] == 6 * BLOCK


def test_evicted_spans_come_back_from_the_host(server: VllmProcess) -> None:
    """In a server whose scheduler and worker are processes of their own."""

    def count(name: str) -> float:
        return server.vllm_metric(f"vllm:kvspan_{name}_total")

    layout = layout_of([2, 1, 0], seed=12)
    size = layout.spans[-1][1]  # the anchor included
    stored, loaded = count("host_tokens_stored"), count("host_tokens_loaded")
    first = server.post("/v1/completions", completion(layout))
    deadline = time.monotonic() + 30
    while count("host_tokens_stored") < stored + size:
        assert time.monotonic() < deadline, "spans are not copied to the host"
        time.sleep(0.05)
    assert server.post("/reset_prefix_cache", {}).status == 200
    prepared = count("span_tokens_prepared")
    again = server.post("/v1/completions", completion(layout, kvspan={"report": True}))
    assert again.json["choices"][0]["text"] == first.json["choices"][0]["text"]
    assert again.json["kv_transfer_params"]["kvspan"]["host_tokens"] == size
    assert again.json["choices"][0]["kvspan"]["reuse"]["prepared_tokens"] == 0
    server.until_idle()
    assert count("host_tokens_loaded") == loaded + size
    assert count("span_tokens_prepared") == prepared
    assert server.vllm_metric("vllm:kvspan_host_memory_bytes") > 0


def test_ordinary_requests_stay_vllms_own(client: openai.OpenAI) -> None:
    words = 'w1 w2 says "kvspan" and more'
    for _ in range(2):
        text = client.completions.create(model="tiny", prompt=words, max_tokens=3, temperature=0)
    assert text.choices[0].text and text.usage.prompt_tokens > 3
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model="tiny", prompt=words, max_tokens=-1)
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(**{**chat([0]), "model": "gpt"})


def test_clients_that_leave(server: VllmProcess) -> None:
    """In the middle of streams, and while spans are being prepared."""
    long = {"max_tokens": 3000, "stream": True, "ignore_eos": True}
    bodies = [
        ("/v1/chat/completions", chat([3, 4], **long)),
        ("/v1/completions", completion(layout_of([2, 1]), **long)),
        ("/v1/query/execute?stream=true&max_tokens=3000", {"user": "w1 w2 w3"}),
    ]
    for path, body in bodies:
        connection, response = server.stream(path, body)
        assert response.readline().startswith(b"data: {")
        response.close()
        connection.close()
    for seed in range(6):
        connection = server.connection()
        headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
        body = completion(layout_of([0, 1, 2], seed=100 + seed), **long)
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        connection.close()
    server.until_idle()
    reply = server.post("/v1/query/execute?temperature=0", query(*PASSAGES))
    assert reply.status == 200 and reply.json["kvspan"]["calls"][0]["reuse"]["notes"] == []


def test_many_at_once(server: VllmProcess) -> None:
    async def run() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key=KEY, max_retries=0
        ) as client:

            async def ask(number: int) -> str:
                body = chat([number % 5, (number + 2) % 5, (number + 1) % 5], system="w50")
                if number % 2:
                    whole = await client.chat.completions.create(**body)
                    return whole.choices[0].message.content or ""
                stream = await client.chat.completions.create(**body, stream=True)
                return "".join([c.choices[0].delta.content or "" async for c in stream])

            together = await asyncio.gather(*(ask(number) for number in range(20)))
            assert together == [await ask(number) for number in range(20)]

    asyncio.run(run())
    server.until_idle()


def test_metrics_and_log(server: VllmProcess) -> None:
    def count(name: str, **labels: str) -> float:
        return server.vllm_metric(f"vllm:kvspan_{name}_total", **labels)

    names = ("span_tokens_looked_up", "span_tokens_hit", "span_tokens_moved",
             "span_tokens_prepared", "span_deferred_seconds")  # fmt: skip
    before = [count(name) for name in names]
    layout = layout_of([2, 1], seed=9)
    size = sum(end - start for start, end in layout.spans)
    for order, expected in (([2, 1], [size, 0, BLOCK, size]), ([1, 2], [size, size, 3 * BLOCK, 0])):
        server.post("/v1/completions", completion(layout_of(order, seed=9)))
        server.until_idle()
        after = [count(name) for name in names]
        grown = [new - old for new, old in zip(after, before, strict=True)]
        assert grown[:4] == expected
        before = after
    assert before[4] > 0
    refused = count("span_requests_refused", reason="request")
    body = completion(layout, logprobs=1, prompt_logprobs=1)
    assert server.post("/v1/completions", body).status == 200
    server.until_idle()
    assert count("span_requests_refused", reason="request") == refused + 1
    labels = {"endpoint": "/v1/query/execute", "status": "200"}
    answered = server.vllm_metric("kvspan_requests_total", **labels)
    assert server.post("/v1/query/execute", query("w1")).status == 200
    assert server.vllm_metric("kvspan_requests_total", **labels) == answered + 1
    said = server.said()
    assert "kvspan: span reuse is on, blocks of 32, 0.0625 GiB on the host" in said
    assert "/v1/query/execute is on" in said
    assert "Traceback" not in said, said[said.index("Traceback") :][:4000]
