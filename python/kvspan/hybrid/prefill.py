"""From a prompt to its first logits on a hybrid model: match, restore, compute what is left."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from kvspan.engine.pool import BlockPool, PoolFullError
from kvspan.engine.prefill import Prefill
from kvspan.engine.sequence import Sequence, block_slots
from kvspan.hybrid.match import BlockIndex, Domain, Match
from kvspan.hybrid.pieces import PIECE, Rows
from kvspan.hybrid.plan import BUDGET_MIN, RestorePlan, make_mark, plan_restore, record
from kvspan.hybrid.policy import Policy
from kvspan.hybrid.replay import ReplayOptions, restore
from kvspan.hybrid.rows import HybridRunner
from kvspan.hybrid.state import Mark, Prefix, RecurrentState, StateStore
from kvspan.ops import digest_fields


@dataclass
class HybridCache:
    """What all requests of an engine share.

    policy, options: how requests that are admitted from now on are restored. checkpoint_interval:
    tokens between full checkpoints, a multiple of PIECE; 0 keeps none, nor marks. no_reuse: why
    cached prefixes are not used, or "".
    """

    pool: BlockPool
    runner: HybridRunner
    checkpoints: StateStore[RecurrentState]
    marks: StateStore[Mark]
    policy: Policy = field(default_factory=Policy)
    options: ReplayOptions = field(default_factory=ReplayOptions)
    checkpoint_interval: int = 1024
    no_reuse: str = ""

    def __post_init__(self) -> None:
        self.index = BlockIndex(self.pool)


class HybridPrefill(Prefill):
    """Takes one sequence of a hybrid model from admission to its first logits, and keeps its state.

    exact: whether all that is computed for it equals an ordinary run, to the bit but for what an
    answer's decoding rounded differently. Only then are states kept as checkpoints, and its blocks
    found by requests of policy exact.
    """

    def __init__(self, seq: Sequence, cache: HybridCache) -> None:
        super().__init__(seq, cache.pool, cache.runner)
        self.cache = cache
        self.model = cache.runner  # `runner` under its own type
        self.policy = cache.policy
        tokens = seq.layout.token_ids.astype(np.int64)
        root = digest_fields("kvspan/hybrid/v1", seq.domain.model, seq.domain.salt, seq.block_size)
        self.prefix = Prefix(root, seq.hashes, tokens, seq.block_size)
        self.match = Match()
        self.state = cache.runner.new_state()
        self.exact = True
        self._pending: list[RecurrentState | Mark] = []  # of decoded tokens

    def admit(self) -> None:
        seq, pool = self.seq, self.pool
        domains: tuple[Domain, ...] = ("exact", "approximate")
        if self.policy.kind == "exact":
            domains = ("exact",)
        if self.cache.no_reuse:
            self.reuse.notes.append(f"cached prefixes not reused: {self.cache.no_reuse}")
        else:  # the last token is always computed: its logits are wanted
            self.match = self.cache.index.find(self.prefix, seq.num_prompt_tokens - 1, domains)
        match = self.match
        pool.acquire(match.blocks)
        seq.table[: len(match.blocks)] = match.blocks
        if match.tail is not None:
            pool.acquire([match.tail])
            self._held.append(match.tail)
        try:
            fresh = pool.allocate(seq.num_blocks - len(match.blocks))
        except PoolFullError:
            self.release()
            raise
        seq.table[len(match.blocks) :] = fresh
        seq.set_slots()
        self.model.decays[fresh] = 0.0
        self._copy_tail(fresh[0])
        self.total_tokens = seq.num_prompt_tokens - match.tokens

    def _copy_tail(self, target: int) -> None:
        """The leading tokens of a block that agrees with the prompt so far, into its own."""
        match, size = self.match, self.seq.block_size
        if match.tail is None:
            return
        ids = torch.tensor([match.tail, target], device=self.seq.device)
        slots = block_slots(ids, size).view(2, size)[:, : match.tail_tokens]
        self.model.cache.copy(slots[0], slots[1])
        self.model.hidden.copy(slots[0], slots[1])
        self._release_held()

    def run(self) -> Iterator[None]:
        seq, end = self.seq, self.seq.num_prompt_tokens
        start = time.perf_counter()
        if self.match.tokens:
            self._restore()
        self.timings.prepare += time.perf_counter() - start
        yield
        start = time.perf_counter()
        at, logits = self.state.position, None
        while at < end:
            rows = Rows.piece(at, end)
            if not self.exact:
                rows = Rows.tight(at, rows.hi)
            logits = self.model.run(
                rows,
                seq.tokens,
                seq.slots,
                self.state,
                write_from=self.match.tokens,
                want_logits=rows.hi == end,
            )
            at = rows.hi
            for kept in self._worth_keeping():
                self._put(kept)
            self.done_tokens = max(0, at - self.match.tokens)
            yield
        self.logits = logits
        self.reuse.computed_tokens += end - self.match.tokens
        self._publish(end // seq.block_size * seq.block_size)
        self.timings.prefill += time.perf_counter() - start

    def _restore(self) -> None:
        cache, match = self.cache, self.match
        plan = self._plan()
        done = restore(self.model, self.seq.tokens, self.seq.slots, plan, cache.options)
        self.state = done.state
        sound = match.exact >= match.tokens and self.model.hidden.exact
        self.exact = plan.exact and sound
        per_token = self.model.bytes_per_token
        moved = done.bytes_moved + match.tail_tokens * per_token
        self.reuse.replay = record(plan, self.exact, moved, per_token)
        if not self.exact:
            self.reuse.notes.append(f"recurrent state restored approximately ({self.policy})")

    def _plan(self) -> RestorePlan:
        cache, matched = self.cache, self.match.tokens
        checkpoint = next(cache.checkpoints.at_most(self.prefix, matched), None)
        marks = []
        if self.policy.kind == "bounded":
            marks = list(cache.marks.at_most(self.prefix, matched))
        return plan_restore(
            self.policy, matched, self.model.map, checkpoint, marks, self._decay_sum
        )

    def _decay_sum(self, start: int, end: int) -> torch.Tensor:
        """Sum of log decays of tokens [start, end), or of fewer where a block is cut: never less
        than the true sum, as none is above 0. float32 [layers, Hv]."""
        size = self.seq.block_size
        blocks = self.seq.table[-(-start // size) : -(-end // size)]
        return self.model.decays[blocks].sum(0)

    def _worth_keeping(self) -> Iterator[RecurrentState | Mark]:
        """Checkpoint and mark of the state as it is, where one is due."""
        at, interval = self.state.position, self.cache.checkpoint_interval
        if not (self.exact and interval) or at % PIECE:
            return
        recent = min(at, BUDGET_MIN)
        yield make_mark(self.state, self._decay_sum(at - recent, at), recent)
        if at % interval == 0:
            yield self.state.share()

    def _put(self, kept: RecurrentState | Mark) -> None:
        if isinstance(kept, Mark):
            self.cache.marks.put(self.prefix, kept)
        else:
            self.cache.checkpoints.put(self.prefix, kept)

    def decoded(self) -> None:
        """After each decoded token: its key is known only when the answer is complete."""
        self._pending += self._worth_keeping()

    def keep(self, written: list[int]) -> None:
        """Make the prompt and the answer findable, and its end a place to go on from.

        written: the answer's tokens that the state has seen.
        """
        seq = self.seq
        seq.extend_hashes(written)
        self.prefix.tokens = np.append(self.prefix.tokens, np.asarray(written, np.int64))
        self._publish(len(self.prefix.tokens))
        for kept in self._pending:
            self._put(kept)
        if self.exact and self.cache.checkpoint_interval:
            self._put(self.state.share())

    def _publish(self, end: int) -> None:
        """Make the blocks of tokens up to `end` findable, for whom they may be."""
        domain: Domain = "exact" if self.exact else "approximate"
        size = self.seq.block_size
        for i in range(len(self.match.blocks), -(-end // size)):
            self.cache.index.register(self.prefix, self.seq.table[i], i, end, domain)
