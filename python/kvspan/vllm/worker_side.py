"""The worker's half of `kvspan.vllm.connector`: what vLLM calls around each forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)
from vllm.logger import init_logger

from kvspan.errors import KvspanError
from kvspan.vllm.span_steps import StepMetadata, StepReport
from kvspan.vllm.span_worker import SpanWorker

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata

    from kvspan.vllm.span_setup import HostSettings

logger = init_logger("vllm.kvspan")


class WorkerSide(KVConnectorBase_V1):
    """Executes what the scheduler's half has planned; nothing where ``_reason`` says why not."""

    _reason: str
    _host_settings: HostSettings | None
    _worker: SpanWorker | None = None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if not self._reason:
            with said_in_log():
                self._worker = SpanWorker(self._vllm_config, kv_caches, self._host_settings)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin(self._metadata())

    def _metadata(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.move(self._metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        # The other moves are over, or ahead on the same stream.
        if self._worker is not None:
            self._worker.move_late(self._metadata(), layer_name)

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        return  # what goes to the host goes once the pass is over

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.end(self._metadata())

    def build_connector_worker_meta(self) -> StepReport | None:
        return self._worker.report() if self._worker is not None else None

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()


@contextmanager
def said_in_log() -> Iterator[None]:
    """What cannot be used stands in one line of the log, above vLLM's tracebacks."""
    try:
        yield
    except KvspanError as error:
        logger.error("kvspan: %s", error)
        raise
