"""The full-attention layers' output vectors, kept per token under the KV pool's own slots."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

# sum: the vector itself. pair: residual and FFN branch apart, for engines that keep them so: twice
# the bytes, and exact where a stored sum would be rounded anew. int8: with a scale per token.
HiddenFormat = Literal["sum", "pair", "int8"]
HIDDEN_FORMATS: tuple[HiddenFormat, ...] = get_args(HiddenFormat)
INT8_MAX = 127


class HiddenCache:
    """num_streams tables of one vector per slot (block * block_size + offset)."""

    def __init__(
        self,
        num_streams: int,
        num_slots: int,
        size: int,
        dtype: torch.dtype,
        device: torch.device,
        format: HiddenFormat = "sum",
    ) -> None:
        self.format = format
        self.dtype = dtype
        stored = torch.int8 if format == "int8" else dtype
        parts = 2 if format == "pair" else 1

        def table(width: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros((num_slots, width), dtype=dtype, device=device)

        self.vectors = [table(parts * size, stored) for _ in range(num_streams)]
        self.scales = [table(1, torch.float32) for _ in range(num_streams * (format == "int8"))]

    @staticmethod
    def bytes_per_token(num_streams: int, size: int, dtype: torch.dtype, format: str) -> int:
        vector = int(size * dtype.itemsize)
        return num_streams * {"sum": vector, "pair": 2 * vector, "int8": size + 4}[format]

    @property
    def exact(self) -> bool:
        """Whether `read` gives the very bits that were written."""
        return self.format != "int8"

    def write(self, stream: int, slots: Tensor, residual: Tensor, branch: Tensor) -> None:
        """Keep residual + branch, [n, H] each, under slots int64 [n]."""
        if self.format == "pair":
            self.vectors[stream][slots] = torch.cat((residual, branch), -1)
            return
        h = residual + branch
        if self.format == "int8":
            scale = (h.float().abs().amax(-1, keepdim=True) / INT8_MAX).clamp_min(1e-30)
            self.scales[stream][slots] = scale
            h = (h.float() / scale).round().to(torch.int8)
        self.vectors[stream][slots] = h

    def read(self, stream: int, slots: Tensor) -> Tensor:
        """[n, H] in the model's dtype."""
        h = self.vectors[stream][slots]
        if self.format == "pair":
            residual, branch = h.chunk(2, -1)
            return residual + branch
        if self.format == "int8":
            return (h.float() * self.scales[stream][slots]).to(self.dtype)
        return h

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy the vectors of slots to other slots, int64 [n] each."""
        for table in (*self.vectors, *self.scales):
            table[target] = table[source]
