"""An engine without a model: answers from the prompt alone, and records what was asked when."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

from kvspan.engine import (
    Capabilities,
    GenerateRequest,
    GenerateResult,
    Reuse,
    Timings,
    Usage,
)
from kvspan.query.prompt import Message, Prompt

ALL = Capabilities(spans=True, reason="", max_tokens=1000, block_size=16, answers=True)
Answer = Callable[[GenerateRequest], str]


def prompt_text(prompt: Prompt) -> str:
    """A prompt on one line: messages as role:text, spans in brackets."""

    def one(message: Message) -> str:
        return f"{message.role[0]}:{message.text}"

    return " ".join(
        one(item) if isinstance(item, Message) else f"[{' '.join(map(one, item.messages))}]"
        for item in prompt
    )


def digest_answer(request: GenerateRequest) -> str:
    """Depends on everything that a sampled answer may depend on."""
    key = f"{prompt_text(request.prompt)} {request.temperature} {request.seed} {request.max_tokens}"
    return hashlib.sha256(key.encode()).hexdigest()[:8]


@dataclass
class FakeEngine:
    """Takes ``ticks`` turns of the event loop per call, or until ``gate`` opens.

    events: ("start" | "end" | "cancel", path) in the order they came. most: calls that ran at the
    same time, at the most. prepared: paths of the calls that were to fill the cache only.
    can: its capabilities.
    """

    answer: Answer = digest_answer
    ticks: int = 3
    gate: asyncio.Event | None = None
    requests: list[GenerateRequest] = field(default_factory=list)
    events: list[tuple[str, str]] = field(default_factory=list)
    running: int = 0
    most: int = 0
    closed: int = 0
    prepared: list[str] = field(default_factory=list)
    can: Capabilities = ALL

    async def generate(
        self, request: GenerateRequest, on_text: Callable[[str], None] | None = None
    ) -> GenerateResult:
        self.requests.append(request)
        self.events.append(("start", request.path))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            for _ in range(self.ticks):
                await asyncio.sleep(0)
            if self.gate is not None:
                await self.gate.wait()
            text = self.answer(request)
            if on_text is not None:
                for character in text:
                    on_text(character)
        except asyncio.CancelledError:
            self.events.append(("cancel", request.path))
            raise
        finally:
            self.running -= 1
        self.events.append(("end", request.path))
        prompt_tokens = len(prompt_text(request.prompt).split())
        return GenerateResult(
            text=text,
            token_ids=list(text.encode()),
            finish_reason="stop",
            usage=Usage(prompt_tokens, len(text), prompt_tokens // 2),
            timings=Timings(ttft=0.25, total=0.5),
            reuse=Reuse(spans=1, moved_tokens=2, prepared_tokens=1),
        )

    async def prepare(self, request: GenerateRequest) -> GenerateResult:
        self.prepared.append(request.path)
        return await self.generate(request)

    def capabilities(self) -> Capabilities:
        return self.can

    def close(self) -> None:
        self.closed += 1
