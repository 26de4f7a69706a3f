"""One request's tokens, positions, block keys and block table."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvspan.engine import Placement
from kvspan.engine.attention import Row, Slots
from kvspan.layout import Answer, SpanLayout
from kvspan.ops import BlockChain, ExtraRange, digest_fields


@dataclass(frozen=True)
class CacheDomain:
    """What every cache key of a request depends on besides its tokens (DESIGN contract 1)."""

    model: str
    salt: str = ""

    def chain(self, layout: SpanLayout) -> BlockChain:
        fields = (self.model, self.salt, layout.block_size)
        return BlockChain(
            layout.block_size,
            root=digest_fields("kvspan/prefix/v1", *fields),
            span_root=digest_fields("kvspan/span/v1", *fields, layout.scope),
            anchored=layout.scope == "anchored",
        )


@dataclass
class SpanRef:
    """A span of a request: blocks [first, first + count) of its table.

    delta: tokens from the span's canonical position to its placement.
    keys: of its blocks, the same wherever it stands. answer: which answer it is, if any.
    found: leading blocks already cached at the canonical position, referenced on behalf of the
    request until it has moved them.
    """

    first: int
    count: int
    delta: int
    keys: list[bytes]
    answer: Answer | None
    found: list[int]

    @property
    def identity(self) -> bytes:
        return self.keys[-1]

    def canonical_keys(self) -> list[Hashable]:
        return [("span", key) for key in self.keys]

    def table_keys(self) -> list[Hashable]:
        """Keys of the blocks as the request sees them: moved copies are cached apart."""
        if self.delta == 0:
            return self.canonical_keys()
        return [("placed", key, self.delta) for key in self.keys]


class Sequence:
    """Tokens of a prompt and its answer, and where their KV lies.

    table: block ids, -1 where none is assigned yet. slots: valid once all are.
    """

    def __init__(
        self,
        layout: SpanLayout,
        placement: Placement,
        domain: CacheDomain,
        max_new_tokens: int,
        device: torch.device,
    ) -> None:
        self.layout = layout
        self.block_size = layout.block_size
        self.device = device
        self.num_prompt_tokens = layout.num_tokens
        self.max_new_tokens = max_new_tokens
        self.capacity = layout.num_tokens + max_new_tokens
        self.tokens = torch.from_numpy(layout.token_ids.astype("int64")).to(device)
        positions = layout.positions(placement)
        self.last_position = int(positions[-1])
        self.positions: torch.Tensor | None = None
        if layout.spans and placement == "parallel":
            tail = torch.arange(1, max_new_tokens + 1) + self.last_position
            self.positions = torch.cat([torch.from_numpy(positions).long(), tail]).to(device)
        self.placement = placement
        self.domain = domain
        self._after = f"after-{placement}"
        self._chain = domain.chain(layout)
        # Text after an answer depends on the prompt the answer was generated after.
        extra = [
            ExtraRange(start, end, answer.digest)
            for (start, end), answer in zip(layout.spans, layout.answers, strict=False)
            if answer is not None
        ]
        digests = self._chain.extend(layout.token_ids, layout.spans, extra)
        self.hashes = [row.tobytes() for row in digests]
        self._prompt_state = self._chain.digest
        self.spans = [self._span(i, positions) for i in range(len(layout.spans))]
        self.table = [-1] * self.num_blocks
        self.slots = Slots(torch.empty(0, dtype=torch.int64, device=device))

    def _span(self, index: int, positions: npt.NDArray[np.int32]) -> SpanRef:
        (start, end), answer = self.layout.spans[index], self.layout.answer(index)
        first, last = start // self.block_size, end // self.block_size
        keys = self.hashes[first:last]
        canonical = self.layout.canonical_start
        if answer is not None:
            keys = answer_keys(answer, self.layout.token_ids[start:end], self.block_size)
            canonical = answer.start
        return SpanRef(first, last - first, int(positions[start]) - canonical, keys, answer, [])

    def answer_digest(self) -> bytes:
        """`Answer.digest` of what is generated after the prompt."""
        rest = self.num_prompt_tokens % self.block_size
        tail = self.layout.token_ids[self.num_prompt_tokens - rest :].astype("<i4").tobytes()
        placement = self.placement if self.spans else None
        return digest_fields("kvspan/answer/v1", self._prompt_state, tail, placement)

    @property
    def num_blocks(self) -> int:
        return -(-self.capacity // self.block_size)

    def text_key(self, block: int) -> Hashable:
        """Key of a block of ordered text; before the first span it is an ordinary prefix block."""
        before = block * self.block_size < self.layout.anchor_len or not self.spans
        return ("prefix" if before else self._after, self.hashes[block])

    def set_slots(self) -> None:
        """Fix the slots from the table, once every block is assigned."""
        blocks = torch.tensor(self.table, dtype=torch.int64, device=self.device)
        self.slots = Slots(block_slots(blocks, self.block_size)[: self.capacity])

    def text_row(self, start: int, end: int, wants_logits: bool = False) -> Row:
        """Prompt tokens [start, end), which see everything before them."""
        return Row(self.tokens[start:end], start, self.slots, self.positions, wants_logits)

    def span_row(self, span: SpanRef, canonical: list[int], cached: int) -> Row:
        """Tokens of a span from its block `cached` on, at the span's canonical position.

        They see the anchor (anchored scope) and the span itself, as rows of a sequence that has
        nothing else in it.
        """
        slots = block_slots(
            torch.tensor(canonical, dtype=torch.int64, device=self.device), self.block_size
        )
        base = self.layout.canonical_start
        if base:
            slots = torch.cat([self.slots.ids[:base], slots])
        start = (span.first + cached) * self.block_size
        end = (span.first + span.count) * self.block_size
        return Row(self.tokens[start:end], base + cached * self.block_size, Slots(slots))

    def extend_hashes(self, new_tokens: list[int]) -> None:
        """Hash generated tokens whose KV was written, so that their full blocks can be cached."""
        if new_tokens:
            ids = torch.tensor(new_tokens, dtype=torch.int64).numpy()
            self.hashes += [row.tobytes() for row in self._chain.extend(ids)]


def answer_keys(answer: Answer, token_ids: npt.NDArray[np.int32], block_size: int) -> list[bytes]:
    """Keys of the blocks of an answer's span; token_ids: `PromptEncoder.answer_tokens`."""
    root = answer.digest
    chain = BlockChain(block_size, root=root, span_root=root, anchored=False)
    return [row.tobytes() for row in chain.extend(token_ids)]


def block_slots(blocks: torch.Tensor, block_size: int) -> torch.Tensor:
    """Slots of all tokens of blocks [n] -> int64 [n * block_size]."""
    offsets = torch.arange(block_size, device=blocks.device)
    return (blocks[:, None] * block_size + offsets).flatten()
