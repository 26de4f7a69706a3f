"""What scheduler and worker of the hybrid connector tell each other, step by step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from kvspan.vllm.hybrid.replay import Replayer
from kvspan.vllm.hybrid.store import OpenPage, PageStore
from kvspan.vllm.hybrid.tracking import Plan, Track, Work

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass
class Shared:
    """Scheduler and worker are in one process, which `support.refusal` sees to.

    They take turns, or the worker is a step behind in a thread of its own: done is the last step
    that it has finished.
    """

    store: PageStore
    replayer: Replayer | None = None
    done: int = 0


@dataclass
class Load:
    plan: Plan
    track: Track
    begun: OpenPage | None


@dataclass
class ReplayMetadata(KVConnectorMetadata):
    """One step: restores, and what the step's requests leave behind."""

    step: int = 0
    loads: list[Load] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)


@dataclass
class Tracked:
    """A request of vLLM's. done: its positions that have been computed for certain.

    waited: steps that it was held back for blocks.
    """

    request: Request
    track: Track
    ordinary_hasher: Any
    poisoned: bool = False
    done: int = 0
    waited: int = 0


@dataclass
class Step:
    """A step that was sent to the worker: where it brings which requests, and its restores."""

    number: int
    ends: list[tuple[Tracked, int]] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
