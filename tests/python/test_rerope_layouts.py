"""Where blocks hold keys and values, and which dimensions rotate by which axis: fused rows, vLLM's
packed CPU layouts, MLA's rotary slice, M-RoPE."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding, Qwen2VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    Qwen3VLTextConfig,
    Qwen3VLTextRotaryEmbedding,
)

from kvspan import ops, reference
from kvspan.rope_scaling import mrope_axes
from rerope_checks import (
    DTYPES,
    ISAS,
    assert_rotated,
    assert_same_bits,
    dtype_name,
    inv_freq_of,
    poison,
    random_keys,
    take,
)

SRC, DST, DELTAS = [0, 3, 1, 2], [5, 0, 1, 4], [1000, -7, 0, 70_000]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("is_hnd", [False, True], ids=["nhd", "hnd"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_fused_rows(dtype: torch.dtype, is_hnd: bool, isa: str) -> None:
    """A token row holds a key and its value: whole rows in one call, or keys by a view."""
    head_dim, inv_freq = 64, inv_freq_of(48)

    def pool(num_blocks: int, seed: int) -> torch.Tensor:
        kv = random_keys(num_blocks, 2, 8, 2 * head_dim, dtype=dtype, seed=seed)
        return kv.transpose(1, 2) if is_hnd else kv.view(num_blocks, 8, 2, 2 * head_dim)

    kv = pool(4, 0)
    whole, halves, in_place = poison(pool(6, 1)), poison(pool(6, 1)), kv.clone()
    ops.rerope(kv, whole, SRC, DST, DELTAS, inv_freq, isa=isa)
    assert_rotated(take(kv, SRC), take(whole, DST), DELTAS, inv_freq, True)
    ops.rerope_layers(
        [kv[..., :head_dim]], [halves[..., :head_dim]],
        [kv[..., head_dim:]], [halves[..., head_dim:]],
        SRC, DST, DELTAS, [inv_freq], isa=isa,
    )  # fmt: skip
    assert_same_bits(halves, whole)
    ops.rerope(in_place[..., :head_dim], in_place[..., :head_dim], SRC, SRC, DELTAS, inv_freq)
    assert_same_bits(take(in_place, SRC), take(whole, DST))


PACKED = [
    ("cpu_vec", torch.float32),
    ("cpu_vec", torch.bfloat16),
    ("cpu_vec", torch.float16),
    ("cpu_vec", torch.float8_e4m3fn),
    ("cpu_vec", torch.float8_e5m2),
    ("cpu_amx", torch.bfloat16),
]
PACKED_IDS = ["vec-f32", "vec-bf16", "vec-f16", "vec-e4m3", "vec-e5m2", "amx"]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "offset"),
    [(64, 64, 0), (128, 64, 0), (80, 20, 16), (32, 4, 28)],
    ids=["all", "half", "slice", "end"],
)
@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize("block_size", [32, 96])
@pytest.mark.parametrize(("layout", "dtype"), PACKED, ids=PACKED_IDS)
def test_packed_cpu_layouts(
    layout: str,
    dtype: torch.dtype,
    block_size: int,
    is_neox: bool,
    head_dim: int,
    rotary_dim: int,
    offset: int,
    isa: str,
) -> None:
    if head_dim % 16:
        assert layout != "cpu_amx"
    keys = random_keys(4, block_size, 3, head_dim, dtype=dtype)
    values = random_keys(4, block_size, 3, head_dim, dtype=dtype, seed=1)
    packed = reference.pack_cpu(keys, values, layout)
    out = poison(torch.empty(6, *packed.shape[1:], dtype=dtype))
    untouched = take(out, [2, 3])
    inv_freq = inv_freq_of(rotary_dim)
    options: dict[str, Any] = {
        "is_neox": is_neox, "rotary_offset": offset, "layout": layout, "isa": isa,
    }  # fmt: skip
    ops.rerope(packed, out, SRC, DST, DELTAS, inv_freq, **options)
    moved_keys, moved_values = reference.unpack_cpu(take(out, DST), layout)
    assert_rotated(keys[SRC], moved_keys, DELTAS, inv_freq, is_neox, rotary_offset=offset)
    assert_same_bits(moved_values, values[SRC])
    assert_same_bits(take(out, [2, 3]), untouched)
    # In place, and the same bits as rows of tokens give.
    ops.rerope(packed, packed, SRC, SRC, DELTAS, inv_freq, **options)
    assert_same_bits(take(packed, SRC), take(out, DST))
    rows = poison(torch.empty_like(keys))
    ops.rerope(keys, rows, SRC, SRC, DELTAS, inv_freq, **options | {"layout": "token_rows"})
    assert_same_bits(moved_keys, rows[SRC])


@pytest.mark.parametrize("block_size", [1, 5, 40])
def test_packed_vec_with_blocks_that_no_vector_divides(block_size: int) -> None:
    keys = random_keys(4, block_size, 3, 10, dtype=torch.float32)
    packed = reference.pack_cpu(keys, keys, "cpu_vec")
    out = torch.full((6, *packed.shape[1:]), float("nan"))
    ops.rerope(packed, out, SRC, DST, DELTAS, inv_freq_of(6), layout="cpu_vec")
    moved_keys, moved_values = reference.unpack_cpu(out[DST], "cpu_vec")
    assert_rotated(keys[SRC], moved_keys, DELTAS, inv_freq_of(6), True)
    assert_same_bits(moved_values, keys[SRC])


def test_packed_layouts_take_block_and_head_strides() -> None:
    """As when several layers share one allocation."""
    keys = random_keys(4, 32, 3, 32, dtype=torch.bfloat16)
    packed = reference.pack_cpu(keys, keys, "cpu_amx")
    wide = poison(torch.empty(6, 2, 5, 32, 64, dtype=torch.bfloat16))
    out = wide[:, 1, 1:4]
    ops.rerope(packed, out, SRC, DST, DELTAS, inv_freq_of(32), layout="cpu_amx")
    moved_keys, _ = reference.unpack_cpu(out[DST], "cpu_amx")
    assert_rotated(keys[SRC], moved_keys, DELTAS, inv_freq_of(32), True)
    assert wide[:, 0].isnan().all() and wide[:, 1, [0, 4]].isnan().all()


def test_the_twin_of_packed_layouts() -> None:
    for layout, dtype in PACKED:
        packed = random_keys(4, 3, 32, 64, dtype=dtype)
        ours, twin = (poison(torch.empty(6, 3, 32, 64, dtype=dtype)) for _ in range(2))
        ops.rerope(packed, ours, SRC, DST, DELTAS, inv_freq_of(32), layout=layout)
        reference.rerope(packed, twin, SRC, DST, DELTAS, inv_freq_of(32), layout=layout)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(
            ours.float(), twin.float(), rtol=eps, atol=4 * eps, equal_nan=True
        )


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"layout": "vec"}, ValueError,
         "layout: expected token_rows, cpu_vec or cpu_amx, got 'vec'"),
        ({"layout": "cpu_amx", "shape": (4, 3, 24, 64)}, ValueError,
         r"k_src: expected a block_size and a head_dim that 16 divides in layout cpu_amx"),
        ({"layout": "cpu_amx", "dtype": torch.float16}, TypeError,
         "k_src: expected bfloat16 in layout cpu_amx, got float16"),
        ({"layout": "cpu_amx", "dtype": torch.float8_e5m2}, TypeError,
         "k_src: expected bfloat16 in layout cpu_amx, got float8_e5m2"),
        ({"layout": "cpu_vec", "shape": (4, 3, 32, 63)}, ValueError,
         r"k_src: expected shape \[num_blocks, num_kv_heads, block_size, 2 \* head_dim\] in layout "
         r"cpu_vec, got \[4, 3, 32, 63\]"),
        ({"layout": "cpu_vec", "shape": (4, 32, 64)}, ValueError, "k_src: expected shape"),
        ({"layout": "cpu_vec", "inv_freq": torch.ones(17)}, ValueError,
         r"inv_freq: expected at most \(head_dim - rotary_offset\) / 2 = 16 frequencies, got 17"),
        ({"layout": "cpu_amx", "inv_freq": torch.ones(7)}, ValueError,
         "inv_freq: expected an even number of frequencies in layout cpu_amx, got 7"),
        ({"layout": "cpu_amx", "rotary_offset": 3}, ValueError,
         "rotary_offset: expected an even number in layout cpu_amx, got 3"),
        ({"rotary_offset": -1}, ValueError, "rotary_offset: expected 0 or more, got -1"),
        ({"deltas": [[1, 2]]}, ValueError,
         "axes: expected the axis of each frequency, since deltas have 2 axes, got none"),
        ({"deltas": [[1, 2]], "axes": [0, 1, 2, 0]}, ValueError,
         r"axes\[2\]: expected an axis in \[0, 2\) of deltas, got 2"),
        ({"deltas": [[1, 2]], "axes": [0, 1, 1]}, ValueError,
         r"axes: expected \[4\] like inv_freq, got \[3\]"),
        ({"deltas": [[1] * 5], "axes": [0] * 4}, ValueError,
         "deltas: expected 1 to 4 position axes, got 5"),
        ({"deltas": torch.ones(1, 4).long()[:, ::2], "axes": [0] * 4}, ValueError,
         "deltas: expected contiguous elements, got stride 2"),
    ],
)  # fmt: skip
def test_bad_arguments(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    changes = {"shape": (4, 3, 32, 64), "dtype": torch.bfloat16} | changes
    pool = torch.zeros(changes.pop("shape"), dtype=torch.float32).to(changes.pop("dtype"))
    arguments: dict[str, Any] = {"deltas": [1], "inv_freq": torch.ones(4)} | changes
    deltas, inv_freq = arguments.pop("deltas"), arguments.pop("inv_freq")
    with pytest.raises(error, match=message):
        ops.rerope(pool, pool.clone(), [0], [1], deltas, inv_freq, **arguments)


def test_packed_layouts_hold_the_values_themselves() -> None:
    pool = torch.zeros(4, 3, 32, 64)
    with pytest.raises(ValueError, match="v_src: expected none in layout cpu_vec"):
        ops.rerope_layers(
            [pool], [pool], [pool], [pool], [0], [1], [1], [torch.ones(4)], layout="cpu_vec"
        )
    strided = torch.zeros(4, 32, 3, 64).transpose(1, 2)
    with pytest.raises(ValueError, match=r"k_src: expected contiguous heads \(stride 64 per token"):
        ops.rerope(strided, pool, [0], [1], [1], torch.ones(4), layout="cpu_vec")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "interleaved"])
def test_mla_moves_only_its_rotary_slice(dtype: torch.dtype, is_neox: bool, isa: str) -> None:
    """Field case 11: rows without heads, 512 latent dimensions, then 64 rotary ones."""
    rows = random_keys(4, 16, 576, dtype=dtype)
    out = poison(torch.empty(6, 16, 576).to(dtype))
    options: dict[str, Any] = {"is_neox": is_neox, "rotary_offset": 512, "isa": isa}
    ops.rerope(rows, out, SRC, DST, DELTAS, inv_freq_of(64), **options)
    moved = take(out, DST).unsqueeze(2)
    source = take(rows, SRC).unsqueeze(2)
    assert_rotated(source, moved, DELTAS, inv_freq_of(64), is_neox, rotary_offset=512)
    ops.rerope(rows, rows, SRC, SRC, DELTAS, inv_freq_of(64), **options)
    assert_same_bits(take(rows, SRC), take(out, DST))


def test_mla_reposition_is_recompute() -> None:
    """Against DeepSeek's own rotation in transformers, which hands the pairs out as halves."""
    inv_freq, latent = inv_freq_of(64), random_keys(1, 16, 512, dtype=torch.float32)
    raw = random_keys(1, 1, 16, 64, dtype=torch.float32, seed=1)

    def rows(first_position: int) -> torch.Tensor:
        angle = (first_position + torch.arange(16)).double()[:, None] * inv_freq.double()
        cos, sin = (torch.cat([f, f], -1)[None] for f in (angle.cos(), angle.sin()))
        halves = apply_rotary_pos_emb_interleave(raw.double(), raw.double(), cos, sin)[1]
        pairs = torch.stack(halves.chunk(2, -1), dim=-1).flatten(-2)
        return torch.cat([latent, pairs[0].float()], dim=-1)

    moved = torch.full((1, 16, 576), float("nan"))
    ops.rerope(rows(40), moved, [0], [0], [3000], inv_freq, is_neox=False, rotary_offset=512)
    torch.testing.assert_close(moved, rows(3040), rtol=0, atol=4e-6)


