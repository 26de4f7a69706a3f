"""Putting the keys and values of a corpus' chunks into an engine's cache before anybody asks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvspan.engine import GenerateRequest, Placement, Scope
from kvspan.query.prompt import Message, Span
from kvspan.retrieve.chunking import Chunk

if TYPE_CHECKING:
    from kvspan.engine import Engine


@dataclass
class Prepared:
    """What was prepared. tokens: of the chunks, padding included; computed: those that were not
    there already. notes: of the engine, each once.
    """

    chunks: int = 0
    tokens: int = 0
    computed: int = 0
    notes: tuple[str, ...] = ()


async def prepare_chunks(
    engine: Engine,
    chunks: Sequence[Chunk],
    *,
    model: str = "",
    system: str = "",
    scope: Scope = "anchored",
    placement: Placement = "sequential",
    salt: str = "",
    max_concurrency: int = 16,
    on_progress: Callable[[int, int], None] | None = None,
) -> Prepared:
    """Prepare every chunk as a span (the paper's G^1), for prompts that begin with ``system``.

    system: the text before the first span of the prompts to come. It is part of what a span in the
        scope "anchored" attends to: prompts with another one find nothing.
    scope, placement, salt: as for ``kvspan.run``. on_progress: called with (chunks done, all).
    Raises KvspanError where the engine fails.
    """
    anchor = (Message("system", system),) if system else ()
    done = Prepared(notes=())
    notes: dict[str, None] = {}
    waiting = iter(list(enumerate(chunks)))

    async def work() -> None:
        for number, chunk in waiting:
            request = GenerateRequest(
                prompt=(*anchor, Span((Message("user", chunk.text),))),
                model=model,
                max_tokens=1,
                temperature=0.0,
                scope=scope,
                placement=placement,
                salt=salt,
                path=f"{chunk.source}[{number}]",
            )
            reuse = (await engine.prepare(request)).reuse
            done.chunks += 1
            done.tokens += reuse.span_tokens
            done.computed += reuse.prepared_tokens
            notes.update(dict.fromkeys(reuse.notes))
            if on_progress:
                on_progress(done.chunks, len(chunks))

    side_by_side = min(max(1, max_concurrency), len(chunks))
    workers = [asyncio.ensure_future(work()) for _ in range(side_by_side)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    done.notes = tuple(notes)
    return done
