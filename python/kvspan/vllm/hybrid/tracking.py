"""The scheduler's side of Tail-Replay: what each request takes from the store and leaves there.

Knows nothing of vLLM, so that it can be tested without one. Per step, `Track.work` says what the
worker has to do for a request, as plain data (`Work`, `Restore`) that names places in the host
tier's memory; `Written` remembers what is there once the step is over, to be published then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from kvspan.host import View
from kvspan.host.pages import Spans
from kvspan.hybrid.groups import LayerMap
from kvspan.hybrid.plan import GroupPlan
from kvspan.ops import BlockChain
from kvspan.vllm.hybrid.decay import Bounds, plan_bounded
from kvspan.vllm.hybrid.policy import Policy
from kvspan.vllm.hybrid.store import FoundState, Match, OpenPage, OpenState, PageStore, page_of

TRIES = 4
WORTH_KEEPING = 64  # tokens: the state after a shorter replay is not kept


@dataclass
class Settings:
    """page: tokens per page. every: tokens between kept states. least: a shorter match than this
    is computed again instead. decode: whether generated tokens are kept too. pair: whether hidden
    vectors are kept so that a replay of them is exact. layers: of the model, for "bounded"."""

    page: int
    policy: Policy = field(default_factory=Policy)
    every: int = 2048
    least: int = 1
    decode: bool = True
    pair: bool = True
    layers: LayerMap | None = None


@dataclass
class ReplayAudit:
    """What became of one request, in tokens.

    matched: taken from the cache. replayed: of those, run again through the linear-attention
    layers. state_from: the position of the exact state it started from; 0 is the start of the
    prompt, -1 zero in the middle of it. exact: whether the state was rebuilt without approximation.
    bytes: of KV, hidden vectors and state that were moved. groups: of "bounded", for each group
    what was replayed, from what (a "checkpoint" or "zero") and the bound of its error; the bound is
    0 where it was replayed exactly.
    """

    policy: str = "exact"
    matched: int = 0
    replayed: int = 0
    state_from: int = 0
    exact: bool = True
    bytes: int = 0
    refused: str = ""
    groups: list[dict[str, Any]] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        return asdict(self)


Table = tuple[list[int], ...]  # a request's device blocks, per KV cache group


@dataclass
class Plan:
    """One restore: KV and state of `length` tokens, of which `local` are on the device already.

    pages, state: what it reads, which the store keeps until `release`. start: where the replay
    begins, from `state` or, without one, from zero. bounds: where each group's does instead.
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
    bounds: Bounds | None = None

    def release(self) -> None:
        for view in self.pages:
            view.release()
        if self.state is not None:
            self.state.release()


@dataclass
class StateCopy:
    """Copy the state after `position` tokens to `spans` of the memory. table: the request's."""

    position: int
    table: Table
    spans: Spans


@dataclass
class Restore:
    """A plan as the worker gets it. table: the request's device blocks.

    pages: where they lie, from the prompt's first on. state: where; None: from zero. scheduled:
    tokens of the step that follows. bounds: as in the plan. begun: the page in which the request
    goes on, after a copy of the positions that it takes over. keep: what is kept of the state that
    was replayed.
    """

    length: int
    local: int
    start: int
    pages: list[int]
    state: Spans | None
    token_ids: np.ndarray
    table: Table
    zero: bool = False
    bounds: Bounds | None = None
    scheduled: int = 0
    begun: int | None = None
    keep: Spans | None = None


@dataclass
class Fill:
    """Hidden vectors of `count` tokens go to positions from `first` on of the page at `page`."""

    page: int
    first: int
    count: int


@dataclass
class Work:
    """What one request leaves behind in one step.

    slot: of its first token in the attention's cache. fills: of its tokens, one after the other.
    copies: pages, and the device blocks whose KV they get. seen: where the state after it is, whose
    norms the pages get; None where they keep what they have.
    """

    slot: int
    fills: list[Fill]
    copies: list[tuple[int, int]]
    state: StateCopy | None = None
    seen: tuple[int, Table] | None = None


