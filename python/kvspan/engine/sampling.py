"""Picking the next token, and turning tokens back into text as they come."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedTokenizerBase


class Sampler:
    """Greedy at temperature 0, else a draw from softmax(logits / temperature).

    The generator is the request's own, so a draw does not depend on what runs beside it.
    """

    def __init__(self, temperature: float, seed: int) -> None:
        self.temperature = temperature
        self.generator = torch.Generator().manual_seed(seed % 2**63)

    def __call__(self, logits: torch.Tensor) -> int:
        """logits: float32 [vocab_size]."""
        if self.temperature == 0:
            return int(logits.argmax())
        probabilities = (logits / self.temperature).softmax(-1).cpu()
        return int(torch.multinomial(probabilities, 1, generator=self.generator))


class Detokenizer:
    """Text of a growing token list; emits only whole characters."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, on_text: Callable[[str], None] | None
    ) -> None:
        self.tokenizer = tokenizer
        self.on_text = on_text
        self.token_ids: list[int] = []
        self._emitted = ""

    def push(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        if self.on_text:
            text = self.text()
            if not text.endswith("\ufffd"):
                self._emit(text)

    def finish(self) -> str:
        text = self.text()
        if self.on_text:
            self._emit(text)
        return text

    def text(self) -> str:
        text = self.tokenizer.decode(self.token_ids, skip_special_tokens=True)
        return text if isinstance(text, str) else "".join(text)

    def _emit(self, text: str) -> None:
        if self.on_text and text.startswith(self._emitted) and len(text) > len(self._emitted):
            self.on_text(text[len(self._emitted) :])
            self._emitted = text
