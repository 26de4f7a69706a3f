"""Pages of attention KV and hidden vectors, and recurrent states, on the host, found by content.

A page holds one attention block's worth of positions. Pages form a tree: a page's parent is the key
of the full page before it, and the key of a full page commits to every token up to its end, to the
tenant's salt and to the LoRA (they are in the root). Within the last page tokens are compared one
by one, so a match ends at the exact token where two prompts part.

Only exact data comes here: what a request computes after an approximate restore is never added.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from kvspan.ops import digest_fields

Tokens = np.ndarray


@dataclass(eq=False)
class Page:
    """Positions [0, size) of one attention block.

    kv: [attention layers, *block shape], the block's bytes in vLLM's own layout. hidden: [streams,
        size, width], what enters each group of linear-attention layers but the first.
    parent: key of the page before. key: own key once full and published, else b"".
    tokens: int64 [n], those that may be used; published ones only.
    filled, saved: positions whose hidden vectors, and whose KV, are in the buffers.
    """

    parent: bytes
    kv: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    key: bytes = b""
    tokens: Tokens = field(default_factory=lambda: np.empty(0, np.int64))
    filled: int = 0
    saved: int = 0
    pins: int = 0
    listed: bool = False


@dataclass(eq=False)
class State:
    """The recurrent state after a page's first `offset` tokens; exact.

    tensors: per linear-attention layer, the convolution's and the recurrent state.
    """

    parent: bytes
    tokens: Tokens
    position: int
    tensors: list[tuple[torch.Tensor, torch.Tensor]]
    pins: int = 0

    @property
    def bytes(self) -> int:
        return sum(t.nbytes for pair in self.tensors for t in pair)


@dataclass(frozen=True)
class Match:
    """The longest cached prefix of a prompt: `length` tokens, covered by `pages`."""

    length: int
    pages: tuple[Page, ...]


def common_prefix(a: Tokens, b: Tokens) -> int:
    """How many leading tokens two arrays share."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n


