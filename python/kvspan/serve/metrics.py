"""What Prometheus gets to see: requests, tokens, spans, times, and the state of the KV pool."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from kvspan.engine import GenerateResult
    from kvspan.engine.job import EngineStats
    from kvspan.engine.local import LocalEngine

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)


class _PoolCollector(Collector):
    """Read when they are asked for: the engine changes them all the time."""

    def __init__(self, engine: LocalEngine) -> None:
        self.engine = engine

    def collect(self) -> Iterable[GaugeMetricFamily]:
        stats: EngineStats = self.engine.stats()
        blocks = GaugeMetricFamily(
            "kvspan_pool_blocks", "KV blocks by what they are used for", labels=["state"]
        )
        # The numbers are read one after the other while the engine works.
        free = max(0, stats.blocks - stats.blocks_in_use - stats.blocks_cached)
        for state, count in (
            ("in_use", stats.blocks_in_use),
            ("cached", stats.blocks_cached),
            ("free", free),
        ):
            blocks.add_metric([state], count)
        calls = GaugeMetricFamily(
            "kvspan_engine_calls", "Generate calls in the engine", labels=["state"]
        )
        calls.add_metric(["waiting"], stats.waiting)
        calls.add_metric(["running"], stats.running)
        return [blocks, calls]


def engine_metrics(engine: LocalEngine) -> Metrics:
    """The metrics of a server of its own, with the state of its engine's pool."""
    registry = CollectorRegistry()
    registry.register(_PoolCollector(engine))
    return Metrics(registry)


class Metrics:
    """The counters of one server."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.requests = Counter(
            "kvspan_requests",
            "Requests by endpoint and HTTP status; 499: the client left",
            ["endpoint", "status"],
            registry=registry,
        )
        self.in_flight = Gauge(
            "kvspan_requests_in_flight",
            "Requests being answered",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.seconds = Histogram(
            "kvspan_request_seconds",
            "From a request to the end of its answer",
            ["endpoint"],
            buckets=SECONDS,
            registry=registry,
        )
        self.ttft = Histogram(
            "kvspan_ttft_seconds",
            "From a generate call to its first token, queueing included",
            buckets=SECONDS,
            registry=registry,
        )

        def tokens(name: str, text: str) -> Counter:
            return Counter(f"kvspan_{name}", text, registry=registry)

        self.prompt = tokens("prompt_tokens", "Prompt tokens of generate calls")
        self.cached = tokens("cached_prompt_tokens", "Prompt tokens found in the cache")
        self.completion = tokens("completion_tokens", "Generated tokens")
        self.looked_up = tokens("span_tokens_looked_up", "Tokens of spans in prompts")
        self.hit = tokens("span_tokens_hit", "Tokens of spans found in the cache")
        self.moved = tokens("span_tokens_moved", "Tokens of spans copied to other positions")
        self.prepared = tokens("span_tokens_prepared", "Tokens of spans that were computed")

    def record(self, result: GenerateResult) -> None:
        """Count a generate call that is over."""
        usage, reuse = result.usage, result.reuse
        self.prompt.inc(usage.prompt_tokens)
        self.cached.inc(usage.cached_tokens)
        self.completion.inc(usage.completion_tokens)
        self.looked_up.inc(reuse.span_tokens)
        self.hit.inc(reuse.reused_tokens)
        self.moved.inc(reuse.moved_tokens)
        self.prepared.inc(reuse.prepared_tokens)
        self.ttft.observe(result.timings.ttft)

    def page(self) -> bytes:
        return generate_latest(self.registry)
