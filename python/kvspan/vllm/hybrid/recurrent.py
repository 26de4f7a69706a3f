"""Where vLLM keeps the recurrent states of requests: the slots of linear-attention layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.kv_cache_interface import MambaSpec

from kvspan.vllm.hybrid.orders import Restore, Table

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

NULL_BLOCK = 0  # vLLM's stand-in for blocks that a request does not need


class RecurrentStates:
    """The states of all linear-attention layers.

    A layer has two tensors, its convolution's state and its recurrent one, each with one slot a
    block. In mode "none" a request has one block for as long as it runs; in mode "align" it has a
    column of them, one for every `block_size` tokens, of which vLLM keeps few.

    modules: linear_attn by layer, in order.
    """

    def __init__(self, modules: Mapping[int, Any], caches: KVCacheConfig) -> None:
        self.modules = dict(modules)
        groups = caches.kv_cache_groups
        group_of = {name: gid for gid, group in enumerate(groups) for name in group.layer_names}
        self._group = {layer: group_of[module.prefix] for layer, module in self.modules.items()}
        # Tokens of a block by KV cache group; None: the request has one block.
        self._block_size: dict[int, int | None] = {
            gid: None if spec.mamba_cache_mode == "none" else spec.block_size
            for gid, spec in enumerate(group.kv_cache_spec for group in groups)
            if isinstance(spec, MambaSpec)
        }

    def slot(self, layer: int, table: Table, position: int) -> int:
        """The block with the layer's state once `position` tokens have been run."""
        gid = self._group[layer]
        size = self._block_size[gid]
        return table[gid][0 if size is None else (position - 1) // size]

    def slots(
        self, table: Table, position: int, layers: Sequence[int] | None = None
    ) -> dict[int, int]:
        """`slot` of these layers; None: of all."""
        return {
            layer: self.slot(layer, table, position)
            for layer in (self.modules if layers is None else layers)
        }

    def tensors(
        self, table: Table, position: int, layers: Sequence[int] | None = None
    ) -> list[torch.Tensor]:
        """What is a request's state after `position` tokens: per layer, in order, the
        convolution's and the recurrent one, views of its slot."""
        return [
            part[slot]
            for layer, slot in self.slots(table, position, layers).items()
            for part in self.modules[layer].kv_cache
        ]

    def destination(self, plan: Restore) -> Table:
        """The request's blocks, such that the state at plan.length goes where the pass looks.

        In mode "align" the step's preparation, which has run by now, has moved on to the block in
        which this step ends.
        """
        table = []
        for gid, blocks in enumerate(plan.table):
            size = self._block_size.get(gid)
            if size is not None:
                blocks = [blocks[(plan.length + plan.scheduled - 1) // size]] * len(blocks)
            table.append(blocks)
        return tuple(table)

    def fill_boundary(self, plan: Restore, table: Table) -> None:
        """Mode "align" also keeps the state of a block that ends right at plan.length."""
        for layer, slot in self.slots(table, plan.length).items():
            gid = self._group[layer]
            size = self._block_size[gid]
            if size is None or plan.length % size:
                continue
            kept = plan.table[gid][plan.length // size - 1]
            if kept not in (NULL_BLOCK, slot):
                for part in self.modules[layer].kv_cache:
                    part[kept].copy_(part[slot])
