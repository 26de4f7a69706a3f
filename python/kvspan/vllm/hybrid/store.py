"""Pages of attention KV and hidden vectors, and recurrent states, found by content in a host tier.

A page holds one attention block's worth of positions. Pages form a tree: a page's parent is the key
of the full page before it, and the key of a full page commits to every token up to its end, to the
tenant's salt and to the LoRA (they are in the root). Within the last page tokens are compared one
by one, so a match ends at the exact token where two prompts part.

What an entry is, stands in its name, so that the tree can be built anew from a tier whose disk
level outlived the process: ``F`` (full page) or ``T`` (the beginning of one), parent, first token,
key; ``S`` (state), parent, tokens after it, digest of those; ``G`` (the state of some groups of
layers alone), the same and the groups, one bit for each.

Under the keys of a prompt there is exact data only. What follows an approximate restore is kept for
the policy "ratio" alone, pages without states, whose keys and parents are others (`Domain`): only
requests with the same policy look there, once no exact page goes on.
A restore within a bound rebuilds some groups exactly and others not; the
exact ones, whose layers' states are those of a prefill, are kept at its boundary under such a name,
which only requests within a bound ever look for. Nothing else of such a restore is kept but where
it ended (`Partings`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvspan.host import HostTier, View
from kvspan.ops import digest_fields
from kvspan.vllm.hybrid.entries import (
    MOST_GROUPS,
    STATE_NAME,
    Domain,
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
from kvspan.vllm.hybrid.geometry import Geometry, page_of

MOST_READ = 16  # of the latest beginnings of a page are read from disk, to see how far they match


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

    def match(
        self, keys: Sequence[bytes], root: bytes, tokens: Tokens, limit: int,
        domain: Domain | None = None,
    ) -> Match:  # fmt: skip
        """The longest cached prefix of at most `limit` tokens. keys: of the prompt's full pages.
        domain: whose approximate pages may follow the exact ones."""
        size = self.geometry.size
        parents = [root, *keys]
        pages = self._full_pages(keys[: limit // size], root, tokens)
        exact = len(pages) * size
        tail = self._longest_child(parents[len(pages)], tokens[exact:limit])
        if domain is None or limit == exact:
            exact += tail.length if tail else 0
            return Match(exact, (*pages, *([tail] if tail else [])), exact)
        apart = self._full_pages(
            [domain(key) for key in keys[len(pages) : limit // size]],
            domain(parents[len(pages)]),
            tokens[exact:],
        )
        length = exact + len(apart) * size
        parent = domain(parents[length // size])
        other = self._longest_child(parent, tokens[length:limit])
        length += other.length if other else 0
        if tail and exact + tail.length >= length:
            return Match(exact + tail.length, (*pages, tail), exact + tail.length)
        return Match(length, (*pages, *apart, *([other] if other else [])), exact)

    def _full_pages(self, keys: Sequence[bytes], parent: bytes, tokens: Tokens) -> list[Found]:
        """The first of the pages with these keys, up to one that is not there. tokens: from the
        parent on."""
        pages = []
        for i, key in enumerate(keys):
            name = full_name(parent, int(tokens[i * self.geometry.size]), key)
            if not self._has(name):
                break
            pages.append(Found(name, self.geometry.size))
            parent = key
        return pages

    def _longest_child(self, parent: bytes, rest: Tokens) -> Found | None:
        if not len(rest):
            return None
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
