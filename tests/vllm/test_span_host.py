"""Spans that the device has evicted and that come back from the host instead of being computed.

The pool of these tests has 60 blocks, and `flood` takes every one of them. What comes back is
compared with transformers, and with the hit on the device, bit by bit.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from served import BLOCK, CONNECTOR, Served, save_tiny, scheduler_of
from test_spans import TOLERANCE, make
from traffic import Ask, Verdict, free_blocks, judge, random_ask, run
from vllm import RequestOutput
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvspan.errors import UsageError
from kvspan.host import CopyQueue
from kvspan.layout import SpanLayout, layout_from_tokens
from kvspan.vllm.connector import KvspanConnector, logger
from kvspan.vllm.span_host import SpanHost
from kvspan.vllm.span_setup import HostSettings, flops, lora_name, open_tier
from kvspan.vllm.span_tier import HostReport, HostStep, SpanTier
from kvspan.vllm.stats import SpanStats

# Random requests of `test_random_requests_with_evictions`.
REQUESTS = int(os.environ.get("KVSPAN_VLLM_SOAK", "60"))
SMALL: dict[str, Any] = {
    "num_blocks": 60, "max_num_batched_tokens": 2048, "max_model_len": 1024,
}  # fmt: skip


def connector(gib: float = 0.0625, **extra: Any) -> dict[str, Any]:
    return {**CONNECTOR, "kv_connector_extra_config": {"host_gib": gib, **extra}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("span-host"))


@pytest.fixture
def hosted(folder: Path) -> Served:
    return Served.shared(folder, connector=connector(), **SMALL)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """All that is counted meanwhile, by vLLM's names and by the host tier's reasons."""
    total: Counter[str] = Counter()
    add, refuse = SpanStats.add, SpanStats.refuse_host

    def counting(self: SpanStats, name: str, count: float) -> None:
        total[name] += count  # type: ignore[assignment]
        add(self, name, count)

    def refusing(self: SpanStats, reason: str, times: int) -> None:
        total[reason] += times
        refuse(self, reason, times)

    monkeypatch.setattr(SpanStats, "add", counting)
    monkeypatch.setattr(SpanStats, "refuse_host", refusing)
    return total


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


@pytest.mark.parametrize(
    ("scope", "placement"),
    [("anchored", "sequential"), ("isolated", "sequential"), ("anchored", "parallel")],
)
def test_a_hit_from_the_host_is_the_hit_on_the_device(
    hosted: Served, counted: Counter[str], scope: str, placement: Any
) -> None:
    first = make([2, 0, 3], scope, seed=201)
    other = make([3, 2, 0], scope, seed=201, question=1)
    (miss,) = hosted.ask([first], placement=placement)
    (hit,) = hosted.ask([other], placement=placement)
    settle(hosted)
    flood(hosted)
    counted.clear()
    (back,) = hosted.ask([other], prepare=False, placement=placement)
    audit = hosted.audit(back)
    assert audit["computed_tokens"] == counted["span_tokens_prepared"] == 0
    assert audit["host_tokens"] == counted["host_tokens_loaded"] == piece_tokens(other)
    assert hosted.audit(hit)["host_tokens"] == 0
    assert bits(back) == bits(hit)
    assert hosted.error(first, miss, placement) <= TOLERANCE
    assert hosted.error(other, back, placement) <= TOLERANCE
    (again,) = hosted.ask([first], prepare=False, placement=placement)
    assert hosted.audit(again)["host_tokens"] == 0  # they are on the device now
    assert hosted.error(first, again, placement) <= TOLERANCE
    assert pinned(hosted) == 0


def test_every_byte_comes_back(hosted: Served) -> None:
    """Into other blocks of the pool, in every layer."""
    layout = make([3, 5, 2], seed=202)
    hosted.ask([layout])
    settle(hosted)
    host, caches = host_of(hosted), tier_of()._caches
    pieces = _request(hosted, layout).pieces

    def blocks() -> list[int]:
        found = [host._blocks_of(piece) for piece in pieces]
        return [block.block_id for some in found for block in some or ()]

    before = blocks()
    kept = [cache[before].clone() for cache in caches]
    flood(hosted)
    assert not blocks()
    hosted.ask([layout], prepare=False)
    after = blocks()
    assert len(after) == len(before) and after != before
    for cache, was in zip(caches, kept, strict=True):
        assert torch.equal(cache[after].view(torch.uint8), was.view(torch.uint8))


def _request(served: Served, layout: SpanLayout) -> Any:
    """The layout as the scheduler sees it."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    from kvspan.vllm.scheduling import SpanRequest

    params = SamplingParams(max_tokens=1)
    ids = layout.token_ids.tolist()
    core = served.llm.llm_engine.engine_core.engine_core
    request = Request("x", ids, params, None, block_hasher=core.request_block_hasher)
    return SpanRequest(layout, request.block_hashes, salt=None, lora="")


