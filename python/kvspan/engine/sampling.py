"""Picking the next token."""

from __future__ import annotations

import math

import torch

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
