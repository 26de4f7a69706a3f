"""What vLLM's log and its /metrics say of spans and replays, by vLLM's own connector statistics.

Counted in the scheduler: tokens are moved and prepared (computed) step by step, those of preempted
requests once more; when a request is over, what of its spans nobody had to compute for it was hit.
Copy and replay of a restore run at once: what of the copy was hidden is copy minus wait seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Gauge
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
    "host_loads": "Spans and anchors brought back from the host tier",
    "host_tokens_loaded": "Tokens of these",
    "host_load_seconds": "Seconds that bringing them back took, which other work may hide",
    "host_disk_seconds": "Of these, seconds of waiting for files, the mean over workers",
    "host_load_failures": "Spans and anchors that the host tier had lost or could not read",
    "host_stores": "Spans and anchors copied to the host tier",
    "host_tokens_stored": "Tokens of these",
    "host_evictions": "Of these, dropped from its memory to make room",
    "replay_tokens_looked_up": "Prompt tokens of a hybrid model that were looked up",
    "replay_tokens_matched": "Of these, tokens whose KV was restored",
    "replay_tokens_replayed": "Of these, tokens that linear-attention layers ran again",
    "replay_approximate_requests": "Requests that went on from an approximate state",
    "replay_bytes": "Bytes of KV, hidden vectors and states that restores read",
    "replay_lookup_seconds": "Seconds of looking up, files not counted",
    "replay_disk_seconds": "Seconds that requests waited for files, while others ran",
    "replay_copy_seconds": "Seconds of copying KV",
    "replay_run_seconds": "Seconds of replaying",
    "replay_wait_seconds": "Seconds that a finished replay waited for its copy",
}
GAUGES = {
    "host_memory_bytes": "Bytes kept in the host tier's memory",
    "host_disk_bytes": "Bytes kept in the host tier's files",
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
HOST_REFUSED = "host_refused"  # by the host tier's own reasons


@dataclass
class SpanStats(KVConnectorStats):
    """data: numbers for COUNTS, under REFUSED for the REASONS met, under HOST_REFUSED for those of
    the host tier, and for the GAUGES read."""

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data: dict[str, Any] = {**dict.fromkeys(COUNTS, 0.0), REFUSED: {}, HOST_REFUSED: {}}

    def add(self, name: str, count: float) -> None:
        self.data[name] += count

    def refuse(self, reason: str) -> None:
        assert reason in REASONS
        self._refuse(REFUSED, reason, 1)

    def refuse_host(self, reason: str, times: int) -> None:
        self._refuse(HOST_REFUSED, reason, times)

    def _refuse(self, what: str, reason: str, times: int) -> None:
        refused = self.data[what]
        refused[reason] = refused.get(reason, 0) + times

    def aggregate(self, other: KVConnectorStats) -> SpanStats:
        for name in COUNTS:
            self.data[name] += other.data[name]
        self.data.update({name: other.data[name] for name in GAUGES if name in other.data})
        for what in (REFUSED, HOST_REFUSED):
            for reason, count in other.data[what].items():
                self._refuse(what, reason, count)
        return self

    def reduce(self) -> dict[str, int | float]:
        counts = {
            name.replace("_", " "): round(self.data[name], 3)
            for name in (*COUNTS, *GAUGES)
            if self.data.get(name) or name.startswith("span_")
        }
        refused = {what: sum(self.data[what].values()) for what in (REFUSED, HOST_REFUSED)}
        counts.update({k.replace("_", " "): n for k, n in refused.items() if n or k == REFUSED})
        return counts

    def is_empty(self) -> bool:
        refused = self.data[REFUSED] or self.data[HOST_REFUSED]
        return not refused and not any(self.data[name] for name in COUNTS)


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
        self._gauges = {
            name: metric_types[Gauge](
                name=f"vllm:kvspan_{name}",
                documentation=text,
                labelnames=labelnames,
                multiprocess_mode="mostrecent",  # of several API servers
            )
            for name, text in GAUGES.items()
        }
        self._refused = counter(
            name=f"vllm:kvspan_{REFUSED}",
            documentation="Requests with spans that ran as ordinary ones, by reason",
            labelnames=[*labelnames, "reason"],
        )
        self._host_refused = counter(
            name=f"vllm:kvspan_{HOST_REFUSED}",
            documentation="What the host tier did not take, and files it did not use, by reason",
            labelnames=[*labelnames, "reason"],
        )
        for values in per_engine_labelvalues.values():
            for one in (*self._counters.values(), *self._gauges.values()):
                one.labels(*values)
            for reason in REASONS:
                self._refused.labels(*values, reason)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        for name, one in self._counters.items():
            one.labels(*values).inc(transfer_stats_data[name])
        for name, one in self._gauges.items():
            if name in transfer_stats_data:
                one.labels(*values).set(transfer_stats_data[name])
        for what, counter in ((REFUSED, self._refused), (HOST_REFUSED, self._host_refused)):
            for reason, count in transfer_stats_data[what].items():
                counter.labels(*values, reason).inc(count)
