"""Hybrid models on real vLLM: a prefix is hit at the exact token where two prompts part."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hybrid_checks import (
    BASE,
    ROUNDING,
    SUFFIX,
    WRONG,
    Watched,
    check_mixed_batch,
    check_split_prefill,
    drop_states,
    names,
    pinned,
    restore_plan,
    split_at,
    tokens,
)
from hybrid_served import Answer, HybridServed, difference, save_hybrid
from vllm import SamplingParams
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from kvspan.host import CopyQueue, HostTier
from kvspan.vllm.hybrid import scheduling
from kvspan.vllm.stats import SpanStats

MORE = int(os.environ.get("KVSPAN_VLLM_BOUNDARIES", "0"))  # so many random boundaries beside these
BOUNDARIES = (
    *(63, 64, 65, 255, 256, 512, 777, 1531, 1999),
    *random.Random(0).sample(range(2, 2000), MORE),
)


@pytest.fixture(
    scope="module",
    params=[
        ("qwen3_5", "none", False),
        ("qwen3_5", "align", False),
        ("qwen3_next", "align", False),
        ("qwen3_next", "none", True),
    ],
    ids=lambda p: f"{p[0]}-{p[1]}" + "-async" * p[2],
)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HybridServed]:
    name, mode, at_once = request.param
    folder = save_hybrid(name, tmp_path_factory.mktemp(name))
    with pytest.MonkeyPatch.context() as patch:
        if at_once:  # which vLLM switches off on CPUs
            allowed = CpuPlatform.check_and_update_config

            def forced(vllm_config: Any) -> None:
                allowed(vllm_config)
                vllm_config.scheduler_config.async_scheduling = True

            patch.setattr(CpuPlatform, "check_and_update_config", staticmethod(forced))
        served = HybridServed(folder, mode)
    assert isinstance(served.core.scheduler, AsyncScheduler) == at_once
    yield served
    served.close()


@pytest.fixture(autouse=True)
def _fresh(served: HybridServed) -> None:
    served.forget()


@pytest.mark.parametrize("m", BOUNDARIES)
def test_exact_is_a_split_prefill(
    served: HybridServed, m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_split_prefill(served, Watched(served, monkeypatch), m)


@pytest.mark.parametrize("m", [255, 777, 1531, 1999])
def test_first_request_that_parts_is_a_hit(served: HybridServed, m: int) -> None:
    suffix = tokens(3, SUFFIX)
    expected = split_at(served, m, suffix)
    served.ask([BASE + tokens(4, SUFFIX)], 1)
    (answer,) = served.ask([BASE[:m] + suffix])
    assert answer.cached == m
    assert difference(answer, expected) < ROUNDING


def test_one_shared_token(served: HybridServed) -> None:
    prompt = BASE[:1] + tokens(3, SUFFIX)
    (full,) = served.ask([prompt], replay="off")
    served.forget()
    served.ask([BASE], 1)
    (answer,) = served.ask([prompt])
    assert answer.cached == 1
    assert difference(answer, full) < ROUNDING


def test_zero_state_shows(served: HybridServed) -> None:
    """The control of the test above: with a wrong state the difference is large."""
    suffix = tokens(3, SUFFIX)
    expected = split_at(served, 777, suffix)
    served.ask([BASE + tokens(4, SUFFIX)], 1)
    (answer,) = served.ask([BASE[:777] + suffix], replay="zero")
    assert answer.cached == 777 and not answer.replay["exact"]
    assert difference(answer, expected) > WRONG


def test_one_token_remains(served: HybridServed) -> None:
    (full,) = served.ask([BASE[:700]])
    served.forget()
    served.ask([BASE], 1)
    (answer,) = served.ask([BASE[:700]])
    assert answer.cached == 699
    assert difference(answer, full) < ROUNDING


def test_answers_are_resumed_at_their_end(served: HybridServed) -> None:
    """A second turn finds the first one's answer, but for its last token, which was never run."""
    (first,) = served.ask([BASE[:300]], 40)
    second = BASE[:300] + list(first.tokens) + tokens(5, 50)
    (answer,) = served.ask([second])
    assert answer.cached == 339 and answer.replay["replayed"] == 0
    served.forget()
    (full,) = served.ask([second], replay="off")
    assert difference(answer, full) < ROUNDING


