"""The embedded engines on every device present, against transformers alone on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from devices import DEVICES
from hybrid_models import ask, open_hybrid, random_tokens, tiny_hybrid
from kvspan.engine import GenerateRequest
from kvspan.engine.local import LocalEngine
from kvspan.layout import layout_from_tokens
from span_oracle import span_logprobs
from tiny_models import VOCAB, tiny_model, word_tokenizer

BLOCK = 16


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["llama", "gemma3", "glm-partial-interleaved"])
def test_spans(name: str, device: str) -> None:
    """Computed, found again, and moved to other positions."""
    random = np.random.default_rng(7)
    anchor, *docs = (random.integers(3, VOCAB, count * BLOCK) for count in (2, 1, 3, 2))
    oracle, engine_model = tiny_model(name), tiny_model(name)
    request = GenerateRequest(prompt=(), max_tokens=3, temperature=0.0, return_logprobs=True)
    model: Any = engine_model.to(device)
    with LocalEngine(
        model, word_tokenizer(), name=name, block_size=BLOCK, kv_cache_gib=0.01
    ) as engine:
        for order in ([0, 1, 2], [0, 1, 2], [2, 0, 1]):
            parts, spans = [anchor], []
            for doc in order:
                start = sum(map(len, parts))
                parts.append(docs[doc])
                spans.append((start, start + len(docs[doc])))
            tail = random.integers(3, VOCAB, 21)
            layout = layout_from_tokens(np.concatenate([*parts, tail]), spans, BLOCK, "anchored")
            result = engine.run_layout(layout, request)
            expected = span_logprobs(oracle, layout, "sequential")
            assert result.first_logprobs is not None
            assert np.abs(result.first_logprobs - expected.numpy()).max() <= 1e-3
        assert result.reuse.reused_tokens == 6 * BLOCK


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["qwen3_5", "olmo_hybrid"])
def test_hybrids(name: str, device: str) -> None:
    """Whole, and from a prefix that ends anywhere."""
    oracle, engine_model = tiny_hybrid(name), tiny_hybrid(name)
    tokens = random_tokens(300)
    model: Any = engine_model.to(device)
    with open_hybrid(model) as engine:
        for prompt in (tokens, tokens[:170] + random_tokens(20, seed=1)):
            answer = ask(engine, prompt, 3)
            with torch.inference_mode():
                logits = oracle(torch.tensor([prompt])).logits[0, -1]
            expected = logits.log_softmax(-1).numpy()
            assert answer.first_logprobs is not None
            assert np.abs(answer.first_logprobs - expected).max() <= 1e-3
        assert answer.usage.cached_tokens >= 170
