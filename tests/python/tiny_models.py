"""Tiny random decoders of the supported families, and a word tokenizer for them."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma3TextConfig,
    GlmConfig,
    GraniteConfig,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

VOCAB = 211
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "initializer_range": 0.25,  # large: attention must matter, or errors in it stay hidden
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def configs() -> dict[str, Any]:
    """Config by the name used as test id. NeoX pairing but for Cohere and GLM (interleaved)."""
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    linear = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    return {
        "llama": LlamaConfig(**_SIZES),
        "llama3-rope": LlamaConfig(**_SIZES, rope_parameters=llama3),
        "linear-rope": LlamaConfig(**_SIZES, rope_parameters=linear),
        "yarn-rope": LlamaConfig(**_SIZES, rope_parameters=yarn),
        "qwen3": Qwen3Config(**_SIZES),
        "granite": GraniteConfig(**_SIZES, attention_multiplier=0.3, embedding_multiplier=3.0),
        "gemma3": Gemma3TextConfig(
            **_SIZES,
            sliding_window=24,
            query_pre_attn_scalar=16,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        "cohere-interleaved": CohereConfig(**_SIZES),
        "glm-partial-interleaved": GlmConfig(**_SIZES, partial_rotary_factor=0.5),
    }


def tiny_model(name: str, attention: str = "eager", seed: int = 0) -> PreTrainedModel:
    """A float32 model of random weights; the same for the same name and seed."""
    torch.manual_seed(seed)
    config = configs()[name]
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    model.generation_config.eos_token_id = VOCAB  # never drawn: random models must not stop
    return model.float().eval()


def word_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """One token per word w0, w1, ...; <bos> comes first; <turn> is special, as a role token is."""
    words = ["<pad>", "<bos>", "<eos>", "<unk>", "<turn>", "\n", "\n\n"]
    words += [f"w{i}" for i in range(VOCAB - len(words))]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split("\n\n", "isolated")]
    )
    from tokenizers.processors import TemplateProcessing

    tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=["<turn>"],
    )
    fast.chat_template = chat_template
    return fast
