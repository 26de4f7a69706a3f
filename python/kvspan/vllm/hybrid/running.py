"""Running one group of linear-attention layers by itself, by the code that the whole model runs.

Where vLLM compiles the model it compiles each group as well, with the same compiler and settings:
sums of other kernels round differently, and the state would not have the bits of a prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from vllm.compilation.backends import set_model_tag
from vllm.compilation.decorators import support_torch_compile
from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context

from kvspan.hybrid.groups import Group
from kvspan.vllm.hybrid.capture import Capture
from kvspan.vllm.hybrid.layers import one_sequence, run_block, run_linear

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_CHUNK = 64  # tokens that the kernels take at a time: runs that are cut there have the same bits


def _model(name: str) -> Callable[..., Any]:
    """A class for one group. vLLM finds compiled code on disk by its class."""

    class GroupModel(nn.Module):
        """The group's layers; of the last one only what its state needs.

        embed: the token embedding, where the inputs are ids. It is run in here as the model does:
        the compiler decides by what stands before where sums are rounded.
        """

        def __init__(self, *, blocks: Sequence[nn.Module], embed: nn.Module | None) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(blocks)
            self.embed = embed

        def forward(self, hidden: Tensor, residual: Tensor | None, positions: Tensor) -> Tensor:
            if self.embed is not None:
                hidden = self.embed(hidden)
            for block in self.blocks[:-1]:
                hidden, residual = run_block(block, hidden, residual, positions)
            last = self.blocks[-1]
            norm = last.input_layernorm
            x = norm(hidden) if residual is None else norm(hidden, residual)[0]
            return run_linear(last.linear_attn, x)

    GroupModel.__qualname__ = f"GroupModel.{name}"
    GroupModel.forward.__qualname__ = f"GroupModel.{name}.forward"
    compiled: Callable[..., Any] = support_torch_compile(
        dynamic_arg_dims={"hidden": 0, "residual": 0, "positions": -1}
    )(GroupModel)
    return compiled


class GroupRunner:
    """Brings a group's states from one position to a later one.

    ids: whether it takes token ids; else rows of the stream before the group, as captured.
    most: tokens of one run. More are run in parts, as vLLM has room for no larger step.
    """

    def __init__(self, config: VllmConfig, decoder: Any, group: Group, capture: Capture) -> None:
        self._config, self._capture = config, capture
        self._device = next(decoder.parameters()).device
        self._hidden_size = decoder.config.hidden_size
        self._names = [decoder.layers[layer].linear_attn.prefix for layer in group.layers]
        self.ids = group.source is None
        self.most = capture.capacity // _CHUNK * _CHUNK or capture.capacity
        # Where images may stand among the tokens vLLM embeds them before the compiled model.
        inside = self.ids and not config.model_config.is_multimodal_model
        self._embed = None if inside or not self.ids else decoder.embed_tokens
        name = f"kvspan_{'first' if self.ids else group.source}"
        with set_current_vllm_config(config), set_model_tag(name):
            self._model = _model(name)(
                vllm_config=config,
                blocks=[decoder.layers[layer] for layer in group.layers],
                embed=decoder.embed_tokens if inside else None,
            )

    @torch.inference_mode()
    def warm_up(self, width: int, dtype: torch.dtype) -> None:
        """Compile, if the engine does. Touches no state. width: of a row."""
        if self._model.do_not_compile:
            return
        n = self._capture.capacity  # as in vLLM's own first pass
        shape, kind = ((n,), torch.int32) if self.ids else ((n, width), dtype)
        with set_current_vllm_config(self._config):
            self._run(torch.zeros(shape, dtype=kind, device=self._device), 0, None)

    def run(self, inputs: Tensor, start: int, slots: Sequence[int]) -> None:
        """inputs: ids [n] or rows [n, width], of at most `most` tokens from position `start` on.

        slots: of the states, for each layer, which are read and written.
        """
        self._run(
            inputs,
            start,
            {
                name: one_sequence(len(inputs), slot, self._device)
                for name, slot in zip(self._names, slots, strict=True)
            },
        )

    def _run(self, inputs: Tensor, start: int, metadata: Any) -> None:
        n = len(inputs)
        residual = None
        if self.ids:
            hidden = inputs.to(torch.int32) if self._embed is None else self._embed(inputs)
        elif inputs.shape[1] == self._hidden_size:
            hidden = inputs.clone()  # vLLM's norms add to it in place
        else:
            hidden, residual = (part.contiguous() for part in inputs.chunk(2, -1))
        positions = torch.arange(start, start + n, device=self._device)
        with (
            self._capture.off(),
            set_forward_context(metadata, self._config, num_tokens=n),
        ):
            self._model(hidden, residual, positions)
