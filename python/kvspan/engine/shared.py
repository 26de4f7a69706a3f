"""Engines that several runs use, each opened once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack

from kvspan.engine import Engine, open_engine
from kvspan.errors import KvspanError


class SharedEngines:
    """Opens the engine of each model when it is first needed, once for all queries.

    A model that cannot be opened is not tried again: that takes long, and would end the same way.
    """

    def __init__(self, open: Callable[[str], Engine] | None) -> None:
        self.open = open
        self.engines: dict[str, Engine] = {}
        self.failed: dict[str, KvspanError] = {}
        self.lock = threading.Lock()

    def __call__(self, model: str) -> Engine:
        """An engine that its user may close without closing it for others."""
        with self.lock:
            if model in self.failed:
                raise self.failed[model].with_traceback(None)
            if model not in self.engines:
                try:
                    self.engines[model] = (self.open or open_engine)(model)
                except KvspanError as error:
                    self.failed[model] = error
                    raise
        return _Borrowed(self.engines[model])

    def close(self) -> None:
        """Close all of them whatever goes wrong."""
        with ExitStack() as stack:
            for engine in self.engines.values():
                stack.callback(engine.close)


class _Borrowed:
    """An engine whose `close` does nothing."""

    def __init__(self, engine: Engine) -> None:
        self.generate = engine.generate
        self.prepare = engine.prepare
        self.capabilities = engine.capabilities

    def close(self) -> None:
        """Nothing: the engine outlives the query."""
