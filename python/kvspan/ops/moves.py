"""CIDRA: plans of concurrent block moves, in place where that is safe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from kvspan import _core
from kvspan.ops._arrays import Int64Array, as_int64
from kvspan.ops.rerope import rerope_layers
from kvspan.ops.streams import Stream

CHOOSE_BLOCK = -1
"""As a destination: the planner chooses the block."""


class StepKind(IntEnum):
    """What a step of a plan does with its block."""

    IN_PLACE = 0
    """Rotate keys where they are; values stay."""
    COPY = 1
    """Copy, keys rotated."""
    DUPLICATE = 2
    """The same, from a block that another move reads too: all but one of a source's moves."""
    TO_SCRATCH = 3
    """Copy, unrotated, to a scratch block: opens a cycle or cuts a chain."""
    FROM_SCRATCH = 4
    """Copy from a scratch block, keys rotated."""
    TO_HOST = 5
    """Copy, unrotated, to the host; ``dst_blocks`` then counts host blocks."""
    FROM_HOST = 6
    """Copy from the host, keys rotated; ``src_blocks`` then counts host blocks."""


@dataclass(frozen=True)
class MoveStats:
    """Counts of a plan.

    Attributes:
        num_copies: steps that write another block than they read: all but those in place.
        num_in_place, num_duplicates: steps of that kind.
        num_saved, num_staged: blocks saved in scratch blocks, on the host.
        num_cycles, largest_cycle: cycles of two moves or more; the moves of the largest.
        scratch_used, host_used: scratch and host blocks in use at a time.
        num_launches: one for each fused batch, ``num_layers`` for another.
    """

    num_copies: int
    num_in_place: int
    num_duplicates: int
    num_saved: int
    num_staged: int
    num_cycles: int
    largest_cycle: int
    scratch_used: int
    host_used: int
    num_launches: int


@dataclass(frozen=True)
class MovePlan:
    """Steps in batches to be run one after the other; plain data, which may be pickled.

    The steps of a batch may run in any order or at once: no block is written twice, or read by one
    step and written by another. Running the batches in order gives what gathering all sources first
    and scattering them afterwards would. Arrays are read-only.

    Attributes:
        kinds: ``[num_steps]`` uint8, see :class:`StepKind`.
        src_blocks, dst_blocks: ``[num_steps]`` int64, block ids; of the host for
            ``FROM_HOST`` and ``TO_HOST``.
        deltas: ``[num_steps]`` int64, tokens to rotate by.
        moves: ``[num_steps]`` int64, the move that a step completes; -1 where it saves a block.
        batch_offsets: ``[num_batches + 1]`` int64; batch ``b`` holds the steps from
            ``batch_offsets[b]`` on, up to ``batch_offsets[b + 1]``. No batch is empty.
        fused: ``[num_batches]`` bool, whether the batch is small enough for one launch for all
            layers.
        destinations: ``[num_moves]`` int64, the block that each move ends in, as given or chosen.
        generations: ``[num_moves]`` int64, how often that block has been rotated afterwards.
        stats: see :class:`MoveStats`.
    """

    kinds: npt.NDArray[np.uint8]
    src_blocks: Int64Array
    dst_blocks: Int64Array
    deltas: Int64Array
    moves: Int64Array
    batch_offsets: Int64Array
    fused: npt.NDArray[np.bool_]
    destinations: Int64Array
    generations: Int64Array
    stats: MoveStats

    @property
    def num_steps(self) -> int:
        """Steps of all batches, those through scratch and host blocks included."""
        return len(self.kinds)

    @property
    def num_batches(self) -> int:
        """Batches, to be run one after the other."""
        return len(self.fused)

    def batches(self) -> Iterator[slice]:
        """Each batch's range of the step arrays."""
        start = 0
        for end in self.batch_offsets[1:].tolist():
            yield slice(start, end)
            start = end


