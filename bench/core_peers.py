"""The core operations against their peers, in one run: one table, and JSON with every sample.

    python bench/core_peers.py                       # all sections
    python bench/core_peers.py hash --json out.json

A ratio above 1 means faster than the case's baseline. A peer that is not installed gets a row that
says so.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
from pathlib import Path

import peers
from peers.frame import Bench, machine

SECTIONS = [m.name for m in pkgutil.iter_modules(peers.__path__) if m.name != "frame"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)} (default: all)")
    parser.add_argument("--repeats", type=int, default=9, help="samples, at least 7 (default 9)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every sample here")
    args = parser.parse_args()
    unknown = sorted(set(args.sections) - set(SECTIONS))
    if unknown:
        parser.error(f"sections: expected some of {', '.join(SECTIONS)}, got {', '.join(unknown)}")
    if args.repeats < 7:
        parser.error(f"--repeats: expected at least 7, got {args.repeats}")
    bench = Bench(repeats=args.repeats)
    before = machine()
    for name in args.sections or SECTIONS:
        bench.section = name
        importlib.import_module(f"peers.{name}").run(bench)
    print(bench.table())
    print(
        f"{before['processor']}, {before['cpus']} CPUs, load {before['load_average']}, "
        f"{args.repeats} samples each"
    )
    if args.json:
        bench.write_json(args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
