"""Random requests to a hybrid, with evictions and aborts: nothing leaks, every answer is right.

The oracle is the same request alone, computed in full. Approximate answers are none of it.
KVSPAN_VLLM_SOAK=2000 runs so many requests instead of a few.
"""

from __future__ import annotations

import os
import random
import resource
from pathlib import Path

from hybrid_checks import ROUNDING, pinned, tokens
from hybrid_served import HybridServed, answer_of, difference, save_hybrid
from vllm import SamplingParams

REQUESTS = int(os.environ.get("KVSPAN_VLLM_SOAK", "60"))


def test_random_requests(tmp_path: Path) -> None:
    rng = random.Random(0)
    served = HybridServed(
        save_hybrid("qwen3_5", tmp_path),
        "align",
        extra={"host_gib": 0.02},
        max_num_batched_tokens=512,
        num_gpu_blocks_override=40,
    )
    engine = served.llm.llm_engine
    pool = served.core.scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    bases = [tokens(i, 1500) for i in range(4)]
    sent = aborted = checked = 0
    worst = 0.0
    memory = []
    while sent < REQUESTS:
        live: dict[str, list[int]] = {}
        for _ in range(rng.randint(1, 8)):
            prompt = rng.choice(bases)[: rng.randint(1, 1400)]
            prompt = prompt + tokens(rng.randint(10, 10**6), rng.randint(1, 80))
            replay = rng.choice(["exact", "exact", "exact", "ratio:0.05", "off"])
            params = SamplingParams(
                max_tokens=rng.randint(1, 24), temperature=0, ignore_eos=True, detokenize=False,
                logprobs=64, extra_args={"kv_transfer_params": {"kvspan": {"replay": replay}}},
            )  # fmt: skip
            engine.add_request(str(sent), {"prompt_token_ids": prompt}, params)
            live[str(sent)] = prompt
            sent += 1
        answers = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished and output.outputs[0].finish_reason == "length":
                    answers[output.request_id] = answer_of(output)
            if rng.random() < 0.05:
                engine.abort_request([rng.choice(list(live))])
                aborted += 1
        for name, answer in answers.items():
            if answer.replay["exact"]:
                (full,) = served.ask([live[name]], 1, replay="off")
                worst = max(worst, difference(answer, full))
                assert worst < ROUNDING, (live[name], answer, full)
                checked += 1
        if sent % 100 < 8:
            memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
            print(f"{sent} sent, {aborted} aborts, {checked} checked, peak {memory[-1]} MiB")
    served.settle()
    tier = served.side.store.tier.stats().memory
    served.llm.reset_prefix_cache()
    assert pool.get_num_free_blocks() == free, "blocks leaked"
    assert pinned(served) == 0, "entries stay pinned"
    assert not served.side.tracked and not served.side.audits
    print(
        f"{sent} requests, {aborted} aborts, {checked} answers compared (worst mean difference "
        f"{worst:.3f}), {tier.evictions} evictions, all {free} blocks free, nothing pinned; "
        f"peak memory {memory[0]} MiB at first, {memory[-1]} MiB at last"
    )
    served.close()
