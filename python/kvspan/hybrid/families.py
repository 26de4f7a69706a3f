"""One adapter per family: where a hybrid model's weights are, and in which order they act.

All tensors are of one run of tokens: hidden vectors ``[T, H]`` in the model's dtype, ``mixed``
``[T, C]`` (q, k and v channels side by side, C = 2 Hk dk + Hv dv), ``z`` ``[T, Hv * dv]``, ``a``
and ``b`` ``[T, Hv]``. Every product is a full-size matrix product over all rows, so that with a
fixed number of rows the bits of one row depend on that row alone (measured for MKL and oneDNN).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from kvspan.hybrid.groups import layer_map

EXPERT_ROWS = 16  # rows per product of one expert: fixed, for the same reason


@dataclass(frozen=True)
class Sizes:
    """Of the linear-attention layers; width: taps of the convolution."""

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    width: int

    @property
    def key_dim(self) -> int:
        return self.num_k_heads * self.head_k_dim

    @property
    def value_dim(self) -> int:
        return self.num_v_heads * self.head_v_dim

    @property
    def channels(self) -> int:
        return 2 * self.key_dim + self.value_dim


@dataclass(frozen=True)
class Projected:
    """What a layer's input projections give; z is None where no output was asked for."""

    mixed: Tensor
    z: Tensor | None
    a: Tensor
    b: Tensor


