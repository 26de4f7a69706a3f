"""The embedded engine: a transformers decoder over kvspan's own paged pool, in this process.

What is here checks requests and lays them out; the work is done in `kvspan.engine.worker`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from kvspan.engine import Capabilities, GenerateRequest, GenerateResult, Progress
from kvspan.engine.attention import IMPLEMENTATION
from kvspan.engine.detokenizer import Detokenizer
from kvspan.engine.job import EngineStats, Job
from kvspan.engine.limits import check_request
from kvspan.engine.loading import load_model
from kvspan.engine.pool import BlockPool
from kvspan.engine.rope import UnsupportedModelError, probe_layers
from kvspan.engine.runner import KVCache, ModelRunner
from kvspan.engine.sampling import Sampler
from kvspan.engine.sequence import CacheDomain
from kvspan.engine.worker import Worker, blocks_beside
from kvspan.errors import KvspanError, UsageError
from kvspan.hybrid.groups import is_hybrid
from kvspan.layout import PromptEncoder, SpanLayout
from kvspan.query.prompt import Span

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEFAULT_MAX_TOKENS = 2048  # where a request leaves it open: what spnl's server does
CHECK_TOLERANCE = {torch.float32: 2e-3}  # log-probabilities against transformers, at load
CHECK_TOLERANCE_LOW = 0.5  # 16-bit types


class LocalEngine:
    """Implements `kvspan.engine.Engine`. Use `open`, and `close` when done."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str = "",
        block_size: int = 16,
        kv_cache_gib: float = 1.0,
        progress: Progress | None = None,
    ) -> None:
        if block_size < 1:
            raise UsageError(f"block_size: expected at least 1, got {block_size}")
        model.set_attn_implementation(IMPLEMENTATION)
        try:
            specs, refused = probe_layers(model)
        except UnsupportedModelError as e:
            raise KvspanError(f"model {name}: the embedded engine cannot run it: {e}") from None
        self.name = name
        self.progress = progress
        self.tokenizer = tokenizer
        self.encoder = PromptEncoder(tokenizer, block_size)
        self.no_spans = refused
        config = model.config.get_text_config()
        self.max_positions = int(config.max_position_embeddings)
        per_block = KVCache.bytes_per_block(specs, block_size, model.dtype)
        memory = memory_bytes(model.device)
        if not 2 * per_block <= kv_cache_gib * 2**30 <= memory:
            raise UsageError(
                f"kv_cache_gib: expected {2 * per_block / 2**30:.3g} (two blocks of {block_size} "
                f"tokens) to {memory / 2**30:.3g} (all memory), got {kv_cache_gib:g}"
            )
        num_blocks = int(kv_cache_gib * 2**30) // per_block
        self.pool = BlockPool(num_blocks)
        try:
            cache = KVCache(specs, num_blocks, block_size, model.dtype, model.device)
        except RuntimeError as e:
            raise KvspanError(f"no memory for a KV pool of {kv_cache_gib:g} GiB: {e}") from None
        self.runner = ModelRunner(model, cache)
        self._check(model)
        # Long prompts take the tokenizer a while, and it must not be used by two threads at once.
        self._encoding = ThreadPoolExecutor(1, "kvspan-tokenizer")
        self.worker = Worker(
            self.runner,
            self.pool,
            name,
            self.encoder,
            self.max_positions,
            stop_ids(model, tokenizer),
            progress,
        )

    @classmethod
    def open(
        cls,
        model: str,
        *,
        block_size: int = 16,
        kv_cache_gib: float = 1.0,
        dtype: str = "auto",
        device: str = "auto",
        progress: Progress | None = None,
        replay: str = "exact",
    ) -> LocalEngine:
        """See `kvspan.engine.open_engine`."""
        loaded, tokenizer = load_model(model, dtype=dtype, device=device, progress=progress)
        if is_hybrid(loaded.config):
            from kvspan.hybrid.engine import HybridEngine

            return HybridEngine(
                loaded,
                tokenizer,
                name=model,
                block_size=block_size,
                kv_cache_gib=kv_cache_gib,
                progress=progress,
                replay=replay,
            )
        if replay != "exact":
            raise UsageError(f"replay: model {model} has no recurrent state, got {replay!r}")
        return cls(
            loaded,
            tokenizer,
            name=model,
            block_size=block_size,
            kv_cache_gib=kv_cache_gib,
            progress=progress,
        )

    def _check(self, model: PreTrainedModel) -> None:
        """The engine gives what transformers gives, before anything else is asked of it."""
        difference = self.runner.check_against_transformers()
        tolerance = CHECK_TOLERANCE.get(model.dtype, CHECK_TOLERANCE_LOW)
        if not difference <= tolerance:
            raise KvspanError(
                f"model {self.name}: the embedded engine cannot run it: log-probabilities differ "
                f"by {difference:.1e} from transformers' own, expected at most {tolerance:.0e}"
            )

    async def generate(
        self, request: GenerateRequest, on_text: Callable[[str], None] | None = None
    ) -> GenerateResult:
        """Run one request. on_text gets the answer piece by piece, on the caller's event loop.

        Raises UsageError for a prompt that the model cannot take, KvspanError when it fails.
        """
        return await self.generate_layout(await self.lay_out(request), request, on_text)

    async def lay_out(self, request: GenerateRequest) -> SpanLayout:
        """`layout`, while the event loop goes on."""
        if self.worker.closed:
            raise KvspanError("the engine is closed")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._encoding, self.layout, request)

    async def generate_layout(
        self,
        layout: SpanLayout,
        request: GenerateRequest,
        on_text: Callable[[str], None] | None = None,
    ) -> GenerateResult:
        """`generate` on tokens that are laid out; the request's prompt and scope are not read."""
        self._check_layout(layout)
        loop = asyncio.get_running_loop()
        emit = None
        if on_text is not None:
            deliver = on_text

            def emit(text: str) -> None:
                loop.call_soon_threadsafe(deliver, text)

        job = self._submit(request, layout, emit)
        try:
            return await asyncio.wrap_future(job.future)
        except asyncio.CancelledError:
            job.cancelled = True
            raise

    async def prepare(self, request: GenerateRequest) -> GenerateResult:
        return await self.generate(replace(request, max_tokens=1, temperature=0.0))

    def run(self, request: GenerateRequest) -> GenerateResult:
        """`generate` for callers without an event loop."""
        return self._submit(request, self.layout(request), None).future.result()

    def run_layout(self, layout: SpanLayout, request: GenerateRequest) -> GenerateResult:
        """`run` on tokens that the caller laid out; the request's prompt and scope are not read."""
        self._check_layout(layout)
        return self._submit(request, layout, None).future.result()

    def _check_layout(self, layout: SpanLayout) -> None:
        if layout.block_size != self.encoder.block_size:
            raise UsageError(
                f"block_size: expected the engine's {self.encoder.block_size}, "
                f"got {layout.block_size}"
            )

    def layout(self, request: GenerateRequest) -> SpanLayout:
        """The token layout the request would run with. Runs nothing."""
        scope = "full" if self.no_spans else request.scope
        domain = CacheDomain(self.name, request.salt)
        return self.encoder.encode(request.prompt, scope, chat=request.chat, domain=domain)

    @property
    def vocab_size(self) -> int:
        """Token ids that the model knows are below this."""
        return int(self.runner.model.get_input_embeddings().num_embeddings)

    def stats(self) -> EngineStats:
        """A snapshot; the worker goes on meanwhile."""
        return self.worker.stats()

    def capabilities(self) -> Capabilities:
        return Capabilities(
            spans=not self.no_spans,
            reason=self.no_spans,
            max_tokens=self.max_positions,
            block_size=self.encoder.block_size,
            answers=not self.no_spans,
        )

    def clear_cache(self) -> int:
        """Forget all cached blocks that no running request holds; how many."""
        return self.worker.clear_cache()

    def close(self) -> None:
        """Stop the worker; requests that are not done fail."""
        self._encoding.shutdown(wait=False)
        self.worker.close()

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _submit(
        self, request: GenerateRequest, layout: SpanLayout, on_text: Callable[[str], None] | None
    ) -> Job:
        context = self.max_positions
        room = context - 1 - int(layout.positions(request.placement)[-1])
        check_request(request, layout, vocab_size=self.vocab_size, room=room, context=context)
        job = Job(
            request,
            layout,
            Detokenizer(self.tokenizer, on_text, request.stop),
            Sampler(request.temperature or 0.0, request.seed),
        )
        has_spans = any(isinstance(item, Span) for item in request.prompt)
        if self.no_spans and request.scope != "full" and has_spans:
            job.notes.append(f"spans not reused: {self.no_spans}")
        given = sum(
            isinstance(item, Span) and any(message.answer for message in item.messages)
            for item in request.prompt
        )
        if given > (used := sum(answer is not None for answer in layout.answers)):
            job.notes.append(
                f"{given - used} of {given} inner answers read as text: their KV is of another "
                f"scope, salt or model, or too many prompts deep"
            )
        job.max_new_tokens = min(request.max_tokens or DEFAULT_MAX_TOKENS, room)
        if request.max_tokens is None:
            # An open-ended answer takes what the pool has left beside the prompt.
            free = self.pool.num_blocks - self._most_blocks(layout)
            job.max_new_tokens = max(1, min(job.max_new_tokens, free * layout.block_size))
        elif request.max_tokens > room:
            job.notes.append(f"max_tokens cut to {room}: the model's context ends there")
        self.worker.submit(job)
        return job

    @staticmethod
    def _most_blocks(layout: SpanLayout) -> int:
        """Blocks a prompt needs at once: itself, and its largest span before it is moved."""
        spans = max((blocks_beside(layout, i) for i in range(len(layout.spans))), default=0)
        return -(-layout.num_tokens // layout.block_size) + spans


def memory_bytes(device: torch.device) -> int:
    """All memory of the device, in use or not."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    generation = getattr(model, "generation_config", None)
    ids = getattr(generation, "eos_token_id", None)
    if ids is None:
        ids = tokenizer.eos_token_id
    if ids is None:
        return set()
    return set(ids) if isinstance(ids, list) else {ids}
