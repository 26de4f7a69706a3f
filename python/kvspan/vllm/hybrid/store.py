"""Pages of attention KV and hidden vectors, and recurrent states, found by content in a host tier.

A page holds one attention block's worth of positions. Pages form a tree: a page's parent is the key
of the full page before it, and the key of a full page commits to every token up to its end, to the
tenant's salt and to the LoRA (they are in the root). Within the last page tokens are compared one
by one, so a match ends at the exact token where two prompts part.

What an entry is, stands in its name, so that the tree can be built anew from a tier whose disk
level outlived the process: ``F`` (full page) or ``T`` (the beginning of one), parent, first token,
key; ``S`` (state), parent, tokens after it, digest of those. Only exact data comes here: what a
request computes after an approximate restore is never added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvspan.host import HostTier, View
from kvspan.ops import digest_fields

Tokens = np.ndarray
Bytes = np.ndarray  # uint8


@dataclass(frozen=True)
class Geometry:
    """What a page holds.

    size: positions. layers, block_bytes: attention layers and one's block. streams, row_bytes:
    groups of linear-attention layers but the first, and what enters one at one position.
    """

    size: int
    layers: int
    block_bytes: int
    streams: int
    row_bytes: int

    @property
    def page_bytes(self) -> int:
        """One entry: the number of tokens and the tokens (int64), KV, hidden vectors."""
        hidden = self.streams * self.size * self.row_bytes
        return 8 * (1 + self.size) + self.layers * self.block_bytes + hidden

    def tokens(self, page: Bytes) -> Tokens:
        """int64 [1 + size]: the number of tokens, then the tokens. A view."""
        return page[: 8 * (1 + self.size)].view(np.int64)

    def kv(self, page: Bytes) -> Bytes:
        """[layers, block_bytes], the blocks in vLLM's own layout. A view."""
        start = 8 * (1 + self.size)
        return page[start : start + self.layers * self.block_bytes].reshape(self.layers, -1)

    def hidden(self, page: Bytes) -> Bytes:
        """[streams, size, row_bytes]. A view."""
        start = 8 * (1 + self.size) + self.layers * self.block_bytes
        return page[start:].reshape(self.streams, self.size, self.row_bytes)


@dataclass(eq=False)
class OpenPage:
    """A page that a request is filling.

    buffer: None until the worker first writes. filled, saved: positions whose hidden vectors, and
    whose KV, are in the buffer. name: of what was stored of it last, b"" for nothing.
    """

    buffer: Bytes | None = None
    filled: int = 0
    saved: int = 0
    name: bytes = b""


class Found(NamedTuple):
    """A stored page: its name, and how many of its tokens match."""

    name: bytes
    length: int


class FoundState(NamedTuple):
    """A stored state: its name and its position."""

    name: bytes
    position: int


class Match(NamedTuple):
    """The longest cached prefix of a prompt: `length` tokens, covered by `pages`."""

    length: int
    pages: tuple[Found, ...]


def common_prefix(a: Tokens, b: Tokens) -> int:
    """How many leading tokens two arrays share."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n


def root_key(salt: str | None, lora: str, size: int) -> bytes:
    """The parent of a prompt's first page: tenants and LoRAs share nothing."""
    return digest_fields("kvspan/vllm/hybrid/v2", salt, lora, size)