def test_device_host_and_new_spans_in_one_request(hosted: Served, counted: Counter[str]) -> None:
    hosted.ask([make([1, 2, 4], seed=203)])
    settle(hosted)
    flood(hosted)
    hosted.ask([make([2], seed=203)])
    layout = make([4, 2, 0, 1], seed=203, between=2)
    for prepare in (False, True):
        (output,) = hosted.ask([layout], prepare=prepare, timeout_s=0.2)
        assert hosted.error(layout, output) <= TOLERANCE
    assert counted["host_load_failures"] == 0 and counted["host_tokens_loaded"] > 0
    assert pinned(hosted) == 0


def test_preparations_find_spans_on_the_host(hosted: Served, counted: Counter[str]) -> None:
    """As the server does it: preparations and the request itself, all at once."""
    ask = Ask(make([5, 1, 3], seed=204))
    run(hosted, [ask])
    settle(hosted)
    flood(hosted)
    counted.clear()
    (output,) = run(hosted, [ask])
    assert output is not None and counted["span_tokens_prepared"] == 0
    assert hosted.audit(output)["host_tokens"] == piece_tokens(ask.layout)
    verdict = Verdict()
    judge(hosted, ask, output, verdict)
    assert not verdict.wrong and verdict.max_error <= TOLERANCE


def test_others_see_nothing_of_it(hosted: Served) -> None:
    """Not an ordinary request, not another tenant, not other boundaries."""
    layout = make([2, 1], seed=205)
    hosted.ask([layout])
    settle(hosted)
    flood(hosted)
    wider = layout_from_tokens(layout.token_ids, [(2 * BLOCK, layout.spans[-1][1])], BLOCK)
    for asked, salt in (
        (layout_from_tokens(layout.token_ids, (), BLOCK), None),
        (layout, "another"),
        (wider, None),
    ):
        (output,) = hosted.ask([asked], prepare=False, timeout_s=0.05, salt=salt)
        spans_from_host = hosted.audit(output).get("host_tokens", 0)
        assert spans_from_host <= (2 * BLOCK if asked is wider else 0)  # the anchor is the same
        assert hosted.error(asked, output) <= TOLERANCE


