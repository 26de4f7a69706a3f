"""The operations as torch sees them: schemas, fake tensors, compiled graphs without breaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import kvspan.torch_ops  # noqa: F401  (registers torch.ops.kvspan)
from kvspan import ops
from rerope_checks import assert_same_bits, inv_freq_of, random_keys

SRC, DST = torch.tensor([0, 3]), torch.tensor([2, 1])
DELTAS, INV_FREQ = torch.tensor([7, -1000]), inv_freq_of(16)


def keys(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return random_keys(4, 8, 2, 16, dtype=dtype, seed=seed)


def calls() -> dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Operator, arguments, options; fresh tensors every time."""
    op = torch.ops.kvspan
    three_axes = torch.tensor([[1, 2, 3], [4, 5, 6]])
    return {
        "rerope": (op.rerope, (keys(), keys(1), SRC, DST, DELTAS, INV_FREQ), {}),
        "rerope-options": (
            op.rerope,
            (keys(), keys(1), SRC, DST, three_axes, inv_freq_of(8), False, [0, 1, 2, 0], 4),
            {},
        ),
        "rerope_": (op.rerope_, (keys(), SRC, DST, DELTAS, INV_FREQ), {}),
        "rerope_layers_": (
            op.rerope_layers_,
            ([keys(), keys(1)], [keys(2), keys(3)], SRC, DST, DELTAS, [INV_FREQ] * 2, [True] * 2),
            {},
        ),
        "copy_blocks": (op.copy_blocks, (keys(), keys(1), SRC, DST), {}),
        "copy_blocks_": (op.copy_blocks_, (keys(), SRC, DST), {}),
    }


@pytest.mark.parametrize("name", calls())
def test_opcheck(name: str) -> None:
    operator, args, options = calls()[name]
    torch.library.opcheck(operator, args, options)


def test_schemas_say_what_is_written() -> None:
    written = {
        "rerope": ["k_dst"],
        "rerope_": ["k"],
        "rerope_layers_": ["keys", "values"],
        "copy_blocks": ["dst"],
        "copy_blocks_": ["pool"],
    }
    for name, expected in written.items():
        schema = getattr(torch.ops.kvspan, name).default._schema
        found = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
        assert found == expected, name
        assert not schema.returns


def step(pool: torch.Tensor, other: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Moves among ordinary operations, each of which depends on the one before."""
    op = torch.ops.kvspan
    pool.mul_(2)
    op.rerope(pool, other, SRC, DST, DELTAS, INV_FREQ)
    op.rerope_(other, DST, DST, DELTAS, INV_FREQ)
    op.copy_blocks_(other, DST, SRC)
    op.copy_blocks(other, pool, SRC, SRC)
    op.rerope_layers_([pool, other], [], SRC, DST, DELTAS, [INV_FREQ, INV_FREQ], [True, False])
    return (hidden * 3 + pool.sum() + other.sum()).relu()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiles_without_graph_breaks(backend: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    compiled: Callable[..., torch.Tensor] = torch.compile(
        step, fullgraph=True, backend=backend, dynamic=dynamic
    )
    for seed in (0, 5):
        plain = keys(seed, torch.float32), keys(seed + 1, torch.float32), torch.ones(3)
        traced = tuple(t.clone() for t in plain)
        expected = step(*plain)
        torch.testing.assert_close(compiled(*traced), expected)
        assert_same_bits(traced[0], plain[0])
        assert_same_bits(traced[1], plain[1])


def test_functionalisation_keeps_a_read_before_the_write() -> None:
    """A clone taken before the move must hold the old keys, one taken after it the new ones."""

    def both(pool: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        before = pool + 0
        torch.ops.kvspan.rerope_(pool, SRC, DST, DELTAS, INV_FREQ)
        return before, pool + 0

    torch._dynamo.reset()
    pool = keys(dtype=torch.float32)
    old, moved = pool.clone(), pool.clone()
    ops.rerope(moved, moved, SRC, DST, DELTAS, INV_FREQ)
    before, after = torch.compile(both, fullgraph=True, backend="aot_eager")(pool)
    assert_same_bits(before, old)
    assert_same_bits(after, moved)
    assert_same_bits(pool, moved)


def test_errors_are_those_of_the_operations() -> None:
    with pytest.raises(ValueError, match=r"src_blocks\[1\]: expected a block in \[0, 4\)"):
        torch.ops.kvspan.rerope(keys(), keys(1), torch.tensor([0, 4]), DST, DELTAS, INV_FREQ)
    with pytest.raises(ValueError, match="block 2 is read by move 1 and written by move 0"):
        torch.ops.kvspan.copy_blocks_(keys(), torch.tensor([0, 2]), DST)
