"""The thread that owns the model and the pool: which request computes what, and when.

It prefills one request at a time, in chunks, and between chunks decodes all running requests
together. Requests wait in order of arrival until the pool can hold them to their last token, so
that nothing is ever preempted.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque

import numpy as np
import torch

from kvspan.engine import GenerateResult, PoolTooSmallError, Progress, Usage
from kvspan.engine.answers import Finished, keep_answers
from kvspan.engine.attention import Row
from kvspan.engine.job import EngineStats, Job
from kvspan.engine.pool import BlockPool, PoolFullError
from kvspan.engine.prefill import Prefill
from kvspan.engine.runner import ModelRunner
from kvspan.engine.sequence import CacheDomain, Sequence
from kvspan.errors import KvspanError
from kvspan.layout import Answer, PromptEncoder, SpanLayout


class Worker:
    """Works on jobs until it is closed. model: the name that cache keys carry.

    encoder: how answers become spans. max_positions: of the model. stop_ids: tokens that end an
    answer. Public methods may be called from any thread.
    """

    def __init__(
        self,
        runner: ModelRunner,
        pool: BlockPool,
        model: str,
        encoder: PromptEncoder,
        max_positions: int,
        stop_ids: set[int],
        progress: Progress | None,
    ) -> None:
        self.runner = runner
        self.pool = pool
        self.model = model
        self.encoder = encoder
        self.max_positions = max_positions
        self.stop_ids = stop_ids
        self.progress = progress
        self.closed = False
        self._wake = threading.Condition()
        # Held for a step: between steps a request is in one of the queues and the pool is at rest.
        # What a step calls back may ask for it again.
        self._step = threading.RLock()
        self._waiting: deque[Job] = deque()
        self._prefilling: Job | None = None
        self._running: list[Job] = []
        self._starved = False  # the head of the queue waits for blocks that running ones hold
        self._thread = threading.Thread(target=self._work, name="kvspan-engine", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job; its future tells how it ended. Raises KvspanError once closed."""
        with self._wake:
            if self.closed:
                raise KvspanError("the engine is closed")
            job.future.set_running_or_notify_cancel()  # from here on we alone settle it
            self._waiting.append(job)
            self._wake.notify()

    def stats(self) -> EngineStats:
        """A snapshot; the work goes on meanwhile."""
        pool = self.pool
        return EngineStats(
            alive=self._thread.is_alive() and not self.closed,
            waiting=len(self._waiting),
            running=len(self._running) + (self._prefilling is not None),
            blocks=pool.num_blocks,
            blocks_in_use=pool.num_blocks - pool.num_available,
            blocks_cached=pool.num_evictable,
        )

    def clear_cache(self) -> int:
        """See `LocalEngine.clear_cache`."""
        self._check_idle()  # at once, and not whenever the worker lets go of its step
        with self._step:
            self._check_idle()
            return self._evict()

    def _check_idle(self) -> None:
        if self._waiting or self._running or self._prefilling:
            raise KvspanError("clear_cache: requests are running")

    def _evict(self) -> int:
        return self.pool.evict()

    def close(self) -> None:
        """Stop; jobs that are not done fail."""
        with self._wake:
            self.closed = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _work(self) -> None:
        error = KvspanError("the engine was closed")
        try:
            while self._wait_for_work():
                with self._step:
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
                self.closed = True
                left = [*self._waiting, *self._running]
            if self._prefilling is not None:
                left.append(self._prefilling)
            for job in left:
                if not job.future.done():
                    job.future.set_exception(error)

    def _wait_for_work(self) -> bool:
        """Block until there is some; False once the engine is closed."""
        with self._wake:
            while not (self._waiting or self._running or self._prefilling or self.closed):
                self._wake.wait()
            return not self.closed

    def _admit(self, job: Job) -> None:
        if job.cancelled:
            self._waiting.popleft()
            self._fail(job, asyncio.CancelledError())
            return
        seq = Sequence(
            job.layout,
            job.request.placement,
            CacheDomain(self.model, job.request.salt),
            job.max_new_tokens,
            self.runner.model.device,
        )
        job.prefill = self._new_prefill(seq)
        job.prefill.timings.queue = time.perf_counter() - job.submitted
        try:
            job.prefill.admit()
        except PoolFullError:
            self._wait_or_fail(job)
            return
        self._waiting.popleft()
        job.steps = job.prefill.run()
        self._prefilling = job

    def _new_prefill(self, seq: Sequence) -> Prefill:
        """What takes a job to its first logits; hybrid models have one of their own."""
        return Prefill(seq, self.pool, self.runner)

    def _wait_or_fail(self, job: Job) -> None:
        """The head of the queue stays there while running requests may yet free blocks."""
        if self._running:
            self._starved = True
            return
        self._waiting.popleft()
        need = job.active.seq.num_blocks
        spans = max((blocks_beside(job.layout, i) for i in range(len(job.layout.spans))), default=0)
        self._fail(
            job,
            PoolTooSmallError(
                f"the KV pool is too small: {job.layout.num_tokens} prompt and "
                f"{job.max_new_tokens} new tokens need {need + spans} blocks of "
                f"{job.layout.block_size}, the pool has {self.pool.num_blocks}; "
                f"give it more (kv_cache_gib, or --kv-cache-gib)",
                path=job.request.path,
            ),
        )

    def _step_prefill(self, job: Job) -> None:
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
                if self._accept(job, logits):
                    self._finish([job])
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
        jobs = list(self._running)
        if not jobs:
            return
        try:
            logits = self._decode(jobs)
        except Exception as e:
            for job in jobs:
                self._fail(job, e)
            return
        done: list[Job] = []
        for job, row in zip(jobs, logits, strict=True):
            try:
                if self._accept(job, row):
                    done.append(job)
            except Exception as e:  # of its own sampler or stream: the others go on
                self._fail(job, e)
        self._finish(done)

    def _decode(self, jobs: list[Job]) -> torch.Tensor:
        """Logits [len(jobs), vocab_size] after each job's newest token."""
        rows = []
        for job in jobs:
            seq = job.active.seq
            at = seq.num_prompt_tokens + len(job.detokenizer.token_ids) - 1
            last = torch.tensor(job.detokenizer.token_ids[-1:], device=seq.device)
            rows.append(Row(last, at, seq.slots, seq.positions, wants_logits=True))
        return self.runner.forward(rows)

    def _accept(self, job: Job, logits: torch.Tensor) -> bool:
        """Take one more token from logits [vocab_size]; whether it is the last."""
        token = job.sampler(logits)
        if not job.first_token_at:
            job.first_token_at = time.perf_counter()
            if job.request.return_logprobs:
                job.first_logprobs = logits.log_softmax(-1)
        if token in self.stop_ids:
            job.finish_reason, job.at_end = "stop", True
        elif job.detokenizer.push(token):
            job.finish_reason = "stop"
        elif len(job.detokenizer.token_ids) >= job.max_new_tokens:
            job.finish_reason = "length"
        return job.finish_reason is not None

    def _finish(self, jobs: list[Job]) -> None:
        """Cache what was computed for jobs that came to their end, and settle their futures."""
        done = []
        for job in jobs:
            try:
                job.text = job.detokenizer.finish()
            except Exception as e:  # of its own stream: the others go on
                self._fail(job, e)
            else:
                self._cache(job)
                done.append(job)
        wanted, answers = [], []
        for job in done:
            if job.request.keep_answer and job.answer is not None:
                wanted.append(job)
                answers.append(Finished(job.active.seq, job.answer, job.written))
        try:
            kept = keep_answers(answers, self.encoder, self.pool, self.runner)
        except Exception as e:
            for job in done:
                self._fail(job, e)
            return
        for job, is_kept in zip(wanted, kept, strict=True):
            if is_kept:
                job.active.reuse.kept_tokens = len(job.detokenizer.token_ids)
            else:
                job.notes.append("the KV of the answer was not kept: the pool is full")
        for job in done:
            self._settle(job)

    def _cache(self, job: Job) -> None:
        """Cache the answer as text, for prompts that go on from it; make it a span if it can be."""
        seq, ids = job.active.seq, job.detokenizer.token_ids
        digest = seq.answer_digest()
        # The last token's own KV was computed only if another one was asked for after it.
        written = ids if job.at_end else ids[:-1]
        seq.extend_hashes(written)
        for i in range(seq.num_prompt_tokens // seq.block_size, len(seq.hashes)):
            self.pool.register(seq.table[i], seq.text_key(i))
        job.written = len(written)
        problem = self._no_span(job)
        if problem is None:
            depth = 1 + max((a.depth for a in job.layout.answers if a is not None), default=0)
            token_ids = np.asarray(ids, dtype=np.int32)
            job.answer = Answer(job.layout, seq.placement, token_ids, digest, seq.domain, depth)
        elif ids and job.request.keep_answer:
            job.notes.append(f"the answer will be read as text, not with its KV: {problem}")

    def _no_span(self, job: Job) -> str | None:
        """Why the answer cannot be a span; None if it can."""
        ids = job.detokenizer.token_ids
        end = job.active.seq.last_position + 1 + len(self.encoder.answer_tokens(ids))
        if job.detokenizer.cut:
            return "it was cut at a stop text"
        if not self.encoder.may_be_span(ids):
            return "it holds a token of the chat template"
        if not ids or end > self.max_positions:
            return "it reaches the end of the model's context" if ids else "it is empty"
        return None

    def _settle(self, job: Job) -> None:
        self._running.remove(job)
        prefill, ids = job.active, job.detokenizer.token_ids
        seq, timings, reuse = prefill.seq, prefill.timings, prefill.reuse
        prefill.release()
        self._starved = False
        now = time.perf_counter()
        timings.ttft = job.first_token_at - job.submitted
        timings.decode = now - job.first_token_at
        timings.total = now - job.submitted
        reuse.notes += job.notes
        usage = Usage(
            prompt_tokens=seq.num_prompt_tokens,
            completion_tokens=len(ids) + job.at_end,
            cached_tokens=max(0, seq.num_prompt_tokens - reuse.computed_tokens),
        )
        logprobs = None if job.first_logprobs is None else job.first_logprobs.cpu().numpy()
        assert job.finish_reason is not None
        job.future.set_result(
            GenerateResult(
                job.text,
                list(ids),
                job.finish_reason,
                usage,
                timings,
                reuse,
                logprobs,
                job.answer,
            )
        )

    def _fail(self, job: Job, error: BaseException) -> None:
        if job in self._running:
            self._running.remove(job)
        if job.prefill is not None:
            job.prefill.release()
        self._starved = False
        if isinstance(error, asyncio.CancelledError):
            job.future.set_exception(KvspanError("the request was cancelled"))
            return
        if not isinstance(error, KvspanError):
            error = KvspanError(f"{type(error).__name__}: {error}", path=job.request.path)
        job.future.set_exception(error)


def blocks_beside(layout: SpanLayout, span: int) -> int:
    """Blocks that a span needs beside the prompt's own while it is computed and moved."""
    start, end = layout.spans[span]
    tokens, answer = end - start, layout.answer(span)
    if answer is not None:
        tokens += answer.prompt.num_tokens + tokens
    return -(-tokens // layout.block_size)
