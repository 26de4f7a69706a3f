"""The state of a server: its engine, its limits, and the requests it is answering."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from kvspan.engine import Capabilities, Engine, GenerateRequest, GenerateResult
from kvspan.parentheses import Parentheses
from kvspan.serve.errors import SERVER, APIError, unknown_model
from kvspan.serve.metrics import Metrics

if TYPE_CHECKING:
    from kvspan.layout import SpanLayout
    from kvspan.retrieve.corpora import Corpora

CUT_TIMEOUT_S = 5  # for requests that are cut short to say so
PROVIDERS = ("local/", "spnl/")  # in queries: the engine that is there


class Alive(Protocol):
    """alive: whether requests are still being worked on."""

    @property
    def alive(self) -> bool: ...


class ServedEngine(Engine, Protocol):
    """An engine that also takes prompts which are laid out already. vocab_size: of token ids."""

    @property
    def vocab_size(self) -> int: ...

    def stats(self) -> Alive: ...

    async def lay_out(self, request: GenerateRequest) -> SpanLayout: ...

    async def generate_layout(
        self,
        layout: SpanLayout,
        request: GenerateRequest,
        on_text: Callable[[str], None] | None = None,
    ) -> GenerateResult: ...


@dataclass(frozen=True)
class Settings:
    """Limits and keys. Times are seconds.

    names: what the model is called here, the first being its own. keys: any of them lets a request
    in; none lets in every request. max_requests: answered or waiting at the same time, choices and
    prompts of one request counted one by one. max_calls, max_query_calls: generate calls of one
    query, at the same time and in all. timeout: of a request as a whole. body_timeout: for its body
    to arrive. drain: for running requests to finish once the server is to stop. retriever: of
    queries; without it they can retrieve from documents of their own only.
    """

    names: tuple[str, ...]
    keys: tuple[str, ...] = ()
    max_body_bytes: int = 16 * 2**20
    max_requests: int = 256
    max_calls: int = 16
    max_query_calls: int = 4096
    timeout: float = 600.0
    body_timeout: float = 30.0
    drain: float = 30.0
    retriever: Corpora | None = None
    keep_alive: float = 15.0
    parentheses: Parentheses | None = None


def shutting_down() -> APIError:
    return APIError(
        503, "the server is shutting down", type=SERVER, code="shutting_down", retry_after=5
    )


class Admission:
    """One request that is being answered. units: how much of the server's limit it has taken.

    ended: whether the server has cut it short.
    """

    def __init__(self, service: Service) -> None:
        self.service = service
        self.units = 0
        self.ended = False
        self._work: asyncio.Future[Any] | None = None

    def take(self, units: int) -> None:
        """Take more of the limit. Raises APIError when there is not that much left."""
        most = self.service.settings.max_requests
        if self.units + units > most:
            raise APIError(
                400,
                f"expected at most {most} answers in one request; found {self.units + units}",
                code="invalid_value",
            )
        if self.service.units + units > most:
            raise APIError(
                429,
                f"the server is full: {self.service.units} of {most} requests are being answered",
                type="rate_limit_error",
                code="too_many_requests",
                retry_after=1,
            )
        self.service.units += units
        self.units += units

    def working(self, work: asyncio.Future[Any]) -> None:
        """What is cancelled when the server cuts the request short."""
        self._work = work
        if self.ended:
            work.cancel()

    def end(self) -> None:
        # Not by cancelling the task that answers: asyncio.wait_for may lose that before 3.12.
        self.ended = True
        if self._work is not None:
            self._work.cancel()


class Service:
    """Implements `kvspan.engine.Engine` for the executor: counts every call, and stays open."""

    def __init__(self, engine: ServedEngine, settings: Settings, metrics: Metrics) -> None:
        self.engine = engine
        self.settings = settings
        self.metrics = metrics
        self.draining = False
        self.started = int(time.time())
        self.units = 0  # of max_requests, taken by all requests together
        self._admitted: set[Admission] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def check_key(self, header: str | None) -> None:
        """Raises APIError unless the Authorization header holds one of the keys."""
        if not self.settings.keys:
            return
        scheme, _, key = (header or "").partition(" ")
        given = key.strip().encode("utf-8", "surrogateescape")
        # Every key is compared, in constant time: how long it takes tells nothing.
        fits = [hmac.compare_digest(given, known.encode()) for known in self.settings.keys]
        if scheme.lower() != "bearer" or not any(fits):
            raise APIError(
                401,
                "wrong API key" if header else "no API key: send 'Authorization: Bearer KEY'",
                code="invalid_api_key",
            )

    def check_model(self, model: str) -> None:
        """Raises UnknownModelError unless it is served here."""
        names = self.settings.names
        plain = next((model[len(p) :] for p in PROVIDERS if model.startswith(p)), model)
        if model not in names and plain not in names:
            raise unknown_model(model, names)

    @property
    def running(self) -> int:
        """Requests that are being answered."""
        return len(self._admitted)

    @contextlib.contextmanager
    def admitted(self) -> Iterator[Admission]:
        """While a request is answered.

        Raises APIError when the server is full (429) or about to stop (503).
        """
        if self.draining:
            raise shutting_down()
        admission = Admission(self)
        admission.take(1)
        self._admitted.add(admission)
        self._idle.clear()
        self.metrics.in_flight.inc()
        try:
            yield admission
        finally:
            self.units -= admission.units
            self._admitted.discard(admission)
            if not self._admitted:
                self._idle.set()
            self.metrics.in_flight.dec()

    async def drain(self, give_up: asyncio.Event) -> int:
        """Take no further requests and wait for the running ones; how many were cut short.

        give_up: ends the waiting before its time.
        """
        self.draining = True
        ends = [asyncio.ensure_future(event.wait()) for event in (self._idle, give_up)]
        await asyncio.wait(ends, timeout=self.settings.drain, return_when=asyncio.FIRST_COMPLETED)
        cut = list(self._admitted)
        for admission in cut:
            admission.end()
        await asyncio.wait(ends[:1], timeout=CUT_TIMEOUT_S)
        for end in ends:
            end.cancel()
        return len(cut)

    # --- the engine, counted ---------------------------------------------------------------------

    async def generate(
        self, request: GenerateRequest, on_text: Callable[[str], None] | None = None
    ) -> GenerateResult:
        result = await self.engine.generate(request, on_text)
        self.metrics.record(result)
        return result

    async def generate_layout(
        self,
        layout: SpanLayout,
        request: GenerateRequest,
        on_text: Callable[[str], None] | None = None,
    ) -> GenerateResult:
        result = await self.engine.generate_layout(layout, request, on_text)
        self.metrics.record(result)
        return result

    async def prepare(self, request: GenerateRequest) -> GenerateResult:
        result = await self.engine.prepare(request)
        self.metrics.record(result)
        return result

    def capabilities(self) -> Capabilities:
        return self.engine.capabilities()

    def close(self) -> None:
        """Nothing: the engine outlives the queries that run on it."""
