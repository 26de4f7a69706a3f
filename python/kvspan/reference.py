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

    def absorbed(parent: bytes, span_digests: Sequence[bytes], tokens: bytes = b"") -> bytes:
        return hashed("kvspan/1 absorb", parent, number(len(span_digests)), *span_digests, tokens)

    def blocks(start: int, end: int, parent: bytes, waiting: list[bytes]) -> bytes:
        for first in range(start, end - block_size + 1, block_size):
            for begin, stop, content in extra:
                if begin < stop and begin < first + block_size and stop > first:
                    place = number(begin - first) + number(stop - begin)
                    parent = hashed("kvspan/1 extra", parent, content, place)
            ids = token_ids[first : first + block_size]
            tokens = b"".join(int(i).to_bytes(4, "little") for i in ids)
            if waiting:
                parent = absorbed(parent, waiting, tokens)
                waiting.clear()
            else:
                parent = hashed("kvspan/1 block", parent, tokens)
            keys.append(parent)
        return parent

    keys: list[bytes] = []
    waiting: list[bytes] = []  # last keys of the spans since the last block outside of spans
    outer, anchor, position = root, bytes(32), 0
    filled = [span for span in spans if span[0] < span[1]]
    for start, end in filled:
        outer = blocks(position, start, outer, waiting)
        if anchored and start == filled[0][0]:
            anchor = outer
        waiting.append(blocks(start, end, hashed("kvspan/1 span", span_root, anchor), []))
        position = end
    outer = blocks(position, len(token_ids), outer, waiting)
    return keys, absorbed(outer, waiting) if waiting else outer


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
    keys: torch.Tensor,
    deltas: Sequence[int] | Sequence[Sequence[int]],
    inv_freq: torch.Tensor,
    *,
    is_neox: bool = True,
    axes: Sequence[int] | None = None,
    rotary_offset: int = 0,
) -> torch.Tensor:
    """Keys moved by ``deltas`` tokens, in float64 throughout and not rounded.

    Args:
        keys: ``[num_moves, block_size, num_kv_heads, head_dim]``.
        deltas: ``[num_moves]`` tokens, or ``[num_moves, num_axes]``.
        inv_freq: ``[rotary_dim / 2]`` float32.
        is_neox: pairs ``(i, i + rotary_dim / 2)``, else ``(2i, 2i + 1)``.
        axes: ``[rotary_dim / 2]``, the position axis of each frequency; None: axis 0.
        rotary_offset: the first rotated dimension.

    Returns:
        float64, the shape of ``keys``.
    """
    if not len(keys):
        return keys.double()  # deltas have no axes to be counted
    half = len(inv_freq)
    first = slice(0, half) if is_neox else slice(0, 2 * half, 2)
    second = slice(half, 2 * half) if is_neox else slice(1, 2 * half, 2)
    delta = torch.tensor(list(deltas), dtype=torch.float64).reshape(len(keys), -1)
    angle = delta[:, [0] * half if axes is None else list(axes)] * inv_freq.double()
    cos, sin = angle.cos()[:, None, None, :], angle.sin()[:, None, None, :]
    out = keys.double()
    if keys.dtype == torch.float64:
        out = out.clone()
    rotated = out[..., rotary_offset : rotary_offset + 2 * half]
    x, y = rotated[..., first].clone(), rotated[..., second].clone()
    rotated[..., first] = x * cos - y * sin
    rotated[..., second] = y * cos + x * sin
    return out


def round_to(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """To nearest even; the 8-bit types saturate instead of overflowing."""
    if dtype.itemsize == 1:
        largest = torch.finfo(dtype).max
        x = x.clamp(-largest, largest)
    return x.to(dtype)


def dequantize(q: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    """float64 numbers of an 8-bit cache; scale: of the whole tensor, or ``[num_kv_heads, 1]``."""
    return q.double() * scale


def quantize(x: torch.Tensor, scale: torch.Tensor | float, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of :func:`dequantize`, rounded once."""
    return round_to(x / scale, dtype)


def rerope(
    k_src: torch.Tensor,
    k_dst: torch.Tensor,
    src_blocks: Sequence[int],
    dst_blocks: Sequence[int],
    deltas: Sequence[int] | Sequence[Sequence[int]],
    inv_freq: torch.Tensor,
    *,
    is_neox: bool = True,
    axes: Sequence[int] | None = None,
    rotary_offset: int = 0,
    layout: str = "token_rows",
) -> None:
    """Twin of :func:`kvspan.ops.rerope`; reads all sources before it writes, so any moves will do.

    Dimensions that are not rotated, and whole blocks of delta 0, keep their bits.
    """
    src, dst, dtype = list(src_blocks), list(dst_blocks), k_src.dtype
    gathered = bits_of(k_src)[src].view(dtype)
    values = None
    if layout != "token_rows":
        gathered, values = unpack_cpu(gathered, layout)
    rotated = rotate(
        gathered, deltas, inv_freq, is_neox=is_neox, axes=axes, rotary_offset=rotary_offset
    )
    dims = slice(rotary_offset, rotary_offset + 2 * len(inv_freq))
    result = gathered.clone()
    for move, delta in enumerate(deltas):
        if any(delta) if isinstance(delta, Sequence) else delta:
            result[move, ..., dims] = round_to(rotated[move, ..., dims], dtype)
    if values is not None:
        result = pack_cpu(result, values, layout)
    bits_of(k_dst)[dst] = bits_of(result)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: NaNs compare, and every dtype can be indexed."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(integers[tensor.dtype.itemsize])


def cpu_places(layout: str, block_size: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where vLLM's packed CPU layouts keep keys and values of one block and head.

    Returns:
        Two of ``[block_size, head_dim]`` int64: the element of each token's dimensions, counted
        from the start of the keys, and from the start of the values, which follow them.
    """
    t = torch.arange(block_size)[:, None]
    d = torch.arange(head_dim)[None, :]
    if layout == "cpu_vec":
        return d * block_size + t, t * head_dim + d
    if layout == "cpu_amx":
        return (
            t // 16 * 16 * head_dim + d // 2 * 32 + t % 16 * 2 + d % 2,
            d // 16 * 16 * block_size + t // 2 * 32 + d % 16 * 2 + t % 2,
        )
    raise ValueError(f"layout: expected cpu_vec or cpu_amx, got {layout!r}")


def pack_cpu(keys: torch.Tensor, values: torch.Tensor, layout: str) -> torch.Tensor:
    """A packed pool ``[num_blocks, num_kv_heads, block_size, 2 * head_dim]``.

    Args:
        keys, values: ``[num_blocks, block_size, num_kv_heads, head_dim]``.
    """
    num_blocks, block_size, num_kv_heads, head_dim = keys.shape
    key_places, value_places = cpu_places(layout, block_size, head_dim)
    packed = keys.new_empty(num_blocks, num_kv_heads, 2 * block_size * head_dim)
    bits = bits_of(packed)
    bits[..., key_places] = bits_of(keys).transpose(1, 2)
    bits[..., block_size * head_dim + value_places] = bits_of(values).transpose(1, 2)
    return packed.view(num_blocks, num_kv_heads, block_size, 2 * head_dim)


def unpack_cpu(packed: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of :func:`pack_cpu`, copied."""
    block_size, head_dim = packed.shape[2], packed.shape[3] // 2
    key_places, value_places = cpu_places(layout, block_size, head_dim)
    flat = bits_of(packed).flatten(2)
    keys = flat[..., key_places].transpose(1, 2)
    values = flat[..., block_size * head_dim + value_places].transpose(1, 2)
    return keys.view(packed.dtype), values.view(packed.dtype)
