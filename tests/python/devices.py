"""The devices that tests run on: the CPU, and a GPU where there is one."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvspan import _core

HAS_CUDA = _core.cuda_device_count() > 0 and torch.cuda.is_available()
DEVICES = ["cpu", "cuda"] if HAS_CUDA else ["cpu"]


def stream_of(device: str) -> int:
    """torch's current stream, as kvspan's operations take it."""
    return int(torch.cuda.current_stream().cuda_stream) if device == "cuda" else 0


def captured(call: Callable[[], object], device: str) -> Callable[[], object]:
    """A call that repeats one without running its Python again: a CUDA graph; on the CPU the call
    itself. Either way it has run once by then."""
    if device == "cpu":
        call()
        return call
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay
