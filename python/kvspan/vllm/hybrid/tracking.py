"""The scheduler's side of Tail-Replay: what each request takes from the store and leaves there.

Knows nothing of vLLM, so that it can be tested without one. Per step, `Track.work` says what the
worker has to do for a request (`kvspan.vllm.hybrid.orders`); `Written` remembers what is there once
the step is over, to be published then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvspan.host import Fetch
from kvspan.ops import BlockChain
from kvspan.vllm.hybrid.decay import Bounds
from kvspan.vllm.hybrid.entries import MOST_GROUPS, Domain, OpenPage, OpenState
from kvspan.vllm.hybrid.orders import Fill, Restore, StateCopy, Table, Work
from kvspan.vllm.hybrid.plans import Plan, Prompt, ReplayAudit, Settings, make_plan
from kvspan.vllm.hybrid.policy import Policy
from kvspan.vllm.hybrid.store import PageStore

TRIES = 4
WORTH_KEEPING = 64  # tokens: the state after a shorter replay is not kept


@dataclass
class Written:
    """What is in pages and states once a step is over, and a request's positions that have run.

    pages: (page, first position written, positions filled, positions saved; -1: as before).
    parts, parting: of an approximate restore within a bound: what was exact of it, and its place.
    last: the request has ended.
    """

    track: Track
    era: int
    end: int
    pages: list[tuple[OpenPage, int, int, int]] = field(default_factory=list)
    state: OpenState | None = None
    parts: OpenState | None = None
    parting: bytes = b""
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
        if self.parting and not failed:
            store.partings.add(self.parting)
        if self.parts is not None:  # exact whatever the request is
            if failed:
                self.parts.memory.abort()
            else:
                track.publish_state(store, self.parts, token_ids)
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
        self.fetch: Fetch | None = None  # of what the coming plan needs
        self.base = 0
        self.pages: list[OpenPage] = []
        self.era = 0
        self.capturing = False
        self.approximate = False
        self.published = 0
        self.last_state = 0
        self.new_states: list[OpenState] = []
        # Where what is approximate is kept; None: nowhere.
        self._domain = Domain(f"{policy}, {policy.k_min}") if policy.name == "ratio" else None
        self._chain = BlockChain(settings.page, root=root, span_root=root, anchored=False)
        self._keys: list[bytes] = []

    @property
    def _is_kept(self) -> bool:
        """Whether what this request computes may be kept, in one place or the other."""
        return not self.approximate or self._domain is not None

    def keys(self, token_ids: Sequence[int]) -> list[bytes]:
        """Keys of the full pages of token_ids, which only ever grow."""
        new = token_ids[self._chain.num_tokens :]
        if len(new):
            rows = self._chain.extend(np.asarray(new, dtype=np.int64))
            self._keys += [row.tobytes() for row in rows]
        return self._keys

    def begin(
        self, store: PageStore, token_ids: Sequence[int], local: int, read: bool = True
    ) -> Plan | None:
        """The restore that goes beyond `local` tokens which the device has, if there is one.

        Called again whenever the request is about to be scheduled anew: nothing of an earlier call
        stays. If files are to be read first there is no plan yet but a `fetch`: once that is done
        (or given up, without `read`) this is to be called again.

        read: whether what is on disk only is to be used.
        """
        fetched = [self.fetch] if self.fetch is not None else []  # pinned until there are views
        self.fetch = None
        try:
            return self._begin(store, token_ids, local, read, fetched)
        finally:
            for fetch in fetched:
                fetch.release()

    def _begin(
        self, store: PageStore, token_ids: Sequence[int], local: int, read: bool,
        fetched: list[Fetch],
    ) -> Plan | None:  # fmt: skip
        self.end_plan()
        self.drop_pages(store)
        size = self.settings.page
        tokens = np.asarray(token_ids, dtype=np.int64)
        keys = self.keys(token_ids)
        self.base = local // size
        self.published = self.last_state = local
        for _ in range(TRIES):  # what cannot be read is forgotten, and what is before it matches
            store.memory_only, store.unread = not read, []
            match = store.match(keys, self.root, tokens, len(tokens) - 1, self._domain)
            # What is computed from here on joins what is kept only if nothing is missing between.
            begun = match.length if self.approximate else match.exact
            self.capturing = begun >= local and self._is_kept
            if self.policy.name == "off":
                return None
            short = match.length <= local or match.length < self.settings.least
            if short and not store.unread:
                return None
            prompt = Prompt(self.root, tokens, keys, self.approximate)
            plan = None
            if not short:
                plan = make_plan(store, self.settings, self.policy, prompt, match, local)
            if store.unread:
                if plan is not None:
                    plan.release()
                names = [*(page.name for page in match.pages), *store.unread]
                if self.policy.name in ("exact", "bounded"):
                    # Where the match may end once those pages are there.
                    state = store.nearest_state(match, self.root, tokens, len(tokens) - 1, keys)
                    names += [state.name] if state is not None else []
                fetch = store.tier.fetch(names)
                if not fetch.done:
                    self.fetch = fetch
                    return None
                fetched.append(fetch)
            elif plan is not None:
                self.plan = plan
                return plan
        return None

    def accepted(self, store: PageStore, plan: Plan, table: Table) -> tuple[Restore, Written]:
        """The plan's tokens have device blocks: what the worker has to do for them."""
        size = self.settings.page
        self.audit = plan.audit
        self.approximate = self.approximate or not plan.exact
        self.capturing = self._is_kept
        self.base = plan.length // size
        self.published = self.last_state = plan.length
        self.pages = []
        restore = Restore(
            plan.length, plan.local, plan.start, [view.spans[0][0] for view in plan.pages],
            None if plan.state is None else plan.state.spans, plan.token_ids, table, plan.zero,
            plan.bounds, parts=plan.parts,
        )  # fmt: skip
        written = Written(self, self.era, plan.length)
        if plan.exact:
            store.partings.discard(plan.parting)  # one makes the state, if it is to be made
        elif plan.bounds is not None:
            written.parting = plan.parting
            self._keep_parts(store, plan, plan.bounds, restore, written)
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
        if self.capturing and not self.approximate and replayed >= WORTH_KEEPING:
            written.state = store.open_state(plan.length, replayed)
            if written.state is not None:
                restore.keep = written.state.memory.spans
        return restore, written

    def _keep_parts(self, store: PageStore, plan: Plan, bounds: Bounds, restore: Restore,
                    written: Written) -> None:  # fmt: skip
        """The states of groups that are replayed exactly where others are not."""
        if not self.settings.pair:
            return
        saves = {
            number: plan.length - group.start
            for number, group in enumerate(bounds.groups[:MOST_GROUPS])
            if not group.bound and plan.length - group.start >= WORTH_KEEPING
        }
        written.parts = store.open_parts(plan.length, saves) if saves else None
        if written.parts is not None:
            spans = written.parts.memory.spans
            restore.keep_parts = store.geometry.parts(sorted(saves), spans)

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
        if self.approximate:
            return
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
            parent, key = self.parent(index), keys[index] if known == size else b""
            if self.approximate:
                assert self._domain is not None, "what is approximate is kept apart or not at all"
                parent, key = self._domain(parent), self._domain(key) if key else b""
            store.publish(page, parent, tokens, key)
            self.published = index * size + known
            if known == size:
                store.close(page)
        # Those of a step that is under way already wait for its end.
        ready = [state for state in self.new_states if state.position <= done]
        for state in ready:
            self.new_states.remove(state)
            self.publish_state(store, state, token_ids)

    def publish_state(self, store: PageStore, state: OpenState, token_ids: Sequence[int]) -> None:
        """Let others find a state. token_ids: up to its position at least."""
        self.keys(token_ids)  # of the state's page's parent
        index = state.position // self.settings.page
        first = index * self.settings.page
        tokens = np.asarray(token_ids[first : state.position], dtype=np.int64)
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
        if self.fetch is not None:
            self.fetch.release()
            self.fetch = None
