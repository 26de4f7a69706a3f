"""Many prompts in one call against the twin and against the same prompts one by one."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hash_strategies import Prompt, make_chain, modes, prompts
from kvspan import reference
from kvspan.ops import BlockChain, digest_fields, extend_chains, sha256_isas


def offsets(parts: list[Any]) -> np.ndarray:
    return np.cumsum([0, *map(len, parts)])


def extend(chains: list[BlockChain], batch: list[Prompt], **options: Any) -> list[list[bytes]]:
    """Keys prompt by prompt."""
    tokens = np.array([t for p in batch for t in p.tokens], dtype=np.int64)
    keys, cu_blocks = extend_chains(
        chains,
        tokens,
        offsets([p.tokens for p in batch]),
        spans=[s for p in batch for s in p.spans],
        cu_spans=offsets([p.spans for p in batch]),
        extra=[e for p in batch for e in p.extra],
        cu_extra=offsets([p.extra for p in batch]),
        **options,
    )
    assert keys.dtype == np.uint8
    assert cu_blocks.dtype == np.int64
    assert keys.shape == (cu_blocks[-1], 32)
    rows = [key.tobytes() for key in keys]
    return [rows[a:b] for a, b in itertools.pairwise(cu_blocks)]


@given(
    data=st.data(),
    block_size=st.sampled_from([1, 3, 16]),
    isa=st.sampled_from(sha256_isas()),
    num_threads=st.integers(0, 4),
)
def test_twin_with_roots_and_scopes_of_their_own(
    data: st.DataObject, block_size: int, isa: str, num_threads: int
) -> None:
    batch = data.draw(st.lists(prompts(block_size), max_size=5))
    options = [
        {
            "root": digest_fields("root", i),
            "span_root": digest_fields("span", i),
            "anchored": i % 2 == 0,
        }
        for i in range(len(batch))
    ]
    chains = [make_chain(block_size, isa=isa, **o) for o in options]
    keys = extend(chains, batch, num_threads=num_threads)
    for i, prompt in enumerate(batch):
        expected, digest = reference.block_keys(
            prompt.tokens, block_size, spans=prompt.spans, extra=prompt.extra, **options[i]
        )
        assert keys[i] == expected
        assert chains[i].digest == digest
        assert chains[i].num_tokens == len(prompt.tokens)


@pytest.mark.parametrize("mode", modes())
@given(data=st.data())
def test_later_calls_continue_each_chain(mode: Any, data: st.DataObject) -> None:
    """Prompts and decode steps mixed, through batches and one by one: the same keys."""
    shared = mode()
    batched = [make_chain(3, **shared) for _ in range(3)]
    single = [make_chain(3, **shared) for _ in range(3)]
    for _ in range(3):
        batch = [data.draw(prompts(3, start=chain.num_tokens)) for chain in single]
        expected = [prompt.extend(chain) for prompt, chain in zip(batch, single, strict=True)]
        assert extend(batched, batch) == expected
    assert [chain.digest for chain in batched] == [chain.digest for chain in single]


@pytest.mark.parametrize(
    "make",
    [
        lambda x: np.array(x, dtype=np.int32),
        lambda x: np.repeat(np.array(x, dtype=np.int64), 3)[::3],
        lambda x: torch.tensor(x, dtype=torch.int32),
    ],
    ids=["int32", "strided", "torch"],
)
def test_token_containers(make: Any) -> None:
    tokens = list(range(100, 123))
    expected = Prompt(tokens[:9], [], []).extend(make_chain())
    expected += Prompt(tokens[9:], [], []).extend(make_chain())
    keys, cu_blocks = extend_chains([make_chain(), make_chain()], make(tokens), [0, 9, 23])
    assert [key.tobytes() for key in keys] == expected
    assert cu_blocks.tolist() == [0, 2, 5]


def test_spans_as_an_array() -> None:
    spans = np.array([[4, 8], [0, 4]])
    keys, _ = extend_chains(
        [make_chain(), make_chain()], np.arange(16), [0, 8, 16], spans=spans, cu_spans=[0, 1, 2]
    )
    first = Prompt(list(range(8)), [(4, 8)], []).extend(make_chain())
    second = Prompt(list(range(8, 16)), [(0, 4)], []).extend(make_chain())
    assert [key.tobytes() for key in keys] == first + second


def test_no_prompts() -> None:
    keys, cu_blocks = extend_chains([], np.empty(0, np.int32), [0])
    assert keys.shape == (0, 32)
    assert cu_blocks.tolist() == [0]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"cu_seqlens": [0, 8]}, ValueError, r"cu_seqlens: expected \[3\] offsets for 2 chains"),
        ({"cu_seqlens": [1, 4, 8]}, ValueError, r"cu_seqlens\[0\]: expected 0, got 1"),
        ({"cu_seqlens": [0, 9, 8]}, ValueError, r"cu_seqlens\[2\]: expected at least 9 like the"),
        ({"cu_seqlens": [0, 4, 7]}, ValueError, r"cu_seqlens\[2\]: expected 8, the number of tok"),
        ({"cu_seqlens": [0.0, 4.0, 8.0]}, TypeError, "cu_seqlens: expected int64, got float64"),
        ({"spans": [(0, 4)]}, ValueError, r"cu_spans: expected \[3\] offsets for 2 chains, got"),
        ({"spans": [(0, 4)], "cu_spans": [0, 0, 0]}, ValueError, r"cu_spans\[2\]: expected 1, the"),
        ({"spans": [(4, 8)], "cu_spans": [0, 0, 1]}, ValueError, r"spans\[0\]: .* \[0, 4\)"),
        ({"extra": [(0, 1, bytes(32))]}, ValueError, r"cu_extra: expected \[3\] offsets"),
        ({"num_threads": -1}, ValueError, r"num_threads: expected 0 \(automatic\) or more, got -1"),
        ({"token_ids": np.full(8, -1)}, ValueError, r"token_ids\[0\]: expected an id in \[0, "),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_bad_batches(options: dict[str, Any], error: type[Exception], message: str) -> None:
    chains = [make_chain(), make_chain()]
    good = {"token_ids": np.arange(8), "cu_seqlens": [0, 4, 8]}
    with pytest.raises(error, match=message):
        extend_chains(chains, **(good | options))
    assert [chain.num_tokens for chain in chains] == [0, 0]


def test_bad_chains() -> None:
    chain = make_chain()
    with pytest.raises(ValueError, match="chains: expected distinct chains, got one twice"):
        extend_chains([chain, chain], np.arange(8), [0, 4, 8])
    with pytest.raises(ValueError, match=r"chains\[1\]: expected block_size 4 like chains\[0\], g"):
        extend_chains([chain, make_chain(8)], np.arange(8), [0, 4, 8])
    for mode in modes()[1:]:
        with pytest.raises(ValueError, match=r"chains\[1\]: expected the same TokenStore as chain"):
            extend_chains([chain, make_chain(**mode())], np.arange(8), [0, 4, 8])


def test_other_threads_run_meanwhile() -> None:
    """The GIL is released.

    No thread is made to give the GIL up here, so the other one gets on only where this one lets it.
    """
    chain, tokens = make_chain(16), np.zeros(1 << 20, np.int32)
    ticks, done = [0], threading.Event()

    def tick() -> None:
        while not done.is_set():
            ticks[0] += 1
            time.sleep(0)  # gives the GIL up

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    thread = threading.Thread(target=tick)
    try:
        thread.start()
        before = ticks[0]
        sum(range(1 << 20))
        assert ticks[0] == before
        for _ in range(100):
            extend_chains([chain], tokens, [0, len(tokens)])
            if ticks[0] > before:
                break
        assert ticks[0] > before
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)
