"""The engines of one run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from kvspan.engine import Capabilities, Engine
from kvspan.errors import KvspanError
from kvspan.query.context import ABLE


class OpenedEngines:
    """The engine that a run was given for all its models, or one that it opens for each.

    only: the one it was given; it stays open. failed: why models have none, by name; others run.
    """

    def __init__(self, only: Engine | None) -> None:
        self.only = only
        self.engines: dict[str, Engine] = {}
        self.failed: dict[str, KvspanError] = {}
        self._known: dict[int, Capabilities] = {}  # by the engine's id

    def open(self, model: str, opener: Callable[[str], Engine]) -> None:
        """Open the engine of a model, or note why that fails, and raise it."""
        try:
            self.engines[model] = opener(model)
        except KvspanError as error:
            self.failed[model] = error
            raise

    def of(self, model: str) -> Engine:
        """The engine of a model. Raises the error with which opening it ended."""
        if model in self.failed:
            raise self.failed[model]
        return self.only or self.engines[model]

    def capabilities(self, model: str) -> Capabilities:
        """Of the engine that runs calls to a model; the same object for the same engine."""
        if model in self.failed:
            return ABLE  # nothing will be asked of it
        engine = self.of(model)
        if id(engine) not in self._known:
            self._known[id(engine)] = engine.capabilities()
        return self._known[id(engine)]

    def close(self) -> None:
        """Close what was opened here, all of it whatever goes wrong."""
        with ExitStack() as stack:
            for engine in self.engines.values():
                stack.callback(engine.close)
