"""Decays and writes of the linear-attention layers, seen as the model runs: what `decay` sums up.

Taps on the input projections keep, per token and value head in float32: g and beta, and the norms
of v behind and before its convolution. The convolution runs over the whole flattened batch, so that
the first tokens of a request's part of a pass mix with another's; for those a bound on v is taken
instead, from the largest input ever seen and the sizes of the taps. Needs torch, not vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import kvspan.torch_ops_gated_delta  # noqa: F401  registers causal_conv1d_
from kvspan.hybrid.groups import LINEAR
from kvspan.vllm.hybrid.capture import Capture, Parts
from kvspan.vllm.hybrid.decay import Bytes, Cells


def tap_gates(capture: Capture, decoder: Any) -> None:
    """Keep what a decoder's linear-attention layers decay and write. Before its first pass."""
    for index, layer in enumerate(decoder.layers):
        if layer.layer_type != LINEAR:
            continue
        module = layer.linear_attn
        heads = len(module.A_log)
        taps: dict[str, tuple[Any, int, Parts]] = {
            "values": (_projection(module), 2 * heads, partial(_values, module))
        }
        if hasattr(module, "in_proj_ba"):
            taps["gates"] = (module.in_proj_ba, 2 * heads, partial(_gates, module))
        else:  # OLMo
            taps["decays"] = (module.a_proj, heads, partial(_decay, module))
            taps["betas"] = (module.b_proj, heads, partial(_beta, module))
        for name, (tapped, width, parts) in taps.items():
            capture.tap(f"{name}.{index}", tapped, width, torch.float32, parts)


def _projection(module: Any) -> Any:
    return module.in_proj_qkvz if hasattr(module, "in_proj_qkvz") else module.in_proj_qkvg


def _gates(module: Any, output: tuple[Tensor, Any]) -> list[Tensor]:
    """[g, beta], each float32 [n, heads]."""
    ba, _ = output
    if module.gqa_interleaved_layout:
        per_key = module.num_v_heads // module.num_k_heads
        b, a = (t.flatten(1) for t in ba.unflatten(1, (-1, 2 * per_key)).split(per_key, -1))
    else:
        b, a = module.split_ba(ba)
    return [*_decay(module, (a, None)), *_beta(module, (b, None))]


def _decay(module: Any, output: tuple[Tensor, Any]) -> list[Tensor]:
    a, _ = output
    return [-module.A_log.float().exp() * F.softplus(a.float() + module.dt_bias.float())]


def _beta(module: Any, output: tuple[Tensor, Any]) -> list[Tensor]:
    b, _ = output
    factor = 2.0 if getattr(module, "allow_neg_eigval", False) else 1.0
    return [b.float().sigmoid() * factor]


