"""Forward passes of a transformers decoder over the paged KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from kvspan import ops
from kvspan.engine.attention import Row, Slots, attend_row, attending
from kvspan.engine.rope import LayerSpec

CHECK_TOKENS = 24  # length of the self-check's prompt
CHECK_TOP = 32  # likeliest tokens that it compares


class KVCache:
    """Keys and values of every layer, in blocks.

    keys[layer]: [num_blocks, block_size, num_kv_heads, head_dim] (NHD), keys after RoPE;
    values[layer]: the same with the value's dim.
    """

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.specs = list(specs)
        self.num_blocks = num_blocks
        self.block_size = block_size

        def empty(spec: LayerSpec, dim: int) -> torch.Tensor:
            shape = (num_blocks, block_size, spec.num_kv_heads, dim)
            return torch.empty(shape, dtype=dtype, device=device)

        self.keys = [empty(spec, spec.head_dim) for spec in specs]
        self.values = [empty(spec, spec.value_dim) for spec in specs]

    @staticmethod
    def bytes_per_block(specs: Sequence[LayerSpec], block_size: int, dtype: torch.dtype) -> int:
        per_token = sum(s.num_kv_heads * (s.head_dim + s.value_dim) for s in specs)
        return int(per_token * dtype.itemsize * block_size)

    def copy(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Copy the tokens in slots src [n] to slots dst [n], none of which is in src, as they are.

        The keys keep the rotation of the position they were computed at.
        """
        for cache in (*self.keys, *self.values):
            slots = cache.flatten(0, 1)
            slots[dst] = slots[src]

    def move(self, src: Sequence[int], dst: Sequence[int], deltas: Sequence[int]) -> None:
        """Copy blocks to other blocks, keys rotated by delta tokens: all as if gathered first."""
        plan = ops.plan_moves(
            np.asarray(src, np.int64), np.asarray(dst, np.int64), np.asarray(deltas, np.int64)
        )
        stream = 0
        if self.keys[0].is_cuda:
            stream = torch.cuda.current_stream(self.keys[0].device).cuda_stream
        ops.run_plan(
            plan,
            self.keys,
            self.values,
            [spec.inv_freq for spec in self.specs],
            is_neox=[spec.is_neox for spec in self.specs],
            stream=stream,
        )


class _Pass:
    """The attention of one forward pass: writes all rows' KV of a layer, then lets rows attend."""

    def __init__(self, cache: KVCache, rows: Sequence[Row]) -> None:
        self.cache = cache
        self.rows = rows
        self.new_slots = torch.cat([row.slots.ids[row.start : row.end] for row in rows])

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        keys, values = self.cache.keys[layer].flatten(0, 1), self.cache.values[layer].flatten(0, 1)
        keys[self.new_slots] = key.transpose(0, 1)
        values[self.new_slots] = value.transpose(0, 1)
        parts, at = [], 0
        for row in self.rows:
            q = query[:, at : at + row.num_tokens]
            parts.append(attend_row(row, q, keys, values, scale, window))
            at += row.num_tokens
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class ModelRunner:
    """Runs rows of many sequences in one forward pass."""

    def __init__(self, model: PreTrainedModel, cache: KVCache) -> None:
        self.model = model
        self.cache = cache

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row]) -> torch.Tensor:
        """Write the KV of all rows; logits [num rows that want them, vocab_size], float32."""
        device = self.model.device
        ids = torch.cat([row.token_ids for row in rows])[None]
        positions = torch.cat([row.query_positions() for row in rows])[None]
        ends = np.cumsum([row.num_tokens for row in rows]) - 1
        last = [int(e) for e, row in zip(ends, rows, strict=True) if row.wants_logits]
        # An int keeps that many; asking for none at all would mean all, so one is computed.
        keep = torch.tensor(last, device=device) if last else 1
        with attending(_Pass(self.cache, rows)):
            out = self.model(
                input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=keep
            )
        return out.logits[0, : len(last)].float()

    @torch.inference_mode()
    def check_against_transformers(self) -> float:
        """Largest log-probability difference to transformers' eager attention on a short prompt.

        Of the CHECK_TOP likeliest tokens: rounding in a 16-bit type moves the unlikely ones far.
        Uses the first blocks of the cache, so it must run before anything is cached.
        """
        device = self.model.device
        vocab = self.model.get_input_embeddings().num_embeddings
        size = self.cache.block_size
        count = min(CHECK_TOKENS, self.cache.num_blocks * size)
        ids = torch.arange(1, count + 1, device=device) * 7919 % vocab
        row = Row(ids, 0, Slots(torch.arange(count, device=device)), wants_logits=True)
        ours = self.forward([row])[0]
        implementation = self.model.config._attn_implementation
        try:
            self.model.set_attn_implementation("eager")
            theirs = self.model(input_ids=ids[None], use_cache=False, logits_to_keep=1).logits[
                0, -1
            ]
        finally:
            self.model.set_attn_implementation(implementation)
        expected = theirs.float().log_softmax(-1)
        top = expected.topk(min(CHECK_TOP, vocab)).indices
        return float((ours.log_softmax(-1) - expected)[top].abs().max())
