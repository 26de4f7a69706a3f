"""Queries from JSON, YAML and plain values.

Strict by default: an unknown node or key, a wrong type or a key given twice is an error that names
the JSON path, what was expected and what was found. ``lenient=True`` reads what spnl's
documentation shows or its parser lets through, with a warning for each thing: unknown keys are
ignored, an array as ``input`` (or as the whole query) is a ``cross``, a bare string as ``input`` is
a ``user`` message, and of a key given twice the last counts.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path as FilePath
from typing import IO, Any, Literal

from kvspan.errors import UsageError
from kvspan.query.nodes import (
    NODES,
    ROOT,
    Cross,
    Generate,
    Join,
    Node,
    Path,
    Text,
    User,
    check_max_tokens,
    check_model,
    check_temperature,
    check_text,
    describe,
)
from kvspan.query.text import parse_json, parse_yaml

Format = Literal["auto", "json", "yaml"]

# Nodes of the format that this version can name but not run.
UNSUPPORTED = ("repeat", "map", "zip", "monad", "print", "augment")
_GENERATE_KEYS = ("model", "input", "max_tokens", "temperature")
_SUFFIXES: dict[str, Format] = {".json": "json", ".yaml": "yaml", ".yml": "yaml"}


class QueryWarning(UserWarning):
    """Something a lenient reader accepted."""


def load(
    file: str | os.PathLike[str] | IO[str] | IO[bytes],
    *,
    lenient: bool = False,
    format: Format = "auto",
) -> Node:
    """Read a query from a file (a path or an open file).

    format: "auto" goes by the suffix (.json, .yaml, .yml), and by the text for anything else.
    Raises UsageError: no such file, not UTF-8, malformed text, or a value that is no query.
    """
    if isinstance(file, (str, os.PathLike)):
        source = os.fspath(file)
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

    format: "auto" takes text that starts with ``{`` or ``[`` for JSON, and tries YAML if it is not.
    source: where the text is from, for messages.

    >>> loads('{"g": {"model": "M", "input": {"user": "hi"}}}')
    g('M', user('hi'))
    >>> loads("g:\\n  model: M\\n  input:\\n    usr: hi\\n", source="q.yaml")
    Traceback (most recent call last):
    kvspan.errors.UsageError: q.yaml: $.g.input.usr: unknown node (did you mean user?); expected \
one of user, system, assistant, seq, par, cross, plus, g; found 'usr'
    """
    if isinstance(text, bytes):
        text = _decode(text, source)
    text = text.removeprefix("\ufeff")
    if format not in ("auto", "json", "yaml"):
        raise UsageError("unknown format", expected="auto, json or yaml", found=repr(format))

    def on_duplicate(error: UsageError) -> None:
        if not lenient:
            raise error
        _warn(f"{error}; the last one counts")

    if format == "auto":
        format = "json" if text.lstrip()[:1] in ("{", "[") else "yaml"
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
    parse = parse_json if format == "json" else parse_yaml
    value = parse(text, source=source, on_duplicate=on_duplicate)
    return _Reader(lenient, source, is_yaml=format == "yaml").read(value)


def from_json(text: str) -> Node:
    """Read a query from JSON text, strictly."""
    return loads(text, format="json")


def from_yaml(text: str) -> Node:
    """Read a query from YAML text, strictly."""
    return loads(text, format="yaml")


def from_obj(value: Any, *, lenient: bool = False, source: str | None = None) -> Node:
    """Read a query from plain values: dicts, lists, strings, numbers.

    >>> from_obj({"plus": [{"user": "a"}, {"user": "b"}]})
    plus(user('a'), user('b'))
    """
    return _Reader(lenient, source).read(value)


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


def _warn(message: str) -> None:
    warnings.warn(message, QueryWarning, stacklevel=3)


