"""Attention of a step with one row per segment of a prompt, and positions that spans ask for.

vLLM's attention sees a batch as rows: consecutive queries, and the blocks their keys lie in. A
request that computes spans itself gets a row for every span, whose keys are its anchor and the span
alone, so that one ordinary forward pass gives what the scope says. That takes the parameters a
backend's metadata was built from; the subclass here keeps them on the metadata. The connector
rebuilds it (`apply`) between vLLM's own build and the forward pass, in steps that need it only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from kvspan.vllm.scheduling import Row


class SpanCPUAttentionMetadataBuilder(CPUAttentionMetadataBuilder):
    """vLLM's own builder; what it was given stays on what it built."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUAttentionMetadata:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        metadata.kvspan_built_from = (self, common_attn_metadata)
        return metadata


class SpanCPUAttentionBackend(CPUAttentionBackend):
    """Registered in the place of vLLM's (`kvspan.vllm.plugin`); its name stays the same."""

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return SpanCPUAttentionMetadataBuilder


@dataclass
class StepPlan:
    """What is special about requests of a step, by the block their first token of it goes to.

    Rows of a batch carry no request id, but no two requests write to the same block.
    rows: attention rows of all the request's tokens in this step, in order.
    shifts: ((num_tokens, shift), ...): positions of so many tokens in a row are lower by shift.
    """

    rows: dict[int, list[Row]] = field(default_factory=dict)
    shifts: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.rows or self.shifts)


def apply(plan: StepPlan, attn_metadata: Any, block_size: int) -> None:
    """Rewrites positions in place and replaces metadata in attn_metadata ({layer: metadata})."""
    if not isinstance(attn_metadata, dict):
        raise TypeError(f"attention metadata: expected a dict, got {type(attn_metadata).__name__}")
    rebuilt: dict[int, Any] = {}
    for layer, metadata in attn_metadata.items():
        if id(metadata) not in rebuilt:
            builder, common = metadata.kvspan_built_from
            if not rebuilt:  # layers share the positions
                _shift(plan.shifts, common, block_size)
            split = _split(plan.rows, common, block_size)
            rebuilt[id(metadata)] = metadata if split is None else builder.build(0, split)
        attn_metadata[layer] = rebuilt[id(metadata)]


def _requests(common: CommonAttentionMetadata, block_size: int) -> list[tuple[int, int, int]]:
    """(first token, end, block its key goes to) of every row that has tokens in this step."""
    bounds = common.query_start_loc_cpu.tolist()
    slots = common.slot_mapping
    return [
        (lo, hi, int(slots[lo]) // block_size if hi > lo else -1) for lo, hi in pairwise(bounds)
    ]


def _shift(
    shifts: Mapping[int, Sequence[tuple[int, int]]],
    common: CommonAttentionMetadata,
    block_size: int,
) -> None:
    if not shifts:
        return
    positions = common.positions
    if positions is None:
        raise TypeError("attention metadata without positions")
    for lo, hi, block in _requests(common, block_size):
        at = lo
        for num_tokens, shift in shifts.get(block, ()):
            positions[at : at + num_tokens] -= shift
            at += num_tokens
        if block in shifts and at != hi:
            raise AssertionError(f"shifts of {at - lo} tokens for a row of {hi - lo}")


def _split(
    rows: Mapping[int, Sequence[Row]], common: CommonAttentionMetadata, block_size: int
) -> CommonAttentionMetadata | None:
    """The metadata with more rows, or None when no request of this batch has any."""
    if not rows:
        return None
    table = common.block_table_tensor
    query_start, seq_lens, tables = [0], [], []
    found = False
    lens = common.seq_lens.tolist()
    for r, (lo, hi, block) in enumerate(_requests(common, block_size)):
        own = rows.get(block)
        if own is None:
            query_start.append(query_start[-1] + hi - lo)
            seq_lens.append(lens[r])
            tables.append(table[r])
            continue
        found = True
        if sum(row.num_tokens for row in own) != hi - lo:
            raise AssertionError(f"rows {own} for {hi - lo} tokens")
        for row in own:
            query_start.append(query_start[-1] + row.num_tokens)
            seq_lens.append(row.seq_len)
            tables.append(_row_table(table[r], row))
    if not found:
        return None
    starts = torch.tensor(query_start, dtype=common.query_start_loc_cpu.dtype)
    lengths = torch.tensor(seq_lens, dtype=common.seq_lens.dtype)
    device = common.seq_lens.device
    return common.replace(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=lengths.to(device),
        seq_lens_cpu_upper_bound=None if common.seq_lens_cpu_upper_bound is None else lengths,
        num_reqs=len(seq_lens),
        max_query_len=int((starts[1:] - starts[:-1]).max()),
        max_seq_len=max(seq_lens),
        block_table_tensor=torch.stack(tables),
        is_prefilling=None,
        req_idx=None,
        _num_computed_tokens_cache=None,
        _token_to_req_indices_cache=None,
    )


def _row_table(table: torch.Tensor, row: Row) -> torch.Tensor:
    """[max_blocks] of a row: its prefix blocks, then the request's from first_block on."""
    if not row.first_block and not row.prefix:
        return table
    out = torch.zeros_like(table)
    count = len(row.prefix)
    if count:
        out[:count] = torch.tensor(row.prefix, dtype=table.dtype)
    own = table[row.first_block :][: len(table) - count]
    out[count : count + len(own)] = own
    return out
