"""The page for Prometheus, as a parser reads it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kvspan.engine import GenerateResult, Reuse, Timings, Usage
from kvspan.engine.job import EngineStats
from kvspan.serve.metrics import engine_metrics


def engine(**stats: int) -> Any:
    return SimpleNamespace(stats=lambda: EngineStats(alive=True, **stats))


BUSY = {"waiting": 1, "running": 2, "blocks": 10, "blocks_in_use": 4, "blocks_cached": 3}


def test_the_page_is_what_prometheus_reads() -> None:
    metrics = engine_metrics(engine(**BUSY))
    odd = '/v1/"quoted"\\path\nline'
    metrics.requests.labels(odd, "200").inc()
    metrics.seconds.labels(odd).observe(0.2)
    reuse = Reuse(span_tokens=8, reused_tokens=5, moved_tokens=4, prepared_tokens=3)
    metrics.record(GenerateResult("", [], "length", Usage(20, 2, 7), Timings(ttft=0.03), reuse))
    families = {one.name: one for one in text_string_to_metric_families(metrics.page().decode())}
    values = {}
    for name, family in families.items():
        assert name.startswith("kvspan_") and family.documentation, name
        for sample in family.samples:
            if family.type == "counter":
                assert sample.name in (f"{name}_total", f"{name}_created")
            elif family.type == "gauge":
                assert sample.name == name or name.endswith("_created")
            values[sample.name, *sample.labels.values()] = sample.value
    assert values["kvspan_requests_total", odd, "200"] == 1
    assert [values["kvspan_pool_blocks", state] for state in ("in_use", "cached", "free")] == [
        4, 3, 3,
    ]  # fmt: skip
    assert values["kvspan_request_seconds_bucket", odd, "0.25"] == 1
    assert values["kvspan_request_seconds_bucket", odd, "0.1"] == 0
    assert values["kvspan_ttft_seconds_count",] == 1
    for name, count in (
        ("prompt_tokens", 20),
        ("completion_tokens", 2),
        ("cached_prompt_tokens", 7),
        ("span_tokens_looked_up", 8),
        ("span_tokens_hit", 5),
        ("span_tokens_moved", 4),
        ("span_tokens_prepared", 3),
    ):
        assert values[f"kvspan_{name}_total",] == count, name


def test_no_number_of_blocks_is_negative() -> None:
    """A block may be given back between the reading of two numbers, and count in both."""
    page = engine_metrics(engine(**{**BUSY, "blocks_in_use": 8})).page().decode()
    assert 'kvspan_pool_blocks{state="free"} 0.0' in page.splitlines()
