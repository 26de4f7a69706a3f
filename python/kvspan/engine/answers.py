"""Answers as spans: the KV that tokens were generated with is kept, and computed again when lost.

An answer's span is its tokens, the separator of the prompt's pieces and padding to whole blocks.
Its anchor is the prompt of its own call. The tokens' KV is copied from where decoding wrote it to
blocks of the span's own, at the positions it was computed at: the copy is by tokens, because an
answer starts anywhere in a block. What decoding did not compute, the last token, the separator and
the padding, is computed there. When blocks have been evicted, the prompt and the answer go through
a prefill of their own, which gives the same (to rounding).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvspan.engine.attention import Row, Slots
from kvspan.engine.pool import BlockPool, PoolFullError
from kvspan.engine.runner import ModelRunner
from kvspan.engine.sequence import Sequence as TokenSequence
from kvspan.engine.sequence import answer_keys, block_slots
from kvspan.layout import Answer, PromptEncoder

CHUNK_TOKENS = 1024  # tokens per forward pass: progress is shown and others decode in between


@dataclass(frozen=True)
class Finished:
    """A sequence at its end. written: tokens of its answer whose KV is in its own blocks."""

    seq: TokenSequence
    answer: Answer
    written: int


def keep_answers(
    finished: Sequence[Finished], encoder: PromptEncoder, pool: BlockPool, runner: ModelRunner
) -> list[bool]:
    """Cache the KV of answers as spans; of each, whether it is cached now: not if the pool is full.

    The sequences must still hold their blocks.
    """
    kept, rows = [], []
    fresh: list[tuple[int, bytes]] = []
    try:
        for done in finished:
            tokens = encoder.answer_tokens(done.answer.token_ids)
            keys = answer_keys(done.answer, tokens, done.seq.block_size)
            kept.append(True)
            if all(pool.lookup(("span", key)) is not None for key in keys):
                continue
            try:
                blocks = pool.allocate(len(keys))
            except PoolFullError:
                kept[-1] = False
                continue
            fresh += zip(blocks, keys, strict=True)
            rows.append(_keep(done, tokens, blocks, runner))
        for batch in batches(rows):
            runner.forward(batch)
        for block, key in fresh:
            pool.register(block, ("span", key))
    finally:
        pool.release(block for block, _ in reversed(fresh))
    return kept


def _keep(
    done: Finished, token_ids: npt.NDArray[np.int32], blocks: list[int], runner: ModelRunner
) -> Row:
    """Copy what is written; the row of the tokens that are left to be computed."""
    seq, start = done.seq, done.seq.num_prompt_tokens
    slots = _slots(blocks, seq)
    runner.cache.copy(seq.slots.ids[start : start + done.written], slots[: done.written])
    tokens = torch.from_numpy(token_ids.astype(np.int64)).to(seq.device)
    positions = seq.positions
    if positions is not None:
        after = torch.arange(1, len(tokens) + 1, device=seq.device) + seq.last_position
        positions = torch.cat([positions[:start], after])
    where = Slots(torch.cat([seq.slots.ids[:start], slots]))
    return Row(tokens[done.written :], start + done.written, where, positions)


def copy_answer(seq: TokenSequence, first: int, blocks: list[int], runner: ModelRunner) -> None:
    """Copy the KV of a prompt's tokens from ``first`` on, as many as blocks hold, to blocks."""
    slots = _slots(blocks, seq)
    runner.cache.copy(seq.slots.ids[first : first + len(slots)], slots)


def _slots(blocks: list[int], seq: TokenSequence) -> torch.Tensor:
    ids = torch.tensor(blocks, dtype=torch.int64, device=seq.device)
    return block_slots(ids, seq.block_size)


def batches(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Rows in order, at most CHUNK_TOKENS a pass; rows are split where they must be."""
    batch: list[Row] = []
    room = CHUNK_TOKENS
    for row in rows:
        at = 0
        while at < row.num_tokens:
            take = min(room, row.num_tokens - at)
            wants = row.wants_logits and at + take == row.num_tokens
            ids = row.token_ids[at : at + take]
            batch.append(Row(ids, row.start + at, row.slots, row.positions, wants))
            at, room = at + take, room - take
            if room == 0:
                yield batch
                batch, room = [], CHUNK_TOKENS
    if batch:
        yield batch
