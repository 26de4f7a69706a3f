"""Requests to a server: queries, chats with marked parts, layouts of tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
from http_server import BLOCK

from kvspan.layout import SpanLayout, layout_from_tokens
from kvspan.query.prompt import Message, Span
from kvspan.vllm.params import to_params
from tiny_models import VOCAB

PASSAGES = [" ".join(f"w{(7 * d + i) % 150}" for i in range(20 + 25 * d)) for d in range(5)]


def query(*passages: str, question: str = "w4", salt: str = "w1") -> dict[str, Any]:
    spans = {"plus": [{"user": text} for text in passages]}
    parts = [{"system": salt}, spans, {"user": question}]
    return {"g": {"model": "spnl/tiny", "max_tokens": 6, "input": {"cross": parts}}}


def parts(order: list[int]) -> list[dict[str, Any]]:
    spans: list[dict[str, Any]] = [
        {"type": "text", "text": PASSAGES[i], "kvspan": {"span": True}} for i in order
    ]
    return [*spans, {"type": "text", "text": "w77", "kvspan": {"span": False}}]


def chat(order: list[int], system: str = "w9", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": parts(order)}]
    return {"model": "tiny", "messages": messages, "max_tokens": 8, "temperature": 0, **fields}


def prompt(order: list[int], system: str = "w9") -> tuple[Message | Span, ...]:
    spans = [Span((Message("user", PASSAGES[i]),)) for i in order]
    return (Message("system", system), *spans, Message("user", "w77"))


def layout_of(order: list[int], seed: int = 5) -> SpanLayout:
    """Tokens a client made itself: an anchor of two blocks, spans, a question."""
    rng = np.random.default_rng(seed)
    documents = [rng.integers(7, VOCAB, n * BLOCK) for n in (2, 1, 3)]
    ids, spans = [rng.integers(7, VOCAB, 2 * BLOCK)], []
    for i in order:
        at = sum(map(len, ids))
        spans.append((at, at + len(documents[i])))
        ids.append(documents[i])
    return layout_from_tokens(np.concatenate([*ids, rng.integers(7, VOCAB, 9)]), spans, BLOCK)


def completion(layout: SpanLayout, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": layout.token_ids.tolist(), "max_tokens": 6, "temperature": 0}
    return {**body, "kv_transfer_params": to_params(layout), **fields}
