"""/v1/query/execute as spnl's own client uses it.

That client sends a repeat or a map as text/plain, asks for a stream unless max_tokens is 1, and
reads chat completions for a repeat and text completions for a map. In a stream it takes what comes
after "data: " in each piece of the body, and its types insist on the fields below.
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
