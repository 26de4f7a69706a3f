"""Types of the C++ extension; kvspan.ops documents the functions."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvspan.ops.streams import Stream

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
def stream_handle(stream: Stream) -> int: ...

class CopyJob:
    @property
    def state(self) -> str: ...
    @property
    def num_chunks(self) -> int: ...
    @property
    def num_done(self) -> int: ...
    @property
    def bytes_done(self) -> int: ...
    def wait(self, num_chunks: int, timeout: float | None) -> bool | None: ...
    def wait_on_stream(self, stream: Stream, num_chunks: int) -> bool: ...
    def cancel(self) -> None: ...

class PageLock:
    def __init__(self, memory: Any) -> None: ...

class CopyQueue:
    def __init__(
        self,
        device: str,
        chunk_bytes: int,
        max_bytes_in_flight: int,
        max_bytes_queued: int,
        num_threads: int,
        bytes_per_second: float,
    ) -> None: ...
    def submit(
        self, src: list[Any], dst: list[Any], priority: int, after: Stream, wait_for_room: bool
    ) -> CopyJob | None: ...
    def stats(self) -> dict[str, int]: ...
    def close(self) -> None: ...

UNLIMITED: int

class MoveStats:
    @property
    def num_copies(self) -> int: ...
    @property
    def num_in_place(self) -> int: ...
    @property
    def num_duplicates(self) -> int: ...
    @property
    def num_saved(self) -> int: ...
    @property
    def num_staged(self) -> int: ...
    @property
    def num_cycles(self) -> int: ...
    @property
    def largest_cycle(self) -> int: ...
    @property
    def scratch_used(self) -> int: ...
    @property
    def host_used(self) -> int: ...
    @property
    def num_launches(self) -> int: ...

class MovePlan:
    @property
    def kinds(self) -> npt.NDArray[np.uint8]: ...
    @property
    def src_blocks(self) -> npt.NDArray[np.int64]: ...
    @property
    def dst_blocks(self) -> npt.NDArray[np.int64]: ...
    @property
    def deltas(self) -> npt.NDArray[np.int64]: ...
    @property
    def moves(self) -> npt.NDArray[np.int64]: ...
    @property
    def batch_offsets(self) -> npt.NDArray[np.int64]: ...
    @property
    def fused(self) -> npt.NDArray[np.bool_]: ...
    @property
    def destinations(self) -> npt.NDArray[np.int64]: ...
    @property
    def generations(self) -> npt.NDArray[np.int64]: ...
    @property
    def stats(self) -> MoveStats: ...

def plan_moves(
    src_blocks: Any,
    dst_blocks: Any,
    deltas: Any,
    *,
    ref_counts: Any,
    generations: Any,
    free_blocks: Any,
    scratch_blocks: Any,
    host_blocks: int,
    num_layers: int,
    launch_budget: int,
    max_depth: int,
    max_generations: int,
) -> MovePlan: ...
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
    stream: Stream,
    isa: str,
) -> None: ...
def gated_delta(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    initial_state: Any,
    out: Any,
    final_state: Any,
    cu_seqlens: Any,
    state_layout: str,
    qk_l2norm: bool,
    scale: float,
    num_threads: int,
    stream: Stream,
    isa: str,
) -> None: ...
def causal_conv1d(
    x: Any,
    weight: Any,
    bias: Any,
    state: Any,
    out: Any,
    cu_seqlens: Any,
    silu: bool,
    num_threads: int,
    stream: Stream,
    isa: str,
) -> None: ...
def copy_blocks(
    src: Any,
    dst: Any,
    src_blocks: Any,
    dst_blocks: Any,
    *,
    num_threads: int = 0,
    stream: Stream = 0,
) -> None: ...
