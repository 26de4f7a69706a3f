"""What the scheduler tells workers about one request: plain data that names places in the host
tier's memory, since they may be in other processes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvspan.host.pages import Spans
from kvspan.vllm.hybrid.decay import Bounds

Table = tuple[list[int], ...]  # a request's device blocks, per KV cache group


@dataclass
class StateCopy:
    """Copy the state after `position` tokens to `spans` of the memory. table: the request's."""

    position: int
    table: Table
    spans: Spans


@dataclass
class Restore:
    """A plan as the worker gets it. table: the request's device blocks.

    pages: where they lie, from the prompt's first on. state: where; None: from zero. scheduled:
    tokens of the step that follows. bounds, parts: as in the plan. begun: the page in which the
    request goes on, after a copy of the positions that it takes over. keep: where the state that
    was replayed goes; keep_parts: where those of some groups do.
    """

    length: int
    local: int
    start: int
    pages: list[int]
    state: Spans | None
    token_ids: np.ndarray
    table: Table
    zero: bool = False
    bounds: Bounds | None = None
    scheduled: int = 0
    begun: int | None = None
    keep: Spans | None = None
    parts: dict[int, Spans] = field(default_factory=dict)
    keep_parts: dict[int, Spans] = field(default_factory=dict)


@dataclass
class Fill:
    """Hidden vectors of `count` tokens go to positions from `first` on of the page at `page`."""

    page: int
    first: int
    count: int


@dataclass
class Work:
    """What one request leaves behind in one step.

    request: its name. slot: of its first token in the attention's cache. fills: of its tokens, one
    after the other. copies: pages, and the device blocks whose KV they get. seen: where the state
    after it is, whose norms the pages get; None where they keep what they have.
    """

    slot: int
    fills: list[Fill]
    copies: list[tuple[int, int]]
    state: StateCopy | None = None
    seen: tuple[int, Table] | None = None
    request: str = ""
