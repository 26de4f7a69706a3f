"""A disk that stops to answer, for as long as a test wants it to."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest

from kvspan.host import DiskLevel, HostTier
from kvspan.host.pages import Bytes

WAIT = 60.0  # seconds until a test that hangs fails


class SlowDisk:
    """Reads of every tier stop until `go_on` is called. begun: their keys."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[bytes] = []
        self._changed = threading.Condition()
        self._blocked = True
        read = DiskLevel.read

        def slow_read(disk: DiskLevel, key: bytes, out: Sequence[Bytes]) -> bool:
            with self._changed:
                self.begun.append(key)
                self._changed.notify_all()
                assert self._changed.wait_for(lambda: not self._blocked, WAIT)
            return read(disk, key, out)

        monkeypatch.setattr(DiskLevel, "read", slow_read)

    def wait_for(self, count: int) -> None:
        """Until so many reads have begun."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.begun) >= count, WAIT)

    def go_on(self) -> None:
        with self._changed:
            self._blocked = False
            self._changed.notify_all()


def nothing_is_held(tier: HostTier) -> None:
    """Once what is being written and read is over."""
    end = time.monotonic() + WAIT
    tier.flush()
    while tier.pinned_bytes() and time.monotonic() < end:
        time.sleep(0.001)
    assert tier.pinned_bytes() == 0


def leave_on_disk(tier: HostTier) -> None:
    """Drops from memory what the disk has."""
    nothing_is_held(tier)
    for key in tier.stored_keys():
        tier._memory.remove(key)
