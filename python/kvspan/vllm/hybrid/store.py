"""Pages of attention KV and hidden vectors, and recurrent states, found by content in a host tier.

A page holds one attention block's worth of positions. Pages form a tree: a page's parent is the key
of the full page before it, and the key of a full page commits to every token up to its end, to the
tenant's salt and to the LoRA (they are in the root). Within the last page tokens are compared one
by one, so a match ends at the exact token where two prompts part.

What an entry is, stands in its name, so that the tree can be built anew from a tier whose disk
level outlived the process: ``F`` (full page) or ``T`` (the beginning of one), parent, first token,
key; ``S`` (state), parent, tokens after it, digest of those; ``G`` (the state of some groups of
layers alone), the same and the groups, one bit for each.

Only exact data comes here: what a request computes after an approximate restore is never added.
That holds for ``G`` too. A restore within a bound rebuilds some groups exactly and others not; the
exact ones, whose layers' states are those of a prefill, are kept at its boundary under such a name,
which only requests within a bound ever look for. Nothing else of such a restore is kept but where
it ended (`Partings`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from kvspan.host import HostTier, View
from kvspan.host.pages import Spans
from kvspan.ops import digest_fields
from kvspan.vllm.hybrid.decay import Cells
from kvspan.vllm.hybrid.entries import (
    MOST_GROUPS,
    STATE_NAME,
    Found,
    FoundState,
    Match,
    OpenPage,
    OpenState,
    Partings,
    Tokens,
    full_name,
    state_count,
    state_name,
    tail_name,
)

Bytes = np.ndarray  # uint8

MOST_READ = 16  # of the latest beginnings of a page are read from disk, to see how far they match


@dataclass(frozen=True)
class Geometry:
    """What a page holds, and how long a state is.

    size: positions. layers, block_bytes: attention layers and one's block on one rank. streams,
    row_bytes: groups of linear-attention layers but the first, and what enters one at one position.
    state_bytes: the recurrent state of all layers on one rank. ranks: workers that share the heads
    (tensor parallelism), each with a part of its own of KV and states; hidden vectors are the same
    on all. cells: of what the gates of linear-attention layers did; None where it is not kept.
    groups: how many linear-attention layers each group has; all have states of one size.
    """

    size: int
    layers: int
    block_bytes: int
    streams: int
    row_bytes: int
    state_bytes: int = 0
    ranks: int = 1
    cells: Cells | None = None
    groups: tuple[int, ...] = ()

    def part_bytes(self, group: int) -> int:
        """The states of one group's layers on all ranks."""
        return self.ranks * self.state_bytes * self.groups[group] // sum(self.groups)

    def parts(self, groups: Sequence[int], spans: Spans) -> dict[int, Spans]:
        """By group, where its states are in an entry of these groups' that lies at `spans`."""
        found, at = {}, 0
        for group in groups:
            found[group] = cut(spans, at, at + self.part_bytes(group))
            at += self.part_bytes(group)
        return found

    @cached_property
    def page_bytes(self) -> int:
        """One entry: the number of tokens and the tokens (int64), KV by rank, hidden vectors, and
        what `cells` describes."""
        return self._gates_start + (self.cells.nbytes if self.cells else 0)

    @cached_property
    def kv_bytes(self) -> int:
        """A page's KV on one rank."""
        return self.layers * self.block_bytes

    @cached_property
    def _kv_start(self) -> int:
        return 8 * (1 + self.size)

    @cached_property
    def _hidden_start(self) -> int:
        return self._kv_start + self.ranks * self.kv_bytes

    @cached_property
    def _gates_start(self) -> int:
        return self._hidden_start + self.streams * self.size * self.row_bytes

    def tokens(self, page: Bytes) -> Tokens:
        """int64 [1 + size]: the number of tokens, then the tokens. A view."""
        return page[: self._kv_start].view(np.int64)

    def kv(self, page: Bytes, rank: int = 0) -> Bytes:
        """[layers, block_bytes], a rank's blocks in vLLM's own layout. A view."""
        start = self._kv_start + rank * self.kv_bytes
        return page[start : start + self.kv_bytes].reshape(self.layers, -1)

    def hidden(self, page: Bytes) -> Bytes:
        """[streams, size, row_bytes]. A view."""
        held = page[self._hidden_start : self._gates_start]
        return held.reshape(self.streams, self.size, self.row_bytes)

    def gates(self, page: Bytes) -> Bytes:
        """What `cells` describes. A view."""
        return page[self._gates_start :]


