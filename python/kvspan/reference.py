"""Naive twins of the operations in :mod:`kvspan.ops`: slow, short, and the truth for tests.

Nothing here shares code with the C++ core. Needs torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch

Spans = Sequence[tuple[int, int]]
Extra = Sequence[tuple[int, int, bytes]]


def block_keys(
    token_ids: Sequence[int],
    block_size: int,
    *,
    root: bytes,
    span_root: bytes,
    anchored: bool,
    spans: Spans = (),
    extra: Extra = (),
    digest: Callable[[bytes], bytes] = lambda message: hashlib.sha256(message).digest(),
) -> tuple[list[bytes], bytes]:
    """Keys of all full blocks of a prompt and the final outer digest; twin of ``BlockChain``.

    Args:
        token_ids: ids in [0, 2**32).
        spans: ``(start, end)`` in tokens, sorted, disjoint, multiples of ``block_size``.
        extra: ``(start, end, digest)``, sorted, disjoint.
        digest: 32 bytes of a message.
    """

    def hashed(tag: str, *parts: bytes) -> bytes:
        return digest(tag.encode().ljust(16, b"\0") + b"".join(parts))

    def number(value: int) -> bytes:
        return value.to_bytes(8, "little", signed=True)

    def blocks(start: int, end: int, parent: bytes) -> bytes:
        for first in range(start, end - block_size + 1, block_size):
            for begin, stop, content in extra:
                if begin < stop and begin < first + block_size and stop > first:
                    place = number(begin - first) + number(stop - begin)
                    parent = hashed("kvspan/1 extra", parent, content, place)
            ids = token_ids[first : first + block_size]
            tokens = b"".join(int(i).to_bytes(4, "little") for i in ids)
            parent = hashed("kvspan/1 block", parent, tokens)
            keys.append(parent)
        return parent

    keys: list[bytes] = []
    outer, anchor, position = root, bytes(32), 0
    filled = [span for span in spans if span[0] < span[1]]
    for start, end in filled:
        outer = blocks(position, start, outer)
        if anchored and start == filled[0][0]:
            anchor = outer
        span_digest = blocks(start, end, hashed("kvspan/1 span", span_root, anchor))
        outer = hashed("kvspan/1 absorb", outer, span_digest)
        position = end
    outer = blocks(position, len(token_ids), outer)
    return keys, outer


def move_blocks(
    pool: torch.Tensor, src_blocks: Sequence[int], dst_blocks: Sequence[int]
) -> torch.Tensor:
    """The pool after all moves at once: gather every source, then scatter.

    Args:
        pool: ``[num_blocks, ...]``, any dtype; not written.
        src_blocks: ``[num_moves]``.
        dst_blocks: ``[num_moves]``, distinct.
    """
    moved = pool.clone()
    moved[list(dst_blocks)] = pool[list(src_blocks)]
    return moved


def rotate(
    keys: torch.Tensor, deltas: Sequence[int], inv_freq: torch.Tensor, *, is_neox: bool = True
) -> torch.Tensor:
    """Keys moved by ``deltas`` tokens, in float64 throughout and not rounded.

    Args:
        keys: ``[num_moves, block_size, num_kv_heads, head_dim]``.
        deltas: ``[num_moves]`` tokens.
        inv_freq: ``[rotary_dim / 2]`` float32.
        is_neox: pairs ``(i, i + rotary_dim / 2)``, else ``(2i, 2i + 1)``.

    Returns:
        float64, the shape of ``keys``.
    """
    half = len(inv_freq)
    first = slice(0, half) if is_neox else slice(0, 2 * half, 2)
    second = slice(half, 2 * half) if is_neox else slice(1, 2 * half, 2)
    angle = torch.tensor(list(deltas), dtype=torch.float64)[:, None] * inv_freq.double()
    cos, sin = angle.cos()[:, None, None, :], angle.sin()[:, None, None, :]
    x = keys.double()
    out = x.clone()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


def rerope(
    k_src: torch.Tensor,
    k_dst: torch.Tensor,
    src_blocks: Sequence[int],
    dst_blocks: Sequence[int],
    deltas: Sequence[int],
    inv_freq: torch.Tensor,
    *,
    is_neox: bool = True,
) -> None:
    """Twin of :func:`kvspan.ops.rerope`; reads all sources before it writes, so any moves will do.

    Dimensions from ``rotary_dim`` on, and whole blocks of delta 0, keep their bits.
    """
    gathered = k_src[list(src_blocks)]
    rotated = rotate(gathered, deltas, inv_freq, is_neox=is_neox)
    rotary_dim = 2 * len(inv_freq)
    result = gathered.clone()
    for move, delta in enumerate(deltas):
        if delta != 0:
            result[move, ..., :rotary_dim] = rotated[move, ..., :rotary_dim].to(k_src.dtype)
    k_dst[list(dst_blocks)] = result
