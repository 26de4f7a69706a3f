"""The command where stdout, stderr or stdin is closed, full or broken: one line, no traceback."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvspan import cli
from test_cli import FLOOD, HERE, QUERY


@pytest.fixture
def query_file(tmp_path: Path) -> str:
    path = tmp_path / "query.json"
    path.write_text(json.dumps(QUERY))
    return str(path)


def shell(words: str, **options) -> subprocess.CompletedProcess[str]:
    """The command under a shell that closes or redirects its streams."""
    return subprocess.run(
        ["sh", "-c", f'exec "$0" -m kvspan {words}', sys.executable],
        capture_output=True,
        text=True,
        timeout=60,
        **options,
    )


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", ["-h", "--version", "explain -h", "schema", "explain -"])
def test_output_that_cannot_be_written(words: str, unbuffered: str) -> None:
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
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
