"""What the embedded engine says of itself, and to those who come after its end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable

import pytest

from fakes import FakeEngine
from kvspan.engine import GenerateRequest
from kvspan.engine.shared import SharedEngines
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


def test_the_cache_is_cleared_between_steps_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not while the worker gives back the blocks of the last request, which runs no more."""
    said: list[str] = []
    threads: list[threading.Thread] = []
    with open_tiny("llama", 16) as engine:
        release = engine.pool.release

        def clear() -> None:
            try:
                engine.clear_cache()
            except KvspanError:
                said.append("refused")
            else:
                said.append("cleared")

        def slow(blocks: Iterable[int]) -> None:
            threads.append(threading.Thread(target=clear))
            threads[-1].start()
            threads[-1].join(0.1)
            release(blocks)
            said.append("released")

        monkeypatch.setattr(engine.pool, "release", slow)
        engine.run(rag([1, 2]))
        for thread in threads:
            thread.join()
        last = len(said) - 1 - said[::-1].index("released")
        assert "cleared" not in said[:last]
        monkeypatch.undo()
        engine.clear_cache()
        assert engine.stats().blocks_cached == 0


def test_shared_engines_are_all_closed() -> None:
    closed: list[str] = []

    class Engine(FakeEngine):
        def close(self) -> None:
            closed.append("closed")
            raise RuntimeError("cannot")

    shared = SharedEngines(lambda model: Engine())
    for model in ("a", "b", "a"):
        shared(model).close()  # of one user of it
    assert not closed
    with pytest.raises(RuntimeError, match="cannot"):
        shared.close()
    assert closed == ["closed"] * 2
