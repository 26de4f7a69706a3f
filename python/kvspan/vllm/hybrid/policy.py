"""How much is replayed under vLLM, as a server's settings or a request say it. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvspan.errors import UsageError
from kvspan.hybrid import policy


@dataclass(frozen=True)
class Policy:
    """How much of a prefix's tail is replayed.

    name: "exact" (from the last state kept, or from the start), "bounded" (of each group as little
        as keeps the fixed-input error below value, and k_min tokens), "ratio" (at least value *
        length and k_min tokens, from zero), "zero" (none, for experiments), "off".
    """

    name: str = "exact"
    value: float = 0.0
    k_min: int = 256

    def __str__(self) -> str:
        return f"{self.name}:{self.value:g}" if self.name in ("bounded", "ratio") else self.name

    def tail(self, length: int) -> int:
        """Tokens to replay at the least for a prefix of `length`; exact needs them all."""
        if self.name == "ratio":
            return min(length, max(self.k_min, math.ceil(self.value * length)))
        return 0 if self.name == "zero" else length

    def bounded(self) -> policy.Policy:
        """As kvspan's own planner takes it."""
        return policy.Policy("bounded", self.value, self.k_min)


def parse_policy(text: object, where: str, k_min: int = 256) -> Policy:
    """As for kvspan's own engine, or "off"; UsageError for anything else."""
    if text == "off":
        return Policy("off", k_min=k_min)
    try:
        parsed = policy.Policy.parse(text if isinstance(text, str) else "")
    except UsageError as error:
        raise UsageError(
            f"{where}: unknown replay policy", expected=f"{error.expected} or off",
            found=repr(text),
        ) from None  # fmt: skip
    return Policy(parsed.kind, parsed.value, k_min)
