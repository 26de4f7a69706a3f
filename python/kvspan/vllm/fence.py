"""What copies of a queue wait for, so that they come after the device's work so far."""

from __future__ import annotations

import torch

from kvspan.ops import Stream


class Fence:
    """device: of the caches."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def behind(self) -> Stream:
        """CUDA: a stream that comes after all that is enqueued by now, never the legacy default
        one, whose handle means none to a queue; 0 on the CPU, where all is done."""
        if self._stream is None:
            return 0
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        stream: Stream = self._stream
        return stream

    def current(self) -> Stream:
        """CUDA: the stream that the model runs on, to make it wait; 0 on the CPU."""
        if self._stream is None:
            return 0
        stream: Stream = torch.cuda.current_stream(self._device)
        return stream
