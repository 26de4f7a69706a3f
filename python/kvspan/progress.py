"""Progress bars on stderr for what takes long: downloads, loading, and long prefills."""

from __future__ import annotations

import sys
import threading
from typing import Any

# A prefill shorter than this is over before a bar could be read.
MIN_PREFILL_TOKENS = 512
_BYTES = ("download", "convert")
_UNITS = {
    "prefill": "token",
    "bulk": "query",
    "read": "file",
    "index": "chunk",
    "embed": "chunk",
    "prepare": "chunk",
}


class ProgressBars:
    """A ``kvspan.engine.Progress`` that draws one bar per phase, gone when the phase is done.

    Draws only where somebody looks: on a terminal, and not if ``quiet``. Safe to call from any
    thread. A context manager: whatever is still drawn is removed at the end.
    """

    def __init__(self, quiet: bool = False) -> None:
        self.enabled = not quiet and sys.stderr is not None and sys.stderr.isatty()
        self._lock = threading.Lock()
        self._bar: Any = None
        self._phase = ""

    def __call__(self, phase: str, done: int, total: int) -> None:
        if not self.enabled or (phase == "prefill" and total < MIN_PREFILL_TOKENS):
            return
        with self._lock:
            if self._bar is None or phase != self._phase or total != self._bar.total:
                self._close()
                if done >= total:
                    return
                from tqdm import tqdm

                scale = phase in _BYTES
                unit = "B" if scale else _UNITS.get(phase, "step")
                self._bar = tqdm(
                    desc=phase,
                    total=total,
                    initial=done if phase == "bulk" else 0,  # what was done before took no time
                    unit=unit,
                    unit_scale=scale,
                    unit_divisor=1024,
                    leave=False,
                    file=sys.stderr,
                )
                self._phase = phase
            self._bar.update(done - self._bar.n)
            if done >= total:
                self._close()

    def __enter__(self) -> ProgressBars:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the bar, for example before an error is printed."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
