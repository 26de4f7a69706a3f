"""CUDA streams as arguments: handles, and objects of the CUDA stream protocol."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvspan import _core, ops
from kvspan.host import CopyQueue


class Stream:
    """As torch.cuda.Stream and cuda.core.Stream are."""

    def __init__(self, told: Any) -> None:
        self.told = told

    def __cuda_stream__(self) -> Any:
        return self.told


@pytest.mark.parametrize("handle", [0, 1, 2**64 - 1])
def test_handles(handle: int) -> None:
    assert _core.stream_handle(handle) == handle
    assert _core.stream_handle(Stream((0, handle))) == handle


@pytest.mark.parametrize(
    ("stream", "error", "text"),
    [
        (None, TypeError, "stream: expected a cudaStream_t as an int, .* got NoneType"),
        (1.0, TypeError, "an object with __cuda_stream__, got float"),
        (Stream((0, "7")), TypeError, "got str"),
        (Stream((1, 7)), TypeError, r"__cuda_stream__\(\) of Stream: .* \(0, handle\), got \(1, 7"),
        (Stream(7), TypeError, r"expected \(0, handle\), got 7"),
        (2**64, ValueError, "stream: expected a cudaStream_t, got 18446744073709551616"),
    ],
)
def test_what_is_no_stream(stream: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        _core.stream_handle(stream)


def test_taken_wherever_a_stream_is() -> None:
    """On the CPU it is not used."""
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    ops.copy_blocks(x, x, [0], [1], stream=Stream((0, 7)))
    assert x[1].tolist() == [0, 1, 2, 3]
    keys, out = np.ones((1, 2, 1, 4), np.float32), np.zeros((1, 2, 1, 4), np.float32)
    ops.rerope(keys, out, [0], [0], [0], np.ones(2, np.float32), stream=Stream((0, 7)))
    assert out.tolist() == keys.tolist()
    with CopyQueue() as queue:
        job = queue.submit([keys], [out], after=Stream((0, 7)))
        assert job.wait_on_stream(Stream((0, 7)))
        with pytest.raises(TypeError, match="after: expected a cudaStream_t"):
            queue.submit([keys], [out], after=None)  # type: ignore[arg-type]
