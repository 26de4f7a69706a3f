"""gated_delta and gated_delta_state against the recurrence in float64 and against transformers."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from kvspan import ops, reference_gated_delta

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Chunks have 64 tokens: both sides of one and of two, and one token behind them.
LENGTHS = (1, 2, 5, 63, 64, 65, 127, 128, 129, 193)
# Of key and value heads and dimensions: grouped and single heads; rows that fill no vector, several
# strips of 64 columns, and a last strip of each width.
SHAPES = {
    "2x2_16x16": (2, 2, 16, 16),
    "1x3_20x37": (1, 3, 20, 37),
    "2x4_64x128": (2, 4, 64, 128),
    "1x5_7x1": (1, 5, 7, 1),
    "1x1_33x100": (1, 1, 33, 100),
}


class Case:
    """Inputs of one call, with NaN in whatever is written."""

    def __init__(
        self,
        num_tokens: int,
        shape: str = "2x2_16x16",
        dtype: torch.dtype = torch.float32,
        *,
        lengths: tuple[int, ...] | None = None,
        layout: str = "kv",
        has_state: bool = True,
        seed: int = 0,
    ) -> None:
        random = torch.Generator().manual_seed(seed)
        num_key_heads, num_heads, key_dim, value_dim = SHAPES[shape]

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=random)

        self.q = normal(num_tokens, num_key_heads, key_dim).to(dtype)
        self.k = normal(num_tokens, num_key_heads, key_dim).to(dtype)
        self.v = normal(num_tokens, num_heads, value_dim).to(dtype)
        self.g = -torch.rand(num_tokens, num_heads, generator=random) * 0.3
        self.beta = 2 * torch.rand(num_tokens, num_heads, generator=random)
        self.options: dict[str, Any] = {"state_layout": layout}
        if lengths is not None:
            ends = np.cumsum([0, *lengths])
            assert ends[-1] == num_tokens
            self.options["cu_seqlens"] = torch.from_numpy(ends)
        count = 1 if lengths is None else len(lengths)
        sizes = (key_dim, value_dim) if layout == "kv" else (value_dim, key_dim)
        self.state = torch.full((count, num_heads, *sizes), torch.nan)
        if has_state:
            self.options["initial_state"] = normal(count, num_heads, *sizes)

    def run(self, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, state = torch.full_like(self.v, torch.nan), self.state.clone()
        given = self.options | {"out": out, "final_state": state} | options
        got = ops.gated_delta(self.q, self.k, self.v, self.g, self.beta, **given)
        assert got[0] is given["out"]
        assert got[1] is given["final_state"]
        return got

    def run_state(self, **options: Any) -> torch.Tensor:
        given = self.options | {"final_state": self.state.clone()} | options
        result = ops.gated_delta_state(self.k, self.v, self.g, self.beta, **given)
        assert result is given["final_state"]
        return result

    def expected(self, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        doubles = [x.double() for x in (self.q, self.k, self.v, self.g, self.beta)]
        return reference_gated_delta.gated_delta(*doubles, **self.options | options)

    def check(self, **options: Any) -> None:
        out, state = self.run(**options)
        options.pop("isa", None)
        options.pop("num_threads", None)
        expected_out, expected_state = self.expected(**options)
        assert_close(state, expected_state)
        assert_close(out, expected_out)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Within 2e-5 of the largest component, and half a place of the storage type."""
    if not expected.numel():
        assert found.shape == expected.shape
        return
    largest = expected.abs().max().item()
    place = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11}[found.dtype]
    error = (found.double() - expected).abs() - place * expected.abs()
    assert error.max().item() <= 2e-5 * max(largest, 1e-3), error.max()
    assert not found.isnan().any()


