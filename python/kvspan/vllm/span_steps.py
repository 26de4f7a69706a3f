"""What the two sides of the span connector tell each other, step by step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvspan.vllm.attention import StepPlan
from kvspan.vllm.scheduling import Move, SpanRequest
from kvspan.vllm.span_tier import HostReport, HostStep

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request


@dataclass
class StepMetadata(KVConnectorMetadata):
    """What the worker has to do in one step; moves are (source block, destination, delta tokens).

    moves: before the forward pass. late: in each layer when its new keys are written, before it
    attends. plan: attention rows and positions that are not vLLM's. host: copies to and from the
    host, where there is a tier.
    """

    moves: list[tuple[int, int, int]] = field(default_factory=list)
    late: list[tuple[int, int, int]] = field(default_factory=list)
    plan: StepPlan = field(default_factory=StepPlan)
    host: HostStep | None = None


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """What workers tell the scheduler with a step's results, one or several of them together."""

    host: HostReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReport:
        assert isinstance(other, StepReport)
        self.host.add(other.host)
        return self


@dataclass
class Tracked:
    """A request of vLLM's and what is known of its spans.

    deadline: until when it waits for others to prepare its spans.
    id, prepare_for: see `SpanParams`. computed: its own span tokens. waits_since: or 0.
    scratch: blocks held for rotated copies of the anchor while it computes spans itself, so many
    sets of them as it may need in one step. restored: keys of pieces that came back from the host
    for it, and their tokens.
    """

    request: Request
    spans: SpanRequest
    timeout_s: float
    deadline: float
    ordinary_hasher: Any
    preemptions: int = 0
    plan: list[Move] = field(default_factory=list)
    local_tokens: int = 0
    computes: bool = False
    scratch: list[KVCacheBlock] = field(default_factory=list)
    id: str = ""
    prepare_for: str = ""
    computed: int = 0
    waits_since: float = 0.0
    restored: dict[bytes, int] = field(default_factory=dict)