def test_control_wrong_blocks(hosted: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that change places between pieces must be found by the comparisons above."""
    layout = make([3, 2, 0], seed=206)
    hosted.ask([layout])
    settle(hosted)
    flood(hosted)
    begin = SpanTier.begin

    def mixed_up(self: SpanTier, step: HostStep) -> None:
        for batch in step.loads:
            ids = [number for one in batch for number in one.blocks]
            ids = [*ids[1:], ids[0]]  # order alone would make no difference to attention
            for i, one in enumerate(batch):
                mine, ids = tuple(ids[: len(one.blocks)]), ids[len(one.blocks) :]
                batch[i] = replace(one, blocks=mine)
        begin(self, step)

    monkeypatch.setattr(SpanTier, "begin", mixed_up)
    (output,) = hosted.ask([layout], prepare=False)
    assert hosted.audit(output)["host_tokens"] > 0
    assert hosted.error(layout, output) > 100 * TOLERANCE
    assert hosted.llm.llm_engine.reset_prefix_cache()


def test_what_the_tier_has_lost_is_computed(hosted: Served, counted: Counter[str]) -> None:
    layout = make([4, 3], seed=207)
    hosted.ask([layout])
    settle(hosted)
    flood(hosted)
    lost = _request(hosted, layout).pieces[1].key
    tier_of().tier.remove(lost)
    (output,) = hosted.ask([layout])
    assert counted["host_load_failures"] == 1 and counted["span_tokens_prepared"] > 0
    assert hosted.error(layout, output) <= TOLERANCE and pinned(hosted) == 0
    settle(hosted)
    assert tier_of().tier.contains(lost)


def test_copies_that_fail_are_misses(
    hosted: Served, counted: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that finds the queue full is dropped, a load that fails is computed instead."""

    class Broken:
        def submit(self, *args: object, **kwargs: object) -> None:
            raise RuntimeError("copy failed: no device")

        def try_submit(self, *args: object, **kwargs: object) -> None:
            return None

    layout = make([1, 2, 3], seed=216)
    with monkeypatch.context() as patch:
        patch.setattr(tier_of(), "_store_queue", Broken())
        hosted.ask([layout])
        settle(hosted)
    assert counted["copies wait"] >= 4 and counted["host_stores"] == 0 and pinned(hosted) == 0
    hosted.ask([layout], prepare=False)  # a span is offered again when it is used where it belongs
    hosted.ask([make([3, 1], seed=216)])
    settle(hosted)
    assert counted["host_stores"] > 0
    flood(hosted)
    prepared = counted["span_tokens_prepared"]
    with monkeypatch.context() as patch:
        patch.setattr(tier_of(), "_load_queue", Broken())
        (output,) = hosted.ask([layout])
    assert hosted.error(layout, output) <= TOLERANCE and pinned(hosted) == 0
    assert counted["host_load_failures"] > 0 and counted["span_tokens_prepared"] > prepared
    assert hosted.audit(output)["host_tokens"] == 0


def test_resetting_the_cache_forgets_the_host_too(hosted: Served) -> None:
    layout = make([4, 2], seed=208)
    hosted.ask([layout])  # stores may be under way
    assert hosted.llm.llm_engine.reset_prefix_cache(reset_connector=True)
    steps(hosted)
    assert not tier_of().tier.stored_keys()
    (output,) = hosted.ask([layout])
    assert hosted.audit(output)["host_tokens"] == 0
    assert hosted.error(layout, output) <= TOLERANCE


@pytest.fixture
def slow(hosted: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Makes copies from or to the host slow: a piece takes seconds."""
    queues = []

    def slow_down(name: str) -> None:
        queues.append(CopyQueue("cpu", chunk_bytes=1 << 12, bytes_per_second=5e5))
        monkeypatch.setattr(tier_of(), name, queues[-1])

    settle(hosted)
    yield slow_down
    settle(hosted)
    for queue in queues:
        queue.close()


def test_copies_hide_behind_the_computation_of_others(
    hosted: Served, slow: Callable[[str], None]
) -> None:
    layout = make([5, 3], seed=209)
    hosted.ask([layout])
    settle(hosted)
    flood(hosted)
    slow("_load_queue")
    engine, host = hosted.llm.llm_engine, host_of(hosted)
    asks = [Ask(layout, prepare=False, timeout_s=60.0)]
    asks += [Ask(layout_from_tokens(np.arange(3, 60 + i), (), BLOCK), max_tokens=5) for i in (0, 1)]
    seen = []
    step = engine.step

    def watching() -> Any:
        outputs = step()
        seen.extend((output.request_id, host.is_busy) for output in outputs if output.finished)
        return outputs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "step", watching)
        outputs = run(hosted, asks)
    assert [busy for _, busy in seen] == [True, True, False]  # the ordinary ones were first
    for ask, output in zip(asks, outputs, strict=True):
        verdict = Verdict()
        assert output is not None
        judge(hosted, ask, output, verdict)
        assert not verdict.wrong and verdict.max_error <= TOLERANCE


def test_aborts_while_loading_leave_nothing_behind(
    hosted: Served, slow: Callable[[str], None]
) -> None:
    layout = make([5, 2, 3], seed=210)
    hosted.ask([layout])
    settle(hosted)
    flood(hosted)
    free = free_blocks(hosted)
    with pytest.MonkeyPatch.context() as patch:
        fast = tier_of()._load_queue
        slow("_load_queue")
        asks = [Ask(layout, prepare=False, timeout_s=60.0) for _ in range(2)]
        outputs = run(hosted, asks, abort=lambda step, i: step == 3 + i)
        assert outputs == [None, None]
        steps(hosted, 1)
        assert free_blocks(hosted) == free and pinned(hosted) == 0
        assert not host_of(hosted).is_busy and not host_of(hosted)._waits
        # One that does not wait as long computes them itself.
        (output,) = hosted.ask([layout], prepare=False, timeout_s=0.05)
        assert hosted.audit(output)["computed_tokens"] > 0
        assert hosted.error(layout, output) <= TOLERANCE
        patch.setattr(tier_of(), "_load_queue", fast)
    flood(hosted)
    (output,) = hosted.ask([layout], prepare=False)
    assert hosted.audit(output)["host_tokens"] == piece_tokens(layout)
    assert hosted.error(layout, output) <= TOLERANCE and pinned(hosted) == 0


def _stored_while_overwritten(hosted: Served, slow: Callable[[str], None], seed: int) -> float:
    """Error of spans whose blocks were handed out again while they were being stored."""
    layout = make([3, 5], seed=seed)
    fast = tier_of()._store_queue
    slow("_store_queue")
    hosted.ask([layout])
    assert host_of(hosted)._storing
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tier_of(), "_store_queue", fast)
        flood(hosted)
    settle(hosted)
    (output,) = hosted.ask([layout], prepare=False)
    assert hosted.audit(output)["host_tokens"] == piece_tokens(layout)
    return hosted.error(layout, output)


def test_blocks_are_stored_before_they_are_written_again(
    hosted: Served, slow: Callable[[str], None]
) -> None:
    assert _stored_while_overwritten(hosted, slow, seed=211) <= TOLERANCE


def test_control_blocks_that_are_written_again(
    hosted: Served, slow: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = SpanTier.begin

    def careless(self: SpanTier, step: HostStep) -> None:
        step.settle = []
        begin(self, step)

    monkeypatch.setattr(SpanTier, "begin", careless)
    assert _stored_while_overwritten(hosted, slow, seed=212) > 100 * TOLERANCE
    assert hosted.llm.llm_engine.reset_prefix_cache(reset_connector=True)


def test_what_cannot_be_is_said(hosted: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    config, live = hosted.llm.llm_engine.vllm_config, scheduler_of(hosted).connector
    monkeypatch.setattr(config.cache_config, "enable_prefix_caching", False)
    said: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda text, *values: said.append(text % values))
    for role in KVConnectorRole:
        off = KvspanConnector(config, role, live._kv_cache_config)
        assert off._host is None and off._host_settings is None and not off._reason
    assert len(said) == 1 and "nothing on the host (prefix caching is off" in said[0]
    caches = {str(i): cache for i, cache in enumerate(tier_of()._caches)}
    with pytest.raises(UsageError, match=r"host_gib: no room for one block; expected 4.58e-05 or"):
        open_tier(config, HostSettings(1000, "", 0), caches, "cpu_vec", 0)
    with pytest.raises(UsageError, match=r"host_gib: more memory than is free; expected .* or le"):
        open_tier(config, HostSettings(2**60, "", 0), caches, "cpu_vec", 0)


def test_two_workers_have_to_confirm(hosted: Served) -> None:
    """What one of them has lost is lost, and its blocks are given back."""
    real = host_of(hosted)
    came: list[str] = []
    host = SpanHost(
        real._scheduler, BLOCK, 2, lambda at, n: 1.0, lambda name, pieces: came.extend(pieces),
        SpanStats, fresh=False,
    )  # fmt: skip
    host.pool = real.pool
    assert hosted.llm.llm_engine.reset_prefix_cache(reset_connector=True)
    spans = _request(hosted, make([2, 3], seed=215))
    keys = [piece.key for piece in spans.pieces]

    def wants() -> bool:
        return host.must_wait("a", spans, 0, 10, 30.0)

    assert wants() and not host.take_step().loads  # nobody has said yet what is there
    host.take_report(HostReport(known=[frozenset(keys)]))
    assert wants() and not host.take_step().loads
    host.take_report(HostReport(known=[frozenset(keys[:2])]))
    free = free_blocks(hosted)
    assert wants()
    ((first, second),) = host.take_step().loads
    assert [first.key, second.key] == keys[:2]
    host.take_report(HostReport(done=[first.id, second.id]))
    assert wants() and not came and free_blocks(hosted) < free
    host.take_report(HostReport(done=[first.id], failed=[second.id]))
    assert came == spans.pieces[:1] and free_blocks(hosted) == free
    assert not wants() and not host.is_busy
    host.finished("a")
    assert hosted.llm.llm_engine.reset_prefix_cache()


def test_long_spans_are_worth_more_for_each_byte(hosted: Served) -> None:
    config = hosted.llm.llm_engine.vllm_config.model_config.hf_text_config
    each = [flops(config, at, count) / count for at, count in ((0, 32), (64, 32), (64, 4096))]
    # Projections of 64 x 128, 64 x 64 twice and 128 x 64, three of 64 x 96, twice each, 3 layers.
    assert each[0] == 3 * (2 * (64 * 384 + 3 * 64 * 96) + 4 * 128 * 16)
    assert each[0] < each[1] < each[2]


def test_loras_on_disk_are_told_apart(tmp_path: Path) -> None:
    from vllm.lora.request import LoRARequest

    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_model.safetensors").write_bytes(name.encode())
    one, two = (LoRARequest("l", 1, str(tmp_path / name)) for name in ("a", "b"))
    assert lora_name(one, for_disk=False) == lora_name(two, for_disk=False) == "1:l"
    first = lora_name(one, for_disk=True)
    assert first != lora_name(two, for_disk=True) and lora_name(None, for_disk=True) == ""
    (tmp_path / "a" / "adapter_model.safetensors").write_bytes(b"other weights")
    assert lora_name(one, for_disk=True) != first


def test_random_requests_with_evictions(folder: Path, counted: Counter[str]) -> None:
    """In a pool and a tier that are both too small, with aborts, against transformers."""
    served = Served.shared(
        folder, num_blocks=34, max_num_batched_tokens=90, max_num_seqs=8, max_model_len=1024,
        connector=connector(40 * BLOCK * 3 * 2 * 2 * 32 * 4 / 2**30),
    )  # fmt: skip
    rng = np.random.default_rng(5)
    free, verdict, aborted = free_blocks(served), Verdict(), 0
    while verdict.requests < REQUESTS:
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
    assert counted["host_loads"] >= REQUESTS // 10 and counted["host_evictions"] > 0
    assert aborted and not verdict.fallbacks


def test_a_restart_finds_what_is_on_disk(
    folder: Path, tmp_path: Path, counted: Counter[str]
) -> None:
    """All but a file in which a bit has changed, and nothing of other weights."""
    on_disk = connector(disk=str(tmp_path), disk_gib=0.25)
    layout, other = make([2, 3], seed=213), make([3, 2], seed=213, question=1)
    served = Served(folder, connector=on_disk, **SMALL)
    served.ask([layout])
    *kept, broken = (piece.key.hex() for piece in _request(served, layout).pieces)
    served.close()
    files = {file.stem: file for file in tmp_path.glob("*/*.kv")}
    assert files.keys() == {*kept, broken}
    data = bytearray(files[broken].read_bytes())
    data[-7] ^= 4
    files[broken].write_bytes(data)
    served = Served(folder, connector=on_disk, **SMALL)
    (output,) = served.ask([other], prepare=False, timeout_s=0.5)
    assert served.error(other, output) <= TOLERANCE
    audit = served.audit(output)
    assert (audit["host_tokens"], audit["computed_tokens"]) == (4 * BLOCK, 2 * BLOCK)
    assert counted["span_tokens_prepared"] == (2 + 4 + 2 + 4) * BLOCK  # at first, and now
    assert counted["host_loads"] == 2
    assert counted["host_load_failures"] == counted["file: checksum"] == 1
    config, tier = served.llm.llm_engine.vllm_config, tier_of()
    caches = {str(i): cache for i, cache in enumerate(tier._caches)}
    served.close()
    settings = HostSettings(1 << 24, str(tmp_path), 1 << 24)
    with closing(open_tier(config, settings, caches, "cpu_vec", 0)) as same:
        assert len(same.tier.stored_keys()) >= 2
    weights = folder / "model.safetensors"
    os.utime(weights, ns=(0, weights.stat().st_mtime_ns + 10**9))
    for told in ((config, "cpu_vec", 0), (config, "cpu_vec", 1), (config, "token_rows", 0)):
        with closing(open_tier(told[0], settings, caches, *told[1:])) as another:
            assert not another.tier.stored_keys()
