"""Spans on the host: an engine whose pool has 60 blocks, and what the tests of its tier look at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from served import BLOCK, CONNECTOR, Served, scheduler_of
from vllm import RequestOutput, SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.request import Request

from kvspan.layout import SpanLayout, layout_from_tokens
from kvspan.vllm.scheduling import SpanRequest
from kvspan.vllm.span_host import SpanHost
from kvspan.vllm.span_tier import SpanTier
from kvspan.vllm.stats import SpanStats

SMALL: dict[str, Any] = {
    "num_blocks": 60, "max_num_batched_tokens": 2048, "max_model_len": 1024,
}  # fmt: skip


def connector(gib: float = 0.0625, **extra: Any) -> dict[str, Any]:
    return {**CONNECTOR, "kv_connector_extra_config": {"host_gib": gib, **extra}}


def small(folder: Path) -> Served:
    """Shared by all tests of spans on the host."""
    return Served.shared(folder, connector=connector(), **SMALL)


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """All that is counted meanwhile, by vLLM's names and by the host tier's reasons."""
    total: Counter[str] = Counter()
    add, refuse = SpanStats.add, SpanStats.refuse_host

    def counting(self: SpanStats, name: str, count: float) -> None:
        total[name] += count  # type: ignore[assignment]
        add(self, name, count)

    def refusing(self: SpanStats, reason: str, times: int) -> None:
        total[reason] += times
        refuse(self, reason, times)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SpanStats, "add", counting)
        patch.setattr(SpanStats, "refuse_host", refusing)
        yield total


def tier_of() -> SpanTier:
    """The worker's, which runs in this process."""
    return get_kv_transfer_group()._worker.tier


def host_of(served: Served) -> SpanHost:
    return scheduler_of(served).connector._host


def flood(served: Served) -> None:
    """Ordinary requests that take every block of the pool."""
    rng = np.random.default_rng(1)
    pool = scheduler_of(served).kv_cache_manager.block_pool
    while any(block.block_hash is not None and block.block_hash not in _flooded(served)
              for block in pool.blocks):  # fmt: skip
        before = {block.block_hash for block in pool.blocks}
        served.ask([layout_from_tokens(rng.integers(3, 500, 25 * BLOCK), (), BLOCK)])
        _flooded(served).update({block.block_hash for block in pool.blocks} - before)


_FLOODED: dict[int, set[Any]] = {}


def _flooded(served: Served) -> set[Any]:
    return _FLOODED.setdefault(id(served), set())


def steps(served: Served, count: int = 3) -> None:
    """Short requests, whose steps carry reports."""
    for _ in range(count):
        served.ask([layout_from_tokens(np.arange(3, 8), (), BLOCK)])


def settle(served: Served) -> None:
    """Until all copies are over."""
    while host_of(served).is_busy:
        steps(served, 1)


def bits(output: RequestOutput) -> list[float]:
    given = output.outputs[0].logprobs
    assert given is not None
    return [given[0][token].logprob for token in sorted(given[0])]


def pinned(served: Served) -> int:
    """What is held in the pool (beside the null block) and in the tier."""
    pool = scheduler_of(served).kv_cache_manager.block_pool
    return sum(b.ref_cnt for b in pool.blocks if not b.is_null) + tier_of().tier.pinned_bytes()


def piece_tokens(layout: SpanLayout) -> int:
    """Tokens of the anchor and of the distinct spans."""
    spans = {layout.token_ids[a:b].tobytes(): b - a for a, b in layout.spans}
    return layout.anchor_len + sum(spans.values())


def seen_as(served: Served, layout: SpanLayout) -> SpanRequest:
    """The layout as the scheduler sees it."""
    params = SamplingParams(max_tokens=1)
    ids = layout.token_ids.tolist()
    core = served.llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
    request = Request("x", ids, params, None, block_hasher=core.request_block_hasher)
    return SpanRequest(layout, request.block_hashes, salt=None, lora="")
