"""Memory of a host tier that other processes write."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvspan.host import HostTier, SharedMemory, map_shared

PAGE = 4096
WRITER = """
import sys
from kvspan.host import map_shared
name, nbytes, *spans = sys.argv[1:]
memory = map_shared(name, int(nbytes))
for span in spans:
    start, count = map(int, span.split(":"))
    memory[start : start + count] = 7
"""
OWNER = """
import sys
from kvspan.host import SharedMemory
shared = SharedMemory(1 << 24)
shared.memory[:] = 1
print(shared.name, flush=True)
sys.stdin.read()
"""


def test_another_process_writes_an_entry() -> None:
    shared = SharedMemory(8 * PAGE)
    with HostTier(8 * PAGE, page_bytes=PAGE, memory=shared.memory) as tier:
        assert tier.put(b"before", bytes(PAGE), cost=1)
        entry = tier.reserve(None, 2 * PAGE + 100)
        assert entry is not None
        spans = [f"{start}:{count}" for start, count in entry.spans]
        command = [sys.executable, "-c", WRITER, shared.name, str(8 * PAGE), *spans]
        subprocess.run(command, check=True)
        assert entry.publish(b"key", 1.0)
        entry.commit()
        out = bytearray(2 * PAGE + 100)
        assert tier.get(b"key", out) and set(out) == {7}
        assert tier.get(b"before", out[:PAGE])
    with pytest.raises(ValueError, match=f"expected shared memory of 9 bytes, found {8 * PAGE}"):
        map_shared(shared.name, 9)
    shared.close()
    shared.close()
    with pytest.raises(OSError, match="No such file"):
        map_shared(shared.name, 8 * PAGE)


def test_nothing_is_left_of_a_killed_owner() -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdin is not None and owner.stdout is not None
    name = owner.stdout.readline().strip()
    memory = map_shared(name, 1 << 24)
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    assert memory[0] == 1, "who has it keeps it"
    assert not Path(name).exists() and not list(Path("/dev/shm").glob("*kvspan*"))
    owner.stdin.close()
    owner.stdout.close()
