"""Decays and writes read off the projections of vLLM's linear-attention modules, which are
stand-ins here, against the convolution of each request alone in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvspan.hybrid.groups import LINEAR
from kvspan.vllm.hybrid.capture import Capture
from kvspan.vllm.hybrid.gates import Gates, tap_gates

KEYS, HEADS, DK, DV, HIDDEN = 2, 4, 4, 8, 16
LENGTHS = (9, 1, 2, 20)  # requests of one pass


class Linear(nn.Linear):
    """Gives a pair, as vLLM's do."""

    def __init__(self, width: int) -> None:
        super().__init__(HIDDEN, width, bias=False)
        nn.init.normal_(self.weight, std=0.4)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


class LinearAttention(nn.Module):
    """kind: layout of "qwen3_5", "qwen3_next" or "olmo_hybrid"."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.num_k_heads, self.num_v_heads = KEYS, HEADS
        self.head_k_dim, self.head_v_dim = DK, DV
        self.value_dim, self.conv_dim, self.tp_size = HEADS * DV, 2 * KEYS * DK + HEADS * DV, 1
        self.A_log, self.dt_bias = (
            nn.Parameter(torch.randn(HEADS)),
            nn.Parameter(torch.randn(HEADS)),
        )
        self.conv1d = nn.Module()
        self.conv1d.weight = nn.Parameter(torch.randn(self.conv_dim, 1, 4))
        self.gqa_interleaved_layout = kind == "qwen3_next"
        width = self.conv_dim + self.value_dim
        if kind == "olmo_hybrid":
            self.allow_neg_eigval = True
            self.in_proj_qkvg = Linear(width)
            self.a_proj, self.b_proj = Linear(HEADS), Linear(HEADS)
        else:
            self.in_proj_qkvz, self.in_proj_ba = Linear(width), Linear(2 * HEADS)

    def split_ba(self, ba: Tensor) -> tuple[Tensor, Tensor]:
        b, a = ba.chunk(2, -1)
        return b, a

    def run(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """v before the convolution [n, HEADS, DV], a and b [n, HEADS], as hooks see them."""
        if self.kind == "olmo_hybrid":
            mixed, (a, _), (b, _) = self.in_proj_qkvg(x)[0], self.a_proj(x), self.b_proj(x)
        else:
            mixed, ba = self.in_proj_qkvz(x)[0], self.in_proj_ba(x)[0]
            b, a = ba.chunk(2, -1)
        if self.gqa_interleaved_layout:
            per_key = HEADS // KEYS
            groups = mixed.view(len(x), KEYS, -1)
            v = groups[..., 2 * DK : 2 * DK + per_key * DV].reshape(len(x), HEADS, DV)
            b, a = (t.reshape(len(x), HEADS) for t in ba.view(len(x), KEYS, -1).chunk(2, -1))
        else:
            v = mixed[:, 2 * KEYS * DK : self.conv_dim].view(len(x), HEADS, DV)
        return v, a, b


def sizes_of(v: Tensor, weight: Tensor) -> Tensor:
    """Norms behind the convolution of one whole sequence v [n, HEADS, DV]: [n, HEADS]."""
    padded = F.pad(v.double().flatten(1).T, (3, 0))
    out = F.conv1d(padded[None], weight[-HEADS * DV :].double(), groups=HEADS * DV)[0].T
    return F.silu(out).unflatten(1, (HEADS, DV)).norm(dim=-1)


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_next", "olmo_hybrid"])
@torch.no_grad()
def test_rows_bound_what_is_written(kind: str) -> None:
    torch.manual_seed(0)
    modules = {index: LinearAttention(kind) for index in (1, 2)}
    layers = [SimpleNamespace(layer_type="full_attention"), *(
        SimpleNamespace(layer_type=LINEAR, linear_attn=module) for module in modules.values()
    )]  # fmt: skip
    capture = Capture(64)
    tap_gates(capture, SimpleNamespace(layers=layers))
    gates = Gates(capture, modules)
    xs = [[torch.randn(n, HIDDEN) for n in LENGTHS] for _ in range(2)]
    kept = [[(torch.empty(0), torch.empty(0))] * len(LENGTHS) for _ in range(2)]
    for step in range(2):
        for module in modules.values():
            module.run(torch.cat(xs[step]))
        firsts = [sum(LENGTHS[:request]) for request in range(len(LENGTHS))]
        g, write = gates.rows(list(zip(firsts, LENGTHS, strict=True)))
        kept[step] = list(zip(g.split(LENGTHS), write.split(LENGTHS), strict=True))
    for request, count in enumerate(LENGTHS):
        whole = torch.cat([xs[0][request], xs[1][request]])
        g, write = (torch.cat([kept[0][request][i], kept[1][request][i]]) for i in (0, 1))
        for number, module in enumerate(modules.values()):
            v, a, b = module.run(whole)
            expected = -module.A_log.exp() * F.softplus(a + module.dt_bias)
            torch.testing.assert_close(g[:, number], expected)
            factor = 2 if kind == "olmo_hybrid" else 1
            true = factor * b.double().sigmoid() * sizes_of(v, module.conv1d.weight)
            assert (write[:, number] >= true * (1 - 1e-5)).all()
            for start in (0, count):
                inner = slice(start + 3, start + count)
                torch.testing.assert_close(write[inner, number], true[inner].float())


@torch.no_grad()
def test_states_gone_on_from_count() -> None:
    """After a restart nothing was seen of the rows before; the convolution's state has them."""
    torch.manual_seed(0)
    module = LinearAttention("qwen3_5")
    capture = Capture(8)
    tap_gates(
        capture, SimpleNamespace(layers=[SimpleNamespace(layer_type=LINEAR, linear_attn=module)])
    )
    for transposed in (False, True):
        gates = Gates(capture, {0: module})
        x = torch.randn(4, HIDDEN)
        x[:3] *= 10  # larger than what is seen
        v, _, b = module.run(x)
        conv = torch.zeros(2, 3, module.conv_dim)
        conv[1, :, -HEADS * DV :] = v[:3].flatten(1)
        module.kv_cache = (
            conv.transpose(1, 2) if transposed else conv,
            torch.ones(2, HEADS, DV, DK),
        )
        true = (b.sigmoid() * sizes_of(v, module.conv1d.weight))[3]
        module.run(x[3:])
        assert (gates.rows([(0, 1)])[1][0, 0] < true).any()
        gates.saw({0: 1})
        assert (gates.rows([(0, 1)])[1][0, 0] >= true).all()
        assert gates.norms({0: 1}).tolist() == [[pytest.approx((DV * DK) ** 0.5)] * HEADS]
