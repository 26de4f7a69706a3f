"""Prompts for the tests of block keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from kvspan.ops import BlockChain, TokenStore, built_with_xxhash, digest_fields

ROOT = digest_fields("test-root", "model")
SPAN_ROOT = digest_fields("test-span", "model")
IMAGES = [digest_fields("mm", name) for name in ("cat", "dog", "cow")]


@dataclass
class Prompt:
    tokens: list[int]
    spans: list[tuple[int, int]]
    extra: list[tuple[int, int, bytes]]

    def extend(self, chain: BlockChain) -> list[bytes]:
        ids = np.array(self.tokens, dtype=np.int64)
        return [key.tobytes() for key in chain.extend(ids, self.spans, self.extra)]


@st.composite
def prompts(draw: st.DrawFn, block_size: int, start: int = 0) -> Prompt:
    """What follows `start` tokens: spans and extra ranges here and there, a few of them empty."""
    size = draw(st.integers(0, 12 * block_size))
    tokens = draw(st.lists(st.integers(0, 2**32 - 1), min_size=size, max_size=size))
    first_block, last_block = -(-start // block_size), (start + size) // block_size
    spans = []
    if first_block <= last_block:
        cuts = sorted(draw(st.lists(st.integers(first_block, last_block), max_size=8)))
        pairs = zip(cuts[::2], cuts[1::2], strict=False)
        spans = [(a * block_size, b * block_size) for a, b in pairs]
    cuts = sorted(draw(st.lists(st.integers(start, start + size), max_size=8)))
    pairs = zip(cuts[::2], cuts[1::2], strict=False)
    extra = [(a, b, draw(st.sampled_from(IMAGES))) for a, b in pairs]
    return Prompt(tokens, spans, extra)


def make_chain(block_size: int = 4, **options: Any) -> BlockChain:
    defaults = {"root": ROOT, "span_root": SPAN_ROOT, "anchored": True}
    return BlockChain(block_size, **(defaults | options))


def modes() -> list[Callable[[], dict[str, Any]]]:
    """Options of a chain for each way to hash that this build has."""
    found: list[Callable[[], dict[str, Any]]] = [dict]
    if built_with_xxhash():
        found.append(lambda: {"store": TokenStore()})
    return found