class PageStore:
    """The tree of pages over a host tier, which bounds, evicts and perhaps keeps them on disk.

    flops: floating-point operations to compute one token again, for the tier's choice of what goes.
    recycle: whether the buffer of a page that is closed serves another at once; not where a step
        may be under way that writes to it.
    """

    def __init__(
        self, tier: HostTier, geometry: Geometry, flops: float = 1.0, recycle: bool = True
    ) -> None:
        self.tier = tier
        self.geometry = geometry
        self.flops = flops
        self.recycle = recycle
        self._children: dict[tuple[bytes, int], list[bytes]] = {}
        self._states: dict[bytes, list[bytes]] = {}
        self._added = 0
        self._swept = 0
        self._spare: list[Bytes] = []
        self._sweep()

    # Reading.

    def match(self, keys: Sequence[bytes], root: bytes, tokens: Tokens, limit: int) -> Match:
        """The longest cached prefix of at most `limit` tokens. keys: of the prompt's full pages."""
        size = self.geometry.size
        pages: list[Found] = []
        parent = root
        for i, key in enumerate(keys[: limit // size]):
            name = self._full(parent, int(tokens[i * size]), key)
            if not self.tier.contains(name):
                break
            pages.append(Found(name, size))
            parent = key
        length = len(pages) * size
        rest = tokens[length:limit]
        if len(rest):
            found = self._longest_child(parent, rest)
            if found is not None:
                pages.append(found)
                length += found.length
        return Match(length, tuple(pages))

    def _longest_child(self, parent: bytes, rest: Tokens) -> Found | None:
        place = (parent, int(rest[0]))
        best = None
        for name in list(self._children.get(place, ())):
            view = self.tier.view(name)
            if view is None:
                self._forget(self._children, place, name)
                continue
            with view:
                held = self.geometry.tokens(page_of(view))
                n = common_prefix(held[1 : 1 + held[0]], rest)
            if best is None or n > best.length:
                best = Found(name, n)
        return best

    def nearest_state(self, match: Match, root: bytes, tokens: Tokens, at: int,
                      keys: Sequence[bytes]) -> FoundState | None:  # fmt: skip
        """The last exact state at or before position `at` of the matched prefix."""
        size = self.geometry.size
        for index in range(at // size, -1, -1):
            parent = keys[index - 1] if index else root
            start = index * size
            # By the count in its name, the latest first.
            for name in sorted(self._states.get(parent, ()), key=_state_count, reverse=True):
                count = _state_count(name)
                if start + count > at or name != self._state(parent, tokens[start : start + count]):
                    continue
                if self.tier.contains(name):
                    return FoundState(name, start + count)
                self._forget(self._states, parent, name)
        return None

    # Writing.

    def open(self, page: OpenPage) -> Bytes:
        """The buffer of a page that is being filled."""
        if page.buffer is None:
            page.buffer = (
                self._spare.pop() if self._spare else np.empty(self.geometry.page_bytes, np.uint8)
            )
        return page.buffer

    def close(self, page: OpenPage) -> None:
        """No more will be written to a page; what was stored of it stays."""
        if page.buffer is not None:
            if self.recycle and len(self._spare) < 64:
                self._spare.append(page.buffer)
            page.buffer = None

    def publish(self, page: OpenPage, parent: bytes, tokens: Tokens, key: bytes) -> bool:
        """Store a page up to these tokens. key: its own if it is full, else b"".

        A shorter beginning stored before goes. False if the tier has no room.
        """
        assert page.buffer is not None
        first = int(tokens[0])
        name = self._full(parent, first, key) if key else self._tail(parent, first, tokens)
        if name == page.name:
            return True
        held = self.geometry.tokens(page.buffer)
        held[0] = len(tokens)
        held[1 : 1 + len(tokens)] = tokens
        if not self.tier.contains(name):
            cost = self.flops * len(tokens)
            if not self.tier.put(name, page.buffer, cost=cost, kind="page"):
                return False
            self._remember(self._children, (parent, first), name)
        if page.name:
            self.tier.remove(page.name)
            self._forget(self._children, (parent, first), page.name)
        page.name = name
        return True

    def add_state(self, parent: bytes, tokens: Tokens, parts: Sequence[Any], saves: int) -> bool:
        """Store an exact state. tokens: after the parent. saves: tokens it spares replaying."""
        name = self._state(parent, tokens)
        if self.tier.contains(name):
            return True
        if not self.tier.put(name, parts, cost=self.flops * saves, kind="state"):
            return False
        self._remember(self._states, parent, name)
        return True

    def clear(self) -> None:
        """Remove every entry."""
        for name in self.tier.stored_keys():
            self.tier.remove(name)
        self._sweep()

    # The tree.

    def _remember(self, tree: dict[Any, list[bytes]], place: Any, name: bytes) -> None:
        names = tree.setdefault(place, [])
        if name not in names:
            names.append(name)
            self._added += 1
        if self._added > max(1024, self._swept):
            self._sweep()  # names of what the tier has dropped meanwhile go

    def _forget(self, tree: dict[Any, list[bytes]], place: Any, name: bytes) -> None:
        names = tree.get(place, [])
        if name in names:
            names.remove(name)
            if not names:
                del tree[place]

    def _sweep(self) -> None:
        """Build the tree from what the tier has now."""
        self._children, self._states = {}, {}
        names = self.tier.stored_keys()
        self._added, self._swept = 0, len(names)
        for name in names:
            kind, parent = name[:1], name[1:33]
            count = int.from_bytes(name[33:41], "little")
            if kind in (b"F", b"T"):
                self._children.setdefault((parent, count), []).append(name)
            elif kind == b"S":
                self._states.setdefault(parent, []).append(name)

    @staticmethod
    def _full(parent: bytes, first: int, key: bytes) -> bytes:
        return b"F" + parent + first.to_bytes(8, "little") + key

    @staticmethod
    def _tail(parent: bytes, first: int, tokens: Tokens) -> bytes:
        digest = digest_fields("kvspan/vllm/hybrid/tail", tokens.tobytes())
        return b"T" + parent + first.to_bytes(8, "little") + digest

    @staticmethod
    def _state(parent: bytes, tokens: Tokens) -> bytes:
        digest = digest_fields("kvspan/vllm/hybrid/state", tokens.tobytes())
        return b"S" + parent + len(tokens).to_bytes(8, "little") + digest


def _state_count(name: bytes) -> int:
    return int.from_bytes(name[33:41], "little")


def page_of(view: View) -> Bytes:
    """A stored page; in one piece, since the tier's pages have its size."""
    (piece,) = view.pages
    return piece
