"""Recurrent states, exact checkpoints of them, and marks: what bounds an approximate one.

Only exact states are ever stored here: a key says which tokens, of which model and tenant, a
state is the outcome of, and nothing that was restored approximately is put under one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvspan.hybrid.families import Sizes


@dataclass
class RecurrentState:
    """The state of all linear-attention layers after `position` tokens.

    conv: per layer [C, W - 1], the last inputs of the convolution, the model's dtype.
    ssm: per layer [Hv, dk, dv], float32.
    """

    position: int
    conv: list[Tensor]
    ssm: list[Tensor]

    @staticmethod
    def zeros(
        num_layers: int, s: Sizes, dtype: torch.dtype, device: torch.device
    ) -> RecurrentState:
        conv = [
            torch.zeros(s.channels, s.width - 1, dtype=dtype, device=device)
            for _ in range(num_layers)
        ]
        ssm = [
            torch.zeros(s.num_v_heads, s.head_k_dim, s.head_v_dim, device=device)
            for _ in range(num_layers)
        ]
        return RecurrentState(0, conv, ssm)

    def share(self) -> RecurrentState:
        """A state to go on from that leaves this one as it is.

        Only decoding writes in place, and only to conv; a new ssm always is a new tensor.
        """
        return RecurrentState(self.position, [t.clone() for t in self.conv], list(self.ssm))

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.conv, *self.ssm))


@dataclass(frozen=True)
class Mark:
    """What is known of the exact state at `position`, short of the state.

    norms: float32 [layers, Hv], Frobenius norm of each head's state.
    heads: per layer, the states [n, dk, dv] of the heads that hardly forget; which: their numbers.
    """

    position: int
    norms: Tensor
    which: tuple[Tensor, ...]
    heads: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.norms, *self.which, *self.heads))


Kept = TypeVar("Kept", RecurrentState, Mark)


class Prefix:
    """A sequence's tokens and block digests: the key of every position in it.

    root: digest that stands before the first block; hashes: one per full block.
    """

    def __init__(
        self, root: bytes, hashes: list[bytes], tokens: npt.NDArray[np.int64], block_size: int
    ) -> None:
        self.root = root
        self.hashes = hashes
        self.tokens = tokens
        self.block_size = block_size

    def parent(self, block: int) -> bytes:
        """Digest of everything before a block."""
        return self.hashes[block - 1] if block else self.root

    def tail(self, block: int, end: int) -> tuple[int, ...]:
        """Tokens from the start of a block up to position end."""
        return tuple(self.tokens[block * self.block_size : end].tolist())

    def key(self, position: int) -> tuple[bytes, tuple[int, ...]]:
        block = position // self.block_size
        return self.parent(block), self.tail(block, position)


class StateStore(Generic[Kept]):
    """States or marks by the tokens they follow, within a budget; the least recently used go."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._kept: OrderedDict[tuple[bytes, tuple[int, ...]], Kept] = OrderedDict()
        self._tails: dict[bytes, set[tuple[int, ...]]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, prefix: Prefix, kept: Kept) -> None:
        """Keep what belongs to kept.position; what is too large for the budget is not kept."""
        key = prefix.key(kept.position)
        if key in self._kept or kept.nbytes > self.budget_bytes:
            return
        self._kept[key] = kept
        self._tails.setdefault(key[0], set()).add(key[1])
        self.used_bytes += kept.nbytes
        while self.used_bytes > self.budget_bytes:
            self._drop(next(iter(self._kept)))

    def has(self, prefix: Prefix, position: int) -> bool:
        return prefix.key(position) in self._kept

    def at_most(self, prefix: Prefix, position: int) -> Iterator[Kept]:
        """What is kept along the prefix, from `position` backwards."""
        for block in range(position // prefix.block_size, -1, -1):
            parent = prefix.parent(block)
            for tail in sorted(self._tails.get(parent, ()), key=len, reverse=True):
                end = block * prefix.block_size + len(tail)
                if end <= position and prefix.tail(block, end) == tail:
                    key = (parent, tail)
                    self._kept.move_to_end(key)
                    yield self._kept[key]

    def clear(self) -> None:
        for key in list(self._kept):
            self._drop(key)

    def _drop(self, key: tuple[bytes, tuple[int, ...]]) -> None:
        self.used_bytes -= self._kept.pop(key).nbytes
        tails = self._tails[key[0]]
        tails.discard(key[1])
        if not tails:
            del self._tails[key[0]]
