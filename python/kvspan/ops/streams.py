"""CUDA streams as arguments."""

from __future__ import annotations

from typing import Protocol


class CudaStream(Protocol):
    """The CUDA stream protocol: ``torch.cuda.Stream``, ``cuda.core.Stream`` and others have it."""

    def __cuda_stream__(self) -> tuple[int, int]:
        """0, the protocol's version, and the ``cudaStream_t``."""


Stream = int | CudaStream  # the cudaStream_t itself; 0: the default stream
