"""A server that is killed, as vLLM starts it by default: nothing of its host tier stays behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from hybrid_served import save_hybrid


def test_nothing_is_left_of_a_killed_server(tmp_path: Path) -> None:
    """Neither in /dev/shm nor as memory that nobody has: it has no name there."""
    folder = save_hybrid("qwen3_5", tmp_path)
    script = Path(__file__).parent / "hybrid_processes.py"
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with subprocess.Popen(
        [sys.executable, script, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=environment, start_new_session=True,
    ) as server:  # fmt: skip
        assert server.stdin is not None and server.stdout is not None
        cached = next(line for line in server.stdout if line.startswith("cached "))
        assert cached.split() == ["cached", "0", "500", "639"]
        mapping = mapped_in(server.pid)
        assert len(mapping) == 2, "the engine and its worker"
        os.kill(min(mapping), signal.SIGKILL)  # the engine: it began the worker
        until = time.monotonic() + 60
        while mapped_in(server.pid) and time.monotonic() < until:
            time.sleep(0.2)
        assert not mapped_in(server.pid)
        os.killpg(server.pid, signal.SIGKILL)
    assert not list(Path("/dev/shm").glob("*kvspan*"))


def mapped_in(session: int) -> list[int]:
    """Processes of a session that have a host tier's memory."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                if os.getsid(int(process.name)) == session:
                    maps = (process / "maps").read_text()
                    found += [int(process.name)] * ("memfd:kvspan" in maps)
    return found
