"""What tests of hybrids under vLLM share: prompts, the states that restores leave, and the oracle.

The oracle is stock vLLM prefilling in two steps, split at the boundary: one step of another shape
rounds bfloat16 differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import pytest
import torch
from hybrid_served import VOCAB, Answer, HybridServed, difference

from kvspan.ops import digest_fields

SUFFIX = 60
# Mean difference in log-probability: steps of other shapes round to 0.01-0.06, wrong states differ
# by 0.2 and more.
ROUNDING, WRONG = 0.12, 0.15


def tokens(seed: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB, (count,), generator=generator).tolist()


BASE = tokens(1, 2000)


def names(served: HybridServed, kind: bytes) -> list[bytes]:
    tier = served.side.store.tier
    return [name for name in tier.stored_keys() if name[:1] in kind]


def drop_states(served: HybridServed) -> None:
    """Leave pages only, so that the next restore replays everything, as the first one there."""
    for name in names(served, b"SG"):
        served.side.store.tier.remove(name)
    served.side.store.partings.clear()
    if served.mode == "align":
        assert served.llm.reset_prefix_cache()


def pinned(served: HybridServed) -> int:
    """Bytes of the tier."""
    return served.side.store.tier.pinned_bytes()  # type: ignore[no-any-return]


def restore_plan(served: HybridServed, prompt: list[int], **kvspan: Any) -> Any:
    """What the worker was told to restore for a prompt, which is answered."""
    plans: list[Any] = []
    replayer = served.replayer
    restore = replayer.restore
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replayer, "restore", lambda plan: (plans.append(plan), restore(plan)))
        served.ask([prompt], 1, **kvspan)
    (plan,) = plans
    return plan


class States(Protocol):
    """restored: those that restores have left in the requests' blocks, as bytes."""

    @property
    def restored(self) -> list[bytes]: ...

    def donor(self, prompt: list[int]) -> bytes:
        """The state after a prompt that runs alone."""


def state_bytes(replayer: Any, position: int, table: Any) -> bytes:
    """A request's state on the device."""
    states = replayer.states.tensors(table, position)
    return b"".join(s.contiguous().cpu().view(torch.uint8).numpy().tobytes() for s in states)


class Watched:
    """`States` of a worker in this process, as they are on the device."""

    def __init__(self, served: HybridServed, monkeypatch: pytest.MonkeyPatch) -> None:
        self.restored: list[bytes] = []
        self._served = served
        replayer = served.replayer
        restore = replayer.restore

        def restore_and_look(plan: Any) -> None:
            restore(plan)
            self.restored.append(
                state_bytes(replayer, plan.length, replayer.states.destination(plan))
            )

        monkeypatch.setattr(replayer, "restore", restore_and_look)

    def donor(self, prompt: list[int]) -> bytes:
        found = {}
        replayer = self._served.replayer
        original = replayer.keep_state

        def keep(copy: Any) -> None:
            found[copy.position] = state_bytes(replayer, copy.position, copy.table)
            original(copy)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(replayer, "keep_state", keep)
            self._served.ask([prompt], 1)
        return found[len(prompt)]


class Kept:
    """`States` as all workers have kept them in the tier, after replays of 64 tokens or more."""

    def __init__(self, served: HybridServed) -> None:
        self._served = served
        self._donors: list[list[int]] = []

    def donor(self, prompt: list[int]) -> bytes:
        self._donors.append(prompt)
        self._served.ask([prompt], 1)
        (state,) = self._of(prompt)
        return state

    @property
    def restored(self) -> list[bytes]:
        return [state for prompt in self._donors for state in self._of(prompt)]

    def _of(self, prompt: list[int]) -> list[bytes]:
        tier, size = self._served.side.store.tier, self._served.side.settings.page
        rest = prompt[len(prompt) // size * size :]
        told = digest_fields(
            "kvspan/vllm/hybrid/state", b"".join(t.to_bytes(8, "little") for t in rest)
        )
        found = []
        for name in names(self._served, b"S"):
            if name.endswith(len(rest).to_bytes(8, "little") + told):
                with tier.view(name) as view:
                    found.append(b"".join(page.tobytes() for page in view.pages))
        return found


def split_at(served: HybridServed, m: int, suffix: list[int]) -> Answer:
    """Stock vLLM's answer: the first m of BASE in a step of their own, then the rest."""
    if served.mode == "align":
        # Steps end on blocks there. A kept state of exactly the prefix is the same thing: it was
        # computed by a prefill of the prefix alone, and nothing is replayed.
        served.ask([BASE[:m]], 1)
        (answer,) = served.ask([BASE[:m] + suffix])
        assert answer.replay.get("replayed", 0) == 0
    else:
        with served.chunks_of(m):
            (answer,) = served.ask([BASE[:m] + suffix], replay="off")
    served.forget()
    return answer


def check_split_prefill(served: HybridServed, states: States, m: int) -> Answer:
    """A restore of all of a donor, replayed from its start, is a prefill split there: the same
    bits of the state and the same answer."""
    suffix = tokens(2, SUFFIX)
    expected = split_at(served, m, suffix)
    before = len(states.restored)
    state = states.donor(BASE[:m])
    drop_states(served)
    (answer,) = served.ask([BASE[:m] + suffix])
    assert answer.cached == m
    assert answer.replay["exact"] and answer.replay["replayed"] == m
    assert answer.tokens == expected.tokens
    assert states.restored[before:] == [state]
    assert pinned(served) == 0
    return answer


def check_mixed_batch(
    served: HybridServed, states: States, lengths: Sequence[int], fresh: int
) -> list[Answer]:
    """Restores of these lengths, all at once, among requests that compute everything.

    Of donors as long as they are the states have the donors' bits. Of a longer donor, whose rows
    another step computed, answers are those of a split prefill but for rounding.

    Returns:
        The answers to the latter.
    """
    suffixes = [tokens(20 + m, 30 + m % 7) for m in lengths]
    others = [tokens(40 + i, 200 + 50 * i) for i in range(fresh)]

    def ask(prefixes: list[list[int]]) -> list[Answer]:
        prompts = [a + b for a, b in zip(prefixes, suffixes, strict=True)]
        with served.chunks_of(256):
            answers = served.ask([*prompts, *others], 24)
        assert [answer.cached for answer in answers] == [*lengths, *[0] * fresh]
        assert pinned(served) == 0
        return answers

    donors = [tokens(500 + m, m) for m in lengths]
    kept = [states.donor(donor) for donor in donors]
    drop_states(served)
    answers = ask(donors)
    assert [answer.replay["replayed"] for answer in answers] == [*lengths, *[0] * fresh]
    assert sorted(states.restored) == sorted(kept)

    served.forget()
    expected = [split_at(served, m, b) for m, b in zip(lengths, suffixes, strict=True)]
    for prompt in others:
        expected += served.ask([prompt], replay="off")
        served.forget()
    served.ask([BASE], 1)
    answers = ask([BASE[:m] for m in lengths])
    worst = max(difference(a, e) for a, e in zip(answers, expected, strict=True))
    assert worst < ROUNDING, worst
    return answers
