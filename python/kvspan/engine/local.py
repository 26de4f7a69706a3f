"""The embedded engine: a transformers decoder over kvspan's own paged pool, in this process.

One worker thread owns the model and the pool. It prefills one request at a time, in chunks, and
between chunks decodes all running requests together. Requests wait in order of arrival until the
pool can hold them to their last token, so that nothing is ever preempted.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import torch

from kvspan.engine import (
    Capabilities,
    GenerateRequest,
    GenerateResult,
    PoolTooSmallError,
    Progress,
    PromptTooLongError,
    Usage,
)
from kvspan.engine.attention import IMPLEMENTATION, Row
from kvspan.engine.loading import load_model
from kvspan.engine.pool import BlockPool, PoolFullError
from kvspan.engine.prefill import Prefill
from kvspan.engine.rope import UnsupportedModelError, probe_layers
from kvspan.engine.runner import KVCache, ModelRunner
from kvspan.engine.sampling import Detokenizer, Sampler
from kvspan.engine.sequence import CacheDomain, Sequence
from kvspan.errors import KvspanError, UsageError
from kvspan.layout import PromptEncoder, SpanLayout

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEFAULT_MAX_TOKENS = 2048  # where a request leaves it open: what spnl's server does
CHECK_TOLERANCE = {torch.float32: 2e-3}  # log-probabilities against transformers, at load
CHECK_TOLERANCE_LOW = 0.5  # 16-bit types


@dataclass(eq=False)
class _Job:
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
        memory = _memory_bytes(model.device)
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
        self._stop_ids = _stop_ids(model, tokenizer)
        # Long prompts take the tokenizer a while, and it must not be used by two threads at once.
        self._encoding = ThreadPoolExecutor(1, "kvspan-tokenizer")
        self._wake = threading.Condition()
        self._waiting: deque[_Job] = deque()
        self._prefilling: _Job | None = None
        self._running: list[_Job] = []
        self._starved = False  # the head of the queue waits for blocks that running ones hold
        self._closed = False
        self._worker = threading.Thread(target=self._work, name="kvspan-engine", daemon=True)
        self._worker.start()

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
    ) -> LocalEngine:
        """See `kvspan.engine.open_engine`."""
        loaded, tokenizer = load_model(model, dtype=dtype, device=device, progress=progress)
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
        if self._closed:
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
        return self.encoder.encode(request.prompt, scope, chat=request.chat)

    @property
    def vocab_size(self) -> int:
        """Token ids that the model knows are below this."""
        return int(self.runner.model.get_input_embeddings().num_embeddings)

    def stats(self) -> EngineStats:
        """A snapshot; the worker goes on meanwhile."""
        pool = self.pool
        in_use = pool.num_blocks - pool.num_available
        return EngineStats(
            alive=self._worker.is_alive() and not self._closed,
            waiting=len(self._waiting),
            running=len(self._running) + (self._prefilling is not None),
            blocks=pool.num_blocks,
            blocks_in_use=in_use,
            blocks_cached=pool.num_evictable,
        )

    def capabilities(self) -> Capabilities:
        return Capabilities(
            spans=not self.no_spans,
            reason=self.no_spans,
            max_tokens=self.max_positions,
            block_size=self.encoder.block_size,
        )

    def clear_cache(self) -> int:
        """Forget all cached blocks that no running request holds; how many."""
        with self._wake:
            if self._waiting or self._running or self._prefilling:
                raise KvspanError("clear_cache: requests are running")
            return self.pool.evict()

    def close(self) -> None:
        """Stop the worker; requests that are not done fail."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._encoding.shutdown(wait=False)
        if threading.current_thread() is not self._worker:
            self._worker.join()

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _submit(
        self, request: GenerateRequest, layout: SpanLayout, on_text: Callable[[str], None] | None
    ) -> _Job:
        temperature = request.temperature or 0.0
        if not 0 <= temperature < float("inf"):
            raise UsageError(f"{request.path}: temperature: expected 0 or more, got {temperature}")
        if request.max_tokens is not None and request.max_tokens < 1:
            raise UsageError(
                f"{request.path}: max_tokens: expected 1 or more, got {request.max_tokens}"
            )
        if int(layout.token_ids.max()) >= self.vocab_size or int(layout.token_ids.min()) < 0:
            raise UsageError(
                f"{request.path}: token ids: expected 0 to {self.vocab_size - 1} as the model has "
                f"them, got {int(layout.token_ids.min())} to {int(layout.token_ids.max())}"
            )
        job = _Job(
            request,
            layout,
            Detokenizer(self.tokenizer, on_text, request.stop),
            Sampler(temperature, request.seed),
        )
        if self.no_spans and request.scope != "full":
            job.notes.append(f"spans not reused: {self.no_spans}")
        room = self.max_positions - 1 - int(layout.positions(request.placement)[-1])
        if room < 1:
            raise PromptTooLongError(
                f"{request.path}: prompt of {layout.num_tokens} tokens is too long: the model's "
                f"context is {self.max_positions} tokens, prompt and answer together"
            )
        job.max_new_tokens = min(request.max_tokens or DEFAULT_MAX_TOKENS, room)
        if request.max_tokens is None:
            # An open-ended answer takes what the pool has left beside the prompt.
            free = self.pool.num_blocks - self._most_blocks(layout)
            job.max_new_tokens = max(1, min(job.max_new_tokens, free * layout.block_size))
        elif request.max_tokens > room:
            job.notes.append(f"max_tokens cut to {room}: the model's context ends there")
        with self._wake:
            if self._closed:
                raise KvspanError("the engine is closed")
            job.future.set_running_or_notify_cancel()  # from here on we alone settle it
            self._waiting.append(job)
            self._wake.notify()
        return job

    @staticmethod
    def _most_blocks(layout: SpanLayout) -> int:
        """Blocks a prompt needs at once: itself, and its largest span before it is moved."""
        spans = max((end - start for start, end in layout.spans), default=0)
        return -(-layout.num_tokens // layout.block_size) + spans // layout.block_size

    def _work(self) -> None:
        error = KvspanError("the engine was closed")
        try:
            while self._wait_for_work():
                if self._prefilling is None and self._waiting and not self._starved:
                    self._admit(self._waiting[0])
                if self._prefilling is not None:
                    self._step_prefill(self._prefilling)
                if self._running:
                    self._step_decode()
        except BaseException as e:  # a bug of ours: nobody may wait for an answer for ever
            error = KvspanError(f"the engine broke down: {type(e).__name__}: {e}")
            raise
        finally:
            with self._wake:
                self._closed = True
                left = [*self._waiting, *self._running]
            if self._prefilling is not None:
                left.append(self._prefilling)
            for job in left:
                if not job.future.done():
                    job.future.set_exception(error)

    def _wait_for_work(self) -> bool:
        """Block until there is some; False once the engine is closed."""
        with self._wake:
            while not (self._waiting or self._running or self._prefilling or self._closed):
                self._wake.wait()
            return not self._closed

    def _admit(self, job: _Job) -> None:
        if job.cancelled:
            self._waiting.popleft()
            self._fail(job, asyncio.CancelledError())
            return
        seq = Sequence(
            job.layout,
            job.request.placement,
            CacheDomain(self.name, job.request.salt),
            job.max_new_tokens,
            self.runner.model.device,
        )
        job.prefill = Prefill(seq, self.pool, self.runner)
        job.prefill.timings.queue = time.perf_counter() - job.submitted
        try:
            job.prefill.admit()
        except PoolFullError:
            self._wait_or_fail(job)
            return
        self._waiting.popleft()
        job.steps = job.prefill.run()
        self._prefilling = job

    def _wait_or_fail(self, job: _Job) -> None:
        """The head of the queue stays there while running requests may yet free blocks."""
        if self._running:
            self._starved = True
            return
        self._waiting.popleft()
        need = job.active.seq.num_blocks
        spans = max((span.count for span in job.active.seq.spans), default=0)
        self._fail(
            job,
            PoolTooSmallError(
                f"{job.request.path}: the KV pool is too small: {job.layout.num_tokens} prompt "
                f"and {job.max_new_tokens} new tokens need {need + spans} blocks of "
                f"{job.layout.block_size}, the pool has {self.pool.num_blocks}; "
                f"give it more (--kv-cache-gib)"
            ),
        )

    def _step_prefill(self, job: _Job) -> None:
        try:
            if job.cancelled:
                raise asyncio.CancelledError
            assert job.steps is not None
            next(job.steps)
            if self.progress:
                self.progress("prefill", job.active.done_tokens, job.active.total_tokens)
        except StopIteration:
            self._prefilling = None
            self._running.append(job)
            logits = job.active.logits
            assert logits is not None
            try:
                if self.progress:
                    self.progress("prefill", job.active.total_tokens, job.active.total_tokens)
                self._accept(job, logits)
            except Exception as e:
                self._fail(job, e)
        except PoolFullError:
            job.active.release()
            self._prefilling = None
            self._waiting.appendleft(job)
            self._wait_or_fail(job)
        except BaseException as e:
            self._prefilling = None
            self._fail(job, e)

    def _step_decode(self) -> None:
        for job in [job for job in self._running if job.cancelled]:
            self._fail(job, asyncio.CancelledError())
        rows = []
        for job in self._running:
            seq = job.active.seq
            at = seq.num_prompt_tokens + len(job.detokenizer.token_ids) - 1
            last = torch.tensor(job.detokenizer.token_ids[-1:], device=seq.device)
            rows.append(Row(last, at, seq.slots, seq.positions, wants_logits=True))
        if not rows:
            return
        jobs = list(self._running)
        try:
            logits = self.runner.forward(rows)
        except Exception as e:
            for job in jobs:
                self._fail(job, e)
            return
        for job, row in zip(jobs, logits, strict=True):
            try:
                self._accept(job, row)
            except Exception as e:  # of its own sampler or stream: the others go on
                self._fail(job, e)

    def _accept(self, job: _Job, logits: torch.Tensor) -> None:
        """Take one more token from logits [vocab_size]; finish the request if it is the last."""
        token = job.sampler(logits)
        if not job.first_token_at:
            job.first_token_at = time.perf_counter()
            if job.request.return_logprobs:
                job.first_logprobs = logits.log_softmax(-1)
        if token in self._stop_ids:
            self._finish(job, "stop", at_end=True)
        elif job.detokenizer.push(token):
            self._finish(job, "stop")
        elif len(job.detokenizer.token_ids) >= job.max_new_tokens:
            self._finish(job, "length")

    def _finish(self, job: _Job, reason: Literal["stop", "length"], at_end: bool = False) -> None:
        """at_end: the model ended the text itself, with a token that is not part of the answer."""
        self._running.remove(job)
        prefill, ids = job.active, job.detokenizer.token_ids
        seq, timings, reuse = prefill.seq, prefill.timings, prefill.reuse
        # The last token's own KV was computed only if another one was asked for after it.
        written = ids if at_end else ids[:-1]
        seq.extend_hashes(written)
        for i in range(seq.num_prompt_tokens // seq.block_size, len(seq.hashes)):
            self.pool.register(seq.table[i], seq.text_key(i))
        prefill.release()
        self._starved = False
        now = time.perf_counter()
        timings.ttft = job.first_token_at - job.submitted
        timings.decode = now - job.first_token_at
        timings.total = now - job.submitted
        reuse.notes += job.notes
        usage = Usage(
            prompt_tokens=seq.num_prompt_tokens,
            completion_tokens=len(ids) + at_end,
            cached_tokens=seq.num_prompt_tokens - reuse.computed_tokens,
        )
        logprobs = None if job.first_logprobs is None else job.first_logprobs.cpu().numpy()
        result = GenerateResult(
            job.detokenizer.finish(), list(ids), reason, usage, timings, reuse, logprobs
        )
        job.future.set_result(result)

    def _fail(self, job: _Job, error: BaseException) -> None:
        if job in self._running:
            self._running.remove(job)
        if job.prefill is not None:
            job.prefill.release()
        self._starved = False
        if isinstance(error, asyncio.CancelledError):
            job.future.set_exception(KvspanError("the request was cancelled"))
            return
        if not isinstance(error, KvspanError):
            error = KvspanError(f"{job.request.path}: {type(error).__name__}: {error}")
        job.future.set_exception(error)


def _memory_bytes(device: torch.device) -> int:
    """All memory of the device, in use or not."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    generation = getattr(model, "generation_config", None)
    ids = getattr(generation, "eos_token_id", None)
    if ids is None:
        ids = tokenizer.eos_token_id
    if ids is None:
        return set()
    return set(ids) if isinstance(ids, list) else {ids}