class _Reader:
    def __init__(self, lenient: bool, source: str | None, is_yaml: bool = False) -> None:
        self.lenient = lenient
        self.source = source
        self.is_yaml = is_yaml

    def error(self, path: Path, message: str, expected: str, found: str) -> UsageError:
        return UsageError(
            message, path=str(path), expected=expected, found=found, source=self.source
        )

    def accept(self, error: UsageError, instead: str) -> None:
        """Warn if lenient, raise if not."""
        if not self.lenient:
            raise error
        _warn(f"{error}; {instead}")

    def read(self, value: Any) -> Node:
        # Each entry is a value still to be read, or what to make of the last `count` nodes read.
        nodes: list[Node] = []
        stack: list[tuple[Any, Path, type[Join] | dict[str, Any] | None, int]]
        stack = [(self.legacy_input(value, ROOT), ROOT, None, 0)]
        while stack:
            value, path, made, count = stack.pop()
            if made is not None:
                below = tuple(nodes[len(nodes) - count :])
                del nodes[len(nodes) - count :]
                nodes.append(
                    Generate(input=below[0], **made) if isinstance(made, dict) else made(below)
                )
                continue
            kind, body = self.node(value, path)
            path = path.child(kind)
            cls = NODES[kind]
            if issubclass(cls, Text):
                problem = check_text(body, f"the value of {kind}")
                if problem and self.is_yaml and not isinstance(body, (str, dict, list)):
                    problem.expected = "a string (quote it: unquoted, YAML reads something else)"
                self.check(problem, path)
                nodes.append(cls(body))
            elif issubclass(cls, Join):
                if not isinstance(body, list):
                    raise self.error(
                        path,
                        f"the value of {kind} is not an array",
                        "an array of nodes",
                        describe(body),
                    )
                stack.append((None, path, cls, len(body)))
                for index in range(len(body) - 1, -1, -1):
                    stack.append((body[index], path.child(index), None, 0))
            else:
                fields = self.generate(body, path)
                below_path = path.child("input")
                inner = self.legacy_input(fields.pop("input"), below_path)
                stack += [(None, path, fields, 1), (inner, below_path, None, 0)]
        return nodes[0]

    def node(self, value: Any, path: Path) -> tuple[str, Any]:
        """The one key of a node, and what it holds."""
        one = "an object with exactly one key, the node's name"
        if not isinstance(value, dict):
            raise self.error(path, "not a query node", one, describe(value))
        if len(value) != 1:
            error = self.error(path, "not a query node", one, describe(value))
            known = [key for key in value if key in NODES]
            if len(known) != 1:
                raise error
            self.accept(error, f"all but {known[0]!r} ignored")
            return known[0], value[known[0]]
        kind, body = next(iter(value.items()))
        if kind in NODES:
            return kind, body
        path = path.child(str(kind))
        if kind in UNSUPPORTED:
            raise self.error(
                path,
                f"{kind} is part of the query language but this version does not support it yet",
                "one of " + ", ".join(NODES),
                repr(kind),
            )
        hint = _closest(str(kind), (*NODES, *UNSUPPORTED))
        raise self.error(path, f"unknown node{hint}", "one of " + ", ".join(NODES), describe(kind))

    def check(self, problem: UsageError | None, path: Path) -> None:
        if problem:
            problem.path, problem.source = str(path), self.source
            raise problem

    def generate(self, body: Any, path: Path) -> dict[str, Any]:
        """The checked fields of a generate; ``input`` is not read yet."""
        keys = "an object with model, input and, if wanted, max_tokens and temperature"
        if not isinstance(body, dict):
            raise self.error(path, "the value of g is not an object", keys, describe(body))
        for key in body:
            if key not in _GENERATE_KEYS:
                hint = _closest(str(key), _GENERATE_KEYS)
                error = self.error(
                    path.child(str(key)),
                    f"unknown key{hint}",
                    "one of " + ", ".join(_GENERATE_KEYS),
                    describe(key),
                )
                self.accept(error, "ignored")
        for key in ("model", "input"):
            if key not in body:
                raise self.error(path, f"g has no {key}", keys, describe(body))
        fields = {key: body.get(key) for key in _GENERATE_KEYS}
        self.check(check_model(fields["model"]), path.child("model"))
        self.check(check_max_tokens(fields["max_tokens"]), path.child("max_tokens"))
        self.check(check_temperature(fields["temperature"]), path.child("temperature"))
        return fields

    def legacy_input(self, value: Any, path: Path) -> Any:
        """``value``, or the node that a legacy form of it stands for."""
        one = "one node"
        if isinstance(value, list):
            error = self.error(path, "an array where one node belongs", one, describe(value))
            self.accept(error, "read as a cross of its items")
            return {Cross.kind: value}
        if isinstance(value, str) and path is not ROOT:
            error = self.error(path, "a string where one node belongs", one, describe(value))
            self.accept(error, "read as a user message")
            return {User.kind: value}
        return value


def _closest(word: str, words: tuple[str, ...]) -> str:
    import difflib

    close = difflib.get_close_matches(word.lower(), words, n=1, cutoff=0.6)
    return f" (did you mean {close[0]}?)" if close else ""
