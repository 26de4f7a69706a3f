"""Queries as Lisp: one list per node, its kind first.

    (g "demo" (cross (system "s") (plus (user "a") (user "b")) (user "q")) 0.0 100)

A node's parts stand in a fixed order, what may be left out comes last, and ``nil`` stands for a
part that is left out before one that is not::

    (user "text") (system "text") (assistant "text") (print "text")
    (seq node ...) (par node ...) (cross node ...) (plus node ...)
    (g model node [temperature [max_tokens]])
    (repeat n (g ...))
    (map model ("text" ...) [temperature [max_tokens]])
    (zip node node)   (monad node)
    (augment embedding_model node name (text "content"))
    (augment embedding_model node name (binary byte ...))
    (kvspan/v1 (reduce k closed (g ...)))
    (kvspan/v1 (options (scope anchored) (placement parallel) (order pinned) (salt "s") node))
    (kvspan/v1 (retrieve corpus node [limit [embedding_model]]))

Strings are JSON strings. A word without quotes is a string too, where a string belongs; ``true``,
``false`` and ``nil`` are themselves, and a comment runs from ``;`` to the end of the line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from json import JSONDecodeError
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, NoReturn

from kvspan.errors import UsageError
from kvspan.query.checks import closest, describe
from kvspan.query.extensions import EXTENSION, EXTENSION_KINDS, Options, Reduce, Retrieve
from kvspan.query.forms import KINDS, Augment, Map, Print, Repeat
from kvspan.query.nodes import Generate, Join, Node, Text
from kvspan.query.text import line_and_column

_SKIP = re.compile(r"(?:[ \t\r\n]+|;[^\n]*)*")
_ATOM = re.compile(r'[^\s();"]+')
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_PLAIN = re.compile(r"[A-Za-z_][\w./-]*", re.ASCII)
_WORDS = {"true": True, "false": False, "nil": None}
_JOINS = tuple(kind for kind, cls in KINDS.items() if issubclass(cls, Join))


@dataclass
class _List:
    """A list as it was read, and the offset of its opening bracket."""

    items: list[Any]
    start: int


def parse_lisp(text: str, *, source: str | None = None) -> Any:
    """The value of a Lisp text, in the shape of the query's JSON.

    Raises UsageError with line and column.

    >>> parse_lisp('(g M (cross (system "s") (user "q")) nil 5)')
    {'g': {'model': 'M', 'input': {'cross': [{'system': 's'}, {'user': 'q'}]}, 'max_tokens': 5}}
    """
    return _Shaper(text, source).shape(_parse(text, source))


def _fail(text: str, source: str | None, pos: int, expected: str, found: str) -> NoReturn:
    line, column = line_and_column(text, pos)
    raise UsageError(
        "malformed Lisp", expected=expected, found=found, source=source, line=line, column=column
    )


def _parse(text: str, source: str | None) -> _List:
    open_lists: list[_List] = []
    pos, end = 0, len(text)
    while True:
        match = _SKIP.match(text, pos)
        pos = match.end() if match else pos
        if pos == end:
            what = "')'" if open_lists else "'('"
            _fail(text, source, pos, what, "the end of the text")
        char = text[pos]
        if char == "(":
            open_lists.append(_List([], pos))
            pos += 1
            continue
        if not open_lists:
            _fail(text, source, pos, "'('", repr(char))
        value: Any
        if char == ")":
            closed = open_lists.pop()
            pos += 1
            if not open_lists:
                match = _SKIP.match(text, pos)
                pos = match.end() if match else pos
                if pos < end:
                    _fail(text, source, pos, "the end of the text", repr(text[pos]))
                return closed
            value = closed
        elif char == '"':
            try:
                value, pos = scanstring(text, pos + 1, False)
            except JSONDecodeError as error:
                problem = error.msg.removesuffix(" at").removesuffix(": ").lower()
                _fail(text, source, error.pos, "a string in double quotes", problem)
        else:
            match = _ATOM.match(text, pos)
            assert match is not None
            value, pos = _atom(match[0]), match.end()
        open_lists[-1].items.append(value)


def _atom(word: str) -> Any:
    if word in _WORDS:
        return _WORDS[word]
    match = _NUMBER.fullmatch(word)
    if not match:
        return word
    if match[1] or match[2] or len(word) > 4000:
        return float(word)
    return int(word)


class _Shaper:
    """Lists to the JSON shape. Errors name line and column; what is inside is the reader's."""

    def __init__(self, text: str, source: str | None) -> None:
        self.text = text
        self.source = source

    def shape(self, root: _List) -> Any:
        results: list[Any] = []
        # A list still to be read, or what to make of the last results.
        stack: list[Any] = [root]
        while stack:
            entry = stack.pop()
            if isinstance(entry, tuple):
                count, make = entry
                below = results[len(results) - count :]
                del results[len(results) - count :]
                results.append(make(below))
            elif isinstance(entry, _List):
                below, make = self.open(entry)
                stack.append((len(below), make))
                stack.extend(reversed(below))
            else:
                results.append(entry)  # no node: for the reader to refuse, with the path
        return results[0]

    def open(self, item: _List) -> tuple[list[Any], Callable[[list[Any]], Any]]:
        """The nodes below a list, and the JSON shape made of theirs."""
        kind, *rest = item.items or [None]
        if kind == EXTENSION and len(rest) == 1 and isinstance(rest[0], _List):
            below, make = self.open_extension(rest[0])
            return below, lambda nodes: {EXTENSION: make(nodes)}
        if kind in _JOINS:
            return rest, lambda nodes: {kind: nodes}
        parts = {
            "user": "text", "system": "text", "assistant": "text", "print": "text",
            "g": "model node [temperature [max_tokens]]",
            "repeat": "n (g ...)",
            "map": "model (text ...) [temperature [max_tokens]]",
            "zip": "node node",
            "monad": "node",
            "augment": "embedding_model node name (text content)",
            EXTENSION: "(extension ...)",
        }  # fmt: skip
        if not isinstance(kind, str) or kind not in parts:
            hint = closest(kind, tuple(KINDS)) if isinstance(kind, str) else ""
            expected = "the name of a node, one of " + ", ".join((*KINDS, EXTENSION))
            self.fail(item, expected, _say(kind) + hint if item.items else "an empty list")
        least, most = {
            "g": (2, 4), "repeat": (2, 2), "map": (2, 4), "zip": (2, 2), "augment": (4, 4),
        }.get(kind, (1, 1))  # fmt: skip
        if not least <= len(rest) <= most or kind == EXTENSION:
            self.fail(item, f"({kind} {parts[kind]})", f"{len(rest)} parts after {kind}")
        if kind in ("user", "system", "assistant", "print"):
            return [], lambda nodes: {kind: self.value(rest[0])}
        if kind == "monad":
            return rest, lambda nodes: {"monad": nodes[0]}
        if kind == "zip":
            return rest, lambda nodes: {"zip": {"first": nodes[0], "second": nodes[1]}}
        if kind == "repeat":
            n, sample = rest
            return [sample], lambda nodes: {"repeat": {"n": n, **self.as_g(item, nodes[0])}}
        if kind == "g":
            settings = self.settings(rest[0], rest[2:])
            model = {"model": settings.pop("model")}
            return [rest[1]], lambda nodes: {"g": {**model, "input": nodes[0], **settings}}
        if kind == "map":
            inputs = rest[1].items if isinstance(rest[1], _List) else rest[1]
            shape = {"metadata": self.settings(rest[0], rest[2:]), "inputs": inputs}
            return [], lambda nodes: {"map": shape}
        embedding_model, body, name, content = rest
        doc = [name, self.content(item, content)]
        return [body], lambda nodes: {
            "augment": {"embedding_model": embedding_model, "body": nodes[0], "doc": doc}
        }

    def open_extension(self, item: _List) -> tuple[list[Any], Callable[[list[Any]], Any]]:
        kind, *rest = item.items or [None]
        if kind == "reduce" and len(rest) == 3:
            k, closed, judge = rest
            return [judge], lambda nodes: {
                "reduce": {**self.as_g(item, nodes[0]), "k": k, "closed": closed}
            }
        if kind == "retrieve" and 2 <= len(rest) <= 4:
            names = ("corpus", "query", "limit", "embedding_model")
            fields = dict(zip(names, rest, strict=False))
            query = fields.pop("query")
            said = {name: value for name, value in fields.items() if value is not None}
            return [query], lambda nodes: {"retrieve": {**said, "query": nodes[0]}}
        if kind == "options" and rest:
            said = {}
            for pair in rest[:-1]:
                if not isinstance(pair, _List) or len(pair.items) != 2:
                    self.fail(item, "(name value) before the node", _say(pair))
                name, value = pair.items
                if name in said:
                    self.fail(pair, "every option once", f"a second {name}")
                said[name] = value
            return rest[-1:], lambda nodes: {"options": {**said, "query": nodes[0]}}
        parts = {
            "reduce": "(reduce k closed (g ...))",
            "retrieve": "(retrieve corpus node [limit [embedding_model]])",
            "options": "(options (name value) ... node)",
        }
        known = kind if isinstance(kind, str) and kind in EXTENSION_KINDS else None
        return self.fail(
            item,
            parts[known] if known else "one of " + ", ".join(parts.values()),
            f"{len(rest)} parts after {kind}" if known else _say(kind),
        )

    def as_g(self, item: _List, node: Any) -> dict[str, Any]:
        if not isinstance(node, dict) or list(node) != ["g"]:
            self.fail(item, "a g node in it", describe(node))
        return dict(node)

    def settings(self, model: Any, rest: list[Any]) -> dict[str, Any]:
        fields = {"model": self.value(model)}
        temperature, max_tokens = [*rest, None, None][:2]
        if max_tokens is not None:
            fields["max_tokens"] = max_tokens
        if temperature is not None:
            fields["temperature"] = temperature
        return fields

    def content(self, item: _List, content: Any) -> Any:
        if isinstance(content, _List) and content.items[:1] == ["text"] and len(content.items) == 2:
            return {"Text": self.value(content.items[1])}
        if isinstance(content, _List) and content.items[:1] == ["binary"]:
            return {"Binary": content.items[1:]}
        return self.fail(item, "(text content) or (binary byte ...)", _say(content))

    def value(self, value: Any) -> Any:
        return {} if isinstance(value, _List) else value

    def fail(self, item: _List, expected: str, found: str) -> NoReturn:
        _fail(self.text, self.source, item.start, expected, found)


