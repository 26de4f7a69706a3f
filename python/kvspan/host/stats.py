"""What a host tier reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class LevelStats:
    """Of one level, memory or disk.

    Attributes:
        entries: entries held now.
        bytes: what they take: whole pages in memory, whole files on disk.
        budget: bytes that they may take.
        by_kind: bytes stored in them, by ``kind``.
        hits: lookups answered from this level.
        evictions: entries dropped to make room.
        stores: entries written.
        others, others_bytes: on disk, files of other models and versions in the same folder, which
            count in the budget, and what they take.
        others_removed: those removed to make room.
    """

    entries: int = 0
    bytes: int = 0
    budget: int = 0
    by_kind: Mapping[str, int] = field(default_factory=dict)
    hits: int = 0
    evictions: int = 0
    stores: int = 0
    others: int = 0
    others_bytes: int = 0
    others_removed: int = 0


@dataclass
class HostStats:
    """A snapshot of a tier.

    Attributes:
        memory: the memory level.
        disk: the disk level; None without one.
        misses: lookups that no level could answer.
        refusals: stores that were refused, by reason.
        ignored: files of the disk level that were not used, by reason.
    """

    memory: LevelStats
    disk: LevelStats | None
    misses: int
    refusals: Mapping[str, int]
    ignored: Mapping[str, int]
