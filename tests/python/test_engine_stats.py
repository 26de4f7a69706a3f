"""What the embedded engine says of itself, and to those who come after its end."""

from __future__ import annotations

import asyncio

import pytest

from kvspan.engine import GenerateRequest
from kvspan.errors import KvspanError
from test_engine_requests import rag
from test_local_engine import open_tiny


def test_statistics_and_the_end() -> None:
    with open_tiny("llama", 16) as engine:
        engine.run(rag([1, 2]))
        stats = engine.stats()
        assert (stats.alive, stats.running, stats.waiting, stats.blocks_in_use) == (True, 0, 0, 0)
        assert stats.blocks == 400 and stats.blocks_cached == engine.pool.num_cached > 4
    assert not engine.stats().alive

    async def late(request: GenerateRequest) -> None:
        await engine.generate(request)

    with pytest.raises(KvspanError, match="the engine is closed"):
        asyncio.run(late(rag([1, 2])))
