"""Pools hardly large enough: a prompt that an empty cache has room for fits a full one too."""

from __future__ import annotations

import pytest

from kvspan.engine import GenerateRequest, GenerateResult
from kvspan.engine.local import LocalEngine
from kvspan.errors import KvspanError
from kvspan.layout import SpanLayout
from test_local_engine import make_layout, open_tiny

BLOCK = 16


def ask(engine: LocalEngine, layout: SpanLayout) -> GenerateResult:
    request = GenerateRequest(prompt=(), max_tokens=4, temperature=0.0)
    return engine.run_layout(layout, request)


def fits(num_blocks: int, layout: SpanLayout) -> list[int] | None:
    with open_tiny("llama", BLOCK, num_blocks) as engine:
        try:
            return ask(engine, layout).token_ids
        except KvspanError:
            return None


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [1, 0, 2, 0]])
def test_what_is_cached_keeps_no_prompt_out(order: list[int]) -> None:
    layout = make_layout(BLOCK, order)
    enough = layout.num_tokens // BLOCK + 1
    room = {n: answer for n in range(enough, enough + 12) if (answer := fits(n, layout))}
    assert min(room) > enough - 1 and len(room) > 5
    for num_blocks, answer in room.items():
        for before in ([0, 1, 2, 3], [2, 3], [3, 0, 1]):
            with open_tiny("llama", BLOCK, num_blocks) as engine:
                warm = make_layout(BLOCK, before)
                if warm.num_tokens > layout.num_tokens:
                    continue
                try:
                    ask(engine, warm)
                except KvspanError:
                    continue
                result = ask(engine, layout)
                assert result.token_ids == answer
                assert result.reuse.reused_tokens >= 0
                assert engine.pool.num_available == engine.pool.num_blocks
