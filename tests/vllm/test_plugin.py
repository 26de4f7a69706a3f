"""The plug-in's parts without an engine: entry points, statistics, what passes through."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI, Request
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.testclient import TestClient
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.plugins.endpoint_plugins.interface import EndpointPlugin as Interface

from kvspan.layout import SpanLayout
from kvspan.vllm import plugin
from kvspan.vllm.engine import reuse_of
from kvspan.vllm.preparing import Preparation
from kvspan.vllm.stats import COUNTS, REFUSED, SpanPromMetrics, SpanStats
from kvspan.vllm.support import missing_hook


def test_entry_points_are_what_vllm_looks_for() -> None:
    (general,) = entry_points(group="vllm.general_plugins", name=plugin.NAME)
    (endpoint,) = entry_points(group="vllm.endpoint_plugins", name=plugin.NAME)
    assert isinstance(endpoint.load()(), Interface)
    for _ in range(2):  # vLLM may load it more than once
        general.load()()
    found = KVConnectorFactory.get_connector_class_by_name(plugin.CONNECTOR)
    assert (found.__module__, found.__name__) == (plugin.MODULE, plugin.CONNECTOR)
    assert missing_hook(plugin.SERVER_HOOKS) == ""


def test_statistics_add_up() -> None:
    first, second = SpanStats(), SpanStats()
    assert first.is_empty()
    first.add("span_tokens_hit", 64)
    second.add("span_tokens_hit", 32)
    second.add("span_deferred_seconds", 0.5)
    for stats in (first, second):
        stats.refuse("request")
    total = first.aggregate(SpanStats(data=second.to_dict()))
    assert total.reduce()["span tokens hit"] == 96
    assert total.reduce()["span deferred seconds"] == 0.5
    assert total.reduce()["span requests refused"] == 2 and not total.is_empty()
    total.reset()
    assert total.is_empty()


def test_statistics_become_counters() -> None:
    registry = CollectorRegistry()

    def counter(**options: Any) -> Counter:
        return Counter(options["name"], options["documentation"], options["labelnames"],
                       registry=registry)  # fmt: skip

    class Config:
        kv_transfer_config = None

    types: dict[Any, Any] = {Counter: counter, Gauge: Gauge, Histogram: Histogram}
    metrics = SpanPromMetrics(Config, types, ["engine"], {0: ["0"], 1: ["1"]})  # type: ignore[arg-type]
    stats = SpanStats()
    for name in COUNTS:
        stats.add(name, 7)
    stats.refuse("declaration")
    for _ in range(2):
        metrics.observe(stats.to_dict(), engine_idx=1)
    for name in COUNTS:
        for engine, expected in (("1", 14), ("0", 0)):
            labels = {"engine": engine}
            assert registry.get_sample_value(f"vllm:kvspan_{name}_total", labels) == expected
    labels = {"engine": "1", "reason": "declaration"}
    assert registry.get_sample_value(f"vllm:kvspan_{REFUSED}_total", labels) == 2


def test_what_became_of_a_prompt() -> None:
    size = 32
    bounds = ((size, 2 * size), (2 * size, 5 * size))
    layout = SpanLayout(np.arange(5 * size + 1, dtype=np.int32), bounds, size)
    cached = 5 * size
    hit = reuse_of(layout, Preparation(), cached, {"fallback": "", "moved_tokens": 3 * size})
    assert (hit.span_hits, hit.reused_tokens, hit.prepared_tokens) == (2, 4 * size, 0)
    assert (hit.moved_tokens, hit.computed_tokens, hit.notes) == (3 * size, 1, [])
    missed = {layout.token_ids[size : 2 * size].tobytes()}
    prepared = Preparation(tokens=size, anchor=size, missed=missed)
    half = reuse_of(layout, prepared, cached, {"fallback": ""})
    assert (half.span_hits, half.reused_tokens, half.prepared_tokens) == (1, 3 * size, size)
    assert half.computed_tokens == 2 * size + 1
    for audit in ({"fallback": "why"}, {"policy": "off", "refused": "why"}):
        none = reuse_of(layout, Preparation(), 0, audit)
        assert (none.span_hits, none.reused_tokens) == (0, 0)
        assert none.notes == ["spans not reused: why"]
    replay = {"policy": "ratio:0.05", "exact": False, "refused": ""}
    plain = SpanLayout(layout.token_ids, (), size)
    hybrid = reuse_of(plain, Preparation(), 3 * size, replay, "recurrent state")
    assert hybrid.replay == replay and hybrid.computed_tokens == 2 * size + 1
    assert hybrid.notes == ["spans not reused: recurrent state",
                            "recurrent state rebuilt approximately (ratio:0.05)"]  # fmt: skip


@pytest.fixture
def client() -> TestClient:
    """vLLM's paths as echoes, and the plug-in on a server that has no engine yet."""
    app = FastAPI()

    @app.post("/v1/completions")
    async def echo(request: Request) -> dict[str, Any]:
        return {"body": (await request.body()).decode(), "headers": dict(request.headers)}

    plugin.EndpointPlugin().attach_router(app)  # type: ignore[arg-type]
    return TestClient(app)


def test_before_the_engine_is_there(client: TestClient) -> None:
    reply = client.post(plugin.QUERY_PATH, json={"user": "hi"})
    assert reply.status_code == 503 and "the server's log" in reply.json()["error"]["message"]
    assert client.get(plugin.QUERY_PATH).status_code == 405


class _Engine:
    parentheses = None
    block_size = 32

    async def lay_out(self, request: object) -> None:
        raise AssertionError("there is nothing to lay out")


class _Service:
    engine = _Engine()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not JSON",
        b'{"prompt": "kvspan"}',
        b'{"prompt": "x", "kvspan": {}}',
        b'{"prompt": "\\"kvspan\\""}',
        b'["kvspan"]',
        b'{"kvspan": ',
        b'{"prompt": "' + b"a" * 1_000_000 + b'"}',
    ],
    ids=lambda body: body[:30].decode(),
)
@pytest.mark.parametrize("ready", [False, True])
def test_requests_without_spans_pass_as_they_came(
    client: TestClient, body: bytes, ready: bool
) -> None:
    if ready:
        client.app.state.kvspan = _Service()  # type: ignore[attr-defined]
    pieces = (body[i : i + 65_536] for i in range(0, len(body), 65_536))
    reply = client.post("/v1/completions", content=pieces, headers={"x-mine": "1"})
    assert reply.json()["body"] == body.decode()
    assert reply.json()["headers"]["x-mine"] == "1"
