"""The core operations: block hashes, move plans, key rotation and block copies.

Every tensor argument is a numpy array or any tensor with DLPack support (torch among them) and is
used in place, never copied. Importing this module imports numpy and the C++ extension, not torch.

Names of shapes: ``num_blocks`` blocks of a paged KV pool, ``block_size`` tokens per block,
``num_kv_heads`` and ``head_dim`` of the attention layer. Block tensors are written NHD,
``[num_blocks, block_size, num_kv_heads, head_dim]``; an HND pool is passed as a permuted view.
"""

from __future__ import annotations

from kvspan import _core
from kvspan.ops.gated_delta import causal_conv1d, gated_delta, gated_delta_state
from kvspan.ops.hash import (
    BlockChain,
    ExtraRange,
    TokenStore,
    built_with_xxhash,
    digest_fields,
    extend_chains,
    sha256_isas,
)
from kvspan.ops.moves import CHOOSE_BLOCK, MovePlan, MoveStats, StepKind, plan_moves, run_plan
from kvspan.ops.rerope import copy_blocks, rerope, rerope_layers, vector_isas
from kvspan.ops.streams import CudaStream, Stream

__all__ = [
    "CHOOSE_BLOCK",
    "BlockChain",
    "CudaStream",
    "ExtraRange",
    "MovePlan",
    "MoveStats",
    "StepKind",
    "Stream",
    "TokenStore",
    "built_with_xxhash",
    "causal_conv1d",
    "copy_blocks",
    "cuda_status",
    "digest_fields",
    "extend_chains",
    "gated_delta",
    "gated_delta_state",
    "plan_moves",
    "rerope",
    "rerope_layers",
    "run_plan",
    "sha256_isas",
    "vector_isas",
]


def cuda_status() -> str:
    """One line on CUDA: not in this build, in it without a usable device, or the device count."""
    if not _core.built_with_cuda():
        return "built without CUDA"
    count = _core.cuda_device_count()
    return f"{count} CUDA device(s)" if count else "no CUDA device"
