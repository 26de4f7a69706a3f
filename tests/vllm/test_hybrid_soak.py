"""Random requests to hybrids, with evictions, preemptions, aborts: all is right, nothing leaks.

OLMo Hybrid computes in float32 here: its answers must be those of stock vLLM but for the last
digits, whatever was in the steps they were computed in. Those of Qwen3.5, in bfloat16, round.
KVSPAN_VLLM_SOAK=2000 runs so many requests instead of a few.
"""

from __future__ import annotations

import os
import random
import resource
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hybrid_checks import ROUNDING, pinned, tokens
from hybrid_served import HybridServed, save_hybrid
from olmo_kernels import olmo_on_cpu
from test_hybrid_olmo import ROUNDING as LAST_DIGITS
from vllm import RequestOutput, SamplingParams

REQUESTS = int(os.environ.get("KVSPAN_VLLM_SOAK", "60"))


@pytest.fixture(params=["qwen3_5", "olmo_hybrid"])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[HybridServed]:
    """With a pool of 40 blocks and a tier of 20 MiB, which are both too small."""
    olmo = request.param == "olmo_hybrid"
    with olmo_on_cpu() if olmo else nullcontext():
        served = HybridServed(
            save_hybrid(request.param, tmp_path),
            "align",
            extra={"host_gib": 0.02},
            dtype="float32" if olmo else "bfloat16",
            max_num_batched_tokens=512,
            num_gpu_blocks_override=40,
            scheduling_policy="priority",
        )
        yield served
        served.close()


@dataclass
class Asked:
    """prompt: as for vLLM. replay: the policy. output: None of one that was given up."""

    prompt: dict[str, Any]
    replay: str
    max_tokens: int
    prompt_logprobs: int | None
    output: RequestOutput | None = None

    def params(self, replay: str) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens, temperature=0, ignore_eos=True, detokenize=False,
            logprobs=64, prompt_logprobs=self.prompt_logprobs,
            extra_args={"kv_transfer_params": {"kvspan": {"replay": replay}}},
        )  # fmt: skip


def random_ask(rng: random.Random, bases: list[list[int]], asked: list[Asked]) -> Asked:
    """A beginning that others share and an end of its own, or the next turn of a request before;
    now and then another's salt, a long answer, or log-probabilities of the prompt, for which
    nothing may be reused."""
    size = rng.randint(1, 1400)
    if rng.random() < 0.2:
        size = size // 128 * 128 or 128  # on a block
    ids = rng.choice(bases)[:size] + tokens(rng.randint(10, 10**6), rng.randint(1, 80))
    before = rng.choice(asked[-12:]) if asked and rng.random() < 0.3 else None
    if before is not None and before.output is not None:
        turn = [*before.prompt["prompt_token_ids"], *before.output.outputs[0].token_ids]
        ids = (turn + ids[-40:])[-1500:] if len(turn) < 1460 else ids
    prompt: dict[str, Any] = {"prompt_token_ids": ids}
    if rng.random() < 0.1:
        prompt["cache_salt"] = "another"
    return Asked(
        prompt,
        rng.choice(["exact", "exact", "ratio:0.05", "ratio:0.05", "off"]),
        rng.randint(1, 24) if rng.random() < 0.9 else rng.randint(100, 200),
        1 if rng.random() < 0.05 else None,
    )


def drive(served: HybridServed, rng: random.Random, seen: Counter[str]) -> list[Asked]:
    """Requests that come while others run, some more urgent than others, some given up."""
    engine, scheduler = served.llm.llm_engine, served.core.scheduler
    preempt = scheduler._preempt_request

    def preempt_and_count(*args: Any, **kwargs: Any) -> Any:
        seen["preemptions"] += 1
        return preempt(*args, **kwargs)

    bases = [tokens(i, 1500) for i in range(4)]
    asked: list[Asked] = []
    live: dict[str, Asked] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "_preempt_request", preempt_and_count)
        while len(asked) < REQUESTS or live:
            if len(asked) < REQUESTS and len(live) < 8 and rng.random() < 0.4:
                one = random_ask(rng, bases, asked)
                name, priority = str(len(asked)), rng.randint(0, 2)
                params = one.params(one.replay)
                engine.add_request(name, one.prompt, params, priority=priority)  # type: ignore[arg-type]
                live[name] = one
                asked.append(one)
            for output in engine.step():
                if output.finished and output.request_id in live:
                    assert isinstance(output, RequestOutput)
                    live.pop(output.request_id).output = output
                    seen["restored"] += bool(output.num_cached_tokens)
            if live and rng.random() < 0.02:
                name = rng.choice(list(live))
                del live[name]
                engine.abort_request([name])
                seen["aborts"] += 1
    served.settle()
    return asked


def error(given: Any, right: Any, limit: float) -> float:
    """The largest mean difference in log-probability of an answer's tokens.

    Up to where it goes on with another token, if that one is about as likely there.
    """
    worst = 0.0
    for mine, its, token, best in zip(
        given.logprobs, right.logprobs, given.token_ids, right.token_ids, strict=True
    ):
        both = mine.keys() & its.keys()
        worst = max(worst, sum(abs(mine[t].logprob - its[t].logprob) for t in both) / len(both))
        if token != best:
            assert its[best].logprob - its[token].logprob < 2 * limit, "another token"
            break
    return worst


def test_random_requests(served: HybridServed) -> None:
    pool = served.core.scheduler.kv_cache_manager.block_pool
    free, seen = pool.get_num_free_blocks(), Counter[str]()
    asked = drive(served, random.Random(0), seen)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    evictions = served.side.store.tier.stats().memory.evictions
    served.llm.reset_prefix_cache()
    assert pool.get_num_free_blocks() == free, "blocks leaked"
    assert pinned(served) == 0, "entries stay pinned"
    assert not served.side.tracked and not served.side.audits and not served.side._ending
    served.forget()
    limit = LAST_DIGITS if served.replayer.config.model_config.dtype.itemsize == 4 else ROUNDING
    worst, compared = 0.0, 0
    for i, one in enumerate(asked):
        if one.output is None or one.replay.startswith("ratio"):
            continue
        if one.prompt_logprobs:
            given = one.output.prompt_logprobs
            assert given is not None and len(given) == len(one.prompt["prompt_token_ids"])
            assert not one.output.num_cached_tokens
        (right,) = served.llm.generate([one.prompt], one.params("off"), use_tqdm=False)  # type: ignore[list-item]
        worst = max(worst, error(one.output.outputs[0], right.outputs[0], limit))
        assert worst < limit, (i, one)
        compared += 1
    print(
        f"{len(asked)} requests, {dict(seen)}, {compared} answers compared, worst mean difference "
        f"{worst:.2g}; {evictions} evictions, all {free} blocks free, peak memory {peak} MiB"
    )
    assert seen["restored"] and seen["aborts"] and evictions
    assert seen["preemptions"] or REQUESTS < 60
