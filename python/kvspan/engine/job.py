"""A request on its way through the engine's worker, and what the worker tells about itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal

import torch

from kvspan.engine import GenerateRequest, GenerateResult
from kvspan.engine.detokenizer import Detokenizer
from kvspan.engine.prefill import Prefill
from kvspan.engine.sampling import Sampler
from kvspan.layout import Answer, SpanLayout


@dataclass(eq=False)
class Job:
    """A request on its way through the worker."""

    request: GenerateRequest
    layout: SpanLayout
    detokenizer: Detokenizer
    sampler: Sampler
    future: Future[GenerateResult] = field(default_factory=Future)
    submitted: float = field(default_factory=time.perf_counter)
    notes: list[str] = field(default_factory=list)
    cancelled: bool = False
    prefill: Prefill | None = None
    steps: Iterator[None] | None = None
    max_new_tokens: int = 0
    finish_reason: Literal["stop", "length"] | None = None
    at_end: bool = False  # the model ended the text itself, with a token that is not in the answer
    text: str = ""
    written: int = 0  # tokens of the answer whose KV was computed
    answer: Answer | None = None
    first_token_at: float = 0.0
    first_logprobs: torch.Tensor | None = None

    @property
    def active(self) -> Prefill:
        assert self.prefill is not None
        return self.prefill


@dataclass(frozen=True)
class EngineStats:
    """What the engine is doing right now. blocks_cached: no request holds them, all can be reused.

    alive: whether requests are still being worked on.
    """

    alive: bool
    waiting: int
    running: int
    blocks: int
    blocks_in_use: int
    blocks_cached: int
