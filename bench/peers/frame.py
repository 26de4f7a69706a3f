"""Timing turn by turn, so that all contestants meet the same noise, and one table of it all."""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from machine import processor

MIN_SECONDS = 0.01  # a sample repeats its call until it takes this long


@dataclass
class Row:
    """One contestant of one case; seconds are for one call."""

    section: str
    case: str
    name: str
    seconds: list[float]
    rate: str = ""
    ratio: float | None = None  # the baseline's time / this one's: above 1 is faster
    target: str = ""
    missing: str = ""  # why there are no figures

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


@dataclass
class Bench:
    """Collects the rows of all sections.

    Attributes:
        repeats: samples of each contestant, at least 7.
    """

    repeats: int = 9
    section: str = ""
    rows: list[Row] = field(default_factory=list)

    def missing(self, case: str, name: str, why: str) -> None:
        """A contestant that is not here. It gets a row that says so, and no figures."""
        self.rows.append(Row(self.section, case, name, [], missing=why))

    def compare(
        self,
        case: str,
        contestants: dict[str, Callable[[], object]],
        *,
        baseline: str,
        items: int | None = None,
        unit: str = "",
        num_bytes: int | None = None,
        targets: dict[str, float] | None = None,
    ) -> None:
        """Time the contestants turn by turn.

        Args:
            case: what is being done, to how much.
            contestants: name -> one call of it.
            baseline: the contestant that ratios are against.
            items, unit: of one call, for a rate such as M tokens/s.
            num_bytes: read and written by one call, for GB/s.
            targets: contestant -> the ratio wanted.
        """
        samples: dict[str, list[float]] = {name: [] for name in contestants}
        calls = {name: _calls_per_sample(run) for name, run in contestants.items()}
        for _ in range(self.repeats):
            for name, run in contestants.items():
                samples[name].append(_time(run, calls[name]))
        for name, seconds in samples.items():
            row = Row(self.section, case, name, seconds)
            # Within each turn, because a busy machine changes its speed from turn to turn.
            row.ratio = statistics.median(
                base / own for base, own in zip(samples[baseline], seconds, strict=True)
            )
            rates = []
            if items is not None:
                rate = items / row.median
                scaled = f"{rate / 1e6:,.1f} M" if rate >= 1e6 else f"{rate / 1e3:,.1f} k"
                rates.append(f"{scaled} {unit}/s")
            if num_bytes is not None:
                rates.append(f"{num_bytes / row.median / 1e9:,.1f} GB/s")
            row.rate = ", ".join(rates)
            wanted = (targets or {}).get(name)
            if wanted is not None:
                verdict = "met" if row.ratio >= wanted else "NOT met"
                row.target = f">= {wanted:g}: {verdict}"
            self.rows.append(row)
            print(f"{self.section}: {case}: {name}: {_duration(row.median)}", file=sys.stderr)

    def table(self) -> str:
        """All rows as aligned text."""
        head = ["case", "who", "median", "min .. max", "rate", "ratio", "target"]
        lines: list[list[str]] = []
        for row in self.rows:
            case = f"{row.section}: {row.case}"
            if row.missing:
                lines.append([case, row.name, "missing", row.missing, "", "", ""])
                continue
            spread = f"{_duration(min(row.seconds))} .. {_duration(max(row.seconds))}"
            ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
            lines.append(
                [case, row.name, _duration(row.median), spread, row.rate, ratio, row.target]
            )
        shown = [line if line[2] != "missing" else line[:3] for line in lines]
        widths = [
            max(len(line[i]) for line in [head, *shown] if i < len(line)) for i in range(len(head))
        ]
        text = ["  ".join(cell.ljust(w) for cell, w in zip(head, widths, strict=True)).rstrip()]
        previous = ""
        for line in lines:
            cells = [line[0] if line[0] != previous else "", *line[1:]]
            previous = line[0]
            text.append(
                "  ".join(cell.ljust(w) for cell, w in zip(cells, widths, strict=True)).rstrip()
            )
        return "\n".join(text)

    def write_json(self, path: Path) -> None:
        """Every sample, and the machine."""
        rows = [{**asdict(row), "median": row.median if row.seconds else None} for row in self.rows]
        path.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=2) + "\n")


def num_cpus() -> int:
    """CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def machine() -> dict[str, object]:
    """What the figures were measured on."""
    return {
        "processor": f"{platform.machine()} {processor()}",
        "cpus": num_cpus(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def _calls_per_sample(run: Callable[[], object]) -> int:
    run()  # warm-up
    seconds = _time(run, 1)
    return max(1, int(MIN_SECONDS / max(seconds, 1e-9)))


def _time(run: Callable[[], object], calls: int) -> float:
    collecting = gc.isenabled()
    gc.disable()  # a collection in one contestant's turn is not its cost
    try:
        start = time.perf_counter()
        for _ in range(calls):
            run()
        return (time.perf_counter() - start) / calls
    finally:
        if collecting:
            gc.enable()


def _duration(seconds: float) -> str:
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
