"""What each forward pass leaves behind for Tail-Replay: rows per token, in buffers that never move.

Chosen modules get a forward hook whose only act is the operation ::

    kvspan::capture(rows!, parts[])       rows[:n] = parts side by side

Eager execution runs the hook; compilation traces it as part of the model, so that the operation is
in the compiled code and in the CUDA graphs, whose replays run no Python. `rows` belongs to its
module and has room for the largest step; rows of padding and of dummy runs are written as well and
mean nothing. The next pass writes over what this one left: whoever wants it copies it out before.
Row i is token i of the flattened batch. Needs torch, not vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kvspan.hybrid.groups import layer_map

Parts = Callable[[Any], list[Tensor]]

_ROWS = "kvspan_rows"  # the buffer of a module
_CAPTURE = "kvspan_capture"  # of a decoder

_library = torch.library.Library("kvspan", "FRAGMENT")
_library.define("capture(Tensor(a!) rows, Tensor[] parts) -> ()")


@torch.library.impl(_library, "capture", "CompositeExplicitAutograd")
def _capture(rows: Tensor, parts: Sequence[Tensor]) -> None:
    """rows [capacity, width]; parts: [n, ...]. What is past the capacity is padding."""
    at = 0
    for part in parts:
        n, width = min(len(part), len(rows)), part.shape[-1]
        rows[:n, at : at + width].copy_(part[:n])
        at += width


@torch.library.register_fake("kvspan::capture", lib=_library)
def _(rows: Tensor, parts: Sequence[Tensor]) -> None:
    return None


class Capture:
    """The buffers of a model. Further rows than the hidden vectors are taken by `tap`.

    capacity: tokens of the largest step.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._modules: dict[str, nn.Module] = {}

    def tap(
        self, name: str, module: nn.Module, width: int, dtype: torch.dtype, parts: Parts
    ) -> None:
        """Keep, under a name, what a module gives for each token.

        parts: from the module's output to tensors [n, ...] that are `width` wide together. It is
        traced when the model is compiled. Call this before the first forward pass.
        """
        device = next(module.parameters()).device
        rows = torch.empty(self.capacity, width, dtype=dtype, device=device)
        module.register_buffer(_ROWS, rows, persistent=False)

        def hook(module: nn.Module, _args: Any, output: Any) -> None:
            torch.ops.kvspan.capture(getattr(module, _ROWS), parts(output))

        module.register_forward_hook(hook)
        self._modules[name] = module

    def rows(self, name: str) -> Tensor:
        """[capacity, width]: of the last pass, row i for token i of its flattened batch."""
        rows: Tensor = getattr(self._modules[name], _ROWS)
        return rows

    @property
    def nbytes(self) -> int:
        return sum(self.rows(name).nbytes for name in self._modules)


def stream(layer: int) -> str:
    """The name of a layer's output."""
    return f"stream.{layer}"


def _pair(output: Any) -> list[Tensor]:
    return [output] if isinstance(output, Tensor) else list(output)


def _sum(output: Any) -> list[Tensor]:
    return [output] if isinstance(output, Tensor) else [output[0] + output[1]]


def capture_streams(
    decoder: Any, capacity: int, dtype: torch.dtype, width: int, pair: bool
) -> Capture:
    """Keep what the groups of linear-attention layers of a decoder start from.

    width: of a hidden vector. pair: (hidden, residual) side by side, else their sum; a model whose
    layers hand on one tensor has only that.
    """
    capture = Capture(capacity)
    layers = decoder.layers
    for index in layer_map([layer.layer_type for layer in layers]).streams:
        capture.tap(
            stream(index), layers[index], width * (1 + pair), dtype, _pair if pair else _sum
        )
    setattr(decoder, _CAPTURE, capture)
    return capture


def capture_of(decoder: nn.Module) -> Capture | None:
    """What `capture_streams` has made of it."""
    found: Capture | None = getattr(decoder, _CAPTURE, None)
    return found
