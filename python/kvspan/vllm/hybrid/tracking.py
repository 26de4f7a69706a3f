"""The scheduler's side of Tail-Replay: what each request takes from the store and leaves there.

Knows nothing of vLLM, so that it can be tested without one. Per step, `Track.work` says what the
worker has to do for a request; what the worker has done is published at the next step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from kvspan.errors import UsageError
from kvspan.ops import BlockChain
from kvspan.vllm.hybrid.store import Page, PageStore, State


@dataclass(frozen=True)
class Policy:
    """How much of a prefix's tail is replayed.

    name: "exact" (from the last state kept, or from the start), "ratio" (at least ratio * length
        and k_min tokens, from zero), "zero" (none, the state is zero: for experiments), "off".
    """

    name: str = "exact"
    ratio: float = 0.0
    k_min: int = 256

    def tail(self, length: int) -> int:
        """Tokens to replay at the least for a prefix of `length`; exact needs them all."""
        if self.name == "ratio":
            return min(length, max(self.k_min, math.ceil(self.ratio * length)))
        return 0 if self.name == "zero" else length


def parse_policy(text: object, where: str, k_min: int = 256) -> Policy:
    """ "exact", "ratio:0.05", "zero" or "off"; UsageError for anything else."""
    name, _, value = text.partition(":") if isinstance(text, str) else ("", "", "")
    if name in ("exact", "zero", "off") and not value:
        return Policy(name, k_min=k_min)
    if name == "ratio":
        try:
            ratio = float(value)
        except ValueError:
            ratio = math.nan
        if 0 < ratio <= 1:
            return Policy(name, ratio, k_min)
    raise UsageError(
        f"{where}: unknown replay policy",
        expected="exact, ratio:R with R in (0, 1], zero or off",
        found=repr(text),
    )


@dataclass
class Settings:
    """page: tokens per page. every: tokens between kept states. least: a shorter match than this
    is computed again instead. decode: whether generated tokens are kept too."""

    page: int
    policy: Policy = field(default_factory=Policy)
    every: int = 2048
    least: int = 1
    decode: bool = True


@dataclass
class ReplayAudit:
    """What became of one request, in tokens.

    matched: taken from the cache. replayed: of those, run again through the linear-attention
    layers. state_from: the position of the exact state it started from; 0 is the start of the
    prompt, -1 zero in the middle of it. exact: whether the state was rebuilt without approximation.
    bytes: of KV, hidden vectors and state that were moved.
    """

    policy: str = "exact"
    matched: int = 0
    replayed: int = 0
    state_from: int = 0
    exact: bool = True
    bytes: int = 0
    refused: str = ""

    def record(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Plan:
    """One restore: KV and state of `length` tokens, of which `local` are on the device already."""

    length: int
    local: int
    start: int
    pages: tuple[Page, ...]
    state: State | None
    exact: bool
    token_ids: np.ndarray
    audit: ReplayAudit
    zero: bool = False
    table: tuple[list[int], ...] = ()
    scheduled: int = 0

    def pin(self, by: int) -> None:
        for page in self.pages:
            page.pins += by
        if self.state is not None:
            self.state.pins += by


@dataclass
class Work:
    """What one request leaves behind in one step, of positions [start, start + count).

    pages: those the positions fall into. first_block: the device block of the first of them.
    copies: (page, device block, positions whose KV is there when the step is over).
    state: (page below which it belongs, its table of device blocks) when the state is to be kept.
    """

    track: Track
    start: int
    count: int
    pages: list[Page]
    first_block: int
    copies: list[tuple[Page, int, int]]
    keep_state: tuple[list[int], ...] | None = None


class Track:
    """One request, from its arrival to its end."""

    def __init__(self, settings: Settings, root: bytes, policy: Policy) -> None:
        self.settings = settings
        self.root = root
        self.policy = policy
        self.audit = ReplayAudit(policy=policy.name)
        self.plan: Plan | None = None
        self.pages: list[Page] = []
        self.capturing = False
        self.approximate = False
        self.published = 0
        self.last_state = 0
        self.new_states: list[State] = []
        self._chain = BlockChain(settings.page, root=root, span_root=root, anchored=False)
        self._keys: list[bytes] = []

    def keys(self, token_ids: Sequence[int]) -> list[bytes]:
        """Keys of the full pages of token_ids, which only ever grow."""
        new = token_ids[self._chain.num_tokens :]
        if len(new):
            rows = self._chain.extend(np.asarray(new, dtype=np.int64))
            self._keys += [row.tobytes() for row in rows]
        return self._keys

    def begin(self, store: PageStore, token_ids: Sequence[int], local: int) -> Plan | None:
        """The restore that goes beyond `local` tokens which the device has, if there is one.

        Called again whenever the request is about to be scheduled anew: nothing of an earlier call
        stays.
        """
        self.end_plan()
        self.drop_open(store)
        size = self.settings.page
        tokens = np.asarray(token_ids, dtype=np.int64)
        keys = self.keys(token_ids)
        match = store.match(keys, self.root, tokens, len(tokens) - 1)
        full = [page for page in match.pages if page.key and page.filled == size]
        self.pages = full[: local // size]
        # What is computed from here on joins what is kept only if nothing is missing in between.
        self.capturing = len(self.pages) * size == local and not self.approximate
        self.published = local
        self.last_state = local
        if match.length <= local or match.length < self.settings.least or self.policy.name == "off":
            return None
        state = store.nearest_state(match, self.root, tokens, match.length)
        start = state.position if state is not None else 0
        exact = True
        tail = self.policy.tail(match.length)
        if match.length - start > tail:
            exact, state, start = False, None, match.length - tail
        self.audit = ReplayAudit(
            policy=self.policy.name,
            matched=match.length,
            replayed=match.length - start,
            state_from=start if exact else -1,
            exact=exact,
        )
        self.plan = Plan(
            match.length, local, start, match.pages, state, exact, tokens[: match.length],
            self.audit, zero=self.policy.name == "zero",
        )  # fmt: skip
        self.plan.pin(1)
        return self.plan

    def accepted(self, plan: Plan, partial: Page | None) -> None:
        """The plan's tokens have device blocks. partial: a copy of its last page to go on in."""
        size = self.settings.page
        self.pages = list(plan.pages[: plan.length // size])
        if partial is not None:
            self.pages.append(partial)
            partial.pins += 1
        self.approximate = self.approximate or not plan.exact
        self.capturing = plan.exact and (partial is not None or plan.length % size == 0)
        self.published = self.last_state = plan.length
        if plan.start < plan.length and plan.exact:
            self.last_state = plan.start

    def work(self, store: PageStore, start: int, count: int, table: tuple[list[int], ...],
             group: int, prompt: int) -> Work | None:  # fmt: skip
        """What positions [start, start + count) of this step leave behind, if anything.

        table: device blocks per KV cache group. group: the attention's. prompt: its length.
        """
        size = self.settings.page
        if not self.capturing:
            return None
        if start >= prompt and not self.settings.decode:
            self.stop(store)
            return None
        blocks = table[group]
        end = start + count
        while len(self.pages) * size < end:
            self.pages.append(Page(parent=self.parent(len(self.pages))))
            self.pages[-1].pins += 1
        first, last = start // size, (end - 1) // size
        copies = [
            (self.pages[i], blocks[i], min(size, end - i * size))
            for i in range(first, last + 1)
            if (i + 1) * size <= end or (start < prompt <= end)
        ]
        due = end == prompt or (end < prompt and end - self.last_state >= self.settings.every)
        if due:
            self.last_state = end
        return Work(
            self, start, count, self.pages[first : last + 1], blocks[first], copies,
            table if due else None,
        )  # fmt: skip

    def parent(self, index: int) -> bytes:
        """The key of the page before page `index`, or b"" while its tokens are not known."""
        if index == 0:
            return self.root
        return self._keys[index - 1] if index <= len(self._keys) else b""

    def publish(self, store: PageStore, token_ids: Sequence[int], done: int) -> None:
        """Let others find positions up to `done`, which the worker has written."""
        if not self.capturing:
            return
        size = self.settings.page
        keys = self.keys(token_ids)
        for index in range(self.published // size, math.ceil(done / size)):
            page = self.pages[index]
            known = min(page.filled, page.saved, done - index * size)
            if page.kv is None:  # no room for it, and so none for what follows
                self.stop(store)
                return
            if known <= len(page.tokens):
                continue
            tokens = np.asarray(token_ids[index * size : index * size + known], dtype=np.int64)
            page.parent = self.parent(index)
            kept = store.publish(page, tokens, keys[index] if known == size else b"")
            if known == size:
                page.pins -= 1
            self.pages[index] = kept
            self.published = index * size + known
        for state in self.new_states:
            index = state.position // size
            state.parent = self.parent(index)
            state.tokens = np.asarray(token_ids[index * size : state.position], dtype=np.int64)
            if state.position <= done:
                store.add_state(state)
        self.new_states = []

    def stop(self, store: PageStore) -> None:
        """Keep nothing more of this request."""
        self.drop_open(store)
        self.capturing = False

    def drop_open(self, store: PageStore) -> None:
        """Let go of the page that was being filled."""
        for page in self.pages:
            if not page.key and page.pins:
                page.pins -= 1
                store.discard(page)
        self.pages = [page for page in self.pages if page.key]
        self.new_states = []

    def end_plan(self) -> None:
        """The restore has been done, or will not be."""
        if self.plan is not None:
            self.plan.pin(-1)
            self.plan = None
