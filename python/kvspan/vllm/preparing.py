"""Getting the spans of a request computed while the request waits for them in vLLM's scheduler.

The connector holds a request back until its spans are in the pool; `Preparer.beside` runs the small
requests of `kvspan.vllm.prepare` next to it, all at once: the scheduler sorts out which of them has
to wait for which. What was evicted in between is computed again, a bounded number of times.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from dataclasses import dataclass, field

from kvspan.layout import SpanLayout
from kvspan.vllm.prepare import prepare_stages

logger = logging.getLogger("vllm.kvspan")

MAX_AT_ONCE = 64  # preparations of one request
REMEMBERED = 65_536  # preparations that are taken to be in the pool still
REMEMBERED_S = 60.0
# Seconds until a request that has not begun gets its spans prepared (again): where all of them were
# taken to be there, where they have just been asked for, and what comes then.
FIRST_WAIT_S, SECOND_WAIT_S = 0.25, 1.0
LATER_WAITS_S = (2.0, 4.0, 8.0, 16.0, 32.0)
# How long a request waits by default: the rounds above, and preparations that take their time.
TIMEOUT_S = 120.0

# Runs a layout for one token; how many of its prompt tokens were in the cache.
RunOne = Callable[[SpanLayout], Awaitable[int]]


@dataclass
class Preparation:
    """What was done for one request. tokens: of spans that were computed for it.

    anchor, text: tokens of its anchor, and of text between its spans, that were computed for it.
    missed: the token ids of these spans, as bytes. rounds: of preparing.
    begun: set by the request once it runs, which ends the preparing.
    """

    tokens: int = 0
    anchor: int = 0
    text: int = 0
    missed: set[bytes] = field(default_factory=set)
    rounds: int = 0
    failure: str = ""
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def computed(self) -> int:
        """All tokens of the request's prompt that were computed for it beforehand."""
        return self.tokens + self.anchor + self.text


class Preparer:
    """Prepares for all requests of one server, and remembers what it has prepared lately."""

    def __init__(self) -> None:
        self._recent: OrderedDict[bytes, float] = OrderedDict()

    @contextlib.asynccontextmanager
    async def beside(
        self,
        layout: SpanLayout,
        run: RunOne,
        domain: Hashable = (),
    ) -> AsyncIterator[Preparation]:
        """Prepare while the body runs the request itself. domain: what else its cache keys say."""
        done = Preparation()
        parts = [part for stage in prepare_stages(layout) for part in stage]
        if not parts:
            yield done
            return
        work = asyncio.ensure_future(self._rounds(parts, run, domain, done))
        try:
            yield done
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def _rounds(
        self, parts: list[SpanLayout], run: RunOne, domain: Hashable, done: Preparation
    ) -> None:
        digests = [_digest(part, domain) for part in parts]
        now = time.monotonic()
        missing = [i for i, digest in enumerate(digests) if self._recent.get(digest, 0.0) <= now]
        for digest in digests:
            self._remember(digest)
        slots = asyncio.Semaphore(MAX_AT_ONCE)
        tasks: dict[int, asyncio.Future[None]] = {}

        def start(numbers: list[int]) -> None:
            done.rounds += bool(numbers)
            for i in numbers:
                tasks[i] = asyncio.ensure_future(_prepare(parts[i], run, slots, done))

        try:
            start(missing)
            for wait in (SECOND_WAIT_S if missing else FIRST_WAIT_S, *LATER_WAITS_S):
                with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                    await asyncio.wait_for(done.begun.wait(), wait)
                if done.begun.is_set():
                    return
                # One that still runs may wait for what another, long done, has lost again.
                start([i for i in range(len(parts)) if i not in tasks or tasks[i].done()])
            await done.begun.wait()
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    def _remember(self, digest: bytes) -> None:
        self._recent[digest] = time.monotonic() + REMEMBERED_S
        self._recent.move_to_end(digest)
        if len(self._recent) > REMEMBERED:
            self._recent.popitem(last=False)


async def _prepare(
    part: SpanLayout, run: RunOne, slots: asyncio.Semaphore, done: Preparation
) -> None:
    try:
        async with slots:
            cached = await run(part)
    except Exception as error:
        # The request itself runs into the same, or waits in vain and says so.
        done.failure = f"{type(error).__name__}: {error}"
        logger.warning("kvspan: preparing a span failed: %s", done.failure)
        return
    # What is computed is the last segment but the token at the end; where that is a span, several
    # of them side by side may have computed the anchor, which counts once.
    last = part.num_tokens - 1
    if not part.spans:
        done.anchor = max(done.anchor, last - cached)
        return
    start, end = part.spans[-1]
    if end < last:
        done.text += max(0, last - max(end, cached))
        return
    done.anchor = max(done.anchor, start - cached)
    if cached < end:
        done.tokens += end - max(start, cached)
        done.missed.add(part.token_ids[start:end].tobytes())


def _digest(part: SpanLayout, domain: Hashable) -> bytes:
    """Of all that is computed by a preparation; its last token is not part of that."""
    digest = hashlib.sha256(repr((domain, part.scope, part.spans)).encode())
    digest.update(part.token_ids[:-1].tobytes())
    return digest.digest()
