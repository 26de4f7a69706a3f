"""What vLLM's log and its /metrics say of spans, through vLLM's own connector statistics.

Counted in the scheduler: tokens are moved and prepared (computed) step by step, those of preempted
requests once more; when a request is over, what of its spans nobody had to compute for it was hit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

COUNTS = {
    "span_tokens_looked_up": "Tokens of spans in requests, preparations left out",
    "span_tokens_hit": "Of these, tokens that were not computed for their request",
    "span_tokens_moved": "Tokens of spans copied to other positions",
    "span_tokens_prepared": "Tokens of spans that were computed",
    "span_deferred_seconds": "Seconds that requests waited for their spans",
}
# Why a request ran as an ordinary one. The log and the answer say it in full.
REASONS = {
    "configuration": "spans are off for this model or these options",
    "declaration": "what the request says of its spans makes no sense",
    "request": "the request asks for what does not go with spans",
    "unprepared": "its spans were not there in time",
    "connector": "another connector's tokens were taken",
}
REFUSED = "span_requests_refused"


@dataclass
class SpanStats(KVConnectorStats):
    """data: a number for each of COUNTS, and under REFUSED one for each of REASONS met."""

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data: dict[str, Any] = {**dict.fromkeys(COUNTS, 0.0), REFUSED: {}}

    def add(self, name: str, count: float) -> None:
        self.data[name] += count

    def refuse(self, reason: str) -> None:
        assert reason in REASONS
        refused = self.data[REFUSED]
        refused[reason] = refused.get(reason, 0) + 1

    def aggregate(self, other: KVConnectorStats) -> SpanStats:
        for name in COUNTS:
            self.data[name] += other.data[name]
        for reason, count in other.data[REFUSED].items():
            self.data[REFUSED][reason] = self.data[REFUSED].get(reason, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        counts = {name.replace("_", " "): round(self.data[name], 3) for name in COUNTS}
        return {**counts, REFUSED.replace("_", " "): sum(self.data[REFUSED].values())}

    def is_empty(self) -> bool:
        return not self.data[REFUSED] and not any(self.data[name] for name in COUNTS)


class SpanPromMetrics(KVConnectorPromMetrics):
    """``vllm:kvspan_...`` counters, with vLLM's own labels."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter = metric_types[Counter]
        self._counters = {
            name: counter(name=f"vllm:kvspan_{name}", documentation=text, labelnames=labelnames)
            for name, text in COUNTS.items()
        }
        self._refused = counter(
            name=f"vllm:kvspan_{REFUSED}",
            documentation="Requests with spans that ran as ordinary ones, by reason",
            labelnames=[*labelnames, "reason"],
        )
        for values in per_engine_labelvalues.values():
            for one in self._counters.values():
                one.labels(*values)
            for reason in REASONS:
                self._refused.labels(*values, reason)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        for name, one in self._counters.items():
            one.labels(*values).inc(transfer_stats_data[name])
        for reason, count in transfer_stats_data[REFUSED].items():
            self._refused.labels(*values, reason).inc(count)
