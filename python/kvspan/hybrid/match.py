"""The longest cached prefix of a prompt, to the token.

Full blocks are found by their chained hash. Where the chain ends, the blocks that ever followed it
(full or not) are compared token by token; of the one that agrees longest the leading tokens are
copied into the request's own block.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvspan.engine.pool import BlockPool
from kvspan.hybrid.state import Prefix

# Whether what a block holds equals an ordinary run. Requests of policy exact see the first alone.
Domain = Literal["exact", "approximate"]


@dataclass
class Match:
    """blocks: of the leading full blocks. tail: a block whose first tail_tokens follow, or None.

    exact: tokens of the prefix whose blocks are all exact.
    """

    blocks: list[int] = field(default_factory=list)
    tail: int | None = None
    tail_tokens: int = 0
    exact: int = 0
    tokens: int = 0


class BlockIndex:
    """Which cached blocks follow which prefix. Forgets what the pool has evicted."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self._children: dict[tuple[Domain, bytes], dict[Hashable, npt.NDArray[np.int64]]] = {}
        self._size = 0

    def register(self, prefix: Prefix, block: int, index: int, end: int, domain: Domain) -> None:
        """Make a written block of a sequence findable.

        index: its place in the sequence. end: one past the last written token.
        """
        size = prefix.block_size
        stop = min(end, (index + 1) * size)
        parent = prefix.parent(index)
        if stop == (index + 1) * size:
            key: Hashable = (domain, prefix.hashes[index])
        else:
            key = (domain, parent, prefix.tail(index, stop))
        self.pool.register(block, key)
        children = self._children.setdefault((domain, parent), {})
        if self.pool.lookup(key) is not None and key not in children:
            children[key] = prefix.tokens[index * size : stop].copy()
            self._size += 1
            if self._size > 4 * self.pool.num_blocks + 64:
                self._sweep()

    def find(self, prefix: Prefix, limit: int, domains: tuple[Domain, ...]) -> Match:
        """The longest cached prefix of at most `limit` tokens. References nothing."""
        size = prefix.block_size
        match, all_exact = Match(), True
        while (len(match.blocks) + 1) * size <= limit:
            index = len(match.blocks)
            for domain in domains:
                block = self.pool.lookup((domain, prefix.hashes[index]))
                if block is not None:
                    break
            else:
                break
            match.blocks.append(block)
            all_exact = all_exact and domain == "exact"
            if all_exact:
                match.exact = (index + 1) * size
        match.tokens = len(match.blocks) * size
        wanted = prefix.tokens[match.tokens : min(limit, match.tokens + size)]
        for domain in domains:
            for block, tokens in self._following(domain, prefix.parent(len(match.blocks))):
                common = _common(wanted, tokens)
                if common > match.tail_tokens:
                    match.tail, match.tail_tokens = block, common
                    if all_exact:
                        match.exact = match.tokens + common * (domain == "exact")
        match.tokens += match.tail_tokens
        return match

    def _following(self, domain: Domain, parent: bytes) -> list[tuple[int, npt.NDArray[np.int64]]]:
        children = self._children.get((domain, parent), {})
        found = []
        for key, tokens in list(children.items()):
            block = self.pool.lookup(key)
            if block is None:
                del children[key]
                self._size -= 1
            else:
                found.append((block, tokens))
        return found

    def _sweep(self) -> None:
        for domain, parent in list(self._children):
            self._following(domain, parent)
            if not self._children[domain, parent]:
                del self._children[domain, parent]


def _common(a: npt.NDArray[np.int64], b: npt.NDArray[np.int64]) -> int:
    """Length of the common start."""
    n = min(len(a), len(b))
    differ = np.nonzero(a[:n] != b[:n])[0]
    return int(differ[0]) if len(differ) else n
