"""An OpenAI-compatible server that does what a script says: answers, errors, silence, cuts."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Step = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    """Gives each request to the next step of the script; the last one is for all that follow."""

    protocol_version = "HTTP/1.1"
    server: FaultyServer

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.body = {}
        self.send(200, {"object": "list", "data": [{"id": name} for name in self.server.models]})

    def do_POST(self) -> None:
        self.body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.server.lock:
            self.server.requests.append(
                (self.path, {k.lower(): v for k, v in self.headers.items()}, self.body)
            )
            script = self.server.script
            step = script.pop(0) if len(script) > 1 else script[0]
            self.server.running += 1
            self.server.most = max(self.server.most, self.server.running)
        try:
            step(self)
        except OSError:  # the client has left
            self.server.left.set()
        finally:
            with self.server.lock:
                self.server.running -= 1

    def send(self, status: int, value: Any, **headers: str) -> None:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        headers.setdefault("content_type", "application/json")
        for name, text in headers.items():
            self.send_header(name.replace("_", "-"), text)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def start_stream(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()

    def chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def event(self, value: Any) -> None:
        self.chunk(b"data: " + json.dumps(value).encode() + b"\n\n")

    def delta(self, text: str | None, finish: str | None = None) -> None:
        delta = {"content": text} if "chat" in self.path else {}
        choice = {"index": 0, "delta": delta, "text": text or "", "finish_reason": finish}
        self.event({"object": "chunk", "choices": [choice]})

    def cut(self) -> None:
        """Break the connection in the middle of the answer."""
        self.close_connection = True


class FaultyServer(ThreadingHTTPServer):
    """A context manager. requests: (path, headers, body) of every call. most: at the same time."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, *script: Step, models: tuple[str, ...] = ("M",)) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script = list(script) or [answer("hello")]
        self.models = models
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.running = self.most = 0
        self.lock = threading.Lock()
        self.left = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)

    def __enter__(self) -> FaultyServer:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 2,
    "total_tokens": 9,
    "prompt_tokens_details": {"cached_tokens": 4},
}


def answer(text: str, finish: str = "stop") -> Step:
    """An ordinary answer, whole or streamed letter by letter, as the request asks."""

    def step(handler: Handler) -> None:
        if handler.body.get("stream"):
            handler.start_stream()
            for letter in text:
                handler.delta(letter)
            handler.delta(None, finish)
            handler.event({"object": "chunk", "choices": [], "usage": USAGE})
            handler.chunk(b"data: [DONE]\n\n")
            handler.chunk(b"")
            return
        content = {"message": {"role": "assistant", "content": text}, "text": text}
        choice = {"index": 0, "finish_reason": finish, **content}
        handler.send(200, {"id": "x", "object": "y", "choices": [choice], "usage": USAGE})

    return step


def error(status: int, message: str = "no", **fields: Any) -> Step:
    """An error. Asks to be called again at once, so that tests do not wait."""

    def step(handler: Handler) -> None:
        body = {"error": {"message": message, "type": "t", "param": None, "code": None, **fields}}
        handler.send(status, body, retry_after_ms="1")

    return step
