"""What an engine is: the one interface between a planned query and whatever runs the model.

The data types here are plain and import neither torch nor transformers; ``open_engine`` does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import numpy as np

    from kvspan.layout import SpanLayout
    from kvspan.query.plan import Prompt

Scope = Literal["anchored", "isolated", "full"]
Placement = Literal["sequential", "parallel"]
# (phase, done, total): called as work proceeds, for example ("prefill", 512, 4096) in tokens.
Progress = Callable[[str, int, int], None]

SCOPES: tuple[Scope, ...] = ("anchored", "isolated", "full")
PLACEMENTS: tuple[Placement, ...] = ("sequential", "parallel")


@dataclass(frozen=True)
class GenerateRequest:
    """One model call.

    max_tokens: at most this many new tokens; None lets the engine run to the end-of-text token.
    temperature: 0 is greedy; None takes the engine's default (0, greedy).
    seed: of this request's own sampler; the same seed, prompt and weights give the same tokens.
    scope: what a span token attends to (DESIGN "attention scope").
    placement: where cached spans are put (DESIGN "placement").
    salt: tenant salt; requests with different salts never share cached blocks.
    path: JSON path of the generate node, for messages.
    """

    prompt: Prompt
    model: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int = 0
    scope: Scope = "anchored"
    placement: Placement = "sequential"
    salt: str = ""
    path: str = "$"
    return_logprobs: bool = False


@dataclass
class Usage:
    """Token counts. cached_tokens: prompt tokens whose KV was found in the cache."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass
class Timings:
    """Seconds. ttft runs from submission, queueing included, until the first token is known."""

    queue: float = 0.0
    prepare: float = 0.0
    move: float = 0.0
    prefill: float = 0.0
    ttft: float = 0.0
    decode: float = 0.0
    total: float = 0.0


@dataclass
class Reuse:
    """What happened to the prompt's tokens, for audit: span_tokens = reused + prepared."""

    spans: int = 0
    span_hits: int = 0
    span_tokens: int = 0
    reused_tokens: int = 0
    moved_tokens: int = 0
    prepared_tokens: int = 0
    computed_tokens: int = 0
    notes: list[str] = field(default_factory=list)


@dataclass
class GenerateResult:
    """Answer of one call. first_logprobs: float32 [vocab_size] of the first new token, if asked."""

    text: str
    token_ids: list[int]
    finish_reason: Literal["stop", "length"]
    usage: Usage
    timings: Timings
    reuse: Reuse
    first_logprobs: np.ndarray[Any, Any] | None = None


@dataclass(frozen=True)
class Capabilities:
    """spans: whether span KV can be reused; if not, reason says why, and scope is always full."""

    spans: bool
    reason: str
    max_tokens: int
    block_size: int


class Engine(Protocol):
    """Runs generate calls. Methods may be called from any event loop; calls run side by side."""

    async def generate(
        self, request: GenerateRequest, on_text: Callable[[str], None] | None = None
    ) -> GenerateResult: ...

    async def prepare(self, request: GenerateRequest) -> GenerateResult:
        """Compute and cache the request's spans and prefix; generate nothing (the paper's G^1)."""
        ...

    def layout(self, request: GenerateRequest) -> SpanLayout:
        """The token layout the request would run with. Runs nothing."""
        ...

    def capabilities(self) -> Capabilities: ...

    def close(self) -> None: ...


def open_engine(
    model: str,
    *,
    block_size: int = 16,
    kv_cache_gib: float = 1.0,
    dtype: str = "auto",
    device: str = "auto",
    progress: Progress | None = None,
) -> Engine:
    """Open the embedded engine on a transformers model: a folder, a hub id, or ``demo``.

    dtype: auto, float32, bfloat16 or float16; auto is float32 on CPU, the checkpoint's on GPU.
    Raises UsageError when the model cannot be found or the arguments make no sense, KvspanError
    when it is there and cannot be loaded.
    """
    from kvspan.engine.local import LocalEngine

    return LocalEngine.open(
        model,
        block_size=block_size,
        kv_cache_gib=kv_cache_gib,
        dtype=dtype,
        device=device,
        progress=progress,
    )
