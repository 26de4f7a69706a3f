"""How much of each group is to be replayed, as a user says it. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from kvspan.errors import UsageError

Kind = Literal["exact", "bounded", "ratio", "zero"]
KINDS: tuple[Kind, ...] = get_args(Kind)
K_MIN = 64  # replayed at least: it is the absolute number of tokens that counts, not the ratio


@dataclass(frozen=True)
class Policy:
    """exact: from a checkpoint, or from the start: equal to computing everything.

    bounded: the fixed-input error of every layer's state at most value times the state's norm.
    ratio: the last value * matched tokens from a zero state, at least k_min.
    zero: no replay at all, for experiments.
    """

    kind: Kind = "exact"
    value: float = 0.0
    k_min: int = K_MIN

    def __str__(self) -> str:
        return f"{self.kind}:{self.value:g}" if self.kind in ("bounded", "ratio") else self.kind

    @staticmethod
    def parse(text: str) -> Policy:
        """Of "exact", "bounded:EPS", "ratio:R" or "zero". Raises UsageError.

        >>> str(Policy.parse("bounded:0.001"))
        'bounded:0.001'
        """
        expected = "exact, bounded:EPS (EPS above 0, up to 1) or ratio:R (R above 0, up to 1)"
        kind, _, number = text.partition(":")
        if text == "exact":
            return Policy()
        if text == "zero":
            return Policy("zero")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if kind == "bounded" and 0 < value <= 1:
            return Policy("bounded", value)
        if kind == "ratio" and 0 < value <= 1:
            return Policy("ratio", value)
        raise UsageError("replay policy", expected=expected, found=repr(text))