@pytest.mark.parametrize("isa", ops.vector_isas())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_the_recurrence(shape: str, dtype: str, isa: str) -> None:
    for num_tokens in (1, 3, 65, 130):
        for layout in ("kv", "vk"):
            Case(num_tokens, shape, DTYPES[dtype], layout=layout).check(isa=isa)


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_lengths_around_chunks(num_tokens: int) -> None:
    for layout in ("kv", "vk"):
        for has_state in (True, False):
            case = Case(num_tokens, layout=layout, has_state=has_state)
            case.check()
            assert torch.equal(case.run_state(), case.run()[1])


@pytest.mark.parametrize("qk_l2norm", [True, False], ids=["norm", "raw"])
def test_norm_and_scale(qk_l2norm: bool) -> None:
    case = Case(70)
    case.k *= 0.2
    case.check(qk_l2norm=qk_l2norm, scale=0.7)


@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
@pytest.mark.parametrize(
    "g", [0.0, -1e-6, -5.0, -50.0, -200.0, -torch.inf], ids=lambda g: f"g{g:g}"
)
def test_extreme_gates(beta: float, g: float) -> None:
    for num_tokens in (1, 64, 129):
        case = Case(num_tokens)
        case.g.fill_(g)
        case.beta.fill_(beta)
        case.check()


def test_a_gate_that_forgets_everything_once() -> None:
    case = Case(100)
    case.g[37] = -torch.inf
    case.check()
    before = case.run_state()
    case.options["initial_state"] = case.options["initial_state"] * 3 + 1
    assert torch.equal(case.run_state(), before)