def _values(module: Any, output: tuple[Tensor, Any]) -> list[Tensor]:
    """[norm of each head's v behind the convolution, and before it], float32 [n, heads]."""
    mixed, _ = output
    if getattr(module, "gqa_interleaved_layout", False):
        dim, per_key = module.head_k_dim, module.num_v_heads // module.num_k_heads
        wide = per_key * module.head_v_dim
        v = mixed.unflatten(1, (-1, 2 * (dim + wide)))[..., 2 * dim : 2 * dim + wide].flatten(1)
    else:
        end = module.conv_dim // module.tp_size
        v = mixed[:, end - module.value_dim // module.tp_size : end]
    return [_norms(module, _convolved(v, _weight(module, v.shape[1]))), _norms(module, v)]


def _norms(module: Any, v: Tensor) -> Tensor:
    heads = v.unflatten(1, (-1, module.head_v_dim))
    return torch.linalg.vector_norm(heads, dim=-1, dtype=torch.float32)


def _weight(module: Any, channels: int) -> Tensor:
    """[channels, taps] of v, which comes last. Where vLLM packs it, it keeps a plain one."""
    conv = module.conv1d
    plain = getattr(conv, "_cpu_unpacked_conv_weight", None)
    weight: Tensor = conv.weight.squeeze(1) if plain is None else plain
    return weight[-channels:]


def _convolved(v: Tensor, weight: Tensor) -> Tensor:
    """silu of the causal convolution of v [n, channels], its rows taken for one sequence."""
    width = weight.shape[1]
    if v.device.type == "cpu":  # where torch's takes several times as long
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
        state = v.new_zeros(1, v.shape[1], width - 1)
        torch.ops.kvspan.causal_conv1d_(v, weight, None, out, state, None, True)
        return out
    out = F.conv1d(v.T[None], weight[:, None], padding=width - 1, groups=len(weight))
    return F.silu(out[0, :, : len(v)].T)


class Part(NamedTuple):
    """A request's tokens in a pass: their first row, and where they are, one after the other: a
    page's bytes that `Cells` describes, the first token's offset there, how many."""

    row: int
    pages: list[tuple[Bytes, int, int]]


class Gates:
    """Reads what `tap_gates` keeps. modules: linear_attn by layer, their weights loaded.

    [layers, heads] and the like are over all linear-attention layers, in order.
    """

    def __init__(self, capture: Capture, modules: Mapping[int, Any]) -> None:
        self._capture = capture
        self._modules = dict(modules)
        reach = []
        for module in self._modules.values():
            weight = _weight(module, len(module.A_log) * module.head_v_dim)
            taps = weight.abs().float().unflatten(0, (-1, module.head_v_dim)).amax(1)
            reach.append(taps.sum(1))
        self._reach = torch.stack(reach)
        self._edge = int(weight.shape[1]) - 1
        self._most = torch.zeros_like(self._reach)
        self._fused = all(hasattr(module, "in_proj_ba") for module in self._modules.values())

    def rows(self, parts: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """g and beta ||v|| (or more) of tokens of the last pass, float32 [n, layers, heads].

        parts: of each request the first row and the number of rows, at least 1.
        """
        device = self._reach.device
        ranges = [torch.arange(first, first + count) for first, count in parts]
        wanted = torch.cat(ranges).to(device)
        near = torch.cat([torch.arange(count) for _, count in parts]).to(device) < self._edge
        g, beta = self._read(("gates",) if self._fused else ("decays", "betas"), wanted)
        v, before = self._read(("values",), wanted)
        self._most = torch.maximum(self._most, before.nan_to_num(0.0, 0.0, 0.0).amax(0))
        return g, beta * torch.where(near[:, None, None], self._reach * self._most, v)

    def _read(self, names: tuple[str, ...], wanted: Tensor) -> tuple[Tensor, Tensor]:
        rows = [
            torch.stack([self._capture.rows(f"{name}.{i}")[wanted] for i in self._modules], 1)
            for name in names
        ]
        one, other = torch.cat(rows, -1).chunk(2, -1)
        return one, other

    def write(self, parts: Sequence[Part], cells: Cells, rank: int) -> None:
        """Add the last pass's tokens to the pages that they are in."""
        counts = [sum(count for _, _, count in part.pages) for part in parts]
        g, write = self.rows([(p.row, n) for p, n in zip(parts, counts, strict=True)])
        if len(g) < 2 * len(parts):  # decoding: one copy, not one for each request
            g, write = g.cpu(), write.cpu()
        at = 0
        for part in parts:
            for held, offset, count in part.pages:
                tokens = slice(at, at + count)
                cells.add(held, offset, g[tokens], write[tokens], rank)
                at += count

    def saw(self, slots: Mapping[int, int]) -> None:
        """A request goes on from the convolution states in these slots, by layer."""
        for number, (layer, module) in enumerate(self._modules.items()):
            conv = module.kv_cache[0][slots[layer]]
            if conv.shape[-1] == self._edge:
                conv = conv.transpose(-1, -2)
            v = conv[:, -len(module.A_log) * module.head_v_dim :]
            self._most[number] = torch.maximum(self._most[number], _norms(module, v).amax(0))

    def norms(self, slots: Mapping[int, int]) -> Tensor:
        """float32 [len(slots), heads]: of the states in these slots, by layer."""
        found = [
            torch.linalg.vector_norm(
                self._modules[layer].kv_cache[1][slot].flatten(1), dim=1, dtype=torch.float32
            )
            for layer, slot in slots.items()
        ]
        return torch.stack(found)
