"""Tiny random hybrids of every family, and runs of them without an engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    OlmoHybridConfig,
    PreTrainedModel,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from kvspan.engine import GenerateRequest, GenerateResult
from kvspan.engine.attention import IMPLEMENTATION, Slots
from kvspan.engine.rope import LayerSpec
from kvspan.engine.runner import KVCache
from kvspan.hybrid.engine import HybridEngine
from kvspan.hybrid.hidden import HiddenCache
from kvspan.hybrid.rows import HybridRunner, Rows
from kvspan.hybrid.state import RecurrentState
from kvspan.layout import layout_from_tokens
from tiny_models import VOCAB, word_tokenizer

FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "olmo_hybrid")
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 8192,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_ROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
_OLMO = {"num_key_value_heads": 4, "linear_num_key_heads": 4, "linear_value_head_dim": 32}


def hybrid_config(name: str, **changes: Any) -> Any:
    """Layers LA LA LA FA LA LA LA FA, unless changed."""
    if name == "qwen3_5":
        return Qwen3_5TextConfig(**{**_SIZES, "rope_parameters": _ROPE, **changes})
    if name == "qwen3_5_moe":
        sizes = {**_SIZES, **_EXPERTS, "rope_parameters": _ROPE}
        return Qwen3_5MoeTextConfig(**{**sizes, **changes})
    if name == "qwen3_next":
        return Qwen3NextConfig(**{**_SIZES, **_EXPERTS, **changes})
    sizes = {key: value for key, value in _SIZES.items() if key != "head_dim"}
    return OlmoHybridConfig(**{**sizes, **_OLMO, **changes})


def tiny_hybrid(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """Random weights, the same for the same name; some heads forget at once, some hardly."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        hybrid_config(name, **changes), attn_implementation="eager"
    )
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            layer.linear_attn.A_log.data.uniform_(-7, 1)
    model.generation_config.eos_token_id = VOCAB  # never drawn: random models must not stop
    return model.to(dtype).eval()


def open_hybrid(model: PreTrainedModel, **options: Any) -> HybridEngine:
    return HybridEngine(model, word_tokenizer(), name="tiny", **{"kv_cache_gib": 0.05, **options})


def ask(
    engine: HybridEngine, tokens: list[int], max_tokens: int = 4, salt: str = ""
) -> GenerateResult:
    """Greedy, with the first token's log-probabilities."""
    layout = layout_from_tokens(np.asarray(tokens), [], engine.encoder.block_size, "full")
    request = GenerateRequest(
        prompt=(),
        max_tokens=max_tokens,
        temperature=0.0,
        scope="full",
        salt=salt,
        return_logprobs=True,
    )
    return engine.run_layout(layout, request)


def random_tokens(count: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, VOCAB, count)]


def make_runner(model: PreTrainedModel, num_tokens: int, block_size: int = 16) -> HybridRunner:
    model.set_attn_implementation(IMPLEMENTATION)
    config = model.config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    spec = LayerSpec(config.num_key_value_heads, dim, dim, None, torch.empty(0), True)
    kinds = config.layer_types
    blocks = -(-num_tokens // block_size)
    cache = KVCache(
        [spec] * kinds.count("full_attention"), blocks, block_size, model.dtype, model.device
    )
    streams = kinds.count("full_attention") - (kinds[-1] == "full_attention")
    hidden = HiddenCache(
        streams, blocks * block_size, config.hidden_size, model.dtype, model.device
    )
    return HybridRunner(model, cache, hidden)


@dataclass
class Track:
    """A sequence in slots [first, first + capacity) of a runner's pool.

    checkpoints: its states at multiples of `interval` tokens.
    """

    runner: HybridRunner
    tokens: torch.Tensor
    first: int
    capacity: int
    interval: int = 0
    checkpoints: list[RecurrentState] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.slots = Slots(torch.arange(self.first, self.first + self.capacity))
        self.state = self.runner.new_state()

    def prefill(self, end: int, write_from: int = 0) -> torch.Tensor:
        """Tokens up to `end`, in pieces; logits of the last one."""
        logits = None
        while self.state.position < end:
            rows = Rows.piece(self.state.position, end)
            logits = self.runner.run(
                rows,
                self.tokens,
                self.slots,
                self.state,
                write_from=write_from,
                want_logits=rows.hi == end,
            )
            if self.interval and rows.hi % self.interval == 0:
                self.checkpoints.append(self.state.share())
        assert logits is not None
        return logits

    def greedy(self, logits: torch.Tensor, count: int) -> tuple[list[int], torch.Tensor]:
        """Tokens, and the logits that the last one was taken from."""
        tokens = [int(logits.argmax())]
        while len(tokens) < count:
            step = (tokens[-1], self.state.position, self.slots, self.state)
            logits = self.runner.decode([step])[0]
            tokens.append(int(logits.argmax()))
        return tokens, logits

    def copy_from(self, other: Track, count: int) -> None:
        """The KV of another sequence's first tokens."""
        source, target = other.slots.ids[:count], self.slots.ids[:count]
        self.runner.cache.copy(source, target)
        self.runner.hidden.copy(source, target)
