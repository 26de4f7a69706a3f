"""What steps leave as on a GPU, in memory of the CPU: copied by a queue, here a slow one, while
later steps run. Found is what has arrived, and requests wait for what is on its way."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hybrid_checks import BASE, ROUNDING, drop_states, names, pinned, split_at, tokens
from hybrid_served import HybridServed, difference, save_hybrid
from vllm import SamplingParams

from kvspan.host import CopyQueue
from kvspan.vllm.hybrid.replay import Replayer
from kvspan.vllm.hybrid.saving import StagedSaving


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HybridServed]:
    folder = save_hybrid("qwen3_5", tmp_path_factory.mktemp("model"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Replayer, "STAGED", True)
        served = HybridServed(folder, "align", extra={"host_gib": 0.03})
    saving = served.replayer.saving
    assert isinstance(saving, StagedSaving)
    saving._queue = CopyQueue(chunk_bytes=1 << 16, bytes_per_second=30e6)
    yield served
    served.close()


@pytest.fixture(autouse=True)
def _fresh(served: HybridServed) -> None:
    served.settle()
    served.forget()


@pytest.mark.parametrize("m", [64, 777])
def test_restores_are_those_of_what_was_computed(served: HybridServed, m: int) -> None:
    suffix = tokens(2, 60)
    expected = split_at(served, m, suffix)
    served.ask([BASE[:m]], 1)
    drop_states(served)
    (answer,) = served.ask([BASE[:m] + suffix])
    assert (answer.cached, answer.replay["replayed"]) == (m, m)
    assert answer.tokens == expected.tokens and answer.logprobs == expected.logprobs


def test_the_next_turn_waits_for_what_is_on_its_way(served: HybridServed) -> None:
    (first,) = served.ask([BASE[:1500]], 8, settle=False)
    prompt = [*BASE[:1500], *first.tokens]
    (answer,) = served.ask([prompt + tokens(3, 20)], 4)
    assert answer.cached == len(prompt) - 1  # nobody has run the last token


def test_evictions_and_aborts_while_copies_are_under_way(served: HybridServed) -> None:
    rng = random.Random(1)
    engine = served.llm.llm_engine
    bases = [tokens(i, 1200) for i in range(3)]
    sent = 0
    for _ in range(8):
        live = []
        for _ in range(rng.randint(1, 5)):
            prompt = rng.choice(bases)[: rng.randint(1, 1100)] + tokens(sent, rng.randint(1, 60))
            params = SamplingParams(
                max_tokens=rng.randint(1, 12), temperature=0, ignore_eos=True, detokenize=False
            )
            engine.add_request(str(sent), {"prompt_token_ids": prompt}, params)
            live.append(str(sent))
            sent += 1
        while engine.has_unfinished_requests():
            engine.step()
            if rng.random() < 0.1:
                engine.abort_request([rng.choice(live)])
        prompt = rng.choice(bases)[: rng.randint(64, 1100)] + tokens(sent, 40)
        (answer,) = served.ask([prompt], 4)
        (full,) = served.ask([prompt], 4, replay="off")
        assert difference(answer, full) < ROUNDING, (answer, full)
    assert served.side.store.tier.stats().memory.evictions > 0
    assert pinned(served) == 0 and not served.side.tracked and not served.side._ending
    served.forget()
    assert not names(served, b"FTS")
