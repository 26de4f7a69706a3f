"""Where tokens stand in a forward pass: pieces of a fixed grid, or rows of their own."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

PIECE = 256  # rows of an exact pass: a multiple of CHUNK
CHUNK = 64  # the grid of the gated delta rule


@dataclass(frozen=True)
class Rows:
    """Tokens [lo, hi) of a sequence as rows [lo - base, hi - base) of `size`."""

    base: int
    size: int
    lo: int
    hi: int

    @staticmethod
    def piece(lo: int, hi: int) -> Rows:
        """The first piece of tokens [lo, hi): up to the end of its place in the grid."""
        base = lo // PIECE * PIECE
        return Rows(base, PIECE, lo, min(hi, base + PIECE))

    @staticmethod
    def tight(lo: int, hi: int) -> Rows:
        return Rows(lo, hi - lo, lo, hi)

    @property
    def real(self) -> slice:
        return slice(self.lo - self.base, self.hi - self.base)

    @property
    def chunks(self) -> slice:
        """The real rows, out to the chunk grid."""
        lo = (self.lo - self.base) // CHUNK * CHUNK
        return slice(lo, min(self.size, -(-(self.hi - self.base) // CHUNK) * CHUNK))

    def spread(self, x: Tensor) -> Tensor:
        """[hi - lo, ...] -> [size, ...], zeros elsewhere."""
        if len(x) == self.size:
            return x
        out = x.new_zeros(self.size, *x.shape[1:])
        out[self.real] = x
        return out
