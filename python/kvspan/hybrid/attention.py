"""Full attention of a hybrid model's passes over the paged pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from kvspan.engine.attention import Row, Slots, attend_row
from kvspan.hybrid.pieces import Rows

if TYPE_CHECKING:
    from kvspan.hybrid.rows import HybridRunner


class PieceAttention:
    """Attention of one pass: the rows' KV is written to the pool, then rows see what is before.

    write_from: tokens before it are in the pool already and are left as they are.
    """

    def __init__(self, runner: HybridRunner, rows: Rows, slots: Slots, write_from: int) -> None:
        self.runner = runner
        self.rows = rows
        self.slots = slots
        self.first = max(rows.lo, write_from)
        self.new_slots = slots.ids[self.first : rows.hi]
        self.mask = runner.mask(rows)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
    ) -> Tensor:
        rows, cache = self.rows, self.runner.cache
        number = self.runner.full_number[layer]
        keys, values = cache.keys[number].flatten(0, 1), cache.values[number].flatten(0, 1)
        new = slice(self.first - rows.base, rows.hi - rows.base)
        keys[self.new_slots] = key[:, new].transpose(0, 1)
        values[self.new_slots] = value[:, new].transpose(0, 1)
        out = F.scaled_dot_product_attention(
            query[None],
            self._gather(keys)[None],
            self._gather(values)[None],
            self.mask,
            scale=scale,
            enable_gqa=query.shape[0] != key.shape[0],
        )
        return out[0].transpose(0, 1)

    def _gather(self, cache: Tensor) -> Tensor:
        """Keys or values of tokens [0, base + size) -> [Hkv, base + size, D]; zeros past hi."""
        rows = self.rows
        found = self.slots.gather(cache, 0, rows.hi)
        end = rows.base + rows.size
        if rows.hi < end:
            padded = found.new_zeros(end, *found.shape[1:])
            padded[: rows.hi] = found
            found = padded
        return found.transpose(0, 1)


class StepAttention:
    """Attention of one decode step: a row of one token for each sequence."""

    def __init__(self, runner: HybridRunner, rows: Sequence[Row]) -> None:
        self.runner = runner
        self.rows = rows
        self.new_slots = torch.cat([row.slots.ids[row.start : row.end] for row in rows])

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
    ) -> Tensor:
        cache = self.runner.cache
        number = self.runner.full_number[layer]
        keys, values = cache.keys[number].flatten(0, 1), cache.values[number].flatten(0, 1)
        keys[self.new_slots] = key.transpose(0, 1)
        values[self.new_slots] = value.transpose(0, 1)
        parts = [
            attend_row(row, query[:, i : i + 1], keys, values, scale, window)
            for i, row in enumerate(self.rows)
        ]
        return torch.cat(parts)
