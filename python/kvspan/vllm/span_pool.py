"""The sources of moves in vLLM's block pool: used in place of copies, or kept for longer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvspan.vllm.scheduling import Move

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool


def steer(pool: BlockPool, moves: Sequence[Move], needed: int) -> None:
    """Makes vLLM hand out the sources themselves, so that keys are rotated where they lie.

    Saves the copies and their blocks, and uses the sources up: for spans that do not come again.
    Not where a source is in use, or wanted twice, or where the pool has fewer free blocks than the
    request needs: a source must not be given up for a request that is not admitted then.
    """
    blocks = [pool.blocks[move.src] for move in moves]
    if needed > pool.get_num_free_blocks() or any(block.ref_cnt for block in blocks):
        return
    if len({block.block_id for block in blocks}) < len(blocks):
        return
    # Blocks without a hash go to the front of the free queue, in this order.
    pool.evict_blocks({block.block_id for block in blocks})
    pool.touch(blocks)
    pool.free_blocks(blocks)


def refresh(pool: BlockPool, moves: Sequence[Move]) -> None:
    """What is used is evicted last, as after a hit: a move alone does not touch its source."""
    sources = [pool.blocks[src] for src in dict.fromkeys(move.src for move in moves)]
    idle = [block for block in sources if not block.ref_cnt]
    pool.touch(idle)
    pool.free_blocks(reversed(idle))
