"""vLLM's own offloading connector with a worker for CPUs: its host blocks are copies of rows.

vLLM's spec refuses to run without a GPU; only the copying is replaced here.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "HostSpec",
        "spec_module_path": "host_offloading",
        "cpu_bytes_to_use": 256 << 20,
    },
}


class HostWorker(OffloadingWorker):
    copied: ClassVar[dict[str, int]] = {"stored": 0, "loaded": 0}

    def __init__(self, kv_caches: CanonicalKVCaches, num_chunks: int) -> None:
        self.tensors = [part.tensor for part in kv_caches.tensors]
        self.host = [torch.empty_like(t[:1]).repeat(num_chunks, 1) for t in self.tensors]
        self.finished: list[TransferResult] = []

    def _copy(self, job_id: int, what: str, src: list[torch.Tensor], dst: list[torch.Tensor],
              specs: tuple[LoadStoreSpec, LoadStoreSpec]) -> bool:  # fmt: skip
        rows = []
        for spec in specs:
            assert isinstance(spec, BlockIDsLoadStoreSpec)
            rows.append(torch.as_tensor(spec.block_ids).long())
        for source, target in zip(src, dst, strict=True):
            target[rows[1]] = source[rows[0]]
        self.copied[what] += len(rows[0])
        self.finished.append(TransferResult(job_id, True))
        return True

    def submit_store(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._copy(job_id, "stored", self.tensors, self.host, (src_spec, dst_spec))

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._copy(job_id, "loaded", self.host, self.tensors, (src_spec, dst_spec))

    def get_finished(self) -> list[TransferResult]:
        finished, self.finished = self.finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        return


class HostSpec(CPUOffloadingSpec):
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        return HostWorker(kv_caches, self.num_chunks)