def plan_moves(
    src_blocks: Any,
    dst_blocks: Any,
    deltas: Any,
    scratch_blocks: Any = (),
    *,
    ref_counts: Any = (),
    generations: Any = (),
    free_blocks: Any = (),
    host_blocks: int = 0,
    num_layers: int = 1,
    launch_budget: int | None = None,
    max_depth: int | None = None,
    max_generations: int | None = None,
) -> MovePlan:
    """Plan the moves of many requests over one pool (CIDRA, Span Queries, arXiv 2511.02749).

    A move wants a block to hold what block ``src`` held, keys rotated by ``delta`` tokens;
    destinations of some may be sources of others. Sources wanted several times are duplicated,
    cycles (strongly connected components) are opened by saving one of their blocks, and the
    components that save blocks are bin-packed, first-fit decreasing, into the scratch blocks there
    are. A permutation costs one copy for each block that changes places and one for each cycle.
    ``cpp/include/kvspan/block_moves.h`` states every rule. A million moves take well under a
    second, and planning is linear in them, but for sorting cycles by size and, with a launch
    budget, moves by urgency.

    Args:
        src_blocks: ``[num_moves]`` int64 block ids (or a list of ints); repeats are fine.
        dst_blocks: ``[num_moves]`` int64 block ids, distinct, or :data:`CHOOSE_BLOCK` where the
            planner chooses: in place if nobody references the source and no other move goes there,
            else the next free block. A move with ``src == dst`` rotates in place, values untouched;
            with delta 0 it is left out.
        deltas: ``[num_moves]`` int64, tokens to rotate by.
        scratch_blocks: int64 block ids that may be overwritten; distinct, none of them in use by a
            move. One is enough for any number of cycles; with more, cycles run side by side.
        ref_counts: ``[num_blocks]`` int64, references to what each block holds now, these moves'
            not counted (a block that a request was just given as a destination has none). A
            referenced block is never written. Empty: none is referenced.
        generations: ``[num_blocks]`` int64, how often each block was rotated since its keys were
            computed. Empty: never.
        free_blocks: int64 block ids, distinct, not in use by a move; chosen from the first on.
        host_blocks: blocks that may be staged on the host at a time, for components that need more
            scratch blocks than there are; 0 forbids it.
        num_layers: layers that every step is done for.
        launch_budget: steps x layers in one launch. A batch has at most that many steps, and is
            fused (one launch for all layers) if its steps times ``num_layers`` are not more. None:
            no limit.
        max_depth: batches (2 or more) that moves which wait for each other may take; longer chains
            and cycles are cut into pieces that run side by side, at one more saved block a cut.
            Waits for a scratch block to be given back are not counted. None: no limit.
        max_generations: rotations that a block may have behind it; bounds the drift of keys in
            16-bit storage (bf16: about n * 2**-8 of a key's length at most). None: no limit.

    Raises:
        ValueError: for repeated destinations, unequal lengths, bad ids, a referenced destination, a
            source rotated too often, or too few free or scratch blocks (the message says how many
            are needed).
        TypeError: for arrays that are not int64.
    """
    plan = _core.plan_moves(
        as_int64(src_blocks),
        as_int64(dst_blocks),
        as_int64(deltas),
        ref_counts=as_int64(ref_counts),
        generations=as_int64(generations),
        free_blocks=as_int64(free_blocks),
        scratch_blocks=as_int64(scratch_blocks),
        host_blocks=host_blocks,
        num_layers=num_layers,
        launch_budget=_core.UNLIMITED if launch_budget is None else launch_budget,
        max_depth=_core.UNLIMITED if max_depth is None else max_depth,
        max_generations=_core.UNLIMITED if max_generations is None else max_generations,
    )
    stats = MoveStats(**{name: getattr(plan.stats, name) for name in MoveStats.__annotations__})
    return MovePlan(
        kinds=plan.kinds,
        src_blocks=plan.src_blocks,
        dst_blocks=plan.dst_blocks,
        deltas=plan.deltas,
        moves=plan.moves,
        batch_offsets=plan.batch_offsets,
        fused=plan.fused,
        destinations=plan.destinations,
        generations=plan.generations,
        stats=stats,
    )


