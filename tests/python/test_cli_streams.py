"""The command when it is interrupted, or stdout, stderr or stdin is closed, full or broken."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cli_queries import HERE, QUERY
from kvspan import cli

INTERRUPTED = """
import asyncio, sys
sys.path.insert(0, {here!r})
from fakes import FakeEngine
from kvspan import cli, cli_options

class Endless(FakeEngine):
    async def generate(self, request, on_text=None):
        if on_text:
            on_text("partial")
        print("running", file=sys.stderr, flush=True)
        try:
            await asyncio.sleep(1000)
        finally:
            print("cancelled", file=sys.stderr, flush=True)

    def close(self):
        print("closed", file=sys.stderr, flush=True)

cli_options.open_engine_with = lambda *_: Endless()
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("flags", [[], ["--stream"], ["--json"]], ids=["plain", "stream", "json"])
def test_ctrl_c_ends_cleanly(query_file, flags: list[str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED.format(here=str(HERE)), "run", query_file, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "running\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ("partial\n" if flags == ["--stream"] else "")
    said = err.splitlines()
    assert said[:2] == ["cancelled", "closed"] and len(said) == 3
    if flags == ["--json"]:
        assert json.loads(said[2])["error"]["kind"] == "interrupted"
    else:
        assert said[2] == "kvspan: interrupted"


FLOOD = """
import sys
sys.path.insert(0, {here!r})
from fakes import FakeEngine
from kvspan import cli, cli_options
cli_options.open_engine_with = lambda *_: FakeEngine(answer=lambda request: "word " * 100000)
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("flags", [[], ["--stream"], ["--json"]], ids=["plain", "stream", "json"])
def test_reader_that_leaves(query_file, flags: list[str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", FLOOD.format(here=str(HERE)), "run", query_file, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(5)
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=60) == 1
    assert err == ""


def test_output_that_the_terminal_cannot_show(query_file) -> None:
    script = FLOOD.replace('"word " * 100000', '"caf\\u00e9 \\U0001f99c"')
    done = subprocess.run(
        [sys.executable, "-c", script.format(here=str(HERE)), "run", query_file, "--quiet"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "caf\\xe9 \\U0001f99c\n", "")


def shell(words: str, **options) -> subprocess.CompletedProcess[str]:
    """The command under a shell that closes or redirects its streams."""
    return subprocess.run(
        ["sh", "-c", f'exec "$0" -m kvspan {words}', sys.executable],
        capture_output=True,
        text=True,
        timeout=120,
        **options,
    )


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", ["-h", "--version", "explain -h", "schema", "explain -"])
def test_output_that_cannot_be_written(words: str, unbuffered: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError")  # which takes seconds
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered, "PYTHONPATH": str(tmp_path)}
    done = shell(f"{words} >/dev/full", input=json.dumps(QUERY), env=env)
    assert done.returncode == 1
    assert done.stderr == "kvspan: error: cannot write the output: No space left on device\n"


def test_answers_that_cannot_be_written(query_file) -> None:
    script = FLOOD.format(here=str(HERE))
    for flags in ("", "--json", "--stream"):
        done = subprocess.run(
            ["sh", "-c", f'exec "$0" -c "$1" run "$2" {flags} >/dev/full', sys.executable, script,
             query_file],
            capture_output=True,
            text=True,
            timeout=60,
        )  # fmt: skip
        assert done.returncode == 1
        message = "cannot write the output: No space left on device"
        if flags == "--json":
            assert json.loads(done.stderr)["error"]["message"] == message
        else:
            assert done.stderr == f"kvspan: error: {message}\n"


def test_streams_that_are_closed(query_file) -> None:
    done = shell(f"run {query_file} >&-")
    assert done.returncode == 1
    assert done.stderr == "kvspan: error: cannot write the output: stdout is closed\n"
    for words in ("run - <&-", "explain - <&-"):
        done = shell(words)
        assert (done.returncode, done.stderr) == (2, "kvspan: error: <stdin>: stdin is closed\n")
    done = shell("run none.json 2>&-")
    assert (done.returncode, done.stdout) == (2, "")


def test_stdin_that_cannot_be_read(monkeypatch, capsys) -> None:
    class Broken(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def readinto(self, buffer) -> int:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(Broken())))
    assert cli.main(["explain", "-"]) == 2
    message = "kvspan: error: <stdin>: cannot read it: Input/output error\n"
    assert capsys.readouterr() == ("", message)
