"""Move plans against a plain Python planner, and against SciPy's search for cycles alone.

There is no other planner of such moves to compare with. The Python loop does what
``plan_moves(src, dst, deltas, scratch)`` does, no more: batches by Kahn's algorithm, cycles opened
through one scratch block. SciPy's strongly connected components are one of the steps, a part of the
work. Ten times the moves should take at most 13 times as long; where moves are in random order, a
million of them no longer fit the caches, and each look-up waits for memory.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvspan.ops import plan_moves
from peers.frame import Bench

NUM_MOVES = 100_000

Moves = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def run(bench: Bench) -> None:
    for name, make in SHAPES.items():
        _against_peers(bench, name, make(NUM_MOVES))
        _growth(bench, name, make)


def _against_peers(bench: Bench, name: str, moves: Moves) -> None:
    case = f"{NUM_MOVES} moves, {name}"
    contestants: dict[str, Callable[[], object]] = {
        "kvspan": lambda: plan_moves(*moves),
        "Python loop": lambda: python_plan(*moves),
    }
    _add_scipy(bench, case, contestants, moves)
    bench.compare(case, contestants, baseline="Python loop", items=NUM_MOVES, unit="moves")


def _growth(bench: Bench, name: str, make: Callable[[int], Moves]) -> None:
    few, many = make(NUM_MOVES), make(10 * NUM_MOVES)
    ten_times, at_once = f"{NUM_MOVES} moves, ten times", f"{10 * NUM_MOVES} moves"
    bench.compare(
        f"{at_once}, {name}: linear?",
        {
            ten_times: lambda: _repeat(10, few),
            at_once: lambda: plan_moves(*many),
        },
        baseline=ten_times,
        items=10 * NUM_MOVES,
        unit="moves",
        targets={at_once: 1 / 1.3},
    )


def _repeat(times: int, moves: Moves) -> None:
    for _ in range(times):
        plan_moves(*moves)


def _moves(src: np.ndarray, dst: np.ndarray, num_scratch: int = 1) -> Moves:
    first = 2 * len(src)
    return src, dst, np.ones(len(src), np.int64), np.arange(first, first + num_scratch)


def _random(num_moves: int) -> Moves:
    rng = np.random.default_rng(0)
    return _moves(rng.integers(0, num_moves, num_moves), rng.permutation(num_moves))


SHAPES: dict[str, Callable[[int], Moves]] = {
    "independent": lambda n: _moves(np.arange(n), np.arange(n, 2 * n)),
    "one chain": lambda n: _moves(np.arange(n), np.arange(1, n + 1)),
    "one cycle": lambda n: _moves(np.arange(n), np.roll(np.arange(n), -1)),
    "fan-out of one block": lambda n: _moves(np.zeros(n, np.int64), np.arange(1, n + 1)),
    "swaps": lambda n: _moves(np.arange(n), np.arange(n) ^ 1, 64),
    "random permutation": lambda n: _moves(np.arange(n), np.random.default_rng(0).permutation(n)),
    "random sources": _random,
}


def python_plan(
    src: np.ndarray, dst: np.ndarray, deltas: np.ndarray, scratch: np.ndarray
) -> list[list[tuple[int, int, int]]]:
    """Batches of (src, dst, delta): a dict of writers, Kahn's algorithm, cycles one by one."""
    moves = list(zip(src.tolist(), dst.tolist(), deltas.tolist(), strict=True))
    writer = {d: i for i, (_, d, _) in enumerate(moves)}
    successor = [writer.get(s, -1) for s, _, _ in moves]
    waits = [0] * len(moves)
    for i, after in enumerate(successor):
        if after not in (-1, i):
            waits[after] += 1
    done = [False] * len(moves)
    batches: list[list[tuple[int, int, int]]] = []
    ready = [i for i, count in enumerate(waits) if count == 0]
    while ready:
        batches.append([moves[i] for i in ready])
        following = []
        for i in ready:
            done[i] = True
            after = successor[i]
            if after not in (-1, i):
                waits[after] -= 1
                if waits[after] == 0:
                    following.append(after)
        ready = following
    for first in range(len(moves)):
        if done[first]:
            continue
        saved = int(scratch[0])
        batches.append([(moves[first][0], saved, 0)])
        i = successor[first]
        while i != first:
            done[i] = True
            batches.append([moves[i]])
            i = successor[i]
        done[first] = True
        batches.append([(saved, moves[first][1], moves[first][2])])
    return batches


def _add_scipy(
    bench: Bench, case: str, contestants: dict[str, Callable[[], object]], moves: Moves
) -> None:
    name = "SciPy, cycles alone"
    try:
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import connected_components
    except ImportError as error:
        bench.missing(case, name, str(error))
        return
    src, dst = moves[:2]

    def components() -> int:
        size = int(max(src.max(), dst.max())) + 1
        graph = csr_array((np.ones(len(src), np.int8), (src, dst)), shape=(size, size))
        count, _ = connected_components(graph, directed=True, connection="strong")
        return int(count)

    contestants[name] = components
