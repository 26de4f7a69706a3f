"""kvspan against spnl 0.22.1 from PyPI, as a differential oracle: what both accept, both run alike.

    python scripts/spnl_oracle.py --spnl-python PYTHON   # of an environment with spnl==0.22.1
    python scripts/spnl_oracle.py                        # makes such an environment, and drops it

Queries are made at random, together with the documented forms, good and legacy. Each is run by spnl
against a small OpenAI-compatible server on localhost that answers with a digest of what it was
asked, and by kvspan on an engine that gives the same answers. Compared are who accepts the query,
and the multisets of (model, messages, max_tokens, temperature) that were asked. Every difference is
printed under a heading that says of what kind it is; the exit status is 1 if one is of no known
kind.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import warnings
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from kvspan import UsageError, arun
from kvspan.engine import Capabilities, GenerateRequest, GenerateResult, Reuse, Timings, Usage
from kvspan.query.prompt import Span
from kvspan.query.read import QueryWarning, from_obj

MODEL = "openai/M"
WORKER = """
import asyncio, json, sys, spnl
async def main():
    for line in sys.stdin:
        try:
            result = await spnl.execute(line)
            out = {"ok": True, "data": str(result.data)}
        except BaseException as error:
            out = {"ok": False, "error": str(error)}
        print(json.dumps(out), flush=True)
asyncio.run(main())
"""

Asked = tuple[Any, ...]


def answer_to(messages: list[list[str]]) -> str:
    """Depends on the set of messages alone, as both sides may order a plus as they like."""
    key = json.dumps(sorted(messages))
    return "a" + hashlib.sha256(key.encode()).hexdigest()[:8]


# --- spnl ------------------------------------------------------------------------------------


class Server(ThreadingHTTPServer):
    """Records what was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[Asked] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    """Answers chat completions, streamed or not."""

    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        """Silence."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        most = body.get("max_completion_tokens", body.get("max_tokens"))
        head = {"id": "1", "created": 1, "model": body["model"]}
        prompts = body.get("prompt", [])  # a map goes to /v1/completions, all inputs at once
        prompts = [prompts] if isinstance(prompts, str) else prompts
        messages = [[message["role"], text_of(message)] for message in body.get("messages", [])]
        samples = body.get("n") or 1  # of a repeat
        chats = [[["user", prompt]] for prompt in prompts] or [messages] * samples
        for asked in chats:
            self.server.asked.append(record(asked, most, body.get("temperature")))
        chunks = []
        for index, text in enumerate(map(answer_to, chats)):
            kind = "text_completion" if prompts else "chat.completion.chunk"
            for part, reason in ((text, None), ("", "stop")):
                said = {"text": part} if prompts else {"delta": {"content": part}}
                choice = {"index": index, "finish_reason": reason, "logprobs": None, **said}
                chunks.append({**head, "object": kind, "choices": [choice]})
        if body.get("stream"):
            content_type = "text/event-stream"
            data = "".join(f"data: {json.dumps(c)}\n\n" for c in chunks) + "data: [DONE]\n\n"
        else:
            content_type = "application/json"
            usage = dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), 1)
            choices = [chunk["choices"][0] for chunk in chunks[::2]]
            for choice in choices:
                choice["finish_reason"] = "stop"
                if not prompts:
                    choice["message"] = {"role": "assistant", **choice.pop("delta")}
            kind = "text_completion" if prompts else "chat.completion"
            data = json.dumps({**head, "object": kind, "choices": choices, "usage": usage})
        self.send_response(200)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(data.encode())))
        self.end_headers()
        self.wfile.write(data.encode())


def text_of(message: dict[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def record(messages: list[list[str]], most: int | None, temperature: float | None) -> Asked:
    """One request, in the form that is compared.

    spnl makes 2048 of a max_tokens that is not given; kvspan leaves it to the engine.
    """
    warm = 0.6 if temperature is None else round(temperature, 4)
    return (tuple(sorted(map(tuple, messages))), None if most in (0, 2048) else most, warm)


class Spnl:
    """A worker process with spnl in it. A query that crashes it costs one process."""

    def __init__(self, python: str) -> None:
        self.python = python
        self.server = Server()
        self.process: subprocess.Popen[str] | None = None

    def run(self, query: Any) -> tuple[str, list[Asked]]:
        """("ok" | "refused" | "crashed" | error text, what was asked)."""
        if self.process is None or self.process.poll() is not None:
            base = f"http://127.0.0.1:{self.server.server_port}/v1"
            names = ("OPENAI_API_BASE", "OPENAI_BASE_URL")
            env = {**os.environ, **dict.fromkeys(names, base), "OPENAI_API_KEY": "none"}
            self.process = subprocess.Popen(
                [self.python, "-c", WORKER], env=env, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        self.server.asked = []
        assert self.process.stdin and self.process.stdout
        try:
            self.process.stdin.write(json.dumps(query) + "\n")
            self.process.stdin.flush()
            # spnl prints what it generates: the worker's own line is the one that is JSON.
            while line := self.process.stdout.readline():
                at = line.rfind('{"ok": ')
                if at >= 0:
                    out = json.loads(line[at:])
                    break
            else:
                return "crashed", self.server.asked
        except BrokenPipeError:
            return "crashed", self.server.asked
        if out["ok"]:
            return "ok", self.server.asked
        error = out["error"]
        return ("refused" if "deserialization" in error else error), self.server.asked

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.server.shutdown()


# --- kvspan ----------------------------------------------------------------------------------


class Recorder:
    """An engine with the same answers."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []

    async def generate(self, request: GenerateRequest, on_text: Any = None) -> GenerateResult:
        messages = [
            [message.role, message.text]
            for item in request.prompt
            for message in (item.messages if isinstance(item, Span) else (item,))
        ]
        self.asked.append(record(messages, request.max_tokens, request.temperature))
        return GenerateResult(answer_to(messages), [], "stop", Usage(), Timings(), Reuse())

    async def prepare(self, request: GenerateRequest) -> GenerateResult:
        return await self.generate(request)

    def capabilities(self) -> Capabilities:
        return Capabilities(spans=True, reason="", max_tokens=0, block_size=16)

    def close(self) -> None:
        """Nothing to close."""


