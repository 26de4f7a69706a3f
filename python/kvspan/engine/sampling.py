"""Picking the next token, and turning tokens back into text as they come."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedTokenizerBase

from kvspan.errors import KvspanError


class Sampler:
    """Greedy at temperature 0, else a draw from softmax(logits / temperature).

    The generator is the request's own, so a draw does not depend on what runs beside it.
    """

    def __init__(self, temperature: float, seed: int) -> None:
        self.temperature = temperature
        self.generator = torch.Generator().manual_seed(seed % 2**63)

    def __call__(self, logits: torch.Tensor) -> int:
        """logits: float32 [vocab_size]. Raises KvspanError where they are no numbers."""
        best = int(logits.argmax())  # of a NaN if there is one
        highest = float(logits[best])
        if not math.isfinite(highest):
            raise KvspanError(
                f"the model's logits are not finite (the highest is {highest}): its weights are "
                f"damaged, or it needs a wider dtype"
            )
        if self.temperature == 0:
            return best
        # In float64, and 0 at the highest: no temperature is too small.
        scaled = (logits.double() - highest) / self.temperature
        probabilities = scaled.softmax(-1).cpu()
        return int(torch.multinomial(probabilities, 1, generator=self.generator))


class Detokenizer:
    """Text of a growing token list; emits only whole characters.

    The text ends before the first of the stop texts. What may turn out to be the start of one is
    held back until that is known, so that nobody gets to see part of it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        on_text: Callable[[str], None] | None,
        stop: Sequence[str] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.on_text = on_text
        self.stop = [text for text in stop if text]
        self.token_ids: list[int] = []
        self.cut = False  # whether the text ends before the tokens do
        self._emitted = ""

    def push(self, token_id: int) -> bool:
        """Take one more token; whether the text has come to a stop text."""
        self.token_ids.append(token_id)
        if not (self.on_text or self.stop):
            return False
        text = self._decode()
        end = self._end(text)
        if self.on_text and end is None and not text.endswith("\ufffd"):
            self._emit(text[: len(text) - self._undecided(text)])
        self.cut = end is not None
        return self.cut

    def finish(self) -> str:
        text = self.text()
        if self.on_text:
            self._emit(text)
        return text

    def text(self) -> str:
        text = self._decode()
        return text[: self._end(text)]

    def _decode(self) -> str:
        text = self.tokenizer.decode(self.token_ids, skip_special_tokens=True)
        return text if isinstance(text, str) else "".join(text)

    def _end(self, text: str) -> int | None:
        """Where the first stop text starts, if there is one."""
        starts = [at for stop in self.stop if (at := text.find(stop)) >= 0]
        return min(starts, default=None)

    def _undecided(self, text: str) -> int:
        """Length of the longest end of the text that a stop text starts with."""
        return max(
            (
                length
                for stop in self.stop
                for length in range(1, min(len(stop), len(text) + 1))
                if text.endswith(stop[:length])
            ),
            default=0,
        )

    def _emit(self, text: str) -> None:
        if self.on_text and text.startswith(self._emitted) and len(text) > len(self._emitted):
            self.on_text(text[len(self._emitted) :])
            self._emitted = text