def _say(value: Any) -> str:
    return "a list" if isinstance(value, _List) else describe(value)


def to_lisp(query: Node) -> str:
    """The query as Lisp, on one line.

    >>> from kvspan.query.builders import cross, g, plus, system
    >>> to_lisp(g("org/model", cross(system("s"), plus("a", "b"), "q"), max_tokens=5))
    '(g org/model (cross (system "s") (plus (user "a") (user "b")) (user "q")) nil 5)'
    """
    parts: list[str] = []
    stack: list[Node | str] = [query]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            parts.append(item)
            continue
        before, after = _around(item)
        parts.append(before)
        stack.append(after)
        for index, child in reversed(list(enumerate(item.children))):
            stack += [child, " "] if index or before[-1:] != "(" else [child]
    return "".join(parts)


def _around(node: Node) -> tuple[str, str]:
    """What stands before the children of a node, and after them."""
    if isinstance(node, (Text, Print)):
        return f"({node.kind} {_string(node.text)}", ")"
    if isinstance(node, Generate):
        return f"(g {_word(node.model)}", _settings(node.max_tokens, node.temperature) + ")"
    if isinstance(node, Repeat):
        return f"(repeat {node.n}", ")"
    if isinstance(node, Map):
        inputs = " ".join(map(_string, node.inputs))
        settings = _settings(node.max_tokens, node.temperature)
        return f"(map {_word(node.model)} ({inputs}){settings}", ")"
    if isinstance(node, Augment):
        content = node.content
        body = (
            f"(text {_string(content)})"
            if isinstance(content, str)
            else f"(binary{''.join(f' {byte}' for byte in content)})"
        )
        return f"(augment {_word(node.embedding_model)}", f" {_string(node.name)} {body})"
    if isinstance(node, Reduce):
        return f"({EXTENSION} (reduce {node.k} {json.dumps(node.closed)}", "))"
    if isinstance(node, Options):
        said = "".join(f" ({name} {_word(value)})" for name, value in node.said().items())
        return f"({EXTENSION} (options{said}", "))"
    if isinstance(node, Retrieve):
        rest = [] if node.limit is None else [str(node.limit)]
        if node.embedding_model is not None:
            rest = [*(rest or ["nil"]), _word(node.embedding_model)]
        return f"({EXTENSION} (retrieve {_word(node.corpus)}", "".join(" " + r for r in rest) + "))"
    return f"({node.kind}", ")"


def _settings(max_tokens: int | None, temperature: float | None) -> str:
    if max_tokens is not None:
        return f" {'nil' if temperature is None else repr(temperature)} {max_tokens}"
    return "" if temperature is None else f" {temperature!r}"


def _word(text: str) -> str:
    return text if _PLAIN.fullmatch(text) and text not in _WORDS else _string(text)


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
