"""JSON and YAML text to plain values, for text that people write and machines nest.

The standard parsers recurse, so a query a thousand levels deep would crash them; they also keep the
last of two equal keys without a word. These two keep a stack of their own, refuse equal keys, and
name line and column of whatever is wrong. YAML is read with PyYAML's safe loader, event by event.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from json import JSONDecodeError
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, NoReturn

from kvspan.errors import UsageError
from kvspan.query.checks import describe
from kvspan.query.nodes import Path

# Aliases let a short YAML text stand for a very large value; beyond this it is refused.
MAX_ALIASED_VALUES = 1_000_000

_SPACE = re.compile(r"[ \t\n\r]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_WORDS = {"true": True, "false": False, "null": None}
_WORD = re.compile(r"true|false|null")

# Called with an error that a lenient reader may turn into a warning; returns or raises.
Report = Callable[[UsageError], None]


def _raise(error: UsageError) -> None:
    raise error


def line_and_column(text: str, index: int) -> tuple[int, int]:
    """1-based line and column of a character.

    >>> line_and_column("ab\\ncd", 4)
    (2, 2)
    """
    before = text[:index]
    return before.count("\n") + 1, index - (before.rfind("\n") + 1) + 1


class _Frames:
    """The containers being filled, outermost first, each with the key that comes next."""

    def __init__(self, source: str | None, report: Report) -> None:
        self.source = source
        self.report = report
        self.open: list[list[Any]] = []  # [container, key] per level

    def path(self) -> Path:
        path = Path(None, "$")
        for container, key in self.open:
            if isinstance(container, dict):
                if key is not None:
                    path = path.child(key)
            else:
                path = path.child(len(container))
        return path

    def set_key(self, key: str, line: int, column: int) -> None:
        frame = self.open[-1]
        frame[1] = key
        if key in frame[0]:
            self.report(
                UsageError(
                    "the same key twice in one object",
                    path=str(self.path()),
                    expected="every key once",
                    found=f"a second {key!r}",
                    source=self.source,
                    line=line,
                    column=column,
                )
            )

    def add(self, value: Any) -> None:
        container, key = self.open[-1]
        if isinstance(container, dict):
            container[key] = value
            self.open[-1][1] = None
        else:
            container.append(value)


def parse_json(text: str, *, source: str | None = None, on_duplicate: Report = _raise) -> Any:
    """The value of a JSON text, nested as deeply as memory allows.

    on_duplicate: called when an object has a key twice; if it returns, the last value counts.
    Raises UsageError with line and column.

    >>> parse_json('{"seq": [1, {"a": null}]}')
    {'seq': [1, {'a': None}]}
    """
    frames = _Frames(source, on_duplicate)
    end = len(text)

    def skip(pos: int) -> int:
        match = _SPACE.match(text, pos)
        return match.end() if match else pos

    def fail(pos: int, expected: str, found: str | None = None) -> NoReturn:
        line, column = line_and_column(text, pos)
        raise UsageError(
            "malformed JSON",
            expected=expected,
            found=found or (repr(text[pos]) if pos < end else "the end of the text"),
            source=source,
            line=line,
            column=column,
        )

    def string(pos: int) -> tuple[str, int]:
        try:
            value, after = scanstring(text, pos + 1, True)
        except JSONDecodeError as error:
            problem = error.msg.removesuffix(" at").removesuffix(": ").lower()
            fail(error.pos, "a string in double quotes", problem)
        return value, after

    def key(pos: int) -> int:
        if text[pos : pos + 1] != '"':
            fail(pos, "a key in double quotes")
        name, after = string(pos)
        frames.set_key(name, *line_and_column(text, pos) if name in frames.open[-1][0] else (0, 0))
        after = skip(after)
        if text[after : after + 1] != ":":
            fail(after, "':' after the key")
        return skip(after + 1)

    def scalar(pos: int) -> tuple[Any, int]:
        if text[pos : pos + 1] == '"':
            return string(pos)
        if match := _NUMBER.match(text, pos):
            if not match[1] and not match[2] and len(match[0]) < 4000:
                return int(match[0]), match.end()
            number = float(match[0])
            if math.isfinite(number):
                return number, match.end()
            fail(pos, "a number that a double can hold", describe(match[0]))
        if match := _WORD.match(text, pos):
            return _WORDS[match[0]], match.end()
        return fail(pos, "a value")

    pos = skip(0)
    while True:
        opening = text[pos : pos + 1]
        if opening in ("{", "["):
            value: Any = {} if opening == "{" else []
            pos = skip(pos + 1)
            if text[pos : pos + 1] != ("}" if opening == "{" else "]"):
                frames.open.append([value, None])
                if opening == "{":
                    pos = key(pos)
                continue
            pos += 1
        else:
            value, pos = scalar(pos)
        # A value is complete: put it where it belongs, and close what it completes.
        while True:
            pos = skip(pos)
            if not frames.open:
                if pos < end:
                    fail(pos, "the end of the text")
                return value
            frames.add(value)
            container = frames.open[-1][0]
            closing = "}" if isinstance(container, dict) else "]"
            mark = text[pos : pos + 1]
            if mark == ",":
                pos = skip(pos + 1)
                if closing == "}":
                    pos = key(pos)
                break
            if mark != closing:
                fail(pos, f"',' or '{closing}'")
            frames.open.pop()
            value, pos = container, pos + 1


def parse_yaml(text: str, *, source: str | None = None, on_duplicate: Report = _raise) -> Any:
    """The value of a YAML text of one document. Plain data only: no tags beyond YAML's own.

    on_duplicate: as for parse_json. Raises UsageError with line and column.

    >>> parse_yaml("seq:\\n- user: hi\\n- {user: there}\\n")
    {'seq': [{'user': 'hi'}, {'user': 'there'}]}
    """
    import yaml
    from yaml.reader import Reader

    if bad := Reader.NON_PRINTABLE.search(text):
        line, column = line_and_column(text, bad.start())
        raise UsageError(
            "malformed YAML",
            expected="printable text (write other characters as escapes in double quotes)",
            found=f"U+{ord(bad[0]):04X}",
            source=source,
            line=line,
            column=column,
        )
    loaders = [getattr(yaml, "CSafeLoader", yaml.SafeLoader), yaml.SafeLoader]
    try:
        # libyaml is ten times faster, and gives up at a depth of 1,000. What it refuses goes to the
        # Python parser, whose messages are then the same whether libyaml is there or not.
        try:
            return _yaml_value(loaders[0](text), source, on_duplicate)
        except yaml.YAMLError:
            return _yaml_value(loaders[1](text), source, on_duplicate)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = " ".join(str(part) for part in (error.context, error.problem) if part)
        raise UsageError(
            f"malformed YAML: {problem}",
            source=source,
            line=mark.line + 1 if mark else None,
            column=mark.column + 1 if mark else None,
        ) from None
    except yaml.YAMLError as error:
        raise UsageError(f"malformed YAML: {error}", source=source) from None


def _yaml_events(loader: Any) -> Iterator[Any]:
    while loader.check_event():
        yield loader.get_event()


def _yaml_value(loader: Any, source: str | None, report: Report) -> Any:
    import yaml

    frames = _Frames(source, report)
    starts: list[tuple[str | None, int]] = []  # per open container: its anchor, values before it
    anchors: dict[str, tuple[Any, int]] = {}  # complete values, and how many values they stand for
    total = documents = 0
    root: Any = None

    def fail(event: Any, message: str, expected: str, found: str) -> NoReturn:
        raise UsageError(
            message,
            path=str(frames.path()),
            expected=expected,
            found=found,
            source=source,
            line=event.start_mark.line + 1,
            column=event.start_mark.column + 1,
        )

    for event in _yaml_events(loader):
        anchor: str | None = None
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                fail(event, "more than one YAML document", "one document", "a second one")
            continue
        if isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
            if frames.open and isinstance(frames.open[-1][0], dict) and frames.open[-1][1] is None:
                fail(event, "a key is not a string", "a string", "a collection")
            standard = "tag:yaml.org,2002:" + (
                "map" if isinstance(event, yaml.MappingStartEvent) else "seq"
            )
            if event.tag not in (None, "!", standard):
                fail(event, "unknown YAML tag", "plain data", repr(event.tag))
            frames.open.append([{} if standard.endswith("map") else [], None])
            starts.append((event.anchor, total))
            total += 1
            continue
        if isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            value = frames.open.pop()[0]
            anchor, before = starts.pop()
            size = total - before
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in anchors:
                fail(event, "unknown YAML alias", "an anchor that is complete", f"*{event.anchor}")
            value, size = anchors[event.anchor]
            total += size
            if total > MAX_ALIASED_VALUES:
                most = f"at most {MAX_ALIASED_VALUES} values"
                fail(event, "the YAML aliases expand to too much", most, "more")
        elif isinstance(event, yaml.ScalarEvent):
            tag = event.tag
            if tag is None or tag == "!":
                tag = loader.resolve(yaml.ScalarNode, event.value, event.implicit)
            mark: Any = event.start_mark
            node = yaml.ScalarNode(tag, event.value, mark, mark)
            try:
                value = loader.construct_object(node)
            except (ValueError, OverflowError) as error:  # 2024-13-45, 0b, ...
                fail(event, f"malformed YAML value: {error}", "plain data", describe(event.value))
            loader.constructed_objects.clear()  # kept by the loader for aliases, not needed here
            anchor, size = event.anchor, 1
            total += 1
        else:  # stream and document ends
            continue
        if anchor is not None:
            anchors[anchor] = (value, size)
        if not frames.open:
            root = value
        elif isinstance(frames.open[-1][0], dict) and frames.open[-1][1] is None:
            if not isinstance(value, str):
                fail(event, "a key is not a string", "a string", describe(value))
            mark = event.start_mark
            frames.set_key(value, mark.line + 1, mark.column + 1)
        else:
            frames.add(value)
    if not documents:
        raise UsageError("the text is empty", expected="one query node", source=source)
    return root
