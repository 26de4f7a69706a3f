"""Move plans: the order in which blocks may be moved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvspan import _core
from kvspan.ops._arrays import Int64Array, as_int64


@dataclass(frozen=True)
class MovePlan:
    """Block moves in batches to be run one after the other.

    Attributes:
        batches: per batch ``(src_blocks, dst_blocks, deltas)``, int64 ``[num_moves]`` each. The
            moves of a batch may run in any order or at once: no block is written twice, or read by
            one move and written by another. Running the batches in order gives what gathering all
            sources first and scattering them afterwards would.
    """

    batches: list[tuple[Int64Array, Int64Array, Int64Array]]

    @property
    def num_moves(self) -> int:
        """Moves of all batches, those through scratch blocks included."""
        return sum(len(src) for src, _, _ in self.batches)


def plan_moves(src_blocks: Any, dst_blocks: Any, deltas: Any, scratch_blocks: Any = ()) -> MovePlan:
    """Order block moves so that no source is overwritten before it has been read.

    Chains of moves become consecutive batches; a cycle is opened by saving one block to a scratch
    block. One scratch block is enough for any number of cycles; with more, cycles run side by side
    in fewer batches. Linear in the number of moves.

    Args:
        src_blocks: ``[num_moves]`` int64 block ids (or a list of ints); repeats are fine.
        dst_blocks: ``[num_moves]`` int64 block ids, distinct.
        deltas: ``[num_moves]`` int64, tokens to rotate by. A move with ``src == dst`` rotates in
            place; with delta 0 it is left out.
        scratch_blocks: int64 block ids that may be overwritten; distinct, none of them in use by a
            move. Needed only if there are cycles.

    Raises:
        ValueError: for repeated destinations, unequal lengths, negative ids, or too few scratch
            blocks (the message says how many are needed).
        TypeError: for arrays that are not int64.
    """
    return MovePlan(
        _core.plan_moves(
            as_int64(src_blocks),
            as_int64(dst_blocks),
            as_int64(deltas),
            as_int64(scratch_blocks),
        )
    )