def qwen2_vl() -> tuple[torch.nn.Module, list[int]]:
    section = [16, 24, 24]
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": section}
    config = Qwen2VLTextConfig(hidden_size=256, num_attention_heads=2, rope_parameters=rope)
    return Qwen2VLRotaryEmbedding(config), mrope_axes(section, interleaved=False)


def qwen3_vl() -> tuple[torch.nn.Module, list[int]]:
    section = [24, 20, 20]
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": section}
    config = Qwen3VLTextConfig(head_dim=128, rope_parameters=rope)
    return Qwen3VLTextRotaryEmbedding(config), mrope_axes(section, interleaved=True)


@pytest.mark.parametrize("model", [qwen2_vl, qwen3_vl])
def test_mrope_reposition_is_recompute(model: Any) -> None:
    """Field case 9, with transformers' own embedding: text, then an image's grid, moved as one."""
    embedding, axes = model()
    text = torch.arange(8).expand(3, 8)
    grid = torch.stack([torch.full((8,), 8), 8 + torch.arange(8) // 4, 8 + torch.arange(8) % 4])
    positions = torch.cat([text, grid], dim=1)  # [3, 16]
    raw = random_keys(1, 16, 2, 128, dtype=torch.float32)

    def keys(delta: tuple[int, int, int]) -> torch.Tensor:
        placed = (positions + torch.tensor(delta)[:, None])[:, None]
        cos, sin = (x[0][:, None].double() for x in embedding(raw, placed))
        x, half = raw[0].double(), 64
        rotated_half = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
        return (x * cos + rotated_half * sin).float()[None]

    for delta in [(100, 100, 100), (40, 3, 17), (0, 5, 0)]:
        moved = torch.full_like(raw, float("nan"))
        ops.rerope(keys((0, 0, 0)), moved, [0], [0], [delta], embedding.inv_freq, axes=axes)
        torch.testing.assert_close(moved, keys(delta), rtol=0, atol=3e-5)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("interleaved", [False, True], ids=["contiguous", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_mrope_against_the_twin(dtype: torch.dtype, interleaved: bool, isa: str) -> None:
    keys = random_keys(4, 5, 2, 40, dtype=dtype)
    axes = mrope_axes([6, 5, 5], interleaved=interleaved)
    deltas = [[3, -40, 1000], [0, 0, 0], [0, 0, 9], [3, -40, 1000]]
    out = poison(torch.empty_like(keys))
    ops.rerope(keys, out, SRC, [3, 0, 1, 2], deltas, inv_freq_of(32), axes=axes, isa=isa)
    assert_rotated(
        take(keys, SRC), take(out, [3, 0, 1, 2]), deltas, inv_freq_of(32), True, axes=axes
    )
    # Equal deltas on all axes are one delta.
    alike, plain = torch.empty_like(keys), torch.empty_like(keys)
    ops.rerope(keys, alike, SRC, [3, 0, 1, 2], [[7] * 3] * 4, inv_freq_of(32), axes=axes, isa=isa)
    ops.rerope(keys, plain, SRC, [3, 0, 1, 2], [7] * 4, inv_freq_of(32), isa=isa)
    assert_same_bits(alike, plain)
