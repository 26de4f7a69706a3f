"""From a request's body to its answer: chat and completions."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvspan import __version__
from kvspan.engine import GenerateRequest, GenerateResult, Scope, Usage
from kvspan.executor import derive_seed
from kvspan.layout import SpanLayout, layout_from_tokens
from kvspan.query.checks import describe
from kvspan.query.prompt import Message, Prompt, Span
from kvspan.serve.errors import APIError
from kvspan.serve.schema import ChatRequest, CompletionRequest, read
from kvspan.serve.service import Service

FINGERPRINT = f"kvspan-{__version__}"
# Takes one event of a stream, as JSON values.
Emit = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Job:
    """A request that has been read. units: how much of the server's limit it takes.

    run: gives the answer; where stream is true, all of it has gone to the Emit by then.
    """

    units: int
    stream: bool
    run: Callable[[Emit], Awaitable[dict[str, Any]]]


def chat(service: Service, body: Any) -> Job:
    """POST /v1/chat/completions."""
    asked = read(ChatRequest, body)
    service.check_model(asked.model)
    prompt = chat_prompt(asked)
    if asked.max_tokens and asked.max_completion_tokens:
        raise APIError(
            400, "max_tokens and max_completion_tokens: expected one of them", param="max_tokens"
        )
    most = asked.max_completion_tokens or asked.max_tokens
    request = _request(asked, prompt, most, "messages")

    async def run(emit: Emit) -> dict[str, Any]:
        layout = await service.engine.lay_out(request)
        return await _Answer(service, asked, [(layout, request)], ChatShape(), emit).run()

    return Job(asked.n, asked.stream, run)


def chat_prompt(asked: ChatRequest) -> Prompt:
    """The messages as a prompt; parts that are marked become spans. Empty parts are left out."""
    parts: list[Message | Span] = []
    for index, message in enumerate(asked.messages):
        for number, part in enumerate(message.content):
            is_span = part.kvspan is not None and part.kvspan.span
            place = f"messages[{index}].content[{number}].kvspan"
            if is_span and message.role != "user":
                raise APIError(
                    400,
                    f"{place}: only parts of user messages can be spans; found one of a "
                    f"{message.role} message",
                    code="invalid_value",
                    param=place,
                )
            if not part.text:
                continue
            role = "system" if message.role == "developer" else message.role
            text = Message(role, part.text)
            parts.append(Span((text,)) if is_span else text)
    if not parts:
        raise APIError(400, "messages: expected some text; found none", param="messages")
    return tuple(parts)


def completion(service: Service, body: Any) -> Job:
    """POST /v1/completions."""
    asked = read(CompletionRequest, body)
    service.check_model(asked.model)
    vocabulary = service.engine.vocab_size
    for number, prompt in enumerate(asked.prompt):
        ids = prompt if isinstance(prompt, list) else []
        for index, token in enumerate(ids):
            if not 0 <= token < vocabulary:
                place = f"prompt{f'[{number}]' if len(asked.prompt) > 1 else ''}[{index}]"
                raise APIError(
                    400,
                    f"{place}: expected a token id from 0 to {vocabulary - 1}; "
                    f"found {describe(token)}",
                    code="invalid_value",
                    param=place,
                )

    async def run(emit: Emit) -> dict[str, Any]:
        prompts: list[tuple[SpanLayout, GenerateRequest]] = []
        for prompt in asked.prompt:
            if isinstance(prompt, str):
                request = _request(asked, (Message("user", prompt),), asked.max_tokens, "prompt")
                layout = await service.engine.lay_out(request)
            else:
                request = _request(asked, (), asked.max_tokens, "prompt")
                layout = _layout_of_tokens(service, prompt, asked.kvspan.scope)
            prompts.append((layout, request))
        return await _Answer(service, asked, prompts, TextShape(), emit).run()

    return Job(asked.n * len(asked.prompt), asked.stream, run)


def _layout_of_tokens(service: Service, prompt: list[int], scope: Scope) -> SpanLayout:
    """Tokens as they are, with the spans that boundaries among them mark, if these are on."""
    can, marks = service.capabilities(), service.settings.parentheses
    if marks is not None:
        layout = marks.decode(prompt, can.block_size, scope if can.spans else "full")
        if layout is not None:
            return layout
    return layout_from_tokens(prompt, (), can.block_size, "full")


def _request(
    asked: ChatRequest | CompletionRequest, prompt: Prompt, max_tokens: int | None, path: str
) -> GenerateRequest:
    is_chat = isinstance(asked, ChatRequest)
    return GenerateRequest(
        prompt=prompt,
        model=asked.model,
        max_tokens=max_tokens,
        temperature=asked.temperature,
        scope=asked.kvspan.scope if is_chat else "full",
        placement=asked.kvspan.placement,
        salt=asked.kvspan.salt,
        stop=tuple(asked.stop),
        chat=is_chat,
        path=path,
    )


class ChatShape:
    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def first(self, index: int) -> dict[str, Any] | None:
        return _choice(index, delta={"role": "assistant", "content": ""})

    def piece(self, index: int, text: str) -> dict[str, Any]:
        return _choice(index, delta={"content": text})

    def last(self, index: int, reason: str) -> dict[str, Any]:
        return _choice(index, reason, delta={})

    def complete(self, index: int, text: str, reason: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return _choice(index, reason, message=message)


class TextShape:
    prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def first(self, index: int) -> dict[str, Any] | None:
        return None

    def piece(self, index: int, text: str) -> dict[str, Any]:
        return _choice(index, text=text)

    def last(self, index: int, reason: str) -> dict[str, Any]:
        return _choice(index, reason, text="")

    def complete(self, index: int, text: str, reason: str) -> dict[str, Any]:
        return _choice(index, reason, text=text)


def _choice(index: int, reason: str | None = None, **content: Any) -> dict[str, Any]:
    return {"index": index, **content, "logprobs": None, "finish_reason": reason}


class Envelope:
    """What all objects of one answer have in common."""

    def __init__(self, shape: ChatShape | TextShape, model: str) -> None:
        self.shape = shape
        self.id = f"{shape.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = model

    def __call__(self, object: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
            **more,
        }


def usage_of(usages: list[Usage], prompts: list[Usage]) -> dict[str, Any]:
    """usages: of all calls. prompts: of those whose prompt counts."""
    prompt = sum(usage.prompt_tokens for usage in prompts)
    completion = sum(usage.completion_tokens for usage in usages)
    cached = sum(usage.cached_tokens for usage in prompts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class _Answer:
    """n choices for each of several prompts, all generated side by side."""

    def __init__(
        self,
        service: Service,
        asked: ChatRequest | CompletionRequest,
        prompts: list[tuple[SpanLayout, GenerateRequest]],
        shape: ChatShape | TextShape,
        emit: Emit,
    ) -> None:
        self.service = service
        self.asked = asked
        self.prompts = prompts
        self.shape = shape
        self.envelope = Envelope(shape, asked.model)
        self.emit = emit
        self.seed = random.getrandbits(63) if asked.seed is None else asked.seed % 2**63

    async def run(self) -> dict[str, Any]:
        n = self.asked.n
        calls = [
            self._call(number * n + choice, choice, layout, request)
            for number, (layout, request) in enumerate(self.prompts)
            for choice in range(n)
        ]
        results = await _all(calls)
        # A prompt is counted once, however many answers it gets, and as its first call found it.
        usage = usage_of([r.usage for r in results], [r.usage for r in results[::n]])
        if self.asked.stream:
            if self.asked.include_usage:
                self.emit(self.envelope(self.shape.part, [], usage=usage))
            return {}
        choices = [
            {**self.shape.complete(i, r.text, r.finish_reason), **self._report(r)}
            for i, r in enumerate(results)
        ]
        return self.envelope(self.shape.whole, choices, usage=usage)

    async def _call(
        self, index: int, choice: int, layout: SpanLayout, request: GenerateRequest
    ) -> GenerateResult:
        # The first choice is the one that n=1 gives.
        seed = derive_seed(self.seed, f"choice {choice}") if choice else self.seed
        request = replace(request, seed=seed)
        if not self.asked.stream:
            return await self.service.generate_layout(layout, request)
        begun = False

        def begin() -> None:
            nonlocal begun
            if not begun and (first := self.shape.first(index)):
                self._send(first)
            begun = True

        def on_text(text: str) -> None:
            begin()
            self._send(self.shape.piece(index, text))

        result = await self.service.generate_layout(layout, request, on_text)
        begin()
        self._send({**self.shape.last(index, result.finish_reason), **self._report(result)})
        return result

    def _send(self, choice: dict[str, Any]) -> None:
        more = {"usage": None} if self.asked.include_usage else {}
        self.emit(self.envelope(self.shape.part, [choice], **more))

    def _report(self, result: GenerateResult) -> dict[str, Any]:
        if not self.asked.kvspan.report:
            return {}
        return {"kvspan": {"reuse": asdict(result.reuse), "timings": asdict(result.timings)}}


async def _all(calls: Sequence[Awaitable[GenerateResult]]) -> list[GenerateResult]:
    """All results in order; the first failure, or cancellation, ends the other calls."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
