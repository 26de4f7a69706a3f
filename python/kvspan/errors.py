"""The two kinds of failure a caller can meet, and how they read.

``UsageError``: what was asked makes no sense (bad query, bad option, no such file or model); the
CLI exits with 2. ``KvspanError``: the request made sense and could not be carried out; the CLI
exits with 1. Both print as one line.
"""

from __future__ import annotations

# A path into a very deep query is cut in the middle: both ends tell the reader where to look.
_PATH_HEAD, _PATH_TAIL = 60, 100


def shorten_path(path: str) -> str:
    """``path`` itself, or its two ends joined by `` ... `` when it is too long for a line.

    >>> shorten_path("$.g.input.cross[2]")
    '$.g.input.cross[2]'
    >>> len(shorten_path("$" + ".seq[0]" * 1000))
    165
    """
    if len(path) <= _PATH_HEAD + _PATH_TAIL + 5:
        return path
    return f"{path[:_PATH_HEAD]} ... {path[-_PATH_TAIL:]}"


def printable(text: str) -> str:
    """Text with control characters escaped: a query must not be able to steer a terminal.

    >>> printable(chr(27) + "[2J")
    '\\\\x1b[2J'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def one_line(text: str) -> str:
    """Text on one line that a terminal can be given."""
    return printable(" ".join(text.split()))


class KvspanError(Exception):
    """A run failed. ``str()`` is ``source: path: message`` on one line.

    message: what is wrong, without the place. path: JSON path into the query.
    source: file name, or ``<stdin>``. Path and source may be None, and are then left out.
    """

    def __init__(
        self, message: str = "", *, path: str | None = None, source: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.path = path
        self.source = source

    def at(self, path: str) -> KvspanError:
        """This error at ``path``, unless it names a path of its own."""
        return KvspanError(self.message, path=self.path or path, source=self.source)

    def _parts(self) -> list[str]:
        """Places, from the widest on, and what is wrong there."""
        return [self.source or "", shorten_path(self.path or ""), self.message]

    def __str__(self) -> str:
        *places, text = self._parts()
        return one_line(": ".join([*filter(None, places), text]))


class UsageError(KvspanError, ValueError):
    """Bad input. ``str()`` is ``source: path: message; expected ...; found ...`` on one line.

    message: what is wrong, without the place.
    path: JSON path into the query, for example ``$.g.input.cross[2].usr``.
    expected, found: what should have stood there and what did, as text.
    source: file name, or ``<stdin>``. line, column: 1-based, for text that cannot be parsed.
    Every part but the message may be None, and is then left out.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        expected: str | None = None,
        found: str | None = None,
        source: str | None = None,
        line: int | None = None,
        column: int | None = None,
    ) -> None:
        super().__init__(message, path=path, source=source)
        self.expected = expected
        self.found = found
        self.line = line
        self.column = column

    def at(self, path: str) -> UsageError:
        """This error at ``path``, unless it names a path of its own."""
        return UsageError(
            self.message,
            path=self.path or path,
            expected=self.expected,
            found=self.found,
            source=self.source,
            line=self.line,
            column=self.column,
        )

    def _parts(self) -> list[str]:
        source, path, text = super()._parts()
        where = "" if self.line is None else f"line {self.line}, column {self.column}"
        if self.expected is not None:
            text += f"; expected {self.expected}"
        if self.found is not None:
            text += f"; found {self.found}"
        return [source, where, path, text]