@dataclass
class Written:
    """What is in pages and states once a step is over, and a request's positions that have run.

    pages: (page, first position written, positions filled, positions saved; -1: as before).
    last: the request has ended.
    """

    track: Track
    era: int
    end: int
    pages: list[tuple[OpenPage, int, int, int]] = field(default_factory=list)
    state: OpenState | None = None
    last: bool = False

    def settle(self, store: PageStore, token_ids: Sequence[int], failed: bool = False) -> None:
        """The step is over: publish it, unless it failed."""
        track = self.track
        for page, first, filled, saved in self.pages:
            if not failed:
                if page.filled == first:
                    page.filled = filled
                page.saved = max(page.saved, saved)
            store.written(page)
        current = track.era == self.era and track.capturing and not failed
        if self.state is not None:
            if current:
                track.new_states.append(self.state)
            else:
                self.state.memory.abort()
        if current:
            track.publish(store, token_ids, self.end)


class Track:
    """One request, from its arrival to its end.

    pages: from page `base` on; those before it came from the store whole. era: rises whenever they
    are dropped.
    """

    def __init__(self, settings: Settings, root: bytes, policy: Policy) -> None:
        self.settings = settings
        self.root = root
        self.policy = policy
        self.audit = ReplayAudit(policy=str(policy))
        self.plan: Plan | None = None
        self.base = 0
        self.pages: list[OpenPage] = []
        self.era = 0
        self.capturing = False
        self.approximate = False
        self.published = 0
        self.last_state = 0
        self.new_states: list[OpenState] = []
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
        views = [store.tier.view(page.name) for page in match.pages]
        state_view = None if state is None else store.tier.view(state.name)
        held = [view for view in (*views, state_view) if view is not None]
        if len(held) < len(views) + (state is not None):
            for view in held:  # something went meanwhile, or there is no memory to read it into
                view.release()
            return None
        bounds = None
        if self.policy.name == "bounded":
            bounds = self._bounds(store, held[: len(views)], match.length, state)
            if bounds is not None:
                reached, start = False, min(group.start for group in bounds.groups)
        exact = reached and (self.settings.pair or start == match.length)
        audit = ReplayAudit(
            policy=str(self.policy),
            matched=match.length,
            replayed=match.length - start,
            state_from=start if reached else -1,
            exact=exact and not self.approximate,
            groups=self._groups(match.length, start, state, bounds),
        )
        self.plan = Plan(
            match.length, local, start, held[: len(views)], state_view, exact,
            tokens[: match.length], audit, self.policy.name == "zero", bounds,
        )  # fmt: skip
        return self.plan

    def _bounds(self, store: PageStore, pages: list[View], length: int,
                state: FoundState | None) -> Bounds | None:  # fmt: skip
        cells, layers = store.geometry.cells, self.settings.layers
        assert cells is not None and layers is not None, "asked for where it is not kept"
        held = [store.geometry.gates(page_of(page)) for page in pages]
        at = None if state is None else state.position
        return plan_bounded(self.policy.bounded(), layers, length, at, held, cells)

    def _groups(self, length: int, start: int, state: FoundState | None,
                bounds: Bounds | None) -> list[dict[str, Any]]:  # fmt: skip
        """What the audit of a bounded restore says of its groups."""
        if self.policy.name != "bounded" or self.settings.layers is None:
            return []
        exact = GroupPlan(start, "zero" if state is None else "checkpoint", 0.0)
        groups = bounds.groups if bounds else (exact,) * len(self.settings.layers.groups)
        return [
            {"replayed_tokens": length - g.start, "start": g.source, "bound": g.bound}
            for g in groups
        ]

    def accepted(self, store: PageStore, plan: Plan, table: Table) -> tuple[Restore, Written]:
        """The plan's tokens have device blocks: what the worker has to do for them."""
        size = self.settings.page
        self.audit = plan.audit
        self.approximate = self.approximate or not plan.exact
        self.capturing = plan.exact and not self.approximate
        self.base = plan.length // size
        self.published = self.last_state = plan.length
        self.pages = []
        restore = Restore(
            plan.length, plan.local, plan.start, [view.spans[0][0] for view in plan.pages],
            None if plan.state is None else plan.state.spans, plan.token_ids, table, plan.zero,
            plan.bounds,
        )  # fmt: skip
        written = Written(self, self.era, plan.length)
        offset = plan.length % size
        if self.capturing and offset:
            page = store.open()
            if page is None:
                self.stop(store)
            else:
                self.pages.append(page)
                page.ordered = offset
                page.writers += 1
                restore.begun = page.at
                written.pages.append((page, 0, offset, offset))
        replayed = plan.length - plan.start
        if self.capturing and replayed >= WORTH_KEEPING:
            written.state = store.open_state(plan.length, replayed)
            if written.state is not None:
                restore.keep = written.state.memory.spans
        return restore, written

    def work(self, store: PageStore, start: int, count: int, table: Table,
             group: int, prompt: int) -> tuple[Work, Written] | None:  # fmt: skip
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
            page = store.open()
            if page is None:
                self.stop(store)  # what follows could not be reached
                return None
            self.pages.append(page)
        if self.pages[start // size - self.base].ordered != start % size:
            self.stop(store)  # something is missing before
            return None
        written = Written(self, self.era, end)
        work = Work(blocks[start // size] * size + start % size, [], [])
        for index in range(start // size, (end - 1) // size + 1):
            page = self.pages[index - self.base]
            first = max(start - index * size, 0)
            upto = min(size, end - index * size)
            work.fills.append(Fill(page.at, first, upto - first))
            page.ordered = upto
            saved = -1
            if upto == size or (start < prompt <= end):
                work.copies.append((page.at, blocks[index]))
                saved = upto
            page.writers += 1
            written.pages.append((page, first, upto, saved))
        # The state is looked at after prompts' steps, and once a page while tokens are generated.
        if store.geometry.cells is not None and (count > 1 or start % size == 0):
            work.seen = end, table
        due = end == prompt or (end < prompt and end - self.last_state >= self.settings.every)
        if due:
            self._keep_state(store, work, written, table)
        return work, written

    def last_work(self, store: PageStore, done: int, table: Table, group: int,
                  state: bool) -> tuple[Work, Written] | None:  # fmt: skip
        """The unfinished page and the state of a request that ends after `done` positions.

        state: whether the state is that of exactly these.
        """
        size = self.settings.page
        index = (done - 1) // size
        if not self.capturing or not 0 <= index - self.base < len(self.pages):
            return None
        page = self.pages[index - self.base]
        written = Written(self, self.era, done, last=True)
        work = Work(0, [], [])
        if done % size:
            work.copies.append((page.at, table[group][index]))
            page.writers += 1
            written.pages.append((page, -1, 0, done % size))
        if state and done > self.last_state:
            self._keep_state(store, work, written, table)
        return work, written

    def _keep_state(self, store: PageStore, work: Work, written: Written, table: Table) -> None:
        written.state = store.open_state(written.end, written.end - self.last_state)
        if written.state is not None:
            work.state = StateCopy(written.end, table, written.state.memory.spans)
            self.last_state = written.end

    def publish(self, store: PageStore, token_ids: Sequence[int], done: int) -> None:
        """Let others find positions up to `done`, which the worker has written."""
        size = self.settings.page
        # Under asynchronous scheduling a step may be over before its last token is told here.
        done = min(done, len(token_ids))
        for index in range(self.published // size, math.ceil(done / size)):
            page = self.pages[index - self.base]
            known = min(page.filled, page.saved, done - index * size)
            if known <= self.published - index * size:
                break  # as in most steps of decoding
            keys = self.keys(token_ids)
            tokens = np.asarray(token_ids[index * size : index * size + known], dtype=np.int64)
            store.publish(page, self.parent(index), tokens, keys[index] if known == size else b"")
            self.published = index * size + known
            if known == size:
                store.close(page)
        # Those of a step that is under way already wait for its end.
        ready = [state for state in self.new_states if state.position <= done]
        for state in ready:
            self.new_states.remove(state)
            self.keys(token_ids)  # of the state's page's parent
            index = state.position // size
            tokens = np.asarray(token_ids[index * size : state.position], dtype=np.int64)
            store.publish_state(state, self.parent(index), tokens)

    def parent(self, index: int) -> bytes:
        """The key of the page before page `index`, whose tokens are known."""
        return self._keys[index - 1] if index else self.root

    def stop(self, store: PageStore) -> None:
        """Keep nothing more of this request."""
        self.drop_pages(store)
        self.capturing = False

    def drop_pages(self, store: PageStore) -> None:
        """Let go of the pages that were being filled."""
        self.era += 1
        for page in self.pages:
            store.close(page)
        for state in self.new_states:
            state.memory.abort()
        self.pages = []
        self.new_states = []

    def end_plan(self) -> None:
        """The restore has been done, or will not be."""
        if self.plan is not None:
            self.plan.release()
            self.plan = None
