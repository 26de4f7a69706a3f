"""Entries of the store of pages and states: their names, those that are found, and those that are
being written. What the names say, `kvspan.vllm.hybrid.store` tells."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvspan.host import Reservation
from kvspan.ops import digest_fields

Tokens = np.ndarray

STATE_NAME = 73  # bytes: kind, parent, count, digest
MOST_GROUPS = 64  # whose states can be kept apart


def full_name(parent: bytes, first: int, key: bytes) -> bytes:
    """Of a full page. first: its first token."""
    return b"F" + parent + first.to_bytes(8, "little") + key


def tail_name(parent: bytes, first: int, tokens: Tokens) -> bytes:
    """Of the beginning of a page."""
    digest = digest_fields("kvspan/vllm/hybrid/tail", tokens.tobytes())
    return b"T" + parent + first.to_bytes(8, "little") + digest


def state_name(parent: bytes, tokens: Tokens, kind: bytes = b"S", which: bytes = b"") -> bytes:
    """Of a state. tokens: after the parent. which: the groups whose it is alone, of kind ``G``."""
    digest = digest_fields("kvspan/vllm/hybrid/state", tokens.tobytes())
    return kind + parent + len(tokens).to_bytes(8, "little") + digest + which


def state_count(name: bytes) -> int:
    """How many tokens after its parent a state is."""
    return int.from_bytes(name[33:41], "little")


@dataclass(eq=False)
class OpenPage:
    """A page that a request is filling, in place.

    ordered: positions whose hidden vectors the steps sent so far will have written. filled, saved:
    positions whose hidden vectors, and whose KV, are written. name: under which it was published
    last, b"" for none. writers: steps under way that write to it. closed: nobody goes on in it.
    """

    memory: Reservation
    ordered: int = 0
    filled: int = 0
    saved: int = 0
    name: bytes = b""
    writers: int = 0
    closed: bool = False

    @property
    def at(self) -> int:
        """Where it begins in the tier's memory."""
        return self.memory.spans[0][0]


@dataclass(eq=False)
class OpenState:
    """A state that a step writes, in place. cost: of computing it again, in FLOPs. era: of the
    store. groups: those whose layers' states it is, in order; None: all."""

    memory: Reservation
    position: int
    cost: float
    era: int
    groups: tuple[int, ...] | None = None


class Found(NamedTuple):
    """A stored page: its name, and how many of its tokens match."""

    name: bytes
    length: int


class FoundState(NamedTuple):
    """A stored state: its name and its position."""

    name: bytes
    position: int

    @property
    def groups(self) -> list[int]:
        """Of an entry of some groups' states: whose, in order."""
        which = int.from_bytes(self.name[STATE_NAME:], "little")
        return [group for group in range(which.bit_length()) if which >> group & 1]


class Partings:
    """Where approximate restores ended, by the name that an exact state there would have. The last
    `most` of them, and only as long as the process."""

    def __init__(self, most: int = 4096) -> None:
        self._most = most
        self._names: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, name: bytes) -> bool:
        return name in self._names

    def add(self, name: bytes) -> None:
        self._names[name] = None
        if len(self._names) > self._most:
            self._names.popitem(last=False)

    def discard(self, name: bytes) -> None:
        self._names.pop(name, None)

    def clear(self) -> None:
        self._names.clear()


class Match(NamedTuple):
    """The longest cached prefix of a prompt: `length` tokens, covered by `pages`. exact: of the
    first how many they hold what a prefill gives; all but where a domain was asked for."""

    length: int
    pages: tuple[Found, ...]
    exact: int


@dataclass(frozen=True)
class Domain:
    """Keys of pages that follow approximate restores under one policy, made of exact ones.

    Whoever looks for exact pages looks for exact keys and parents, and so never finds these, nor
    does a request under another policy. policy: all that it says.
    """

    policy: str

    def __call__(self, key: bytes) -> bytes:
        return digest_fields("kvspan/vllm/hybrid/approximate/v1", self.policy, key)
