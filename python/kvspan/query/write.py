"""Queries to JSON, YAML, Lisp and plain values; ``read`` gives back an equal query, always.

None is left out, everything else is written as it stands: the files are plain spnl files but for
nodes of kvspan's own, which stand under one versioned key. ``to_lisp`` is in ``kvspan.query.lisp``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from kvspan.query.extensions import EXTENSION, Options, Reduce, Retrieve
from kvspan.query.forms import Augment, Map, Monad, Print, Repeat, Zip
from kvspan.query.lisp import to_lisp as to_lisp
from kvspan.query.nodes import Generate, Node, Path, Text
from kvspan.query.traverse import fold

# Control characters, and line breaks that YAML parsers fold or disagree on: need double quotes.
_ESCAPED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\xa0\u2028\u2029\ufeff]")

# Deeper than this nothing is indented further, or the size of text would grow with the square.
_MAX_INDENT = 40


def to_obj(query: Node) -> dict[str, Any]:
    """The query as dicts and lists, in the shape of its JSON.

    >>> from kvspan.query.builders import g, plus
    >>> to_obj(g("M", plus("a"), max_tokens=5))
    {'g': {'model': 'M', 'input': {'plus': [{'user': 'a'}]}, 'max_tokens': 5}}
    """

    def combine(node: Node, below: list[dict[str, Any]], path: Path) -> dict[str, Any]:
        if isinstance(node, (Text, Print)):
            return {node.kind: node.text}
        if isinstance(node, Generate):
            fields: dict[str, Any] = {"model": node.model, "input": below[0]}
            if node.max_tokens is not None:
                fields["max_tokens"] = node.max_tokens
            if node.temperature is not None:
                fields["temperature"] = node.temperature
            return {"g": fields}
        return _form(node, below)

    return fold(query, combine)


def _form(node: Node, below: list[dict[str, Any]]) -> dict[str, Any]:
    if isinstance(node, Repeat):
        return {"repeat": {"n": node.n, **below[0]}}
    if isinstance(node, Map):
        metadata = {
            "model": node.model,
            "max_tokens": node.max_tokens,
            "temperature": node.temperature,
        }
        return {"map": {"metadata": _said(metadata), "inputs": list(node.inputs)}}
    if isinstance(node, Zip):
        return {"zip": {"first": below[0], "second": below[1]}}
    if isinstance(node, Monad):
        return {"monad": below[0]}
    if isinstance(node, Augment):
        content = node.content
        value = {"Text": content} if isinstance(content, str) else {"Binary": list(content)}
        model = {"embedding_model": node.embedding_model}
        return {"augment": {**model, "body": below[0], "doc": [node.name, value]}}
    if isinstance(node, Reduce):
        return {EXTENSION: {"reduce": {"k": node.k, "closed": node.closed, **below[0]}}}
    if isinstance(node, Options):
        return {EXTENSION: {"options": {**node.said(), "query": below[0]}}}
    if isinstance(node, Retrieve):
        said = _said({"limit": node.limit, "embedding_model": node.embedding_model})
        return {EXTENSION: {"retrieve": {"corpus": node.corpus, **said, "query": below[0]}}}
    return {node.kind: below}


def _said(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def to_json(query: Node, indent: int | None = None) -> str:
    """The query as JSON; on one line unless ``indent`` (spaces per level) is given.

    >>> from kvspan.query.builders import cross
    >>> to_json(cross("a", "b"))
    '{"cross": [{"user": "a"}, {"user": "b"}]}'
    """
    return dump_json(to_obj(query), indent)


def dump_json(value: Any, indent: int | None = None) -> str:
    """``json.dumps`` for values of any depth. Not-a-number and infinities are a ValueError."""
    parts: list[str] = []
    # Entries are finished text, or (value, level) still to be written.
    stack: list[str | tuple[Any, int]] = [(value, 0)]
    while stack:
        entry = stack.pop()
        if isinstance(entry, str):
            parts.append(entry)
            continue
        item, level = entry
        if not isinstance(item, (dict, list, tuple)) or not item:
            parts.append(json.dumps(item, ensure_ascii=False, allow_nan=False))
            continue
        inner = "" if indent is None else "\n" + " " * (indent * min(level + 1, _MAX_INDENT))
        outer = "" if indent is None else "\n" + " " * (indent * min(level, _MAX_INDENT))
        separator = ", " if indent is None else "," + inner
        is_object = isinstance(item, dict)
        todo: list[str | tuple[Any, int]] = [("{" if is_object else "[") + inner]
        for index, child in enumerate(item.items() if isinstance(item, dict) else item):
            if index:
                todo.append(separator)
            if is_object:
                name, child = child
                todo.append(json.dumps(str(name), ensure_ascii=False) + ": ")
            todo.append((child, level + 1))
        todo.append(outer + ("}" if is_object else "]"))
        stack.extend(reversed(todo))
    return "".join(parts)


def to_yaml(query: Node) -> str:
    """The query as YAML, in block style; texts of several lines as literal blocks.

    >>> from kvspan.query.builders import g
    >>> print(to_yaml(g("M", "hi", temperature=0.0)), end="")
    g:
      model: M
      input:
        user: hi
      temperature: 0.0
    """
    import yaml

    # No line is folded: long texts stay as they are, and deep ones in flow style on one line.
    return str(yaml.emit(_yaml_events(to_obj(query)), allow_unicode=True, width=2**31))


def _yaml_events(value: Any) -> Iterator[Any]:
    import yaml
    from yaml.resolver import Resolver

    resolver = Resolver()
    yield yaml.StreamStartEvent()
    yield yaml.DocumentStartEvent(explicit=False)
    level = 0
    stack: list[Any] = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, yaml.Event):
            level -= 1
            yield item
        elif isinstance(item, dict):
            yield yaml.MappingStartEvent(None, None, True, flow_style=level >= _MAX_INDENT)
            level += 1
            stack.append(yaml.MappingEndEvent())
            for key, child in reversed(item.items()):
                stack += [child, str(key)]
        elif isinstance(item, list):
            flow = not item or level >= _MAX_INDENT
            yield yaml.SequenceStartEvent(None, None, True, flow_style=flow)
            level += 1
            stack.append(yaml.SequenceEndEvent())
            stack.extend(reversed(item))
        elif isinstance(item, str):
            plain = resolver.resolve(yaml.ScalarNode, item, (True, False))
            style = '"' if _ESCAPED.search(item) else "|" if "\n" in item else None
            implicit = (plain == "tag:yaml.org,2002:str", True)
            yield yaml.ScalarEvent(None, None, implicit, item, style=style)
        else:
            text = json.dumps(item) if isinstance(item, bool) else repr(item)
            if (
                not isinstance(item, bool) and "e" in text and "." not in text
            ):  # YAML 1.1 takes 1e-05 for a string
                text = text.replace("e", ".0e")
            yield yaml.ScalarEvent(None, None, (True, False), text)
    yield yaml.DocumentEndEvent(explicit=False)
    yield yaml.StreamEndEvent()