class PageStore:
    """Pages and states within a byte budget; the least recently used go first.

    size: tokens per page. budget: bytes of pages and states together. Buffers of pages that are
    dropped are used again. Not safe for threads: vLLM's scheduler and worker take turns.
    """

    def __init__(self, size: int, budget: int) -> None:
        self.size = size
        self.budget = budget
        self.bytes = 0
        self.evicted = 0
        self._pages: dict[bytes, Page] = {}
        self._children: dict[tuple[bytes, int], list[Page]] = {}
        self._states: dict[bytes, list[State]] = {}
        self._order: OrderedDict[Page | State, int] = OrderedDict()
        self._free: list[tuple[torch.Tensor, torch.Tensor]] = []

    # Reading.

    def match(self, keys: Sequence[bytes], root: bytes, tokens: Tokens, limit: int) -> Match:
        """The longest cached prefix of at most `limit` tokens. keys: of the prompt's full pages."""
        pages: list[Page] = []
        for key in keys[: limit // self.size]:
            page = self._pages.get(key)
            if page is None:
                break
            pages.append(page)
        length = len(pages) * self.size
        parent = pages[-1].key if pages else root
        rest = tokens[length:limit]
        if len(rest):
            best, partial = 0, None
            for page in self._children.get((parent, int(rest[0])), ()):
                n = common_prefix(page.tokens, rest)
                if n > best:
                    best, partial = n, page
            if partial is not None:
                pages.append(partial)
                length += best
        # From the end, so that what was used together leaves from its end.
        for page in reversed(pages):
            self._order.move_to_end(page)
        return Match(length, tuple(pages))

    def nearest_state(self, match: Match, root: bytes, tokens: Tokens, at: int) -> State | None:
        """The last exact state at or before position `at` on the matched path."""
        for index in range(at // self.size, -1, -1):
            parent = match.pages[index - 1].key if index else root
            start = index * self.size
            found = [
                state
                for state in self._states.get(parent, ())
                if state.position <= at
                and np.array_equal(state.tokens, tokens[start : state.position])
            ]
            if found:
                state = max(found, key=lambda s: s.position)
                self._order.move_to_end(state)
                return state
        return None

    def has_state(self, parent: bytes, tokens: Tokens) -> bool:
        """Whether the state after these tokens of the page below `parent` is kept."""
        return any(np.array_equal(s.tokens, tokens) for s in self._states.get(parent, ()))

    # Writing.

    def buffers(self, page: Page, kv: torch.Size, kv_dtype: torch.dtype,
                hidden: torch.Size, hidden_dtype: torch.dtype) -> bool:  # fmt: skip
        """Give a new page its buffers; False when the budget has no room even after evictions."""
        need = kv.numel() * kv_dtype.itemsize + hidden.numel() * hidden_dtype.itemsize
        if not self._make_room(need):
            return False
        if self._free:
            page.kv, page.hidden = self._free.pop()
        else:
            page.kv = torch.empty(kv, dtype=kv_dtype)
            page.hidden = torch.empty(hidden, dtype=hidden_dtype)
        self._order[page] = need
        self.bytes += need
        return True

    def publish(self, page: Page, tokens: Tokens, key: bytes) -> Page:
        """Let a page be found up to these tokens. key: its own once it is full, else b"".

        Returns the page to go on with: an equal one that was there before, if any.
        """
        if key:
            other = self._pages.get(key)
            if other is not None and other is not page:
                self._drop(page)
                self._order.move_to_end(other)
                return other
            self._pages[key] = page
        page.key = key
        page.tokens = np.array(tokens, dtype=np.int64)
        if not page.listed and len(tokens):
            self._children.setdefault((page.parent, int(tokens[0])), []).append(page)
            page.listed = True
        return page

    def add_state(self, state: State) -> bool:
        """Keep an exact state; False when there is no room."""
        if self.has_state(state.parent, state.tokens):
            return True
        if not self._make_room(state.bytes):
            return False
        self._states.setdefault(state.parent, []).append(state)
        self._order[state] = state.bytes
        self.bytes += state.bytes
        return True

    def discard(self, page: Page) -> None:
        """Forget a page that was never published."""
        if page in self._order and not page.listed:
            self._drop(page)

    def clear(self) -> bool:
        """Drop everything; False, and nothing is dropped, while something is in use."""
        if any(item.pins for item in self._order):
            return False
        for item in list(self._order):
            self._drop(item)
        return True

    def _make_room(self, need: int) -> bool:
        if need > self.budget:
            return False
        while self.bytes + need > self.budget:
            victim = next((item for item in self._order if not item.pins), None)
            if victim is None:
                return False
            self._drop(victim)
            self.evicted += 1
        return True

    def _drop(self, item: Page | State) -> None:
        self.bytes -= self._order.pop(item)
        if isinstance(item, State):
            states = self._states[item.parent]
            states.remove(item)
            if not states:
                del self._states[item.parent]
            return
        if item.listed:
            siblings = self._children[item.parent, int(item.tokens[0])]
            siblings.remove(item)
            if not siblings:
                del self._children[item.parent, int(item.tokens[0])]
            item.listed = False
        if item.key and self._pages.get(item.key) is item:
            del self._pages[item.key]
        if item.kv is not None and item.hidden is not None:
            self._free.append((item.kv, item.hidden))
        item.kv = item.hidden = None
        item.tokens = np.empty(0, np.int64)

    def statistics(self) -> dict[str, int]:
        """Counts for logs and tests."""
        pinned = sum(1 for item in self._order if item.pins)
        states = sum(isinstance(item, State) for item in self._order)
        return {
            "bytes": self.bytes,
            "pages": len(self._order) - states,
            "states": states,
            "pinned": pinned,
            "evicted": self.evicted,
        }


def root_key(salt: str | None, lora: str, size: int) -> bytes:
    """The parent of a prompt's first page: tenants and LoRAs share nothing."""
    return digest_fields("kvspan/vllm/hybrid/v1", salt, lora, size)