class Family(ABC):
    """What the families have in common. Holds no weights of its own but re-ordered copies."""

    gated_norm = "norm"  # name of the norm between state and output projection
    output = "out_proj"
    beta_factor = 1.0

    def __init__(self, model: PreTrainedModel) -> None:
        self.base: Any = model.model
        self.head: Any = model.get_output_embeddings()
        self.config = model.config.get_text_config()
        self.map = layer_map(self.config.layer_types)
        c = self.config
        self.sizes = Sizes(
            num_k_heads=c.linear_num_key_heads,
            num_v_heads=c.linear_num_value_heads,
            head_k_dim=c.linear_key_head_dim,
            head_v_dim=c.linear_value_head_dim,
            width=c.linear_conv_kernel_dim,
        )
        self._kv_weights: dict[int, Tensor] = {}

    # --- the model around the layers

    def embed(self, ids: Tensor) -> Tensor:
        """ids int64 [T] -> [T, H]."""
        out: Tensor = self.base.embed_tokens(ids)
        return out

    def rotary(self, x: Tensor, positions: Tensor) -> Any:
        """What the attention layers take as positions; None for models without RoPE."""
        rotary = self.base.rotary_emb
        return None if rotary is None else rotary(x[None], positions[None])

    def logits(self, x: Tensor) -> Tensor:
        """[R, H] after the last layer -> [R, vocab_size], float32."""
        out: Tensor = self.head(self.base.norm(x))
        return out.float()

    # --- a full-attention layer

    def full(self, layer: int, x: Tensor, rope: Any) -> tuple[Tensor, Tensor]:
        """The two halves of the output, which is their sum: (residual, FFN branch), [T, H] each."""
        block = self.base.layers[layer]
        x = x + self._attend(block, block.input_layernorm(x), rope)
        return x, self._ffn(block, block.post_attention_layernorm(x))

    def _attend(self, block: Any, h: Tensor, rope: Any) -> Tensor:
        out, _ = block.self_attn(
            hidden_states=h[None], position_embeddings=rope, attention_mask=None, cache=None
        )
        first: Tensor = out[0]
        return first

    # --- a linear-attention layer

    def project(self, layer: int, x: Tensor, outputs: bool = True) -> Projected:
        """Norm and input projections of x [T, H]; outputs: whether z is wanted."""
        block = self.base.layers[layer]
        return self._project(block.linear_attn, block.input_layernorm(x), outputs)

    def project_kv(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(k and v channels [T, Hk dk + Hv dv], a, b): all that a state needs, q left out.

        A smaller product than `project`'s: not of the same bits.
        """
        block = self.base.layers[layer]
        la, h = block.linear_attn, block.input_layernorm(x)
        if layer not in self._kv_weights:
            self._kv_weights[layer] = self._kv_weight(la)
        a, b = self._gate_inputs(la, h)
        return F.linear(h, self._kv_weights[layer]), a, b

    def gates(self, layer: int, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """(log decay g <= 0, beta), float32 [T, Hv]."""
        la = self.base.layers[layer].linear_attn
        g = -la.A_log.float().exp() * F.softplus(a.float() + la.dt_bias)
        return g.float(), b.sigmoid().float() * self.beta_factor

    def conv(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """(weight [C, W], bias [C] or None)."""
        conv = self.base.layers[layer].linear_attn.conv1d
        return conv.weight.squeeze(1), conv.bias

    def mix(self, layer: int, x: Tensor, out: Tensor, z: Tensor) -> Tensor:
        """x plus the mixer's branch: out [T, Hv, dv] through gated norm and projection."""
        la = self.base.layers[layer].linear_attn
        dim = self.sizes.head_v_dim
        normed = getattr(la, self.gated_norm)(out.reshape(-1, dim), z.reshape(-1, dim))
        branch: Tensor = getattr(la, self.output)(normed.reshape(len(x), -1))
        return x + branch

    def feed_forward(self, layer: int, x: Tensor) -> Tensor:
        """x plus the FFN's branch."""
        block = self.base.layers[layer]
        return x + self._ffn(block, block.post_attention_layernorm(x))

    def _ffn(self, block: Any, h: Tensor) -> Tensor:
        return experts(block.mlp, h) if hasattr(block.mlp, "experts") else block.mlp(h)

    @abstractmethod
    def _project(self, la: Any, h: Tensor, outputs: bool) -> Projected:
        """All input projections of h; of z only where outputs are wanted."""

    @abstractmethod
    def _gate_inputs(self, la: Any, h: Tensor) -> tuple[Tensor, Tensor]:
        """a and b of h alone."""

    @abstractmethod
    def _kv_weight(self, la: Any) -> Tensor:
        """[Hk dk + Hv dv, H]: the rows of the projection that give k and v."""


class Qwen35(Family):
    """Qwen3.5 and Qwen3.5-MoE: q, k, v in one projection, z, b and a in one each."""

    def rotary(self, x: Tensor, positions: Tensor) -> Any:
        # Text has one position on all three axes; not every transformers 5 spreads it itself.
        return self.base.rotary_emb(x[None], positions.expand(3, 1, -1))

    def _project(self, la: Any, h: Tensor, outputs: bool) -> Projected:
        z = la.in_proj_z(h) if outputs else None
        return Projected(la.in_proj_qkv(h), z, *self._gate_inputs(la, h))

    def _gate_inputs(self, la: Any, h: Tensor) -> tuple[Tensor, Tensor]:
        return la.in_proj_a(h), la.in_proj_b(h)

    def _kv_weight(self, la: Any) -> Tensor:
        weight: Tensor = la.in_proj_qkv.weight[self.sizes.key_dim :]
        return weight


class Qwen3Next(Family):
    """Qwen3-Next: one projection whose rows are [q, k, v, z] of a key head, then of the next."""

    def _split(self, rows: Tensor) -> tuple[Tensor, ...]:
        """[..., one row per output of in_proj_qkvz] -> q, k, v, z with heads side by side."""
        s = self.sizes
        group = s.num_v_heads // s.num_k_heads * s.head_v_dim
        heads = rows.unflatten(-1, (s.num_k_heads, 2 * s.head_k_dim + 2 * group))
        parts = heads.split([s.head_k_dim, s.head_k_dim, group, group], dim=-1)
        return tuple(part.flatten(-2) for part in parts)

    def _project(self, la: Any, h: Tensor, outputs: bool) -> Projected:
        q, k, v, z = self._split(la.in_proj_qkvz(h))
        return Projected(
            torch.cat((q, k, v), -1), z if outputs else None, *self._gate_inputs(la, h)
        )

    def _gate_inputs(self, la: Any, h: Tensor) -> tuple[Tensor, Tensor]:
        s = self.sizes
        per_head = s.num_v_heads // s.num_k_heads
        b, a = la.in_proj_ba(h).unflatten(-1, (s.num_k_heads, 2, per_head)).unbind(-2)
        return a.flatten(-2), b.flatten(-2)

    def _kv_weight(self, la: Any) -> Tensor:
        _, k, v, _ = self._split(la.in_proj_qkvz.weight.T)
        return torch.cat((k, v), -1).T.contiguous()


class OlmoHybrid(Family):
    """OLMo Hybrid: separate projections, beta up to 2; attention layers norm what they add."""

    gated_norm = "o_norm"
    output = "o_proj"

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.beta_factor = 2.0 if self.config.linear_allow_neg_eigval else 1.0

    def full(self, layer: int, x: Tensor, rope: Any) -> tuple[Tensor, Tensor]:
        block = self.base.layers[layer]
        x = x + block.post_attention_layernorm(self._attend(block, x, rope))
        return x, block.post_feedforward_layernorm(self._ffn(block, x))

    def _project(self, la: Any, h: Tensor, outputs: bool) -> Projected:
        mixed = torch.cat([la.q_proj(h), la.k_proj(h), la.v_proj(h)], -1)
        return Projected(mixed, la.g_proj(h) if outputs else None, *self._gate_inputs(la, h))

    def _gate_inputs(self, la: Any, h: Tensor) -> tuple[Tensor, Tensor]:
        return la.a_proj(h), la.b_proj(h)

    def _kv_weight(self, la: Any) -> Tensor:
        return torch.cat([la.k_proj.weight, la.v_proj.weight])


_ADAPTERS: dict[str, type[Family]] = {
    "qwen3_5_text": Qwen35,
    "qwen3_5_moe_text": Qwen35,
    "qwen3_next": Qwen3Next,
    "olmo_hybrid": OlmoHybrid,
}


def family_of(model: PreTrainedModel) -> Family:
    """The adapter of a model that `groups.refusal` has nothing against."""
    return _ADAPTERS[model.config.get_text_config().model_type](model)


def experts(block: Any, h: Tensor) -> Tensor:
    """A sparse mixture of experts over h [T, H], with products of EXPERT_ROWS rows each.

    How many tokens share an expert depends on the other tokens; with the number of rows in a
    product fixed, a token's bits do not. Branches of a token are added in the order of the experts.
    """
    _, weights, chosen = block.gate(h)
    out = torch.zeros_like(h)
    for expert in chosen.unique().tolist():
        tokens, which = torch.where(chosen == expert)
        for at in range(0, len(tokens), EXPERT_ROWS):
            part = tokens[at : at + EXPERT_ROWS]
            x = h.new_zeros(EXPERT_ROWS, h.shape[1])
            x[: len(part)] = h[part]
            gate, up = F.linear(x, block.experts.gate_up_proj[expert]).chunk(2, dim=-1)
            y = F.linear(block.experts.act_fn(gate) * up, block.experts.down_proj[expert])
            scale = weights[part, which[at : at + EXPERT_ROWS], None]
            out[part] += (y[: len(part)] * scale).to(out.dtype)
    shared: Tensor = F.sigmoid(block.shared_expert_gate(h)) * block.shared_expert(h)
    return out + shared