def kvspan_run(value: Any) -> tuple[str, list[Asked]]:
    """As ``Spnl.run``. Lenient, because spnl ignores unknown keys."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", QueryWarning)
        try:
            query = from_obj(value, lenient=True)
        except UsageError as error:
            return f"refused: {error}", []
    engine = Recorder()
    try:
        asyncio.run(arun(query, engine=engine))
    except UsageError as error:
        return str(error), engine.asked
    return "ok", engine.asked


# --- queries ---------------------------------------------------------------------------------


def g(below: Any, **settings: Any) -> Any:
    return {"g": {"model": MODEL, "input": below, **settings}}


U = {"user": "a"}
FORMS: list[Any] = [
    g({"user": "hi"}),
    g({"cross": [{"system": "s"}, {"plus": [{"user": "A"}, {"user": "B"}]}, {"user": "q"}]}),
    {"repeat": {"n": 3, "g": {"model": MODEL, "input": {"user": "draft"}, "max_tokens": 5}}},
    {"map": {"metadata": {"model": MODEL}, "inputs": ["a", "b"]}},
    g({"seq": [{"system": "s"}, {"user": "u"}]}, max_tokens=None, temperature=None),
    g({"seq": [{"system": "judge"}, {"plus": [{"repeat": {"n": 4, "g": {
        "model": MODEL, "input": {"user": "write"}}}}]}]}),
    {"repeat": {"n": 2, "query": g(U)}},
    *(g("a"), g([U]), [U], "a", g(U, colour="red"), {"usr": "a"}, {"user": 3}, {"plus": U}),
    *({"seq": [{"print": "x"}, g(U)]}, {"monad": g(U)}, {"print": "x"}, {"cross": []}),
    *({"zip": {"first": g(U), "second": U}}, {"repeat": {"n": -1, "g": g(U)["g"]}}, {"g": U}),
    {"augment": {"embedding_model": "e", "body": U, "doc": ["d", {"Text": "t"}]}},
    *(g(U, max_tokens=7, temperature=0.0), g(U, max_tokens=-1), g(U, temperature="hot")),
]  # fmt: skip


def random_query(rng: random.Random, depth: int = 0) -> Any:
    """A generate over messages, joins, samples and inner generates."""
    settings = {}
    if rng.random() < 0.4:
        settings["max_tokens"] = rng.choice([1, 9, 100])
    if rng.random() < 0.4:
        settings["temperature"] = rng.choice([0.0, 0.25, 1.0])
    return g(random_node(rng, depth + 1), **settings)


def random_node(rng: random.Random, depth: int) -> Any:
    roll = rng.random()
    if depth > 4 or roll < 0.4:
        return {rng.choice(["user", "user", "system", "assistant"]): f"t{rng.randrange(10**6)}"}
    if roll < 0.55:
        return random_query(rng, depth)
    if roll < 0.62:
        inner = {"model": MODEL, "input": {"user": f"r{rng.randrange(10**6)}"}}
        return {"plus": [{"repeat": {"n": rng.randint(1, 3), "g": inner}}]}
    join = rng.choice(["seq", "par", "cross", "plus"])
    return {join: [random_node(rng, depth + 1) for _ in range(rng.randint(1, 3))]}


KNOWN_REFUSALS = {
    "needs a retriever": "retrieval needs a retriever in kvspan, and none was given here",
    "asks no model anything": "messages alone are echoed by spnl, and a chat in kvspan",
    "max_tokens is not a token count": "spnl wraps a negative max_tokens round to 4294967295",
    "empty generate": "spnl asks with no message at all, kvspan says that the input is empty",
}


# --- comparing -------------------------------------------------------------------------------


def compare(query: Any, theirs: tuple[str, list[Asked]], ours: tuple[str, list[Asked]]) -> str:
    """What kind of outcome it is; one that begins with "DIFFERENT" has no explanation here."""
    text = json.dumps(query)
    if theirs[0] == "crashed":
        return "spnl crashes; kvspan " + ("runs it" if ours[0] == "ok" else "says why not")
    if theirs[0] == "refused":
        if ours[0] != "ok":
            return "both refuse"
        return "kvspan (lenient) accepts what spnl refuses"
    if theirs[0] != "ok":
        if ours[0] != "ok":
            return "both fail"
        return f"spnl fails where kvspan runs: {theirs[0][:60]}"
    if ours[0] != "ok":
        for words, kind in KNOWN_REFUSALS.items():
            if words in ours[0]:
                return f"known: {kind}"
        return f"DIFFERENT: spnl accepts, {ours[0]}"
    left, right = collections.Counter(theirs[1]), collections.Counter(ours[1])
    if left == right:
        return "same requests"
    if "max_tokens" in text or "temperature" in text:
        bare = [collections.Counter(asked[0] for asked in side) for side in (theirs[1], ours[1])]
        if bare[0] == bare[1] and '"temperature": null' in text:
            return "known: spnl takes a temperature of null for 0, kvspan for the default"
        if bare[0] == bare[1]:
            return "DIFFERENT: same messages, other settings"
    return "DIFFERENT: other requests"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--spnl-python", help="Python of an environment with spnl==0.22.1")
    parser.add_argument("--queries", type=int, default=300, help="random ones (default 300)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=2, help="examples per kind (default 2)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        python = args.spnl_python
        if python is None:
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            python = str(Path(folder) / "bin" / "python")
            subprocess.run([python, "-m", "pip", "install", "-q", "spnl==0.22.1"], check=True)
        rng = random.Random(args.seed)
        queries = [*FORMS, *(random_query(rng) for _ in range(args.queries))]
        spnl = Spnl(python)
        kinds: dict[str, list[str]] = collections.defaultdict(list)
        try:
            for query in queries:
                theirs, ours = spnl.run(query), kvspan_run(query)
                kind = compare(query, theirs, ours)
                example = json.dumps(query)
                if kind.startswith("DIFFERENT"):
                    example += f"\n      spnl:   {theirs}\n      kvspan: {ours}"
                kinds[kind].append(example)
        finally:
            spnl.close()
    for kind, examples in sorted(kinds.items(), key=lambda item: -len(item[1])):
        print(f"{len(examples):5}  {kind}")
        for example in examples[: args.show] if kind != "same requests" else []:
            print(f"       {example}")
    return int(any(kind.startswith("DIFFERENT") for kind in kinds))


if __name__ == "__main__":
    sys.exit(main())
