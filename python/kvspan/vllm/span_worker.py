"""The worker's side of the span connector: moves, attention metadata, copies to the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.forward_context import get_forward_context

from kvspan.vllm.attention import apply
from kvspan.vllm.moving import BlockMover
from kvspan.vllm.span_setup import HostSettings, open_tier
from kvspan.vllm.span_steps import StepMetadata, StepReport
from kvspan.vllm.support import cache_layout, kept, rotary

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig


class SpanWorker:
    """kv_caches: per layer, vLLM's tensor. host: of the tier; None without one.

    Raises UsageError where the tier cannot be made.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_caches: dict[str, torch.Tensor],
        host: HostSettings | None,
    ) -> None:
        model = vllm_config.model_config
        self._block_size = vllm_config.cache_config.block_size
        inv_freq, is_neox = rotary(model.hf_text_config, model.get_head_size())
        layout = cache_layout(vllm_config, self._block_size, model.get_head_size())
        caches = {layer: kept(cache, vllm_config) for layer, cache in kv_caches.items()}
        self._mover = BlockMover(caches, layout, inv_freq, is_neox)
        rank = get_tensor_model_parallel_rank()
        self.tier = open_tier(vllm_config, host, kv_caches, layout, rank) if host else None

    def begin(self, step: StepMetadata) -> None:
        """Attention metadata are built, nothing has run yet."""
        if self.tier is not None and step.host is not None:
            self.tier.begin(step.host)
            if not step.moves:
                self.tier.load(step.host.loads)
        if step.plan:
            apply(step.plan, get_forward_context().attn_metadata, self._block_size)

    def move(self, step: StepMetadata) -> None:
        """Before the forward pass of a step with moves."""
        if not step.moves:
            return
        self._mover.move(step.moves)
        if self.tier is not None and step.host is not None:
            self.tier.load(step.host.loads)

    def move_late(self, step: StepMetadata, layer: str) -> None:
        """When the new keys of a layer are written, before it attends."""
        if step.late:
            self._mover.move(step.late, layer)

    def end(self, step: StepMetadata) -> None:
        """The forward pass is over, or enqueued."""
        if self.tier is not None and step.host is not None and step.host.stores:
            self.tier.keep(step.host.stores)

    def report(self) -> StepReport | None:
        host = self.tier.report() if self.tier is not None else None
        return StepReport(host) if host is not None else None

    def close(self) -> None:
        if self.tier is not None:
            self.tier.close()
