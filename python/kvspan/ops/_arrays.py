"""What the operations share in taking arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


def as_int64(values: Any) -> Any:
    """Sequences of ints become int64 arrays; arrays and tensors pass through, to be checked."""
    if hasattr(values, "__dlpack__"):
        return values
    array = np.asarray(values)
    return array.astype(np.int64) if array.size == 0 else array