def run_plan(
    plan: MovePlan,
    keys: Sequence[Any],
    values: Sequence[Any],
    inv_freq: Sequence[Any],
    *,
    deltas: Any = None,
    is_neox: bool | Sequence[bool] = True,
    **options: Any,
) -> None:
    """Run all batches of a plan on the pools of all layers.

    Args:
        plan: of :func:`plan_moves`; its blocks, scratch blocks included, are those of the pools.
        keys: one pool a layer, read and **written**, as for :func:`rerope_layers`. Plans that stage
            blocks on the host need numpy arrays or torch tensors; copies to the host then wait for
            the stream.
        values: likewise; or empty where they are not moved beside the keys.
        inv_freq, is_neox: as for :func:`rerope_layers`.
        deltas: ``[num_moves, num_axes]`` int64, tokens of each move on each position axis (M-RoPE);
            all zero exactly where the plan was given 0. None: the plan's own.
        options: ``axes``, ``rotary_offset``, ``layout``, ``num_threads``, ``stream``, ``isa`` of
            :func:`rerope_layers`.

    Raises:
        ValueError, TypeError, RuntimeError: as for :func:`rerope_layers`.
    """
    neox = [is_neox] * len(keys) if isinstance(is_neox, bool) else list(is_neox)
    tokens = plan.deltas if deltas is None else _step_deltas(plan, deltas)

    def rotate(src: Int64Array, dst: Int64Array, by: Int64Array, first: int, last: int) -> None:
        rerope_layers(
            keys[first:last],
            keys[first:last],
            values[first:last],
            values[first:last],
            src,
            dst,
            by,
            inv_freq[first:last],
            is_neox=neox[first:last],
            **options,
        )

    host = _HostBlocks([*keys, *values], plan, options.get("stream", 0))
    for batch, fused in zip(plan.batches(), plan.fused.tolist(), strict=True):
        src, dst, by = plan.src_blocks[batch], plan.dst_blocks[batch], tokens[batch]
        if plan.stats.num_staged:
            kinds = plan.kinds[batch]
            to_host, from_host = kinds == StepKind.TO_HOST, kinds == StepKind.FROM_HOST
            host.store(src[to_host], dst[to_host])
            host.load(src[from_host], dst[from_host])
            # What came from the host is rotated where it now is.
            src = np.where(from_host, dst, src)[~to_host]
            dst, by = dst[~to_host], by[~to_host]
        if len(src) == 0:
            continue
        if fused:
            rotate(src, dst, by, 0, len(keys))
        else:
            for layer in range(len(keys)):
                rotate(src, dst, by, layer, layer + 1)


def _step_deltas(plan: MovePlan, deltas: Any) -> Int64Array:
    """Per-axis tokens of every step: those of the move it completes, none where it saves."""
    per_move = np.asarray(deltas)
    if per_move.ndim != 2 or len(per_move) != len(plan.destinations) or per_move.dtype != np.int64:
        raise ValueError(
            f"deltas: expected int64 [{len(plan.destinations)}, num_axes] like the plan's moves, "
            f"got {per_move.dtype} {list(per_move.shape)}"
        )
    completes = plan.moves >= 0
    steps = np.zeros((plan.num_steps, per_move.shape[1]), np.int64)
    steps[completes] = per_move[plan.moves[completes]]
    return steps


class _HostBlocks:
    """A plan's host blocks, of every tensor; they take no part in rotations."""

    def __init__(self, tensors: Sequence[Any], plan: MovePlan, stream: Stream) -> None:
        if plan.stats.num_staged == 0:
            return
        # As bytes where elements are 8-bit floats, which frameworks cannot index.
        self.tensors = [
            t.view(np.uint8 if isinstance(t, np.ndarray) else _torch().uint8)
            if t.dtype.itemsize == 1
            else t
            for t in tensors
        ]
        self.stream = _core.stream_handle(stream)
        self.blocks = [self._empty(t, plan.stats.host_used) for t in self.tensors]

    @staticmethod
    def _empty(tensor: Any, count: int) -> Any:
        shape = (count, *tensor.shape[1:])
        if isinstance(tensor, np.ndarray):
            return np.empty(shape, tensor.dtype)
        return tensor.new_empty(shape, device="cpu")

    def _on_stream(self) -> AbstractContextManager[Any]:
        tensor = self.tensors[0]
        if isinstance(tensor, np.ndarray) or not tensor.is_cuda:
            return nullcontext()
        cuda = _torch().cuda
        if self.stream == 0:
            return cuda.stream(cuda.default_stream(tensor.device))  # type: ignore[no-any-return]
        stream = cuda.ExternalStream(self.stream, device=tensor.device)
        return cuda.stream(stream)  # type: ignore[no-any-return]

    def store(self, src: Int64Array, dst: Int64Array) -> None:
        """Blocks src of the pools -> host blocks dst."""
        if len(src) == 0:
            return
        with self._on_stream():
            for tensor, blocks in zip(self.tensors, self.blocks, strict=True):
                taken = tensor[src.tolist()]
                blocks[dst.tolist()] = taken if isinstance(taken, np.ndarray) else taken.cpu()

    def load(self, src: Int64Array, dst: Int64Array) -> None:
        """Host blocks src -> blocks dst of the pools."""
        if len(src) == 0:
            return
        with self._on_stream():
            for tensor, blocks in zip(self.tensors, self.blocks, strict=True):
                taken = blocks[src.tolist()]
                is_array = isinstance(taken, np.ndarray)
                tensor[dst.tolist()] = taken if is_array else taken.to(tensor.device)


def _torch() -> Any:
    """torch, for its tensors only: importing kvspan.ops does not need it."""
    import torch

    return torch
