"""What an engine is: the one interface between a planned query and whatever runs the model.

The data types here are plain and import neither torch nor transformers nor openai; ``open_engine``
imports what the engine it opens is made of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from kvspan.errors import KvspanError, UsageError
from kvspan.extras import engine_extra, importing

if TYPE_CHECKING:
    import numpy as np

    from kvspan.query.prompt import Prompt

Scope = Literal["anchored", "isolated", "full"]
Placement = Literal["sequential", "parallel"]
Kind = Literal["local", "openai"]
# (phase, done, total): called as work proceeds, for example ("prefill", 512, 4096) in tokens.
Progress = Callable[[str, int, int], None]

SCOPES: tuple[Scope, ...] = ("anchored", "isolated", "full")
PLACEMENTS: tuple[Placement, ...] = ("sequential", "parallel")
KINDS: tuple[Kind, ...] = ("local", "openai")


class PromptTooLongError(UsageError):
    """The prompt leaves no room for an answer in the model's context."""


class PoolTooSmallError(KvspanError):
    """Prompt and answer need more KV blocks than the engine has, whatever else is running."""


@dataclass(frozen=True)
class GenerateRequest:
    """One model call.

    max_tokens: at most this many new tokens; None lets the engine run to the end-of-text token.
    temperature: 0 is greedy; None takes the engine's default (0, greedy).
    seed: of this request's own sampler; the same seed, prompt and weights give the same tokens.
    scope: what a span token attends to (DESIGN "attention scope").
    placement: where cached spans are put (DESIGN "placement").
    salt: tenant salt; requests with different salts never share cached blocks.
    stop: texts that end the answer where one of them first appears; it is not part of the answer.
    chat: whether the prompt goes through the model's chat template; if not, the texts of its
        messages are the prompt, and the answer goes on from them.
    keep_answer: whether the answer will be read as a span (`GenerateResult.answer`), so that its
        KV is better kept. It changes no answer.
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
    stop: tuple[str, ...] = ()
    chat: bool = True
    keep_answer: bool = False
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
    """What happened to the prompt's tokens, for audit: span_tokens = reused + prepared.

    answers: spans that are answers of other calls. answer_tokens: generated tokens in them, and
    answer_reused_tokens: those whose KV was found. kept_tokens: of this call's own answer, those
    whose KV was kept for spans to come. replay: on hybrid models, how the recurrent state at the
    end of the cached prefix was restored (`kvspan.hybrid.plan.record`).
    """

    spans: int = 0
    span_hits: int = 0
    span_tokens: int = 0
    reused_tokens: int = 0
    moved_tokens: int = 0
    prepared_tokens: int = 0
    computed_tokens: int = 0
    answers: int = 0
    answer_tokens: int = 0
    answer_reused_tokens: int = 0
    kept_tokens: int = 0
    replay: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)


@dataclass
class GenerateResult:
    """Answer of one call.

    token_ids: of the answer; empty where the engine does not know them.
    first_logprobs: float32 [vocab_size] of the first new token, if asked for.
    answer: for `Message.answer`, where the engine can use the answer's KV as a span's.
    """

    text: str
    token_ids: list[int]
    finish_reason: Literal["stop", "length"]
    usage: Usage
    timings: Timings
    reuse: Reuse
    first_logprobs: np.ndarray[Any, Any] | None = None
    answer: object = field(default=None, repr=False)


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do.

    spans: whether span KV can be reused; if not, reason says why, and scope is always full.
    answers: whether answers can be spans with the KV they were generated with.
    max_tokens: the model's context, prompt and answer together; 0 where it is not known.
    block_size: tokens per KV block; 0 where it is not known.
    """

    spans: bool
    reason: str
    max_tokens: int
    block_size: int
    answers: bool = False


def plain_server(url: str = "") -> Capabilities:
    """What a server can do that speaks OpenAI's protocol and no more."""
    reason = f"the server{url and f' at {url}'} takes plain prompts only"
    return Capabilities(spans=False, reason=reason, max_tokens=0, block_size=0)


class Engine(Protocol):
    """Runs generate calls. Methods may be called from any event loop; calls run side by side.

    Cancelling a call ends it in the engine as well.
    """

    async def generate(
        self, request: GenerateRequest, on_text: Callable[[str], None] | None = None
    ) -> GenerateResult: ...

    async def prepare(self, request: GenerateRequest) -> GenerateResult:
        """Compute and cache the request's spans and prefix; generate nothing (the paper's G^1)."""
        ...

    def capabilities(self) -> Capabilities: ...

    def close(self) -> None: ...


def open_engine(
    model: str,
    *,
    kind: Kind = "local",
    block_size: int = 16,
    kv_cache_gib: float = 1.0,
    dtype: str = "auto",
    device: str = "auto",
    progress: Progress | None = None,
    base_url: str | None = None,
    timeout: float = 600.0,
    max_retries: int = 4,
    max_concurrency: int = 16,
    replay: str = "exact",
) -> Engine:
    """Open an engine.

    kind "local", the embedded engine: model is a folder, a hub id, or ``demo``.
        dtype: auto, float32, bfloat16 or float16; auto is float32 on CPU, the checkpoint's on GPU.
        replay: how the recurrent state of a hybrid model is restored at the end of a cached
        prefix: exact, bounded:EPS or ratio:R (`kvspan.hybrid.policy`).
        block_size, kv_cache_gib, dtype, device, replay and progress are for this kind alone.
    kind "openai", any OpenAI-compatible server: model is the server's name of it, used for calls
        that name none. The API key is read from KVSPAN_API_KEY or OPENAI_API_KEY.
        base_url: for example http://127.0.0.1:8000/v1; None takes OPENAI_BASE_URL.
        timeout: seconds the server may be silent. max_retries: further attempts after 429, 5xx and
        lost connections. max_concurrency: calls that are sent at the same time.

    Raises UsageError when the model cannot be found or the arguments make no sense, KvspanError
    when it is there and cannot be loaded.
    """
    if kind == "openai":
        with importing("openai"):
            from kvspan.engine.openai import OpenAIEngine

        return OpenAIEngine(
            model,
            base_url=base_url,
            timeout=timeout,
            max_retries=max_retries,
            max_concurrency=max_concurrency,
        )
    if kind != "local":
        raise UsageError("unknown kind of engine", expected=" or ".join(KINDS), found=repr(kind))
    with importing(engine_extra(model)):
        from kvspan.engine.local import LocalEngine

    return LocalEngine.open(
        model,
        block_size=block_size,
        kv_cache_gib=kv_cache_gib,
        dtype=dtype,
        device=device,
        progress=progress,
        replay=replay,
    )
