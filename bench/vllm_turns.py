"""Two engines to compare, each in a process of its own, that work turn by turn."""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any


def _serve(pipe: Connection, threads: int, make: Callable[..., Any], args: Any) -> None:
    """Calls of the methods of what is made here, by name, until None comes."""
    import torch

    torch.set_num_threads(threads)
    worker = make(*args)
    pipe.send("ready")
    while call := pipe.recv():
        name, values = call
        pipe.send(getattr(worker, name)(*values))


class Remote:
    """What `make(*args)` gives, in a process that has so many threads of torch.

    It is there when this returns; its methods are called by name. The process ends with this one.
    """

    def __init__(self, threads: int, make: Callable[..., Any], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(other, threads, make, args), daemon=True
        )
        self._process.start()
        other.close()
        self._pipe.recv()

    def __call__(self, method: str, *values: Any) -> Any:
        self._pipe.send((method, values))
        return self._pipe.recv()

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join()


def in_turns(
    stock: Remote, kvspan: Remote, rounds: int, method: str, *values: Any
) -> dict[str, list[Any]]:
    """What a method gives, by engine and round. The round's number comes after its values.

    Each goes first in turn, so that neither gains from what the other left behind.
    """
    given: dict[str, list[Any]] = {"stock": [], "kvspan": []}
    for i in range(rounds):
        pair = [("stock", stock), ("kvspan", kvspan)]
        for name, remote in pair if i % 2 else pair[::-1]:
            given[name].append(remote(method, *values, i))
    return given


def summary(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}
