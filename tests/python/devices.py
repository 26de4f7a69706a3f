"""The devices that tests run on: the CPU, and where there are some a GPU, and one that is not the
current device."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvspan import _core

_COUNT = torch.cuda.device_count() if _core.cuda_device_count() else 0
DEVICES = ["cpu", "cuda", "cuda:1"][: 1 + _COUNT]


def stream_of(device: str) -> int:
    """torch's current stream, as kvspan's operations take it."""
    return 0 if device == "cpu" else int(torch.cuda.current_stream(device).cuda_stream)


def captured(call: Callable[[], object], device: str) -> Callable[[], object]:
    """A call that repeats one without running its Python again: a CUDA graph; on the CPU the call
    itself. Either way it has run once by then."""
    if device == "cpu":
        call()
        return call
    with torch.cuda.device(device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()

    def replay() -> None:
        with torch.cuda.device(device):
            graph.replay()

    return replay