def test_next_turn_waits_for_the_end_of_the_last(served: HybridServed) -> None:
    """It comes before the step that stores what the first turn leaves, and is asked again."""
    (first,) = served.ask([BASE[:300]], 40, settle=False)
    assert served.side._ending
    second = BASE[:300] + list(first.tokens) + tokens(5, 50)
    (answer,) = served.ask([second])
    assert answer.cached == 339 and answer.replay["replayed"] == 0


def test_restores_among_fresh_requests(
    served: HybridServed, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = (100, 333, 512, 777, 1300, 1531, 1999)
    check_mixed_batch(served, Watched(served, monkeypatch), lengths, 4)


@pytest.mark.parametrize("m", [777, 768])
def test_nothing_approximate_is_hit(served: HybridServed, m: int) -> None:
    """What follows an approximate restore is found by nobody, here or in vLLM's own cache, but by
    the next turns of a chat under the same policy; also where the restore ends on a block, and the
    first step after it at another."""
    long = BASE[:m] + tokens(6, 900)
    turn = [*long, *tokens(7, 300)]
    expected = split_at(served, m, long[m:])

    def chat() -> list[Answer]:
        served.forget()
        served.ask([BASE + tokens(4, SUFFIX)], 1)
        before = names(served, b"S")
        turns = [served.ask([prompt], 1, replay="ratio:0.02")[0] for prompt in (long, turn)]
        assert names(served, b"S") == before, "states are exact"
        return turns

    rough, after = chat()
    assert rough.cached == m and rough.replay["state_from"] == -1
    assert after.cached == len(long) and not after.replay["exact"]
    (answer,) = served.ask([long])
    assert answer.cached <= m and answer.replay["exact"]
    assert difference(answer, expected) < ROUNDING
    (again,) = served.ask([long], replay="ratio:0.05")
    assert again.cached > m, "the exact request is a source"
    chat()
    for replay in ("ratio:0.05", "off"):
        assert served.ask([turn], 1, replay=replay)[0].cached <= m


def test_others_salts_are_not_hit(served: HybridServed) -> None:
    params = SamplingParams(max_tokens=1, detokenize=False)
    prompts = [{"prompt_token_ids": BASE[:600], "cache_salt": salt} for salt in ("a", "b", "a")]
    cached = [
        served.llm.generate([prompt], params, use_tqdm=False)[0].num_cached_tokens
        for prompt in prompts
    ]
    assert cached[:2] == [0, 0] and cached[2] and cached[2] >= 512


def test_bad_policy_is_said(served: HybridServed) -> None:
    (answer,) = served.ask([BASE[:100]], replay="roughly")
    assert "expected exact, bounded:EPS" in answer.replay["refused"]
    (answer,) = served.ask([BASE[:100]], replya="exact")
    assert "kvspan.replya: unknown field (did you mean replay?)" in answer.replay["refused"]


def test_random_traffic_in_a_small_store(served: HybridServed) -> None:
    """Pages and states are evicted all the time; answers stay right and nothing stays pinned."""
    rng = random.Random(0)
    store, replayer = served.side.store, served.replayer
    large, memory = store.tier, replayer.memory
    replayer.memory = np.zeros(8 * 2**20, np.uint8)
    store.tier = HostTier(8 * 2**20, page_bytes=store.geometry.page_bytes, memory=replayer.memory)
    try:
        for _ in range(12):
            prompts = []
            for _ in range(rng.randint(1, 4)):
                m = rng.randint(1, 1900)
                start = rng.choice([BASE, tokens(7, 2000)])
                prompts.append(start[:m] + tokens(rng.randint(100, 10**6), rng.randint(1, 90)))
            answers = served.ask(prompts, rng.randint(1, 20))
            for prompt, answer in zip(prompts, answers, strict=True):
                if answer.cached and rng.random() < 0.5:
                    (full,) = served.ask([prompt], 1, replay="off")
                    assert full.cached % 256 == 0
                    assert difference(answer, full) < ROUNDING
            assert pinned(served) == 0
        assert store.tier.stats().memory.evictions > 10
    finally:
        store.tier.close()
        store.tier, replayer.memory = large, memory
        served.forget()


def test_block_boundary_is_kept_whole(served: HybridServed) -> None:
    """A restore that ends on a block: vLLM's own cache then holds the state of that block too."""
    served.ask([BASE + tokens(4, SUFFIX)], 1)
    (first,) = served.ask([BASE[:512] + tokens(8, SUFFIX)], 1)
    assert first.cached == 512
    prompt = BASE[:512] + tokens(9, SUFFIX)
    (second,) = served.ask([prompt], replay="off")  # vLLM's own hit, if any
    served.forget()
    (full,) = served.ask([prompt], replay="off")
    assert difference(second, full) < ROUNDING


def test_wait_for_blocks_has_an_end(served: HybridServed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others pass a request that is held back: after some steps it computes all instead."""
    served.ask([BASE[:300]], 1)
    told: list[int | None] = []
    find = served.connector.get_num_new_matched_tokens

    def find_and_tell(request: Any, computed: int) -> tuple[int | None, bool]:
        found: tuple[int | None, bool] = find(request, computed)
        if request.num_prompt_tokens == 320:
            told.append(found[0])
        return found

    monkeypatch.setattr(served.connector, "get_num_new_matched_tokens", find_and_tell)
    monkeypatch.setattr(served.side, "_has_room", lambda request: False)
    monkeypatch.setattr(scheduling, "MAX_WAIT_STEPS", 3)
    monkeypatch.setattr(served.side, "_busy", True)
    _, held = served.ask([tokens(5, 40), BASE[:300] + tokens(6, 20)], 12)
    assert told == [None, None, None, 0]
    assert held.replay["matched"] == 0


def test_counters(served: HybridServed, monkeypatch: pytest.MonkeyPatch) -> None:
    total = SpanStats()
    get = served.connector.get_kv_connector_stats

    def get_and_add() -> SpanStats | None:
        stats = get()
        if stats is not None:
            total.aggregate(stats)
        return stats

    monkeypatch.setattr(served.connector, "get_kv_connector_stats", get_and_add)
    served.ask([BASE[:600]], 1)
    served.ask([BASE[:500] + tokens(2, 60)], 1, replay="ratio:0.1")
    served.connector.get_kv_connector_stats()  # of the last step, if it was sent ahead
    counts = total.data
    assert counts["replay_tokens_looked_up"] == 600 + 560
    assert (counts["replay_tokens_matched"], counts["replay_tokens_replayed"]) == (500, 50)
    assert counts["replay_approximate_requests"] == 1
    assert counts["replay_bytes"] > 0 and counts["replay_run_seconds"] > 0
    assert counts["replay_copy_seconds"] > 0
    assert counts["host_memory_bytes"] > 0


def test_copy_and_replay_run_at_once(served: HybridServed, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a copy that takes long the restore takes no longer than the copy, or little."""
    replayer = served.replayer
    served.ask([BASE], 1)
    drop_states(served)  # and vLLM's own, so that all KV is copied
    prompt = BASE[:1900] + tokens(2, 20)
    kv = replayer.geometry.kv_bytes * -(-1900 // replayer.geometry.size)
    slow = CopyQueue(bytes_per_second=kv / 2)
    monkeypatch.setattr(replayer, "queue", slow)
    kept: list[Any] = []
    take = replayer.take_timing

    def take_and_look() -> Any:
        kept.append(take())
        return kept[-1]

    monkeypatch.setattr(replayer, "take_timing", take_and_look)
    served.ask([prompt], 1)
    slow.close()
    (timing,) = (timing for timing in kept if timing.restores)
    assert timing.copy_s > 1.9
    assert timing.replay_s + timing.wait_s <= 1.15 * max(timing.copy_s, timing.replay_s)


def test_restore_that_fails_ends_its_copy(
    served: HybridServed, monkeypatch: pytest.MonkeyPatch
) -> None:
    replayer = served.replayer
    served.ask([BASE], 1)
    plan = restore_plan(served, BASE[:1900] + tokens(2, 20))

    def fail(plan: Any) -> None:
        raise RuntimeError("replay failed")

    monkeypatch.setattr(replayer, "_restore_states", fail)
    with CopyQueue(chunk_bytes=1 << 16, bytes_per_second=1 << 17) as slow:
        monkeypatch.setattr(replayer, "queue", slow)
        with pytest.raises(RuntimeError, match="replay failed"):
            replayer.restore(plan)
        stats = slow.stats()
        assert (stats["jobs_cancelled"], stats["bytes_queued"], stats["bytes_in_flight"]) == (
            1,
            0,
            0,
        )
