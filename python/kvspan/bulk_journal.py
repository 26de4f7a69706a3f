"""The output of a bulk run, and the journal by which a run that was killed goes on."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from pathlib import Path
from typing import Any

from kvspan.errors import UsageError


class Journal:
    """The output and, until it is complete, the journal beside it. Writes nothing before `begin`.

    The journal's first line says which run it is of; the others are results in the order they came,
    of the window that is not yet in the output. ``written``: results in the output. ``kept``: the
    lines of those in the journal, by index.

    overwrite: start anew whatever is there. source: the queries, which no output may replace.
    Raises UsageError for an output or a journal of something else, for one that cannot be written,
    and for one that another run is writing.
    """

    def __init__(self, out: Path, digest: str, overwrite: bool, source: Path) -> None:
        self.out = out
        if not out.name:
            raise UsageError("the output has no name", expected="a file", found=repr(str(out)))
        self.path = out.with_name(out.name + ".journal")
        self._new = out.with_name(out.name + ".journal.new")
        self.digest = digest
        self.overwrite = overwrite
        self.kept: dict[int, str] = {}
        self.written = self.failed_before = 0
        for path in (out, self.path):
            if not path.exists():
                continue
            if not path.is_file():  # /dev/null, say: replacing it would delete it
                raise UsageError("cannot write the output: not a regular file", source=str(path))
            if source.samefile(path):
                raise UsageError(
                    "the output would replace the queries",
                    source=str(path),
                    expected="an output other than the input",
                    found="the same file",
                )
        self.started = self.path.exists()
        # An empty one is what a run leaves that ends before its first step.
        if out.exists() and out.stat().st_size and not (self.started or overwrite):
            raise UsageError(
                "the output is there already (--overwrite replaces it)", source=str(out)
            )
        if self.started and not overwrite:
            self._check_run()
        folder = out.parent
        if not os.access(folder, os.W_OK | os.X_OK):
            reason = "no permission" if folder.is_dir() else "no such folder"
            raise UsageError(f"cannot write the output: {reason}", source=str(folder))

    def begin(self) -> None:
        """Open the output, and go on from an earlier run or start anew. UsageError as above."""
        try:
            self.output = self.out.open("ab")
            self._lock()
            if self.overwrite:
                self.path.unlink(missing_ok=True)
                self.output.truncate(0)
            elif self.started:
                self._resume()
            self.done_before = self.written + len(self.kept)
            self._restart()
        except OSError as error:
            with contextlib.suppress(OSError):
                self._new.unlink(missing_ok=True)
                if not (self.started or self.out.stat().st_size):
                    self.out.unlink()
            reason = error.strerror or str(error)
            raise UsageError(f"cannot write the output: {reason}", source=str(self.out)) from None

    def _lock(self) -> None:
        """Held until the file is closed or the process ends, however it ends."""
        try:
            fcntl.flock(self.output, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.output.close()
            raise UsageError("another run is writing the output", source=str(self.out)) from None
        except OSError:  # a file system without locks
            pass

    def _check_run(self) -> None:
        head = (_whole_lines(self.path) or [b""])[0]
        if head != self._head():
            raise UsageError(
                "a journal of another run is there: other queries or other options (--overwrite "
                "starts anew)",
                source=str(self.path),
            )

    def _head(self) -> bytes:
        return json.dumps({"run": self.digest}).encode()

    def _resume(self) -> None:
        whole = _whole_lines(self.out)
        self.written = len(whole)
        self.failed_before = sum(has_failed(json.loads(line)) for line in whole)
        os.truncate(self.out, sum(len(line) + 1 for line in whole))
        for line in _whole_lines(self.path)[1:]:
            record = json.loads(line)
            # Results that reached the output just before the end are in both files.
            if record["index"] >= self.written:
                self.kept[record["index"]] = line.decode()
                self.failed_before += has_failed(record)

    def _restart(self) -> None:
        """A new journal with what is kept, put in the place of the old one in one step."""
        with self._new.open("wb") as file:
            file.write(self._head() + b"\n")
            for line in self.kept.values():
                file.write(line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self._new.replace(self.path)
        self.file = self.path.open("ab")

    def add(self, record: dict[str, Any]) -> None:
        """Append a result; from here on it survives a kill."""
        line = json.dumps(record, ensure_ascii=True)
        self.kept[record["index"]] = line
        self.file.write(line.encode() + b"\n")
        self.file.flush()

    def flush(self, indexes: list[int]) -> None:
        """Move a complete window to the output."""
        for index in indexes:
            self.output.write(self.kept.pop(index).encode() + b"\n")
        self.output.flush()
        os.fsync(self.output.fileno())
        self.file.close()
        self._restart()

    def finish(self) -> None:
        """Every result is in the output: the journal has done its work."""
        self.close()
        self.path.unlink()

    def close(self) -> None:
        for file in (self.file, self.output):
            with contextlib.suppress(OSError):
                file.close()


def _whole_lines(path: Path) -> list[bytes]:
    """The lines of a file without the last one if it was cut short."""
    return path.read_bytes().split(b"\n")[:-1]


def has_failed(record: dict[str, Any]) -> bool:
    """Whether a result says that its query, or a call of it, failed."""
    return "error" in record or "failures" in record
