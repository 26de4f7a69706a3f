"""Requests to vLLM's own completions: those with spans get them prepared while vLLM answers.

An ordinary request is passed on as it came; all it costs is a search for one word in its body.
Answers stay vLLM's: only its count of cached tokens is put right (what was computed for the request
beforehand was not in the cache), and what was reused is added where the request asks for it.
"""

from __future__ import annotations

import copy
import json
import time
import uuid
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvspan.engine import Timings
from kvspan.layout import SpanLayout
from kvspan.serve.app import encode, error_response
from kvspan.serve.errors import to_api_error
from kvspan.vllm.bodies import CHAT, COMPLETIONS, SpanBody, read_body
from kvspan.vllm.engine import VllmEngine, reuse_of
from kvspan.vllm.params import KEY
from kvspan.vllm.preparing import TIMEOUT_S, Preparation

if TYPE_CHECKING:
    from starlette.datastructures import State
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

PATHS = (CHAT, COMPLETIONS)
WORD = f'"{KEY}"'.encode()
STREAM_NOTE = "in a stream vLLM does not say what was moved, nor whether the spans were given up"


class SpanMiddleware:
    """ASGI middleware; ``app.state.kvspan`` is the service that `kvspan.vllm.plugin` opens."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        state: State = scope["app"].state
        service = getattr(state, "kvspan", None)
        if path not in PATHS or service is None:
            await self.app(scope, receive, send)
            return
        messages: list[Message] = []
        while not messages or messages[-1].get("more_body"):
            messages.append(await receive())
        body = b"".join(message.get("body", b"") for message in messages)
        engine: VllmEngine = service.engine
        if WORD not in body and engine.parentheses is None:
            await self.app(scope, _replay(messages, receive), send)
            return
        try:
            asked = await read_body(
                path, body, engine.lay_out, engine.block_size, engine.parentheses
            )
            layout = None if asked is None else asked.layout
            if asked is not None and layout is None and asked.params:
                layout = await _render(path, asked, state, engine)
        except Exception as error:
            await error_response(to_api_error(error))(scope, receive, send)
            return
        if asked is None:
            await self.app(scope, _replay(messages, receive), send)
        elif layout is None:
            await self.app(*_with_body(scope, receive, asked.body), send)
        else:
            await self._answer(scope, receive, send, asked, layout, engine)

    async def _answer(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        asked: SpanBody,
        layout: SpanLayout,
        engine: VllmEngine,
    ) -> None:
        state = scope["app"].state
        lora = state.openai_serving_models.lora_requests.get(str(asked.body.get("model")))
        name = f"kvspan-{uuid.uuid4().hex}"
        if spans := (asked.body.get("kv_transfer_params") or {}).get(KEY):
            spans["id"] = name
            spans.setdefault("timeout_s", TIMEOUT_S)
            if engine.reason:  # nobody prepares them: there is nothing to wait for
                spans["timeout_s"] = 0
        async with engine.beside(
            layout,
            salt=asked.salt,
            lora=lora,
            placement=asked.placement,
            name=name,
        ) as prepared:
            filtered = _Answer(send, asked, layout, prepared, engine.reason)
            await self.app(*_with_body(scope, receive, asked.body), filtered)


def _replay(messages: list[Message], receive: Receive) -> Receive:
    """Gives the messages that were read already, and then what else comes."""
    rest = iter(messages)

    async def again() -> Message:
        return next(rest, None) or await receive()

    return again


def _with_body(scope: Scope, receive: Receive, body: dict[str, Any]) -> tuple[Scope, Receive]:
    """The request with another body."""
    data = json.dumps(body).encode()
    headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
    headers.append((b"content-length", str(len(data)).encode()))
    message: Message = {"type": "http.request", "body": data, "more_body": False}
    return {**scope, "headers": headers}, _replay([message], receive)


async def _render(
    path: str, asked: SpanBody, state: State, engine: VllmEngine
) -> SpanLayout | None:
    """The layout of a prompt that vLLM makes the tokens of; None where vLLM refuses it."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    body = copy.deepcopy(asked.body)  # vLLM changes what it renders
    try:
        if path == CHAT:
            chat = ChatCompletionRequest.model_validate(body)
            rendered = await state.openai_serving_chat.render_chat_request(chat)
            inputs = rendered[1] if isinstance(rendered, tuple) else []
        else:
            text = CompletionRequest.model_validate(body)
            rendered = await state.openai_serving_completion.render_completion_request(text)
            inputs = rendered if isinstance(rendered, list) else []
    except Exception:  # vLLM's own answer says what is wrong
        return None
    if len(inputs) != 1 or "prompt_token_ids" not in inputs[0]:
        return None
    return asked.lay_out(list(inputs[0]["prompt_token_ids"]), engine.block_size)


class _Answer:
    """A `Send` that reads the answer on its way out."""

    def __init__(
        self,
        send: Send,
        asked: SpanBody,
        layout: SpanLayout,
        prepared: Preparation,
        off: str,
    ) -> None:
        self.send = send
        self.asked = asked
        self.layout = layout
        self.prepared = prepared
        self.off = off
        self.started = time.perf_counter()
        self.first_at = 0.0
        self.start: Message | None = None  # held back: the length may change
        self.body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            kind = dict(message["headers"]).get(b"content-type", b"")
            if message["status"] == 200 and kind.startswith(b"application/json"):
                self.start = message
                return
        elif message["type"] == "http.response.body":
            if message.get("body"):
                self.first_at = self.first_at or time.perf_counter()
                self.prepared.begun.set()
            if self.start is not None:
                self.body += message.get("body", b"")
                if not message.get("more_body"):
                    await self._whole()
                return
            if message.get("body"):
                message = {**message, "body": self._event(message["body"])}
        await self.send(message)

    async def _whole(self) -> None:
        assert self.start is not None
        value = json.loads(self.body)
        # Where the client has left, vLLM answers null to nobody.
        body = encode(self._adapted(value)) if isinstance(value, dict) else self.body
        headers = [(k, v) for k, v in self.start["headers"] if k != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        await self.send({**self.start, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})

    def _event(self, data: bytes) -> bytes:
        """vLLM sends every event whole, in a message of its own."""
        if not data.startswith(b"data: {") or not data.endswith(b"\n\n"):
            return data
        if b'"usage"' not in data and not (self.asked.report and b'"finish_reason":"' in data):
            return data
        try:
            value = json.loads(data[len(b"data: ") :])
        except ValueError:
            return data
        return b"data: " + encode(self._adapted(value, stream=True)) + b"\n\n"

    def _adapted(self, answer: dict[str, Any], stream: bool = False) -> dict[str, Any]:
        details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
        cached = details.get("cached_tokens")
        if cached is not None:
            details["cached_tokens"] = max(0, cached - self.prepared.computed)
        if self.asked.report:
            report = self._report(answer, cached, stream)
            for choice in answer.get("choices", ()):
                if choice.get("finish_reason"):
                    choice[KEY] = report
        return answer

    def _report(self, answer: dict[str, Any], cached: int | None, stream: bool) -> dict[str, Any]:
        if cached is None:  # vLLM was not told to say so, or not yet
            cached = self.layout.spans[-1][1] if self.layout.spans else 0
        audit = (answer.get("kv_transfer_params") or {}).get(KEY) or {}
        reuse = reuse_of(self.layout, self.prepared, cached, audit, self.off)
        if stream:
            reuse.notes.append(STREAM_NOTE)
        now = time.perf_counter()
        first = self.first_at or now
        timings = Timings(ttft=first - self.started, decode=now - first, total=now - self.started)
        return {"reuse": asdict(reuse), "timings": asdict(timings)}
