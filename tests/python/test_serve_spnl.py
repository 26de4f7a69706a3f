"""The server as spnl's own clients use it: /v1/query/execute, and OpenAI's endpoints.

The first of them sends a repeat or a map as text/plain, asks for a stream unless max_tokens is 1,
and reads chat completions for a repeat and text completions for a map. In a stream it takes what
comes after "data: " in each piece of the body, and its types insist on the fields below.
"""

from __future__ import annotations

from typing import Any

import pytest

from serving import ServerProcess, events

G = {"model": "spnl/tiny", "input": {"user": "w1 w2"}, "max_tokens": 4, "temperature": 0.0}
MAP = {"metadata": {"model": "spnl/tiny", "max_tokens": 4, "temperature": 0.0}}
QUERIES: dict[str, Any] = {
    "repeat": {"repeat": {"n": 2, "g": G}},
    "map": {"map": {**MAP, "inputs": ["w1", "w2 w3"]}},
}


def post(server: ServerProcess, query: Any, stream: bool) -> Any:
    path = f"/v1/query/execute?stream={str(stream).lower()}"
    reply = server.post(path, query, **{"content-type": "text/plain"})
    assert reply.status == 200, reply.data
    return reply


def content(kind: str, choice: dict[str, Any], stream: bool) -> str:
    assert {"index", "finish_reason"} <= set(choice)
    if kind == "map":
        return str(choice["text"])
    said = choice["delta" if stream else "message"]
    assert stream or said["role"] == "assistant"
    return str(said.get("content") or "")


@pytest.mark.parametrize("kind", QUERIES)
def test_what_the_client_reads(server: ServerProcess, kind: str) -> None:
    whole = post(server, QUERIES[kind], stream=False).json
    assert {"id", "object", "created", "model", "choices"} <= set(whole)
    texts = [content(kind, choice, stream=False) for choice in whole["choices"]]
    assert len(texts) == 2 and all(texts)
    streamed = ["", ""]
    for event in events(post(server, QUERIES[kind], stream=True).data):
        assert {"id", "object", "created", "model", "choices"} <= set(event)
        for choice in event["choices"]:
            streamed[choice["index"]] += content(kind, choice, stream=True)
    assert streamed == texts


def test_a_map_with_options_is_one_too(server: ServerProcess) -> None:
    query = {"kvspan/v1": {"options": {"scope": "isolated", "query": QUERIES["map"]}}}
    assert post(server, query, stream=False).json["object"] == "text_completion"


# What spnl 0.22.1 from PyPI sends for models called openai/NAME, recorded.
CHAT = {
    "model": "tiny",
    "reasoning_effort": "low",
    "max_completion_tokens": 4,
    "stream": True,
    "n": 3,
    "temperature": 0.0,
    "messages": [{"role": "user", "content": "w1"}, {"role": "user", "content": "w2 w3"}],
}
TEXT = {
    "model": "tiny",
    "prompt": ["w1", "w2"],
    "max_tokens": 4,
    "temperature": 0.0,
    "stream": True,
}


@pytest.mark.parametrize(
    ("path", "body", "kind", "answers"),
    [("/v1/chat/completions", CHAT, "repeat", 3), ("/v1/completions", TEXT, "map", 2)],
    ids=["chat", "text"],
)
def test_what_its_package_sends_to_openai_servers(
    server: ServerProcess, path: str, body: dict[str, Any], kind: str, answers: int
) -> None:
    reply = server.post(path, body)
    assert reply.status == 200, reply.data
    texts = [""] * answers
    for event in events(reply.data):
        for choice in event["choices"]:
            texts[choice["index"]] += content(kind, choice, stream=True)
    assert all(texts)
