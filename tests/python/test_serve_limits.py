"""Keys, limits, clients that leave, and the end of the server."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from kvspan.errors import UsageError
from kvspan.serve.cli import read_keys
from serving import CHAT, ServerProcess, events

LONG = {**CHAT, "max_tokens": 3000}  # takes seconds, and fits the pool
STREAM = {**LONG, "stream": True}
PATH = "/v1/chat/completions"


def in_background(server: ServerProcess, body: Any, replies: list[Any]) -> threading.Thread:
    thread = threading.Thread(target=lambda: replies.append(server.post(PATH, body)))
    thread.start()
    return thread


@pytest.fixture(scope="module")
def strict(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with keys and small limits."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("# of the team\nsecond\n\n third \n")
    options = ["--max-body-mib", "0.01", "--max-requests", "3", "--timeout", "1", "--api-key-file"]
    with ServerProcess(tiny_folder, *options, str(file), KVSPAN_API_KEY="first") as server:
        yield server


KEY = {"Authorization": "Bearer first"}


@pytest.mark.parametrize("key", ["first", "second", "third"])
def test_every_key_fits(strict: ServerProcess, key: str) -> None:
    with openai.OpenAI(base_url=f"{strict.url}/v1", api_key=key, max_retries=0) as client:
        assert client.chat.completions.create(**CHAT).choices[0].message.content  # type: ignore[call-overload]


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Bearer ", "first", "Basic first",
                                    "Bearer firs", "Bearer first1", "Bearer \xff"])  # fmt: skip
@pytest.mark.parametrize("path", [PATH, "/v1/query/execute", "/v1/models", "/metrics"])
def test_no_other_key_fits(strict: ServerProcess, path: str, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header}
    if path.startswith("/v1/m") or path == "/metrics":
        reply = strict.get(path, **headers)
    else:
        reply = strict.post(path, {}, **headers)
    assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
    assert reply.headers["www-authenticate"] == "Bearer"
    assert strict.get("/health").status == 200


def test_the_client_sees_a_wrong_key(strict: ServerProcess) -> None:
    with (
        openai.OpenAI(base_url=f"{strict.url}/v1", api_key="wrong") as client,
        pytest.raises(openai.AuthenticationError, match="wrong API key"),
    ):
        client.models.list()


@pytest.mark.parametrize("size", [11_000, 3_000_000])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_large_body(strict: ServerProcess, size: int, chunked: bool) -> None:
    body = json.dumps({**CHAT, "messages": [{"role": "user", "content": "w" * size}]}).encode()
    connection = strict.connection()
    data: Any = iter([body[: size // 2], body[size // 2 :]]) if chunked else body
    connection.request("POST", PATH, data, KEY, encode_chunked=chunked)
    response = connection.getresponse()
    assert response.status == 413
    assert json.loads(response.read())["error"]["code"] == "request_too_large"
    connection.close()
    assert strict.post(PATH, CHAT, **KEY).status == 200


def test_time_is_limited(strict: ServerProcess) -> None:
    reply = strict.post(PATH, LONG, **KEY)
    assert (reply.status, reply.error["code"]) == (504, "timeout")
    stream = strict.post(PATH, STREAM, **KEY)
    *pieces, last = [line for line in stream.data.decode().split("\n\n") if line]
    assert stream.status == 200 and len(pieces) > 3
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
    with (
        openai.OpenAI(base_url=f"{strict.url}/v1", api_key="first", max_retries=0) as client,
        pytest.raises(openai.APIError, match="no complete answer within 1 s"),
    ):
        list(client.chat.completions.create(**STREAM))  # type: ignore[call-overload]
    metrics = strict.get("/metrics", **KEY).data.decode()
    assert 'kvspan_requests_total{endpoint="/v1/chat/completions",status="504"} 3.0' in metrics


def test_a_full_server(strict: ServerProcess) -> None:
    replies: list[Any] = []
    ask = {"messages": LONG["messages"], "model": "tiny", "max_tokens": 3000}

    def post() -> None:
        replies.append(strict.post(PATH, {**ask, "n": 2}, **KEY))

    thread = threading.Thread(target=post)
    thread.start()
    deadline = time.monotonic() + 30
    while b"kvspan_requests_in_flight 1.0" not in strict.get("/metrics", **KEY).data:
        assert time.monotonic() < deadline
    reply = strict.post(PATH, {**CHAT, "n": 2}, **KEY)
    assert (reply.status, reply.error["code"]) == (429, "too_many_requests")
    assert reply.error["type"] == "rate_limit_error" and reply.headers["retry-after"] == "1"
    assert strict.post(PATH, CHAT, **KEY).status == 200  # two of three are taken
    thread.join()
    # The client asks again after a 429, and gets its answer in the end.
    threads = [threading.Thread(target=post) for _ in range(2)]
    for thread in threads:
        thread.start()
    with openai.OpenAI(base_url=f"{strict.url}/v1", api_key="first", max_retries=9) as client:
        assert len(client.chat.completions.create(**CHAT, n=3).choices) == 3  # type: ignore[call-overload]
    for thread in threads:
        thread.join()


def test_a_body_that_does_not_come(server: ServerProcess) -> None:
    """The client goes away in the middle of its body; nothing is left of it."""
    with socket.create_connection((server.host, server.port)) as connection:
        head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
        connection.sendall(head.encode() + b'{"model"')
        server.until(1, "kvspan_requests_in_flight")
    server.until(0, "kvspan_requests_in_flight")


@pytest.mark.parametrize("body", [LONG, STREAM, {**STREAM, "n": 3}], ids=["whole", "stream", "n"])
def test_a_client_that_leaves_ends_its_request(server: ServerProcess, body: Any) -> None:
    labels = {"endpoint": PATH, "status": "499"}
    left = server.metric("kvspan_requests_total", **labels)
    generated = server.metric("kvspan_completion_tokens_total")
    if body.get("stream"):
        connection, response = server.stream(PATH, body)
        response.close()
    else:
        connection = server.connection()
        connection.request("POST", PATH, json.dumps(body))
        server.until(1, "kvspan_engine_calls", state="running")
    assert server.metric("kvspan_pool_blocks", state="in_use") > 0
    connection.close()
    server.until(left + 1, "kvspan_requests_total", **labels)
    server.until(0, "kvspan_pool_blocks", state="in_use")
    assert server.metric("kvspan_engine_calls", state="running") == 0
    assert server.metric("kvspan_engine_calls", state="waiting") == 0
    assert server.metric("kvspan_completion_tokens_total") == generated  # none came to its end


def test_a_client_that_leaves_ends_its_query(server: ServerProcess) -> None:
    inner = [
        {"g": {"model": "tiny", "max_tokens": 700, "input": {"user": f"w{i}"}}} for i in range(4)
    ]
    query = {"g": {"model": "tiny", "max_tokens": 3, "input": {"plus": inner}}}
    connection = server.connection()
    connection.request("POST", "/v1/query/execute", json.dumps(query))
    server.until(4, "kvspan_engine_calls", state="running")
    connection.close()
    server.until(0, "kvspan_pool_blocks", state="in_use")
    server.until(0, "kvspan_requests_in_flight")
    assert server.metric("kvspan_engine_calls", state="running") == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_requests_finish(tiny_folder: Path, number: int) -> None:
    body = {**STREAM, "max_tokens": 600, "seed": 1}
    with ServerProcess(tiny_folder, "--drain-timeout", "300") as server:
        connection, response = server.stream(PATH, body)
        replies: list[Any] = []
        waiting = in_background(server, {**body, "stream": False}, replies)
        server.until(2, "kvspan_engine_calls", state="running")
        server.stop(number)
        deadline = time.monotonic() + 30
        while (health := server.get("/health")).status == 200:
            assert time.monotonic() < deadline
        assert health.json == {"status": "draining"}
        refused = server.post(PATH, CHAT)
        assert (refused.status, refused.error["code"]) == (503, "shutting_down")
        assert refused.headers["retry-after"] == "5"
        chunks = events(b"data: {}\n\n" + response.read().lstrip(b"\n"))
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        waiting.join()
        text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[1:])
        assert replies[0].status == 200
        assert replies[0].json["choices"][0]["message"]["content"] == text
        connection.close()
        status, said = server.wait()
    assert status == 0
    assert "stopping: 2 requests are being answered" in said and said.endswith("kvspan: stopped\n")


@pytest.mark.parametrize("again", [False, True], ids=["its time is up", "second signal"])
def test_requests_are_cut_short_in_the_end(tiny_folder: Path, again: bool) -> None:
    limit = "60" if again else "0.2"
    with ServerProcess(tiny_folder, "--drain-timeout", limit) as server:
        connection, response = server.stream(PATH, STREAM)
        replies: list[Any] = []
        waiting = in_background(server, LONG, replies)
        server.until(2, "kvspan_engine_calls", state="running")
        server.stop()
        if again:
            deadline = time.monotonic() + 30
            while server.get("/health").status == 200:
                assert time.monotonic() < deadline
            server.stop()
        last = response.read().decode().strip().split("\n\n")[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
        waiting.join()
        assert (replies[0].status, replies[0].error["code"]) == (503, "shutting_down")
        connection.close()
        status, said = server.wait()
    assert status == 0 and "2 requests were cut short" in said


def test_an_idle_server_stops_at_once(tiny_folder: Path) -> None:
    with ServerProcess(tiny_folder) as server:
        kept = server.connection()  # a connection that is kept alive does not keep the server
        kept.request("GET", "/health")
        assert kept.getresponse().read() == b'{"status":"ok"}'
        server.stop()
        assert server.wait()[0] == 0
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            kept.request("GET", "/health")
            kept.getresponse()


def kvspan(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvspan", "serve", "--model", "nowhere", *words],
        capture_output=True,
        text=True,
        timeout=120,
        env={"HF_HUB_OFFLINE": "1", **env},
    )


def test_a_port_in_use(server: ServerProcess) -> None:
    result = kvspan("--port", str(server.port))
    assert result.returncode == 2
    expected = f"kvspan: error: cannot listen on 127.0.0.1:{server.port}: Address already in use\n"
    assert result.stderr == expected


def test_others_are_warned_of() -> None:
    warning = "warning: 0.0.0.0 can be reached from other machines and no API key is set"
    assert warning in kvspan("--host", "0.0.0.0", "--port", "0").stderr
    with_key = kvspan("--host", "0.0.0.0", "--port", "0", KVSPAN_API_KEY="x")
    assert "warning" not in with_key.stderr and with_key.returncode == 2


def test_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KVSPAN_API_KEY", raising=False)
    file = tmp_path / "keys"
    assert read_keys(None) == ()
    for text, message in (("\n# a\n", "no API key in the file"), ("a b", "HTTP cannot send")):
        file.write_text(text)
        with pytest.raises(UsageError, match=message):
            read_keys(str(file))
    with pytest.raises(UsageError, match="cannot read the API keys: No such file"):
        read_keys(str(tmp_path / "none"))
    monkeypatch.setenv("KVSPAN_API_KEY", " ")
    with pytest.raises(UsageError, match="KVSPAN_API_KEY is set and empty"):
        read_keys(None)
