"""Judges over drafts, run on an engine that says words only, and what they are checked by."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from kvspan import cross, g, plus, run, system
from kvspan.engine import GenerateRequest, GenerateResult
from kvspan.engine.local import LocalEngine
from kvspan.executor import RunResult
from kvspan.query.nodes import Node
from nested_oracle import nested_logprobs
from test_local_engine import TOLERANCE, open_tiny
from tiny_models import tiny_model

RESERVED = 7  # token ids of the word tokenizer that are no words


def words(first: int, count: int) -> str:
    return " ".join(f"w{(first + n) % 200}" for n in range(count))


@contextmanager
def opened(
    name: str = "llama", block_size: int = 16, num_blocks: int = 600
) -> Iterator[LocalEngine]:
    """An engine that says words only, so that every answer may be a span."""
    with open_tiny(name, block_size, num_blocks) as engine:

        def no_word_is_reserved(module: Any, args: Any, logits: torch.Tensor) -> torch.Tensor:
            return logits.index_fill(-1, torch.arange(RESERVED), -1e9)

        engine.runner.model.lm_head.register_forward_hook(no_word_is_reserved)
        yield engine


class Recorder:
    """Passes requests on to an engine, and keeps them."""

    def __init__(self, engine: LocalEngine) -> None:
        self.engine = engine
        self.requests: list[GenerateRequest] = []
        self.prepare = engine.prepare
        self.capabilities = engine.capabilities

    async def generate(self, request: GenerateRequest, on_text: Any = None) -> GenerateResult:
        self.requests.append(request)
        return await self.engine.generate(request, on_text)

    def close(self) -> None:
        pass


def recorded(engine: LocalEngine, query: Node, **options: Any) -> tuple[RunResult, list]:
    recorder = Recorder(engine)
    result = run(query, engine=recorder, **options)  # type: ignore[arg-type]
    by_path = {request.path: request for request in recorder.requests}
    return result, [by_path[call.path] for call in result.calls]


def judge(drafts: Node | list[Node], question: str = words(90, 5)) -> Node:
    system_text = system(words(50, 9))
    return g("M", cross(system_text, plus(drafts), question), max_tokens=8, temperature=0)


def uneven_drafts(count: int = 5, temperature: float = 0.9) -> list[Node]:
    return [
        g("M", cross(system(words(n, 3)), words(7 * n, 5 + 3 * n)), 3 + 17 * n, temperature)
        for n in range(count)
    ]


def logprobs(engine: LocalEngine, request: GenerateRequest) -> np.ndarray:
    result = engine.run(replace(request, return_logprobs=True, max_tokens=1))
    assert result.first_logprobs is not None
    return result.first_logprobs


def check_hit_is_miss(engine: LocalEngine, request: GenerateRequest, name: str) -> None:
    """The request from the cache, without it, and by transformers, but for impossible tokens."""
    layout = engine.layout(request)
    assert any(layout.answers)
    expected = nested_logprobs(tiny_model(name), layout, request.placement)[RESERVED:]
    expected = expected.log_softmax(-1).numpy()
    hit = logprobs(engine, request)[RESERVED:]
    engine.clear_cache()
    miss = logprobs(engine, request)[RESERVED:]
    assert np.abs(hit - expected).max() <= TOLERANCE
    assert np.abs(miss - expected).max() <= TOLERANCE
    assert engine.pool.num_available == engine.pool.num_blocks