def test_without_decay_and_with_full_overwrite_a_key_recalls_its_value() -> None:
    """With alpha and beta 1, a state answers its last key with its last value, exactly."""
    case = Case(128)
    case.g.zero_()
    case.beta.fill_(1.0)
    state = case.run_state(qk_l2norm=True)
    key = torch.nn.functional.normalize(case.k[-1], dim=-1)
    recalled = torch.einsum("hkv,hk->hv", state[0], key)
    torch.testing.assert_close(recalled, case.v[-1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("isa", ops.vector_isas())
@pytest.mark.parametrize("layout", ["kv", "vk"])
def test_sequences_side_by_side_have_the_bits_of_each_alone(layout: str, isa: str) -> None:
    lengths = (65, 0, 1, 64, 0, 130, 2, 1)
    case = Case(sum(lengths), "1x3_20x37", lengths=lengths, layout=layout)
    case.check(isa=isa)
    out, state = case.run(isa=isa)
    ends = np.cumsum([0, *lengths])
    for n, (begin, end) in enumerate(itertools.pairwise(ends)):
        rows = slice(begin, end)
        alone_out, alone_state = ops.gated_delta(
            *(x[rows] for x in (case.q, case.k, case.v, case.g, case.beta)),
            initial_state=case.options["initial_state"][n : n + 1],
            state_layout=layout,
            isa=isa,
        )
        assert torch.equal(alone_out, out[rows])
        assert torch.equal(alone_state[0], state[n])
        if begin == end:
            assert torch.equal(state[n], case.options["initial_state"][n])


@pytest.mark.parametrize("isa", ops.vector_isas())
@pytest.mark.parametrize("shape", ["2x2_16x16", "1x3_20x37"])
def test_continuing_at_a_chunk_gives_the_bits_of_not_stopping(shape: str, isa: str) -> None:
    for num_tokens, cut, layout in (
        (65, 64, "kv"),
        (65, 64, "vk"),
        (300, 128, "kv"),
        (192, 64, "vk"),
    ):
        case = Case(num_tokens, shape, torch.bfloat16, layout=layout)
        out, state = case.run(isa=isa)
        inputs = (case.q, case.k, case.v, case.g, case.beta)
        first_out, middle = ops.gated_delta(*(x[:cut] for x in inputs), **case.options, isa=isa)
        options = case.options | {"initial_state": middle}
        last_out, last = ops.gated_delta(*(x[cut:] for x in inputs), **options, isa=isa)
        assert torch.equal(torch.cat([first_out, last_out]), out)
        assert torch.equal(last, state)


def test_later_tokens_change_nothing_before_them() -> None:
    case = Case(150)
    out, _ = case.run()
    for tensor in (case.q, case.k, case.v, case.g, case.beta):
        tensor[101:] = torch.nan
    poisoned, _ = case.run()
    assert torch.equal(out[:101], poisoned[:101])


def test_threads_and_state_only_give_the_same_bits() -> None:
    lengths = (130, 1, 70)
    case = Case(sum(lengths), "2x4_64x128", torch.bfloat16, lengths=lengths)
    out, state = case.run(num_threads=1)
    for num_threads in (2, 7, 64):
        more_out, more_state = case.run(num_threads=num_threads)
        assert torch.equal(more_out, out)
        assert torch.equal(more_state, state)
        assert torch.equal(case.run_state(num_threads=num_threads), state)


def test_the_initial_state_may_be_written_over() -> None:
    for num_tokens in (1, 64, 66):
        case = Case(num_tokens, layout="kv")
        _, state = case.run()
        in_place = case.options["initial_state"].clone()
        case.run(initial_state=in_place, final_state=in_place)
        assert torch.equal(in_place, state)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_tensors_keep_what_is_between(dtype: str) -> None:
    """As views of a projection's output, and of slots of a state pool with more in them."""
    case = Case(67, "1x3_20x37", DTYPES[dtype])
    out, state = case.run()

    def spread(x: torch.Tensor) -> torch.Tensor:
        wide = x.new_full((x.shape[0] + 2, *x.shape[1:-1], x.shape[-1] + 3), torch.nan)
        view = wide[1:-1, ..., 1:-2]
        view.copy_(x)
        return view

    wide_out, wide_state = spread(torch.zeros_like(out)), spread(state)
    names = ("q", "k", "v")
    for name in names:
        setattr(case, name, spread(getattr(case, name)))
    case.g, case.beta = (x.T.contiguous().T for x in (case.g, case.beta))
    case.run(
        out=wide_out, final_state=wide_state, initial_state=spread(case.options["initial_state"])
    )
    assert torch.equal(wide_out, out)
    assert torch.equal(wide_state, state)
    for view in (wide_out, wide_state):
        assert view._base is not None
        assert view._base.isnan().sum() == view._base.numel() - view.numel()


def test_numpy_arrays_and_made_results() -> None:
    case = Case(66, lengths=(1, 65))
    arrays = [x.numpy() for x in (case.q, case.k, case.v, case.g, case.beta)]
    out, state = ops.gated_delta(*arrays, cu_seqlens=np.array([0, 1, 66], np.int32))
    assert isinstance(out, np.ndarray)
    assert isinstance(state, np.ndarray)
    case.options.pop("initial_state")
    expected = case.run()
    np.testing.assert_array_equal(out, expected[0].numpy())
    np.testing.assert_array_equal(state, expected[1].numpy())
    made = ops.gated_delta_state(*arrays[1:], cu_seqlens=[0, 1, 66], state_layout="vk")
    np.testing.assert_array_equal(made, state.swapaxes(2, 3))


def test_no_tokens_and_no_sequences() -> None:
    case = Case(0)
    out, state = case.run()
    assert out.shape == (0, 2, 16)
    assert torch.equal(state, case.options["initial_state"])
    assert ops.gated_delta_state(case.k, case.v, case.g, case.beta).eq(0).all()
    assert ops.gated_delta_state(case.k, case.v, case.g, case.beta, cu_seqlens=[0]).shape[0] == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_transformers(dtype: str) -> None:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    case = Case(200, "2x4_64x128", DTYPES[dtype])
    inputs = (case.q, case.k, case.v, case.g, case.beta)
    expected_out, expected_state = torch_chunk_gated_delta_rule(
        *(x[None] for x in inputs),
        initial_state=case.options["initial_state"],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    out, state = case.run()
    torch.testing.assert_close(state, expected_state, atol=2e-5, rtol=1e-5)
    places = {"fp32": 2e-5, "bf16": 2**-7, "fp16": 2**-10}[dtype]
    torch.testing.assert_close(out, expected_out[0], atol=2e-5, rtol=places)
