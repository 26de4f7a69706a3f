"""The worker's side: moves blocks of vLLM's KV cache, keys rotated, in all layers at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from kvspan import ops

Layout = Literal["token_rows", "cpu_vec", "cpu_amx"]


@dataclass
class BlockMover:
    """caches: per layer, vLLM's tensor [num_blocks, num_kv_heads, block_size, 2 * head_dim].

    8-bit floats are not vLLM's integers here, but of their own type (`kvspan.vllm.support.kept`).

    layout: "cpu_vec" or "cpu_amx" for vLLM's CPU attention, whose blocks hold all keys and then all
    values; "token_rows" for GPU attention, whose rows hold a key and then its value.
    inv_freq: float32 [rotary_dim / 2], the same for all layers.
    """

    caches: Mapping[str, torch.Tensor]
    layout: Layout
    inv_freq: torch.Tensor
    is_neox: bool

    def move(self, moves: list[tuple[int, int, int]], layer: str | None = None) -> None:
        """Moves (source block, destination block, delta tokens), as if all were gathered first.

        layer: the only layer to do it in; None means all.
        """
        if not moves:
            return
        src, dst, delta = (np.asarray(column, np.int64) for column in zip(*moves, strict=True))
        # A source that some move overwrites is copied aside first, already rotated.
        aside = np.isin(src, dst) & (src != dst)
        caches = self.caches.values() if layer is None else [self.caches[layer]]
        pools = [self._view(cache) for cache in caches]
        if aside.any():
            count = int(aside.sum())
            buffers = [pool.new_empty((count, *pool.shape[1:])) for pool in pools]
            order = np.arange(count)
            self._run(pools, buffers, src[aside], order, delta[aside])
            self._run(pools, pools, src[~aside], dst[~aside], delta[~aside])
            self._run(buffers, pools, order, dst[aside], np.zeros(count, np.int64))
        else:
            self._run(pools, pools, src, dst, delta)

    def _view(self, cache: torch.Tensor) -> torch.Tensor:
        """As `ops.rerope_layers` wants it: [num_blocks, block_size, heads, 2 D] for token rows."""
        return cache.transpose(1, 2) if self.layout == "token_rows" else cache

    def _run(
        self,
        source: list[torch.Tensor],
        target: list[torch.Tensor],
        src: np.ndarray,
        dst: np.ndarray,
        delta: np.ndarray,
    ) -> None:
        if not len(src):
            return
        stream = torch.cuda.current_stream(source[0].device).cuda_stream if source[0].is_cuda else 0
        ops.rerope_layers(
            source,
            target,
            (),
            (),
            src,
            dst,
            delta,
            [self.inv_freq] * len(source),
            is_neox=self.is_neox,
            layout=self.layout,
            stream=stream,
        )
