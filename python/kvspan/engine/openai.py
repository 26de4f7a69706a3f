"""An engine for any OpenAI-compatible server, through the official client.

The server gets plain prompts: spans are sent in the order they stand in, as text, and a note on
each result says so. The client is used on an event loop of the engine's own, in a thread, so that
one engine (its connections, its limit on calls at a time) serves callers on any number of loops.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import openai

from kvspan.engine import (
    Capabilities,
    GenerateRequest,
    GenerateResult,
    Reuse,
    Timings,
    Usage,
    plain_server,
)
from kvspan.engine.openai_errors import KEY_VARIABLES, StreamBroken, explained, message_of
from kvspan.errors import KvspanError, UsageError
from kvspan.layout import SEPARATOR, to_turns
from kvspan.query.prompt import Span

URL_VARIABLE = "OPENAI_BASE_URL"
OPENAI_URL = "https://api.openai.com/v1"
CONNECT_TIMEOUT_S = 10.0
PROVIDERS = ("openai/", "spnl/", "local/")  # before a model's name in queries
# What some servers refuse to hear of, and what to say to them instead.
FALLBACKS = {"max_tokens": "max_completion_tokens", "stream_options": None, "seed": None}
_REFUSED = re.compile(
    r"unsupported|not supported|unknown|unrecogni[sz]ed|unexpected|not permitted|extra", re.I
)
T = TypeVar("T")


@dataclass
class _Answer:
    """What has come back of one call so far."""

    text: str = ""
    finish_reason: str | None = None
    usage: Any = None
    first_at: float = 0.0
    notes: list[str] = field(default_factory=list)


class OpenAIEngine:
    """Implements `kvspan.engine.Engine`; see `kvspan.engine.open_engine` for the arguments."""

    def __init__(
        self,
        model: str = "",
        *,
        base_url: str | None = None,
        timeout: float = 600.0,
        max_retries: int = 4,
        max_concurrency: int = 16,
    ) -> None:
        self.model = model
        self.url = (base_url or os.environ.get(URL_VARIABLE) or OPENAI_URL).rstrip("/")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(
                "bad base URL",
                expected="http://HOST[:PORT]/v1 or https://...",
                found=repr(self.url),
            )
        if not timeout > 0:
            raise UsageError("bad timeout", expected="more than 0 seconds", found=str(timeout))
        if max_retries < 0:
            raise UsageError("bad max_retries", expected="0 or more", found=str(max_retries))
        if max_concurrency < 1:
            raise UsageError(
                "bad max_concurrency", expected="1 or more", found=str(max_concurrency)
            )
        names = reversed(KEY_VARIABLES) if self.url == OPENAI_URL else KEY_VARIABLES
        key = next((key for name in names if (key := os.environ.get(name))), None)
        if key is None and self.url == OPENAI_URL:
            raise UsageError(
                f"no API key for {OPENAI_URL}", expected=f"one in {' or '.join(KEY_VARIABLES)}"
            )
        self.timeout = timeout
        self.max_retries = max_retries
        self._client = openai.AsyncOpenAI(
            base_url=self.url,
            api_key=key or "none",  # the client insists on one
            timeout=openai.Timeout(timeout, connect=min(timeout, CONNECT_TIMEOUT_S)),
            max_retries=max_retries,
        )
        self._slots = asyncio.Semaphore(max_concurrency)
        self._refused: dict[str, str | None] = {}  # fields of FALLBACKS this server does not take
        self._names: dict[str, str] | None = None
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="kvspan-openai", daemon=True
        )
        self._thread.start()

    async def generate(
        self, request: GenerateRequest, on_text: Callable[[str], None] | None = None
    ) -> GenerateResult:
        """Run one request; on_text gets the answer piece by piece, on the caller's event loop."""
        emit = None
        if on_text is not None:
            caller, deliver = asyncio.get_running_loop(), on_text

            def emit(text: str) -> None:
                caller.call_soon_threadsafe(deliver, text)

        return await asyncio.wrap_future(self._submit(self._generate(request, emit)))

    async def prepare(self, request: GenerateRequest) -> GenerateResult:
        """Ask for one token, so that a server with a prefix cache has seen the prompt."""
        return await self.generate(replace(request, max_tokens=1, temperature=0.0))

    def capabilities(self) -> Capabilities:
        return plain_server(self.url)

    def models(self) -> list[dict[str, Any]]:
        """What the server says of its models, each an object with at least an ``id``."""
        return self._submit(self._models()).result()

    def close(self) -> None:
        """End the calls that are still running, and all connections."""
        if self._closed:
            return
        self._closed = True

        async def end() -> None:
            running = asyncio.all_tasks(self._loop) - {asyncio.current_task(self._loop)}
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await self._client.close()

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> OpenAIEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self._closed:
            work.close()
            raise KvspanError("the engine is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    # --- on the engine's own loop from here on ---------------------------------------------------

    async def _generate(
        self, request: GenerateRequest, emit: Callable[[str], None] | None
    ) -> GenerateResult:
        started = time.perf_counter()
        async with self._slots:
            sent = time.perf_counter()
            with explained(self.url, self.timeout, self.max_retries + 1):
                body = await self._body(request, stream=emit is not None)
                answer = await self._ask(request, body, emit)
        now = time.perf_counter()
        first = answer.first_at or now
        usage = answer.usage
        details = getattr(usage, "prompt_tokens_details", None)
        reuse = Reuse(notes=[*self._notes(request), *answer.notes])
        return GenerateResult(
            text=answer.text,
            token_ids=[],
            finish_reason=_finish_reason(answer.finish_reason, reuse.notes),
            usage=Usage(
                prompt_tokens=getattr(usage, "prompt_tokens", None) or 0,
                completion_tokens=getattr(usage, "completion_tokens", None) or 0,
                cached_tokens=getattr(details, "cached_tokens", None) or 0,
            ),
            timings=Timings(
                queue=sent - started,
                ttft=first - started,
                decode=now - first,
                total=now - started,
            ),
            reuse=reuse,
        )

    def _notes(self, request: GenerateRequest) -> list[str]:
        notes = []
        if any(isinstance(part, Span) for part in request.prompt):
            notes.append(f"spans sent as plain text: {self.capabilities().reason}")
        if request.salt:
            notes.append("the tenant salt was not sent: the protocol has none")
        return notes

    async def _body(self, request: GenerateRequest, stream: bool) -> dict[str, Any]:
        body: dict[str, Any] = {"model": await self._name(request.model or self.model)}
        turns = to_turns(request.prompt)
        if request.chat:
            body["messages"] = [{"role": role, "content": text} for role, text in turns]
        else:
            body["prompt"] = SEPARATOR.join(text for _, text in turns)
        if request.max_tokens is not None:
            body["max_tokens"] = request.max_tokens
        if request.temperature is not None:
            body["temperature"] = request.temperature
        if request.temperature:
            body["seed"] = request.seed % 2**31  # many servers keep 32 bits of it
        if request.stop:
            body["stop"] = list(request.stop)
        if stream:
            body.update(stream=True, stream_options={"include_usage": True})
        return body

    async def _name(self, model: str) -> str:
        """The server's name for a model; a provider before it may or may not be part of that."""
        if not model:
            raise UsageError("the call names no model", expected="a model of the server")
        provider = next((p for p in PROVIDERS if model.startswith(p)), None)
        if provider is None:
            return model
        if self._names is None:
            try:
                self._names = {entry["id"]: entry["id"] for entry in await self._models()}
            except KvspanError:  # not every server has a list
                return model
        plain = model.removeprefix(provider)
        return self._names.get(model) or self._names.get(plain) or model

    async def _models(self) -> list[dict[str, Any]]:
        with explained(self.url, self.timeout, self.max_retries + 1):
            page = await self._client.models.list()
            found = [entry.model_dump() for entry in page.data]
            if not all(isinstance(entry.get("id"), str) for entry in found):
                raise TypeError("a model without an id")
            return found

    async def _ask(
        self, request: GenerateRequest, body: dict[str, Any], emit: Callable[[str], None] | None
    ) -> _Answer:
        """One call, again while that may help: without fields the server does not know, and after
        a stream that broke before any of it was handed on. (The client itself asks again after
        429, 5xx and lost connections.)"""
        tried: dict[str, str | None] = {}
        breaks = 0
        while True:
            sent = _adapted(body, {**self._refused, **tried})
            try:
                answer = await self._once(request, sent, emit)
            except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
                name = _refused_field(error, sent)
                if name is None:
                    raise
                tried[name] = FALLBACKS[name]
            except StreamBroken as error:
                if error.text or breaks >= self.max_retries:
                    raise
                breaks += 1
                await asyncio.sleep(backoff(breaks))
            else:
                self._refused.update(tried)
                if breaks:
                    often = "once" if breaks == 1 else f"{breaks} times"
                    answer.notes.append(f"the stream broke {often} before it began")
                if "seed" in self._refused and "seed" in body:
                    answer.notes.append("the server takes no seed: another run may differ")
                return answer

    async def _once(
        self, request: GenerateRequest, body: dict[str, Any], emit: Callable[[str], None] | None
    ) -> _Answer:
        resource = self._client.chat.completions if request.chat else self._client.completions
        response = await resource.with_raw_response.create(**body)
        answer = _Answer()
        if response.retries_taken:
            answer.notes.append(f"answered at attempt {response.retries_taken + 1}")
        parsed: Any = response.parse()
        if emit is not None:
            await self._read_stream(parsed, request.chat, answer, emit)
            return answer
        choice = parsed.choices[0]
        content = choice.message.content if request.chat else choice.text
        answer.text = content or ""
        answer.finish_reason = choice.finish_reason
        answer.usage = parsed.usage
        return answer

    async def _read_stream(
        self, stream: Any, chat: bool, answer: _Answer, emit: Callable[[str], None]
    ) -> None:
        pieces: list[str] = []
        try:
            async with stream:
                async for chunk in stream:
                    answer.usage = getattr(chunk, "usage", None) or answer.usage
                    for choice in chunk.choices or ():
                        piece = choice.delta.content if chat else choice.text
                        if piece:
                            answer.first_at = answer.first_at or time.perf_counter()
                            pieces.append(piece)
                            emit(piece)
                        answer.finish_reason = choice.finish_reason or answer.finish_reason
        except openai.APIConnectionError as error:
            reason = f"{type(error.__cause__ or error).__name__}: {error.__cause__ or error}"
            raise StreamBroken(reason, bool(pieces)) from error
        if answer.finish_reason is None:
            raise StreamBroken("it ended without a finish_reason", bool(pieces))
        answer.text = "".join(pieces)


def backoff(attempt: int) -> float:
    """Seconds to wait before the next attempt, the first being 1: doubling, with jitter.

    >>> [0.25 * 2**n <= backoff(n) <= 0.5 * 2**n for n in range(1, 4)], backoff(50) <= 8
    ([True, True, True], True)
    """
    return float(min(8.0, 0.5 * 2.0**attempt) * random.uniform(0.5, 1.0))


def _adapted(body: dict[str, Any], refused: dict[str, str | None]) -> dict[str, Any]:
    out = {}
    for name, value in body.items():
        new = refused.get(name, name)
        if new is not None:
            out[new] = value
    return out


def _refused_field(error: openai.APIStatusError, body: dict[str, Any]) -> str | None:
    """The field that the server says it does not take, if kvspan can do without it."""
    text = f"{getattr(error, 'param', '')} {message_of(error)}"
    if not _REFUSED.search(text):
        return None
    return next((name for name in FALLBACKS if name in body and name in text), None)


def _finish_reason(reason: str | None, notes: list[str]) -> Literal["stop", "length"]:
    if reason == "length":
        return "length"
    if reason not in (None, "stop"):
        notes.append(f"the server's finish_reason is {reason!r}")
    return "stop"
