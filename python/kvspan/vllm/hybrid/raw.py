"""Tensors as bytes."""

from __future__ import annotations

import torch

from kvspan.host.pages import Bytes


def to_bytes(tensor: torch.Tensor) -> Bytes:
    """A tensor's bytes, on the host; the last axis is that of the bytes."""
    held: Bytes = tensor.contiguous().cpu().view(torch.uint8).numpy()
    return held


def to_host(into: Bytes, tensor: torch.Tensor) -> None:
    """Write a tensor's bytes to a contiguous part of the host's memory, which may be longer."""
    size = tensor.numel() * tensor.element_size()
    held = torch.from_numpy(into.reshape(-1)[:size]).view(tensor.dtype)
    held.view(tensor.shape).copy_(tensor)


def in_memory_order(pool: torch.Tensor) -> torch.Tensor:
    """A pool of blocks with its axes in the order of their strides, that of the blocks first."""
    rest = sorted(range(1, pool.dim()), key=lambda axis: -pool.stride(axis))
    return pool.permute(0, *rest)
