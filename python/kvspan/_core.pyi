"""Types of the C++ extension; kvspan.ops documents the functions."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

class TokenStore:
    def __init__(self) -> None: ...
    def clear(self) -> None: ...
    @property
    def num_entries(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def num_collisions(self) -> int: ...

class BlockChain:
    def __init__(
        self,
        block_size: int,
        *,
        root: bytes,
        span_root: bytes,
        anchored: bool,
        isa: str,
        store: TokenStore | None,
    ) -> None: ...
    def extend(self, token_ids: Any, spans: Any, extra: Any) -> npt.NDArray[np.uint8]: ...
    @property
    def block_size(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def digest(self) -> bytes: ...

def extend_chains(
    chains: list[BlockChain],
    token_ids: Any,
    cu_seqlens: Any,
    spans: Any,
    cu_spans: Any,
    extra: Any,
    cu_extra: Any,
    num_threads: int,
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]: ...
def built_with_xxhash() -> bool: ...
def sha256_isas() -> tuple[str, ...]: ...
def vector_isas() -> tuple[str, ...]: ...
def built_with_cuda() -> bool: ...
def cuda_device_count() -> int: ...
def plan_moves(
    src_blocks: Any, dst_blocks: Any, deltas: Any, scratch_blocks: Any
) -> list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]]: ...
def rerope(
    k_src: Sequence[Any],
    k_dst: Sequence[Any],
    v_src: Sequence[Any],
    v_dst: Sequence[Any],
    src_blocks: Any,
    dst_blocks: Any,
    deltas: Any,
    inv_freq: Sequence[Any],
    is_neox: Sequence[bool],
    axes: Any,
    rotary_offset: int,
    layout: str,
    num_threads: int,
    stream: int,
    isa: str,
) -> None: ...
def copy_blocks(
    src: Any,
    dst: Any,
    src_blocks: Any,
    dst_blocks: Any,
    *,
    num_threads: int = 0,
    stream: int = 0,
) -> None: ...
