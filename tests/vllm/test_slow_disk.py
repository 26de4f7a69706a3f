"""Reads from disk that take long: other requests are answered meanwhile, and nothing is left of
those that end before. The disk stops where a test says so; nothing here depends on time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hybrid_checks import BASE, ROUNDING, tokens
from hybrid_served import HybridServed, difference, save_hybrid
from served import BLOCK, Served, scheduler_of
from span_hosted import SMALL, connector, flood, host_of, piece_tokens, settle, steps, tier_of
from test_spans import TOLERANCE, make
from traffic import Ask, free_blocks, run
from vllm import SamplingParams

from kvspan.host import DiskLevel, reading
from kvspan.layout import layout_from_tokens
from kvspan.vllm.hybrid import scheduling
from slow_disk import SlowDisk, leave_on_disk, nothing_is_held


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    disk = SlowDisk(monkeypatch)
    yield disk
    disk.go_on()


class TestHybrids:
    PROMPT = BASE[:700] + tokens(2, 60)

    @pytest.fixture(scope="class")
    @staticmethod
    def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HybridServed]:
        folder = save_hybrid("qwen3_5", tmp_path_factory.mktemp("model"))
        disk = str(tmp_path_factory.mktemp("disk"))
        served = HybridServed(
            folder, "none", extra={"disk": disk, "disk_gib": 1, "host_gib": 0.125}
        )
        yield served
        if hasattr(served, "llm"):
            served.close()

    @pytest.fixture
    def served(self, made: HybridServed) -> HybridServed:
        """700 tokens of BASE are on disk, and nothing is in memory."""
        made.forget()
        made.ask([BASE[:700]], 1)
        leave_on_disk(made.side.store.tier)
        return made

    @staticmethod
    def send(served: HybridServed, name: str, prompt: list[int], count: int = 4) -> None:
        params = SamplingParams(
            max_tokens=count, temperature=0, detokenize=False, ignore_eos=True, logprobs=64
        )
        served.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)

    @staticmethod
    def until(served: HybridServed, over: Callable[[], bool], name: str = "") -> Any:
        """Steps until then, or until a request is answered."""
        engine = served.llm.llm_engine
        while not over():
            for output in engine.step():
                if output.finished and output.request_id == name:
                    return output
        return None

    def test_others_go_on(
        self, served: HybridServed, slow: SlowDisk, counted: Counter[str]
    ) -> None:
        self.send(served, "slow", self.PROMPT)
        self.send(served, "other", tokens(5, 300))
        assert self.until(served, lambda: False, "other").num_cached_tokens == 0
        slow.wait_for(1)
        for _ in range(20):  # alone it is neither forgotten nor answered
            assert served.core.scheduler.has_unfinished_requests()
            assert not served.llm.llm_engine.step()
        slow.go_on()
        answer = self.until(served, lambda: False, "slow")
        assert answer.num_cached_tokens == 700
        assert counted["replay_disk_seconds"] > 0 and counted["replay_tokens_matched"] == 700
        served.settle()
        nothing_is_held(served.side.store.tier)
        (full,) = served.ask([self.PROMPT], 4, replay="off")
        (again,) = served.ask([self.PROMPT], 4)
        assert difference(again, full) < ROUNDING
        assert list(answer.outputs[0].token_ids) == list(again.tokens)

    def test_aborted_meanwhile(self, served: HybridServed, slow: SlowDisk) -> None:
        self.send(served, "slow", self.PROMPT)
        self.until(served, lambda: bool(slow.begun))
        served.llm.llm_engine.abort_request(["slow"])
        served.settle()
        assert not served.side.tracked
        slow.go_on()
        (answer,) = served.ask([self.PROMPT], 4)
        assert answer.cached == 700
        nothing_is_held(served.side.store.tier)

    def test_given_up(
        self,
        served: HybridServed,
        slow: SlowDisk,
        monkeypatch: pytest.MonkeyPatch,
        counted: Counter[str],
    ) -> None:
        """A disk that does not answer in time: what is in memory is used, the rest computed. Who
        comes while it hangs does not wait for it."""
        warned: list[str] = []
        log = scheduling.logger
        monkeypatch.setattr(log, "warning", lambda text, *of: warned.append(text % of))
        self.send(served, "slow", self.PROMPT)
        self.until(served, lambda: bool(slow.begun))
        impatient = replace(served.side._options, disk_wait_s=0.0)
        monkeypatch.setattr(served.side, "_options", impatient)
        for waiting in served.side.tracked.values():
            waiting.read_until = 0.0
        answer = self.until(served, lambda: False, "slow")
        assert answer.num_cached_tokens == 0 and counted["replay_disk_seconds"] > 0
        (line,) = warned
        assert "files were not read in 0 s" in line
        waited = counted["replay_disk_seconds"]
        self.send(served, "next", [*self.PROMPT[:600], *tokens(7, 40)])
        assert self.until(served, lambda: False, "next").outputs
        assert counted["replay_disk_seconds"] == waited and len(warned) == 1
        slow.go_on()
        served.settle()
        nothing_is_held(served.side.store.tier)

    def test_reads_that_fail(
        self, served: HybridServed, monkeypatch: pytest.MonkeyPatch, counted: Counter[str]
    ) -> None:
        read, calls = DiskLevel.read, []

        def failing(disk: DiskLevel, key: bytes, out: Any) -> bool:
            calls.append(key)
            if len(calls) == 1:
                raise MemoryError("for a test")
            return read(disk, key, out)

        monkeypatch.setattr(DiskLevel, "read", failing)
        (answer,) = served.ask([self.PROMPT], 4)
        assert answer.cached == 700 and len(calls) > 1, "it is tried again"
        monkeypatch.setattr(DiskLevel, "read", lambda *_: calls.append(b"") or False)
        leave_on_disk(served.side.store.tier)
        (computed,) = served.ask([self.PROMPT], 4)
        assert computed.cached == 0 and computed.tokens == answer.tokens
        nothing_is_held(served.side.store.tier)

    def test_cleared_meanwhile(self, served: HybridServed, slow: SlowDisk) -> None:
        """Nothing of it is found any more, and nobody waits for the disk to say so."""
        self.send(served, "slow", self.PROMPT)
        self.until(served, lambda: bool(slow.begun))
        served.connector.reset_cache()
        answer = self.until(served, lambda: False, "slow")
        assert answer.num_cached_tokens == 0
        slow.go_on()
        served.settle()
        nothing_is_held(served.side.store.tier)

    def test_shut_down_meanwhile(
        self, served: HybridServed, slow: SlowDisk, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(reading, "_JOIN_S", 0.0)
        self.send(served, "slow", self.PROMPT)
        self.until(served, lambda: bool(slow.begun))
        served.close()


class TestSpans:
    @pytest.fixture(scope="class")
    @staticmethod
    def hosted(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Served:
        disk = str(tmp_path_factory.mktemp("disk"))
        return Served.shared(llama, connector=connector(disk=disk, disk_gib=0.25), **SMALL)

    @staticmethod
    def kept(hosted: Served, seed: int) -> Any:
        """A layout whose spans are on disk, not in memory and not on the device."""
        layout = make([3, 2], seed=seed)
        hosted.ask([layout])
        settle(hosted)
        flood(hosted)
        leave_on_disk(tier_of().tier)
        return layout

    def test_others_go_on(self, hosted: Served, slow: SlowDisk, counted: Counter[str]) -> None:
        """Ordinary requests, and those whose spans are in memory: they need no disk."""
        layout = self.kept(hosted, 301)
        near = make([2, 4], seed=302)
        hosted.ask([near])
        settle(hosted)
        flood(hosted)
        counted.clear()
        ordinary = layout_from_tokens(np.arange(3, 60), (), BLOCK)
        asks = [
            Ask(layout, prepare=False, timeout_s=600.0),
            Ask(near, prepare=False, timeout_s=600.0),
            Ask(ordinary, max_tokens=5),
        ]
        engine, order = hosted.llm.llm_engine, []
        step = engine.step

        def watching() -> Any:
            outputs = step()
            order.extend(len(o.prompt_token_ids or ()) for o in outputs if o.finished)
            if len(order) == 2:
                slow.go_on()
            return outputs

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "step", watching)
            outputs = run(hosted, asks)
        assert order[2] == len(layout.token_ids) and slow.begun
        for asked, output in zip((layout, near), outputs, strict=False):
            assert output is not None and hosted.error(asked, output) <= TOLERANCE
            assert hosted.audit(output)["host_tokens"] == piece_tokens(asked)
        assert 0 < counted["host_disk_seconds"] <= counted["host_load_seconds"]
        nothing_is_held(tier_of().tier)

    def test_aborted_meanwhile(self, hosted: Served, slow: SlowDisk) -> None:
        layout = self.kept(hosted, 303)
        free = free_blocks(hosted)
        asks = [Ask(layout, prepare=False, timeout_s=600.0)]
        assert run(hosted, asks, abort=lambda step, i: bool(slow.begun)) == [None]
        steps(hosted, 1)
        assert free_blocks(hosted) == free and not host_of(hosted).is_busy
        slow.go_on()
        (output,) = hosted.ask([layout], prepare=False)
        assert hosted.audit(output)["host_tokens"] == piece_tokens(layout)
        assert hosted.error(layout, output) <= TOLERANCE
        nothing_is_held(tier_of().tier)

    def test_reads_that_fail(
        self, hosted: Served, monkeypatch: pytest.MonkeyPatch, counted: Counter[str]
    ) -> None:
        layout = self.kept(hosted, 304)
        monkeypatch.setattr(DiskLevel, "read", lambda *_: False)
        (output,) = hosted.ask([layout])
        assert hosted.audit(output)["host_tokens"] == 0 and counted["host_load_failures"] > 0
        assert hosted.error(layout, output) <= TOLERANCE
        nothing_is_held(tier_of().tier)

    def test_cleared_meanwhile(self, hosted: Served, slow: SlowDisk) -> None:
        """No step waits for the files."""
        layout = self.kept(hosted, 305)
        engine = hosted.llm.llm_engine

        def clear(step: int, i: int) -> bool:
            if slow.begun and not cleared:
                cleared.append(step)
                host_of(hosted).clear()
            return False

        cleared: list[int] = []
        (output,) = run(hosted, [Ask(layout, timeout_s=600.0)], abort=clear)
        assert output is not None and cleared and not engine.has_unfinished_requests()
        assert hosted.audit(output)["host_tokens"] == 0
        assert hosted.error(layout, output) <= TOLERANCE
        slow.go_on()
        settle(hosted)
        nothing_is_held(tier_of().tier)

    def test_shut_down_meanwhile(
        self, hosted: Served, slow: SlowDisk, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(reading, "_JOIN_S", 0.0)
        layout = self.kept(hosted, 306)
        scheduler = scheduler_of(hosted)
        asks = [Ask(layout, prepare=False, timeout_s=600.0)]
        with pytest.raises(SystemExit):
            run(hosted, asks, abort=lambda step, i: _leave(bool(slow.begun)))
        assert scheduler.has_unfinished_requests()
        hosted.close()


def _leave(now: bool) -> bool:
    if now:
        raise SystemExit
    return False
