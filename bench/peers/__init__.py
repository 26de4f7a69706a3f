"""Peer comparisons, one module a section; each has ``run(bench: Bench) -> None``."""