def common_prefix(a: Tokens, b: Tokens) -> int:
    """How many leading tokens two arrays share."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n


def cut(spans: Spans, start: int, end: int) -> Spans:
    """Where bytes [start, end) of what lies at `spans` are.

    >>> cut(((100, 10), (300, 10)), 8, 12)
    ((108, 2), (300, 2))
    """
    found, base = [], 0
    for at, count in spans:
        low, high = max(start - base, 0), min(end - base, count)
        if low < high:
            found.append((at + low, high - low))
        base += count
    return tuple(found)


def root_key(salt: str | None, lora: str, size: int) -> bytes:
    """The parent of a prompt's first page: tenants and LoRAs share nothing."""
    return digest_fields("kvspan/vllm/hybrid/v2", salt, lora, size)


class PageStore:
    """The tree of pages over a host tier, which bounds, evicts and perhaps keeps them on disk.

    flops: floating-point operations to compute one token again, for the tier's choice of what goes.

    Nobody waits for the disk in here. What a lookup would have to read is noted in `unread`; it
    goes on as if that was not there, and is to be repeated once it has been fetched.

    memory_only: lookups find nothing of what is on disk only.
    """

    def __init__(self, tier: HostTier, geometry: Geometry, flops: float = 1.0) -> None:
        self.tier = tier
        self.geometry = geometry
        self.flops = flops
        self.partings = Partings()
        self._children: dict[tuple[bytes, int], list[bytes]] = {}
        self._states: dict[bytes, list[bytes]] = {}
        self._parts: dict[bytes, list[bytes]] = {}
        self._era = 0
        self._added = 0
        self._swept = 0
        self.memory_only = False
        self.unread: list[bytes] = []
        self._sweep()

    # Reading.

    def view(self, name: bytes) -> View | None:
        """An entry in place, if memory has it."""
        view = self.tier.view(name, from_disk=False)
        if view is None and self._has(name):
            self.unread.append(name)
        return view

    def _has(self, name: bytes) -> bool:
        return self.tier.in_memory(name) if self.memory_only else self.tier.contains(name)

    def match(self, keys: Sequence[bytes], root: bytes, tokens: Tokens, limit: int) -> Match:
        """The longest cached prefix of at most `limit` tokens. keys: of the prompt's full pages."""
        size = self.geometry.size
        pages: list[Found] = []
        parent = root
        for i, key in enumerate(keys[: limit // size]):
            name = full_name(parent, int(tokens[i * size]), key)
            if not self._has(name):
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
        for age, name in enumerate(self._children.get(place, [])[::-1]):  # the latest first
            if not self.tier.contains(name):
                self._forget(self._children, place, name)
                continue
            if age >= MOST_READ and not self.tier.in_memory(name):
                continue
            view = self.view(name)
            if view is None:
                continue
            with view:
                held = self.geometry.tokens(page_of(view))
                n = common_prefix(held[1 : 1 + held[0]], rest)
            if best is None or n > best.length:
                best = Found(name, n)
        return best

    def nearest_state(
        self, match: Match, root: bytes, tokens: Tokens, at: int, keys: Sequence[bytes],
        group: int | None = None, after: int = 0,
    ) -> FoundState | None:  # fmt: skip
        """The last exact state at or before position `at` of the matched prefix.

        group: of that group's layers alone, of what is kept apart from whole states. after: none
        that ends in a page before this position is looked for.
        """
        size = self.geometry.size
        kept = self._states if group is None else self._parts
        for index in range(at // size, after // size - 1, -1):
            parent = keys[index - 1] if index else root
            start = index * size
            # By the count in its name, the latest first.
            for name in sorted(kept.get(parent, ()), key=state_count, reverse=True):
                found = FoundState(name, start + state_count(name))
                own = tokens[start : found.position]
                if found.position > at or (group is not None and group not in found.groups):
                    continue
                if name != state_name(parent, own, name[:1], name[STATE_NAME:]):
                    continue
                if self._has(name):
                    return found
                if not self.tier.contains(name):
                    self._forget(kept, parent, name)
        return None

    # Writing.

    def open(self) -> OpenPage | None:
        """Memory for a page; None where there is no room."""
        memory = self.tier.reserve(None, self.geometry.page_bytes, kind="page")
        return None if memory is None else OpenPage(memory)

    def close(self, page: OpenPage) -> None:
        """Nobody goes on in a page; what was published of it stays, else its memory is free.

        Once no step writes to it any more.
        """
        page.closed = True
        if page.writers == 0:
            page.memory.commit()

    def written(self, page: OpenPage) -> None:
        """One of the page's writers is done."""
        page.writers -= 1
        if page.closed and page.writers == 0:
            page.memory.commit()

    def publish(self, page: OpenPage, parent: bytes, tokens: Tokens, key: bytes) -> None:
        """Let a page be found, up to these tokens. key: its own if it is full, else b"".

        A shorter beginning published before is not found any more.
        """
        first = int(tokens[0])
        name = full_name(parent, first, key) if key else tail_name(parent, first, tokens)
        if name == page.name:
            return
        held = self.geometry.tokens(page.memory.pages[0])
        held[0] = len(tokens)
        held[1 : 1 + len(tokens)] = tokens
        if not self.tier.contains(name) and page.memory.publish(name, self.flops * len(tokens)):
            self._remember(self._children, (parent, first), name)
        if page.name:
            self.tier.remove(page.name)
            self._forget(self._children, (parent, first), page.name)
        page.name = name

    def open_state(self, position: int, saves: int) -> OpenState | None:
        """Memory for the state at a position; None where there is no room.

        saves: tokens that it spares replaying.
        """
        nbytes = self.geometry.ranks * self.geometry.state_bytes
        return self._open_state(position, nbytes, "state", self.flops * max(saves, 1))

    def open_parts(self, position: int, saves: Mapping[int, int]) -> OpenState | None:
        """Memory for the states of these groups alone. saves: of each, as above, at least 1."""
        geometry = self.geometry
        groups = tuple(sorted(saves))
        nbytes = sum(map(geometry.part_bytes, groups))
        tokens = sum(n * geometry.groups[group] for group, n in saves.items())
        cost = self.flops * tokens / sum(geometry.groups)
        return self._open_state(position, nbytes, "part", cost, groups)

    def _open_state(self, position: int, nbytes: int, kind: str, cost: float,
                    groups: tuple[int, ...] | None = None) -> OpenState | None:  # fmt: skip
        memory = self.tier.reserve(None, nbytes, kind=kind)
        return None if memory is None else OpenState(memory, position, cost, self._era, groups)

    def publish_state(self, state: OpenState, parent: bytes, tokens: Tokens) -> None:
        """Let an exact state be found, unless all was cleared since it was opened. tokens: after
        the parent."""
        if state.era != self._era:
            state.memory.abort()
            return
        if state.groups is None:
            name, kept = state_name(parent, tokens, b"S"), self._states
        else:
            which = sum(1 << group for group in state.groups).to_bytes(MOST_GROUPS // 8, "little")
            name, kept = state_name(parent, tokens, b"G", which), self._parts
        if not self.tier.contains(name) and state.memory.publish(name, state.cost):
            self._remember(kept, parent, name)
        state.memory.commit()
        if state.groups is None:  # all that there is of it
            for part in self._parts.get(parent, [])[:]:
                if part[1:STATE_NAME] == name[1:]:
                    self.tier.remove(part)
                    self._forget(self._parts, parent, part)

    def clear(self) -> None:
        """Remove every entry, and let none be found that is being written."""
        self._era += 1
        self.partings.clear()
        self.tier.clear()
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
        self._children, self._states, self._parts = {}, {}, {}
        names = self.tier.stored_keys()
        self._added, self._swept = 0, len(names)
        for name in names:
            kind, parent = name[:1], name[1:33]
            count = int.from_bytes(name[33:41], "little")
            if kind in (b"F", b"T"):
                self._children.setdefault((parent, count), []).append(name)
            elif kind == b"S":
                self._states.setdefault(parent, []).append(name)
            elif kind == b"G":
                self._parts.setdefault(parent, []).append(name)


def page_of(view: View) -> Bytes:
    """A stored page; in one piece, since the tier's pages have its size."""
    (piece,) = view.pages
    return piece
