"""Hundreds of mixed requests against transformers with an explicit mask, in a pool of 34 blocks.

Cold, reordered, partly hit, one token after the spans, ordinary twins, other boundaries, both
scopes and placements, with and without preparation, several at once, prompts in chunks of 90
tokens, answers long enough that vLLM preempts, and aborts.
"""

from __future__ import annotations

import gc
import os
import resource
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from served import BLOCK, Served, scheduler_of
from span_hosted import connector, host_of, pinned, settle
from test_spans import TOLERANCE, make
from traffic import (
    Ask,
    Verdict,
    counted_preemptions,
    free_blocks,
    judge,
    random_ask,
    run,
)

# Random requests of one model in `test_nothing_is_left_behind`. The long run has 2000.
REQUESTS = int(os.environ.get("KVSPAN_VLLM_REQUESTS", "150"))
# Those of `test_evictions_to_the_host`. The long run has 2000.
HOSTED_REQUESTS = int(os.environ.get("KVSPAN_VLLM_SOAK", "60"))


@pytest.fixture
def tight(model_folder: Path) -> Served:
    """34 blocks for everything, prompts in chunks of at most 90 tokens."""
    return Served.shared(
        model_folder, num_blocks=34, max_num_batched_tokens=90, max_num_seqs=8, max_model_len=1024
    )


def test_mixed_requests_equal_transformers(tight: Served) -> None:
    rng = np.random.default_rng(0)
    free = free_blocks(tight)
    verdict, kinds = Verdict(), Counter[str]()
    with counted_preemptions(tight) as preempted:
        while verdict.requests < 200:
            asks = [random_ask(rng) for _ in range(rng.integers(1, 6))]
            if rng.random() < 0.08:  # answers so long that they don't all fit
                orders = [[i, i + 1] for i in range(4)]
                layouts = [make(order, tail=17 + order[0], seed=5) for order in orders]
                asks = [Ask(layout, "preempting", 170) for layout in layouts]
            doomed = {i: int(rng.integers(0, 12)) for i in range(len(asks)) if rng.random() < 0.1}
            outputs = run(
                tight, asks, logprobs=50, abort=lambda step, i, at=doomed: at.get(i, -1) == step
            )  # type: ignore[misc]
            for ask, output in zip(asks, outputs, strict=True):
                if output is not None:
                    judge(tight, ask, output, verdict)
                    kinds[f"{ask.kind}, {ask.placement}, {ask.layout.scope}"] += 1
                    assert verdict.max_error <= TOLERANCE and not verdict.wrong, (ask, verdict)
                else:
                    kinds["aborted"] += 1
    print(f"{verdict}, {len(preempted)} preemptions, {dict(kinds)}")
    assert verdict.ties <= 2 and not verdict.fallbacks, verdict
    assert verdict.moved >= 20 and verdict.computed >= 20, verdict
    assert preempted and min(kinds.values()) > 0 and len(kinds) >= 12, kinds
    assert free_blocks(tight) == free


def test_preempted_requests_whose_spans_are_gone_go_on_as_before(tight: Served) -> None:
    """Answers so long that not all fit: vLLM preempts, evicts what was free, and resumes.

    Nobody prepares the spans of a resumed request again: it computes them itself.
    """
    asks = [
        Ask(make([i % 4, (i + 1) % 4], tail=17 + i, seed=5), max_tokens=180, timeout_s=30.0)
        for i in range(4)
    ]
    verdict = Verdict()
    with counted_preemptions(tight) as preempted:
        outputs = run(tight, asks, logprobs=0)
    assert len(set(preempted)) > 1
    for ask, output in zip(asks, outputs, strict=True):
        assert output is not None and tight.audit(output)["fallback"] == ""
        judge(tight, ask, output, verdict)
    assert not verdict.wrong and verdict.max_error <= TOLERANCE and verdict.computed, verdict


