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

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kvspan.hybrid.groups import layer_map

_LEAST_STAGED = 1 << 26  # bytes
Parts = Callable[[Any], list[Tensor]]

# Models alive. vLLM gives a connector the attention layers only, not the decoder around them.
_decoders: weakref.WeakSet[nn.Module] = weakref.WeakSet()

_library = torch.library.Library("kvspan", "FRAGMENT")
# The parts are not written, but declared so: code compiled from what follows then goes on with the
# values that were captured, and does not compute them anew with more digits than are stored.
_library.define("capture(Tensor(a!) rows, Tensor(b!)[] parts) -> ()")


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

    capacity: tokens of the largest step. staging, ring: of `StagedSaving` and `StagedLoading`, made
    here so that vLLM's profile of memory counts them; None on the CPU.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.staging: Tensor | None = None
        self.ring: Tensor | None = None
        self._rows: dict[str, Tensor] = {}
        self._off = False

    def tap(
        self, name: str, module: nn.Module, width: int, dtype: torch.dtype, parts: Parts
    ) -> None:
        """Keep, under a name, what a module gives for each token.

        parts: from the module's output to tensors [n, ...] that are `width` wide together. It is
        traced when the model is compiled. Call this before the first forward pass.
        """
        device = next(module.parameters()).device
        # A tensor of its own for each, since compiled code takes views of one badly. No buffer of
        # the module: it is no weight, neither for checksums nor for a sleeping engine.
        rows = torch.empty(self.capacity, width, dtype=dtype, device=device)
        module.kvspan_rows = rows

        def hook(module: nn.Module, _args: Any, output: Any) -> None:
            if self._off:
                return
            torch.ops.kvspan.capture(module.kvspan_rows, parts(output))

        module.register_forward_hook(hook)
        self._rows[name] = rows

    @contextmanager
    def off(self) -> Iterator[None]:
        """Modules called in here, or traced for later calls, leave nothing behind."""
        self._off = True
        try:
            yield
        finally:
            self._off = False

    def rows(self, name: str) -> Tensor:
        """[capacity, width]: of the last pass, row i for token i of its flattened batch."""
        return self._rows[name]

    @property
    def largest(self) -> int:
        """Bytes of the largest buffer."""
        return max((rows.nbytes for rows in self._rows.values()), default=0)

    @property
    def nbytes(self) -> int:
        return sum(rows.nbytes for rows in self._rows.values())


def stream(layer: int) -> str:
    """The name of a layer's output."""
    return f"stream.{layer}"


def _side_by_side(output: Any) -> list[Tensor]:
    return [output] if isinstance(output, Tensor) else list(output)


def _sum(output: Any) -> list[Tensor]:
    return [output] if isinstance(output, Tensor) else [output[0] + output[1]]


def capture_streams(
    decoder: Any, hidden_size: int, dtype: torch.dtype, *, pair: bool, capacity: int
) -> Capture:
    """Keep what the groups of linear-attention layers of a decoder start from.

    pair: (hidden, residual) side by side, else their sum. Layers that hand on one tensor have only
    that. Call this before the first forward pass.
    """
    capture = Capture(capacity)
    layers = decoder.layers
    for index in layer_map([layer.layer_type for layer in layers]).streams:
        two = pair and "residual" in inspect.signature(type(layers[index]).forward).parameters
        parts = _side_by_side if pair else _sum
        capture.tap(stream(index), layers[index], hidden_size * (1 + two), dtype, parts)
    device = next(decoder.parameters()).device
    if device.type != "cpu":
        nbytes = max(capture.nbytes, _LEAST_STAGED)
        capture.staging = torch.empty(nbytes, dtype=torch.uint8, device=device)
        nbytes = 2 * capture.largest  # one is used while another arrives
        capture.ring = torch.empty(nbytes, dtype=torch.uint8, device=device)
    decoder.kvspan_capture = capture
    _decoders.add(decoder)
    return capture


def captured(layers: Mapping[str, Any]) -> tuple[Any, Capture]:
    """The decoder that `capture_streams` was called for and that has these linear_attn layers.

    layers: by name, as in vLLM's static_forward_context, which may hold others as well.
    RuntimeError where there is none.
    """
    known = {id(layer) for layer in layers.values()}
    for decoder in _decoders:
        if any(id(getattr(layer, "linear_attn", None)) in known for layer in decoder.layers):
            return decoder, decoder.kvspan_capture
    raise RuntimeError(
        "kvspan: the model was built without the buffers of kvspan; "
        "expected that of kvspan.vllm.hybrid.models"
    )
