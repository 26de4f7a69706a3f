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
from kvspan.host import View
from kvspan.ops import BlockChain
from kvspan.vllm.hybrid.store import FoundState, Match, OpenPage, PageStore

TRIES = 4


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
    is computed again instead. decode: whether generated tokens are kept too. pair: whether hidden
    vectors are kept so that a replay of them is exact."""

    page: int
    policy: Policy = field(default_factory=Policy)
    every: int = 2048
    least: int = 1
    decode: bool = True
    pair: bool = True


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
    """One restore: KV and state of `length` tokens, of which `local` are on the device already.

    pages, state: what it reads, which the store keeps until `release`. start: where the replay
    begins, from `state` or, without one, from zero. scheduled: tokens of the step that follows.
    """

    length: int
    local: int
    start: int
    pages: list[View]
    state: View | None
    exact: bool
    token_ids: np.ndarray
    audit: ReplayAudit
    zero: bool = False
    table: tuple[list[int], ...] = ()
    scheduled: int = 0

    def release(self) -> None:
        for view in self.pages:
            view.release()
        if self.state is not None:
            self.state.release()


@dataclass(eq=False)
class KeptState:
    """A state that the worker has copied: the position, and the bytes of its tensors."""

    position: int
    parts: list[np.ndarray]
    saves: int


@dataclass
class Work:
    """What one request leaves behind in one step, of positions [start, start + count).

    pages: those the positions fall into. first_block: the device block of the first of them.
    copies: (page, device block, positions whose KV is there when the step is over).
    keep_state: the request's device blocks when the state after the step is to be kept. saves:
    tokens that it spares replaying.
    """

    track: Track
    start: int
    count: int
    pages: list[OpenPage]
    first_block: int
    copies: list[tuple[OpenPage, int, int]]
    keep_state: tuple[list[int], ...] | None = None
    saves: int = 1


class Track:
    """One request, from its arrival to its end.

    pages: from page `base` on; those before it came from the store whole.
    """

    def __init__(self, settings: Settings, root: bytes, policy: Policy) -> None:
        self.settings = settings
        self.root = root
        self.policy = policy
        self.audit = ReplayAudit(policy=policy.name)
        self.plan: Plan | None = None
        self.base = 0
        self.pages: list[OpenPage] = []
        self.capturing = False
        self.approximate = False
        self.published = 0
        self.last_state = 0
        self.new_states: list[KeptState] = []
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
        self.drop_pages(store)
        size = self.settings.page
        tokens = np.asarray(token_ids, dtype=np.int64)
        keys = self.keys(token_ids)
        self.base = local // size
        self.published = self.last_state = local
        for _ in range(TRIES):  # what cannot be read is forgotten, and what is before it matches
            match = store.match(keys, self.root, tokens, len(tokens) - 1)
            # What is computed from here on joins what is kept only if nothing is missing between.
            self.capturing = match.length >= local and not self.approximate
            short = match.length <= local or match.length < self.settings.least
            if short or self.policy.name == "off":
                return None
            state = store.nearest_state(match, self.root, tokens, match.length, keys)
            if (plan := self._plan(store, match, state, tokens, local)) is not None:
                return plan
        return None

    def _plan(self, store: PageStore, match: Match, state: FoundState | None, tokens: np.ndarray,
              local: int) -> Plan | None:  # fmt: skip
        start = state.position if state is not None else 0
        tail = self.policy.tail(match.length)
        reached = match.length - start <= tail or start == match.length
        if not reached:
            state, start = None, match.length - tail
        exact = reached and (self.settings.pair or start == match.length)
        views = [store.tier.view(page.name) for page in match.pages]
        state_view = None if state is None else store.tier.view(state.name)
        held = [view for view in (*views, state_view) if view is not None]
        if len(held) < len(views) + (state is not None):
            for view in held:  # something went meanwhile, or there is no memory to read it into
                view.release()
            return None
        audit = ReplayAudit(
            policy=self.policy.name,
            matched=match.length,
            replayed=match.length - start,
            state_from=start if reached else -1,
            exact=exact and not self.approximate,
        )
        self.plan = Plan(
            match.length, local, start, held[: len(views)], state_view, exact,
            tokens[: match.length], audit, zero=self.policy.name == "zero",
        )  # fmt: skip
        return self.plan

    def accepted(self, plan: Plan) -> OpenPage | None:
        """The plan's tokens have device blocks. Returns the page to go on in, if one is begun."""
        size = self.settings.page
        self.audit = plan.audit
        self.approximate = self.approximate or not plan.exact
        self.capturing = plan.exact and not self.approximate
        self.base = plan.length // size
        self.published = self.last_state = plan.length
        self.pages = []
        if self.capturing and plan.length % size:
            self.pages.append(OpenPage())
            return self.pages[0]
        return None

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
        while (self.base + len(self.pages)) * size < end:
            self.pages.append(OpenPage())
        first, last = start // size, (end - 1) // size
        pages = self.pages[first - self.base : last + 1 - self.base]
        copies = [
            (page, blocks[i], min(size, end - i * size))
            for i, page in enumerate(pages, first)
            if (i + 1) * size <= end or (start < prompt <= end)
        ]
        due = end == prompt or (end < prompt and end - self.last_state >= self.settings.every)
        work = Work(self, start, count, pages, blocks[first], copies)
        if due:
            work.keep_state, work.saves = table, end - self.last_state
            self.last_state = end
        return work

    def keep_state(self, position: int, parts: list[np.ndarray], saves: int) -> None:
        """The worker has copied the state at a position."""
        self.new_states.append(KeptState(position, parts, max(saves, 1)))

    def publish(self, store: PageStore, token_ids: Sequence[int], done: int) -> None:
        """Let others find positions up to `done`, which the worker has written."""
        if not self.capturing:
            return
        size = self.settings.page
        # Under asynchronous scheduling a step may be over before its last token is told here.
        done = min(done, len(token_ids))
        keys = self.keys(token_ids)
        for index in range(self.published // size, math.ceil(done / size)):
            page = self.pages[index - self.base]
            known = min(page.filled, page.saved, done - index * size)
            if known <= self.published - index * size:
                break
            tokens = np.asarray(token_ids[index * size : index * size + known], dtype=np.int64)
            key = keys[index] if known == size else b""
            if not store.publish(page, self.parent(index), tokens, key):
                self.stop(store)  # no room for it, and what follows could not be reached
                return
            self.published = index * size + known
            if known == size:
                store.close(page)
        # Those of a step that is under way already wait for its end.
        ready = [state for state in self.new_states if state.position <= done]
        for state in ready:
            self.new_states.remove(state)
            index = state.position // size
            tokens = np.asarray(token_ids[index * size : state.position], dtype=np.int64)
            store.add_state(self.parent(index), tokens, state.parts, state.saves)

    def parent(self, index: int) -> bytes:
        """The key of the page before page `index`, whose tokens are known."""
        return self._keys[index - 1] if index else self.root

    def stop(self, store: PageStore) -> None:
        """Keep nothing more of this request."""
        self.drop_pages(store)
        self.capturing = False

    def drop_pages(self, store: PageStore) -> None:
        """Let go of the pages that were being filled."""
        for page in self.pages:
            store.close(page)
        self.pages = []
        self.new_states = []

    def end_plan(self) -> None:
        """The restore has been done, or will not be."""
        if self.plan is not None:
            self.plan.release()
            self.plan = None