def test_resumed_requests_that_cannot_compute_spans_say_so(
    tight: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never full attention in silence, where the attention backend takes no rows of ours."""
    monkeypatch.setattr(scheduler_of(tight).connector, "_no_rows", "a backend that can't")
    asks = [
        Ask(make([i % 4, (i + 1) % 4], tail=17 + i, seed=6), max_tokens=180, timeout_s=0.5)
        for i in range(4)
    ]
    verdict, said = Verdict(), 0
    with counted_preemptions(tight) as preempted:
        outputs = run(tight, asks, logprobs=0)
    for ask, output in zip(asks, outputs, strict=True):
        assert output is not None
        if tight.audit(output)["fallback"]:
            said += 1
        else:
            judge(tight, ask, output, verdict)
    assert preempted and said and not verdict.wrong and verdict.max_error <= TOLERANCE


def test_nothing_is_left_behind(tight: Served) -> None:
    """Random requests with aborts: no block stays taken, nothing grows."""
    rng = np.random.default_rng(9)
    scheduler = scheduler_of(tight)
    pool, connector = scheduler.kv_cache_manager.block_pool, scheduler.connector
    free, done, aborted = free_blocks(tight), 0, 0
    memory: list[tuple[int, int]] = []
    while done < REQUESTS:
        asks = [random_ask(rng) for _ in range(rng.integers(1, 6))]
        doomed = {i: int(rng.integers(0, 8)) for i in range(len(asks)) if rng.random() < 0.3}
        outputs = run(
            tight, asks, logprobs=None, abort=lambda step, i, at=doomed: at.get(i, -1) == step
        )  # type: ignore[misc]
        done += len(asks)
        aborted += outputs.count(None)
        assert free_blocks(tight) == free
        if done > REQUESTS // 2:  # caches of torch and of Python are warm
            gc.collect()
            memory.append((len(gc.get_objects()), resident_bytes()))
    assert all(block.ref_cnt == 0 for block in pool.blocks if not block.is_null)
    assert not connector._tracked and not connector._audits.notes and not connector._rows.holding
    assert not connector._scheduler._computing
    assert len(connector._scheduler._written) <= connector._scheduler.limit + 1
    assert aborted >= REQUESTS // 10
    half = len(memory) // 2
    objects, resident = np.median(memory[half:], axis=0) - np.median(memory[:half], axis=0)
    print(
        f"{done} requests, {aborted} aborted, {free} blocks free, more in the last quarter: "
        f"{objects:.0f} objects, {resident / 2**20:.2f} MiB"
    )
    assert objects < 1000 and resident < 16 * 2**20
    verdict = Verdict()
    ask = Ask(make([1, 0, 2], seed=3))
    (output,) = run(tight, [ask])
    assert output is not None
    judge(tight, ask, output, verdict)
    assert verdict.max_error <= TOLERANCE and not verdict.wrong


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_evictions_to_the_host(llama: Path, counted: Counter[str]) -> None:
    """In a pool and a tier that are both too small, with aborts, against transformers."""
    served = Served.shared(
        llama, num_blocks=34, max_num_batched_tokens=90, max_num_seqs=8, max_model_len=1024,
        connector=connector(40 * BLOCK * 3 * 2 * 2 * 32 * 4 / 2**30),
    )  # fmt: skip
    rng = np.random.default_rng(5)
    free, verdict, aborted = free_blocks(served), Verdict(), 0
    while verdict.requests < HOSTED_REQUESTS:
        asks = [random_ask(rng) for _ in range(rng.integers(1, 6))]
        doomed = {i: int(rng.integers(0, 8)) for i in range(len(asks)) if rng.random() < 0.2}
        outputs = run(
            served, asks, logprobs=50, abort=lambda step, i, at=doomed: at.get(i, -1) == step
        )  # type: ignore[misc]
        aborted += outputs.count(None)
        for ask, output in zip(asks, outputs, strict=True):
            if output is not None:
                judge(served, ask, output, verdict)
                assert verdict.max_error <= TOLERANCE and not verdict.wrong, (ask, verdict)
        settle(served)
        assert free_blocks(served) == free and pinned(served) == 0
    told = {name: n for name, n in counted.items() if name.startswith("host") and n}
    print(f"{verdict}, {aborted} aborted, {told}")
    assert not host_of(served)._waits and not host_of(served)._offered
    assert counted["host_loads"] >= HOSTED_REQUESTS // 10 and counted["host_evictions"] > 0
    assert aborted and not verdict.fallbacks
