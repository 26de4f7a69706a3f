"""What became of requests with spans: their answers' audits, and the counters of all of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvspan.vllm.params import KEY, SpanAudit
from kvspan.vllm.scheduling import Piece
from kvspan.vllm.span_steps import Tracked
from kvspan.vllm.stats import SpanStats

MAX_REMEMBERED = 4096  # requests whose preparations are counted


@dataclass
class _Prepared:
    """What was done for a request by its preparations. restored: as `Tracked.restored`."""

    computed: int = 0
    restored: dict[bytes, int] = field(default_factory=dict)


class SpanAudits:
    """notes: the audits of requests that are not over, by name."""

    def __init__(self) -> None:
        self.stats = SpanStats()
        self.notes: dict[str, SpanAudit] = {}
        self._prepared_for: dict[str, _Prepared] = {}

    def waits(self, tracked: Tracked) -> None:
        tracked.waits_since = tracked.waits_since or time.monotonic()

    def admitted(self, tracked: Tracked) -> None:
        if tracked.waits_since:
            self.stats.add("span_deferred_seconds", time.monotonic() - tracked.waits_since)
            tracked.waits_since = 0.0

    def computes(self, tracked: Tracked, count: int) -> None:
        """Notes that count tokens of spans are computed in a step."""
        self.stats.add("span_tokens_prepared", count)
        tracked.computed += count
        if count and tracked.prepare_for:
            self._done_for(tracked.prepare_for).computed += count

    def restored(self, tracked: Tracked, pieces: Sequence[Piece]) -> None:
        """Notes what came back from the host for a request that waited for it."""
        restored = tracked.restored
        if tracked.prepare_for:
            restored = self._done_for(tracked.prepare_for).restored
        restored.update({piece.key: piece.num_tokens for piece in pieces})

    def over(self, tracked: Tracked) -> None:
        """Counts spans looked up and found, when their request is over."""
        if tracked.prepare_for:
            return
        audit = tracked.spans.audit
        prepared = self._prepared_for.pop(tracked.id, None) or _Prepared()
        audit.host_tokens = sum((prepared.restored | tracked.restored).values())
        missed = tracked.computed + prepared.computed
        hit = 0 if audit.fallback else max(0, audit.span_tokens - missed)
        self.stats.add("span_tokens_looked_up", audit.span_tokens)
        self.stats.add("span_tokens_hit", hit)

    def answer(self, name: str) -> dict[str, Any] | None:
        audit = self.notes.pop(name, None)
        return {KEY: asdict(audit)} if audit else None

    def _done_for(self, id: str) -> _Prepared:
        known = self._prepared_for
        done = known.setdefault(id, _Prepared())
        if len(known) > MAX_REMEMBERED:  # their requests never came
            del known[next(iter(known))]
        return done
