"""What gated_delta and gated_delta_state refuse, and in which words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvspan import ops

BAD_CALLS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "v-dims": (
        {"v": torch.zeros(4, 2)},
        ValueError,
        "v: expected shape [num_tokens, num_value_heads, value_dim], got [4, 2]",
    ),
    "k-tokens": (
        {"k": torch.zeros(3, 1, 8)},
        ValueError,
        ("k: expected shape [4, num_key_heads, key_dim] (the tokens of v), got [3, 1, 8]"),
    ),
    "heads": (
        {"k": torch.zeros(4, 3, 8), "q": torch.zeros(4, 3, 8)},
        ValueError,
        "v: expected a multiple of k's 3 heads, got 2",
    ),
    "no-heads": (
        {"k": torch.zeros(4, 0, 8)},
        ValueError,
        ("k, v: expected at least one head and dimension, got [4, 0, 8] and [4, 2, 5]"),
    ),
    "v-dtype": (
        {"v": torch.zeros(4, 2, 5, dtype=torch.float64)},
        TypeError,
        "v: expected float32, bfloat16 or float16, got float64",
    ),
    "k-dtype": (
        {"k": torch.zeros(4, 1, 8, dtype=torch.bfloat16)},
        TypeError,
        "k: expected float32 like v, got bfloat16",
    ),
    "q-shape": (
        {"q": torch.zeros(4, 1, 7)},
        ValueError,
        "q: expected shape [4, 1, 8] (like k), got [4, 1, 7]",
    ),
    "q-none": (
        {"q": None},
        TypeError,
        "q: expected a tensor like k, got None (see gated_delta_state)",
    ),
    "q-list": (
        {"q": [1.0]},
        TypeError,
        "q: expected a numpy array or a tensor with DLPack support, got list",
    ),
    "v-list": ({"v": [1.0]}, TypeError, "v: expected a numpy array or a torch tensor, got list"),
    "k-stride": (
        {"k": torch.zeros(4, 1, 16)[..., ::2]},
        ValueError,
        "k: expected a contiguous last dimension (stride 1), got stride 2",
    ),
    "g-shape": (
        {"g": torch.zeros(4, 1)},
        ValueError,
        "g: expected shape [4, 2] (tokens and value heads of v), got [4, 1]",
    ),
    "g-dtype": (
        {"g": torch.zeros(4, 2).bfloat16()},
        TypeError,
        "g: expected float32, got bfloat16",
    ),
    "beta-dtype": (
        {"beta": torch.zeros(4, 2).double()},
        TypeError,
        "beta: expected float32, got float64",
    ),
    "out-shape": (
        {"out": torch.zeros(4, 2, 6)},
        ValueError,
        "out: expected shape [4, 2, 5] (like v), got [4, 2, 6]",
    ),
    "out-dtype": (
        {"out": torch.zeros(4, 2, 5).half()},
        TypeError,
        "out: expected float32 like v, got float16",
    ),
    "out-expanded": (
        {"out": torch.zeros(1, 2, 5).expand(4, 2, 5)},
        ValueError,
        ("out: expected distinct elements, got a dimension expanded from size 1 to 4"),
    ),
    "state-layout": (
        {"state_layout": "kq"},
        ValueError,
        "state_layout: expected kv or vk, got 'kq'",
    ),
    "state-shape": (
        {"initial_state": torch.zeros(1, 2, 5, 8)},
        ValueError,
        (
            "initial_state: expected shape [1, 2, 8, 5] (sequences, value heads, "
            "key_dim, value_dim in layout kv), got [1, 2, 5, 8]"
        ),
    ),
    "state-shape-vk": (
        {"state_layout": "vk", "final_state": torch.zeros(1, 2, 8, 5)},
        ValueError,
        (
            "final_state: expected shape [1, 2, 5, 8] (sequences, value heads, "
            "value_dim, key_dim in layout vk), got [1, 2, 8, 5]"
        ),
    ),
    "state-dtype": (
        {"final_state": torch.zeros(1, 2, 8, 5).bfloat16()},
        TypeError,
        "final_state: expected float32, got bfloat16",
    ),
    "state-transposed": (
        {"initial_state": torch.zeros(1, 2, 5, 8).mT},
        ValueError,
        ("initial_state: expected a contiguous last dimension (stride 1), got stride 8"),
    ),
    "cu-empty": (
        {"cu_seqlens": torch.zeros(0, dtype=torch.int64), "final_state": torch.zeros(1, 2, 8, 5)},
        ValueError,
        "cu_seqlens: expected [num_sequences + 1], got [0]",
    ),
    "cu-first": ({"cu_seqlens": [1, 4]}, ValueError, "cu_seqlens[0]: expected 0, got 1"),
    "cu-down": (
        {"cu_seqlens": [0, 3, 2, 4]},
        ValueError,
        "cu_seqlens[2]: expected at least 3 like the one before, got 2",
    ),
    "cu-last": (
        {"cu_seqlens": [0, 3]},
        ValueError,
        "cu_seqlens[1]: expected the 4 tokens there are, got 3",
    ),
    "scale": ({"scale": float("nan")}, ValueError, "scale: expected a finite number, got nan"),
    "isa": (
        {"isa": "sse9"},
        ValueError,
        "isa: expected auto, baseline, avx2, avx512 or avx512_vbmi, got 'sse9'",
    ),
    "threads": (
        {"num_threads": -1},
        ValueError,
        "num_threads: expected 0 (automatic) or more, got -1",
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_arguments(name: str) -> None:
    changes, error, message = BAD_CALLS[name]
    given: dict[str, Any] = {
        "q": torch.zeros(4, 1, 8),
        "k": torch.zeros(4, 1, 8),
        "v": torch.zeros(4, 2, 5),
        "g": torch.zeros(4, 2),
        "beta": torch.zeros(4, 2),
    }
    with pytest.raises(error) as caught:
        ops.gated_delta(**given | changes)
    assert str(caught.value) == message


def test_a_read_only_output_is_refused() -> None:
    k, v, gate = (
        np.zeros((1, 1, 4), np.float32),
        np.zeros((1, 1, 4), np.float32),
        np.zeros((1, 1), np.float32),
    )
    state = np.zeros((1, 1, 4, 4), np.float32)
    state.flags.writeable = False
    with pytest.raises(
        ValueError, match="final_state: expected a writable tensor, got a read-only"
    ):
        ops.gated_delta_state(k, v, gate, gate, final_state=state)
