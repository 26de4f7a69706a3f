"""What scheduler and worker of the hybrid connector tell each other, step by step.

Plain data, since they may be in different processes. The scheduler says where in the host tier's
memory things are to be written or read (offsets in bytes); the worker, or each of a tensor-parallel
group for its part, says which steps are over, to the last of their writes. Everything else stays
with the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvspan.vllm.hybrid.orders import Restore, Work

__all__ = ["Arena", "ReplayMetadata", "StepDone"]


@dataclass(frozen=True)
class Arena:
    """The host tier's memory. name: to map it by; "" where it is in the worker's own process."""

    name: str
    nbytes: int
    engine: str


@dataclass
class ReplayMetadata(KVConnectorMetadata):
    """One step, in this order: what finished requests leave, restores, the pass, what it leaves.

    step: its number, rising; 0: the connector is off. held: finished requests among `lasts` whose
    blocks vLLM frees once this step has read them.
    """

    step: int = 0
    arena: Arena | None = None
    lasts: list[Work] = field(default_factory=list)
    loads: list[Restore] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    held: list[str] = field(default_factory=list)


@dataclass
class StepDone(KVConnectorWorkerMetadata):
    """A worker has done all steps up to `step`. failed: those that wrote what nobody may read.

    copy_s, replay_s, wait_s: seconds that restores took since it told the last time.
    """

    step: int
    failed: tuple[int, ...] = ()
    copy_s: float = 0.0
    replay_s: float = 0.0
    wait_s: float = 0.0

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepDone:
        """Of two workers: over is what both have done; the seconds are those of the slower one."""
        assert isinstance(other, StepDone)
        return StepDone(
            min(self.step, other.step),
            (*self.failed, *other.failed),
            max(self.copy_s, other.copy_s),
            max(self.replay_s, other.replay_s),
            max(self.wait_s, other.wait_s),
        )
