"""`kvspan serve` as a process of its own, on a tiny model."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tiny_models import tiny_model, word_tokenizer

TEMPLATE = (
    "{% for m in messages %}<turn>{{ m['role'] }}\n\n{{ m['content'] }}\n\n{% endfor %}<turn>"
)
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "w1 w2"}], "max_tokens": 4}


def save_model(folder: Path) -> Path:
    tiny_model("llama").save_pretrained(folder)
    word_tokenizer(TEMPLATE).save_pretrained(folder)
    return folder


class Reply:
    """An answer that has been read to its end."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.getheaders()}
        self.data = response.read()

    @property
    def json(self) -> Any:
        return json.loads(self.data)

    @property
    def error(self) -> dict[str, Any]:
        """The error object, which has to be all there is and complete."""
        (name, error) = next(iter(self.json.items()))
        assert (name, len(self.json)) == ("error", 1)
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"] and "\n" not in error["message"]
        return dict(error)


class ServerProcess:
    """A context manager; killed at the end if it is still there."""

    def __init__(self, model: Path, *options: str, **env: str) -> None:
        words = ["--model", str(model), "--served-model-name", "tiny", "--port", "0"]
        words += ["--threads", "1", "--kv-cache-gib", "0.02", *options]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvspan", "serve", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **env},
        )
        self.lines: list[str] = []
        self.url = ""

    def __enter__(self) -> ServerProcess:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            if match := re.search(r"serving tiny.* at (http://(\S+):(\d+))/v1", line):
                self.url, self.host, self.port = match[1], match[2], int(match[3])
                return self
        raise AssertionError(f"the server did not start: {self.lines}")

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def stop(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self) -> tuple[int, str]:
        """Exit status, and what was said since the start."""
        _, said = self.process.communicate(timeout=60)
        return self.process.returncode, said

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=60)

    def get(self, path: str, **headers: str) -> Reply:
        return self._ask("GET", path, None, headers)

    def post(self, path: str, body: Any, **headers: str) -> Reply:
        """body: bytes as they are, anything else as JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self._ask("POST", path, data, headers)

    def _ask(self, method: str, path: str, data: bytes | None, headers: dict[str, str]) -> Reply:
        connection = self.connection()
        try:
            connection.request(method, path, data, headers)
            return Reply(connection.getresponse())
        finally:
            connection.close()

    def stream(self, path: str, body: Any) -> tuple[http.client.HTTPConnection, Any]:
        """A stream whose first event has come."""
        connection = self.connection()
        connection.request("POST", path, json.dumps(body))
        response = connection.getresponse()
        assert response.status == 200, response.read()
        assert response.readline().startswith(b"data: {")
        return connection, response

    def metric(self, name: str, **labels: str) -> float:
        """The value of a metric, 0 where it has none yet."""
        inside = ",".join(f'{key}="{value}"' for key, value in labels.items())
        start = f"{name}{{{inside}}} " if labels else f"{name} "
        for line in self.get("/metrics").data.decode().splitlines():
            if line.startswith(start):
                return float(line[len(start) :])
        return 0.0

    def until(self, value: float, name: str, **labels: str) -> None:
        """Wait for a metric to have a value; fails after half a minute."""
        deadline = time.monotonic() + 30
        while (found := self.metric(name, **labels)) != value:
            assert time.monotonic() < deadline, f"{name}: expected {value}, still {found}"
            time.sleep(0.02)


def events(data: bytes) -> list[Any]:
    """The events of a stream; the last one has to be [DONE]."""
    lines = [line for line in data.decode().split("\n\n") if line and not line.startswith(":")]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
