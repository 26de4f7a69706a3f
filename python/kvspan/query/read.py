"""Queries from JSON, YAML, Lisp and plain values.

Strict by default: an unknown node or key, a wrong type or a key given twice is an error that names
the JSON path, what was expected and what was found. ``lenient=True`` reads what spnl's
documentation shows or its parser lets through, with a warning for each thing: unknown keys are
ignored, an array where one node belongs (as ``input``, or as the whole query) is a ``cross``, a
bare string there or in an array of nodes is a ``user`` message, ``query`` in a ``repeat`` is its
``g`` node, and of a key given twice the last counts.
"""

from __future__ import annotations

import os
from pathlib import Path as FilePath
from typing import IO, Any, Literal

from kvspan.errors import UsageError
from kvspan.query.lisp import parse_lisp
from kvspan.query.nodes import Node
from kvspan.query.reader import QueryWarning as QueryWarning
from kvspan.query.reader import Reader, warn
from kvspan.query.text import parse_json, parse_yaml

Format = Literal["auto", "json", "yaml", "lisp"]

_SUFFIXES: dict[str, Format] = {
    ".json": "json",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".lisp": "lisp",
}


def load(
    file: str | os.PathLike[str] | IO[str] | IO[bytes],
    *,
    lenient: bool = False,
    format: Format = "auto",
) -> Node:
    """Read a query from a file (a path or an open file).

    format: "auto" goes by the suffix (.json, .yaml, .yml, .lisp), else by the text.
    Raises UsageError: no such file, not UTF-8, malformed text, or a value that is no query.
    """
    if isinstance(file, (str, os.PathLike)):
        source = os.fspath(file)
        if not source:
            raise UsageError("the name of the query file is empty", expected="a file", found="''")
        if format == "auto":
            format = _SUFFIXES.get(FilePath(source).suffix.lower(), "auto")
        try:
            data: str | bytes = FilePath(source).read_bytes()
        except FileNotFoundError:
            raise UsageError("no such file", source=source) from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UsageError(f"cannot read the file: {reason}", source=source) from None
    else:
        name = getattr(file, "name", None)
        source = name if isinstance(name, str) else "<file>"
        data = file.read()
    return loads(data, lenient=lenient, format=format, source=source)


def loads(
    text: str | bytes,
    *,
    lenient: bool = False,
    format: Format = "auto",
    source: str | None = None,
) -> Node:
    """Read a query from text.

    format: "auto" takes text that starts with ``{`` or ``[`` for JSON, and tries YAML if it is not;
        text that starts with ``(`` or ``;`` is Lisp.
    source: where the text is from, for messages.

    >>> loads('{"g": {"model": "M", "input": {"user": "hi"}}}')
    g('M', user('hi'))
    >>> loads("g:\\n  model: M\\n  input:\\n    usr: hi\\n", source="q.yaml")
    Traceback (most recent call last):
    kvspan.errors.UsageError: q.yaml: $.g.input.usr: unknown node (did you mean user?); expected \
one of user, system, assistant, seq, par, cross, plus, g, repeat, map, zip, monad, print, augment, \
kvspan/v1; found 'usr'
    """
    if isinstance(text, bytes):
        text = _decode(text, source)
    text = text.removeprefix("\ufeff")
    if format not in ("auto", "json", "yaml", "lisp"):
        raise UsageError("unknown format", expected="auto, json, yaml or lisp", found=repr(format))

    def on_duplicate(error: UsageError) -> None:
        if not lenient:
            raise error
        warn(f"{error}; the last one counts")

    if format == "auto":
        first = text.lstrip()[:1]
        format = "json" if first in ("{", "[") else "lisp" if first in ("(", ";") else "yaml"
        if format == "json":
            try:
                value = parse_json(text, source=source, on_duplicate=on_duplicate)
            except UsageError as error:
                if error.path is not None:  # a key given twice: it is JSON
                    raise
                # YAML in flow style also starts with a brace. If it is neither, it was to be JSON.
                try:
                    value = parse_yaml(text, source=source, on_duplicate=on_duplicate)
                except UsageError:
                    raise error from None
            return from_obj(value, lenient=lenient, source=source)
    if format == "lisp":
        return from_obj(parse_lisp(text, source=source), lenient=lenient, source=source)
    parse = parse_json if format == "json" else parse_yaml
    value = parse(text, source=source, on_duplicate=on_duplicate)
    return Reader(lenient, source, is_yaml=format == "yaml").read(value)


def from_json(text: str) -> Node:
    """Read a query from JSON text, strictly."""
    return loads(text, format="json")


def from_yaml(text: str) -> Node:
    """Read a query from YAML text, strictly."""
    return loads(text, format="yaml")


def from_lisp(text: str) -> Node:
    """Read a query from Lisp text, strictly; ``kvspan.query.lisp`` says how it is written."""
    return loads(text, format="lisp")


def from_obj(value: Any, *, lenient: bool = False, source: str | None = None) -> Node:
    """Read a query from plain values: dicts, lists, strings, numbers.

    >>> from_obj({"plus": [{"user": "a"}, {"user": "b"}]})
    plus(user('a'), user('b'))
    """
    return Reader(lenient, source).read(value)


def _decode(data: bytes, source: str | None) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8")
        raise UsageError(
            "the text is not UTF-8",
            source=source,
            line=before.count("\n") + 1,
            column=len(before) - before.rfind("\n"),
            found=f"byte 0x{data[error.start]:02x}",
        ) from None
