"""The pool against a model of it: references, keys, eviction order, nothing lost."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from hypothesis.strategies import data, integers

from kvspan.engine.pool import BlockPool, PoolFullError

BLOCKS = 6


class PoolMachine(RuleBasedStateMachine):
    """Random traffic; `held` and `keys` are what the pool must believe."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS)
        self.held: list[int] = []  # one entry per reference
        self.keys: dict[int, int] = {}  # key -> block, as far as it may still be cached
        self.idle: list[int] = []  # cached and unreferenced, least recently released first
        self.next_key = 0

    @rule(count=integers(0, BLOCKS + 1))
    def allocate(self, count: int) -> None:
        free = BLOCKS - len(set(self.held))
        if count > free:
            with pytest.raises(PoolFullError, match=f"expected {count} free blocks, got {free}"):
                self.pool.allocate(count)
            return
        unkeyed = free - len(self.idle)
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count and not set(blocks) & set(self.held)
        evicted, self.idle = (
            self.idle[: max(0, count - unkeyed)],
            self.idle[max(0, count - unkeyed) :],
        )
        assert set(evicted) <= set(blocks) and not set(self.idle) & set(blocks)
        self.keys = {key: block for key, block in self.keys.items() if block not in evicted}
        self.held += blocks

    @precondition(lambda self: self.held)
    @rule(choice=data())
    def register(self, choice) -> None:
        block = self.held[choice.draw(integers(0, len(self.held) - 1))]
        self.pool.register(block, self.next_key)
        if block not in self.keys.values():
            self.keys[self.next_key] = block
        self.next_key += 1

    @precondition(lambda self: self.keys)
    @rule(choice=data())
    def acquire(self, choice) -> None:
        block = list(self.keys.values())[choice.draw(integers(0, len(self.keys) - 1))]
        self.pool.acquire([block])
        self.held.append(block)
        if block in self.idle:
            self.idle.remove(block)

    @precondition(lambda self: self.held)
    @rule(choice=data())
    def release(self, choice) -> None:
        block = self.held.pop(choice.draw(integers(0, len(self.held) - 1)))
        self.pool.release([block])
        if block not in self.held and block in self.keys.values():
            self.idle.append(block)

    @rule(count=integers(0, BLOCKS))
    def evict(self, count: int) -> None:
        gone, self.idle = self.idle[:count], self.idle[count:]
        assert self.pool.evict(count) == len(gone)
        self.keys = {key: block for key, block in self.keys.items() if block not in gone}

    @invariant()
    def agrees(self) -> None:
        assert self.pool.num_available == BLOCKS - len(set(self.held))
        assert self.pool.num_cached == len(self.keys)
        for key in range(self.next_key):
            assert self.pool.lookup(key) == self.keys.get(key)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


def test_releasing_too_often_is_a_bug() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.release([block])
    with pytest.raises(AssertionError, match=f"block {block} released more often"):
        pool.release([block])


def test_fresh_blocks_come_in_runs() -> None:
    assert BlockPool(8).allocate(5) == [0, 1, 2, 3, 4]
