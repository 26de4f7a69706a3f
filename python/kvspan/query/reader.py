"""Plain values (dicts, lists, strings, numbers) to query nodes, checked key by key.

One method per shape of node. Each returns the children still to be read and how to make the node
of them, so that ``Reader.read`` needs no recursion.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvspan.errors import UsageError
from kvspan.query.checks import (
    check_count,
    check_flag,
    check_max_tokens,
    check_model,
    check_temperature,
    check_text,
    check_word,
    closest,
    describe,
)
from kvspan.query.extensions import (
    EXTENSION,
    EXTENSION_KINDS,
    ORDER_WORDS,
    PLACEMENT_WORDS,
    SCOPE_WORDS,
    Options,
    Reduce,
    Retrieve,
)
from kvspan.query.forms import KINDS, Augment, Map, Monad, Print, Repeat, Zip
from kvspan.query.nodes import ROOT, Cross, Generate, Join, Node, Path, Text, User


class QueryWarning(UserWarning):
    """Something a lenient reader accepted."""


def warn(message: str) -> None:
    """Say what a lenient reader accepted."""
    warnings.warn(message, QueryWarning, stacklevel=3)


@dataclass
class _Opened:
    """A node whose children are still to be read. below: (value, path) of each."""

    below: list[tuple[Any, Path]]
    make: Callable[[list[Any]], Node]


_NAMES = (*KINDS, EXTENSION)
_ONE_OF = "one of " + ", ".join(_NAMES)


class Reader:
    """Reads one value. lenient: see ``kvspan.query.read``. source: where it is from."""

    def __init__(self, lenient: bool, source: str | None, is_yaml: bool = False) -> None:
        self.lenient = lenient
        self.source = source
        self.is_yaml = is_yaml

    def read(self, value: Any) -> Node:
        nodes: list[Node] = []
        # A value still to be read, or what to make of the last nodes that were read.
        stack: list[tuple[Any, Path] | _Opened] = [(self.legacy_input(value, ROOT), ROOT)]
        while stack:
            entry = stack.pop()
            if isinstance(entry, _Opened):
                count = len(entry.below)
                below = nodes[len(nodes) - count :]
                del nodes[len(nodes) - count :]
                nodes.append(entry.make(below))
                continue
            kind, body, path = self.node(*entry)
            opened = self.open(kind, body, path)
            stack.append(opened)
            stack.extend(reversed(opened.below))
        return nodes[0]

    def open(self, kind: str, body: Any, path: Path) -> _Opened:
        cls = KINDS.get(kind) or EXTENSION_KINDS[kind]
        if issubclass(cls, (Text, Print)):
            self.text(body, path, f"the value of {kind}")
            return _Opened([], lambda below: cls(body))
        if issubclass(cls, Join):
            items = self.array(body, path, f"the value of {kind}", "an array of nodes")
            below = [(item, path.child(index)) for index, item in enumerate(items)]
            if self.lenient:
                below = [(self.legacy_input(item, place), place) for item, place in below]
            return _Opened(below, lambda below: cls(tuple(below)))
        if cls is Monad:
            return _Opened([(self.legacy_input(body, path), path)], lambda below: Monad(*below))
        opener: Callable[[Any, Path], _Opened] = getattr(self, f"open_{kind}")
        return opener(body, path)

    # --- one shape each ----------------------------------------------------------------------

    def open_g(self, body: Any, path: Path) -> _Opened:
        fields = self.fields(body, path, "g", ("model", "input"), ("max_tokens", "temperature"))
        settings = self.settings(fields, path)
        below = path.child("input")
        inner = self.legacy_input(fields["input"], below)
        return _Opened([(inner, below)], lambda nodes: Generate(input=nodes[0], **settings))

    def open_repeat(self, body: Any, path: Path) -> _Opened:
        legacy = isinstance(body, dict) and "query" in body and "g" not in body
        if legacy:
            error = self.error(
                path.child("query"), "unknown key", "g, the value of a g node", "'query'"
            )
            self.accept(error, "read as the g node to repeat")
        fields = self.fields(body, path, "repeat", ("n", "query" if legacy else "g"), ())
        self.check(check_count(fields["n"], "the n of repeat", 0), path.child("n"))
        sample = self.generate_in(fields["query"], path.child("query")) if legacy else fields["g"]
        return _Opened([({"g": sample}, path)], lambda nodes: Repeat(fields["n"], nodes[0]))

    def generate_in(self, value: Any, path: Path) -> Any:
        """The value of the g node that must stand here."""
        if not isinstance(value, dict) or list(value) != ["g"]:
            raise self.error(path, "not a g node", "an object with the key 'g'", describe(value))
        return value["g"]

    def open_map(self, body: Any, path: Path) -> _Opened:
        fields = self.fields(body, path, "map", ("metadata", "inputs"), ())
        place = path.child("metadata")
        optional = ("max_tokens", "temperature")
        metadata = self.fields(fields["metadata"], place, "metadata", ("model",), optional)
        settings = self.settings(metadata, place)
        place = path.child("inputs")
        inputs = self.array(fields["inputs"], place, "the inputs of map", "an array of strings")
        for index, text in enumerate(inputs):
            self.text(text, place.child(index), f"input {index} of map")
        return _Opened([], lambda nodes: Map(inputs=tuple(inputs), **settings))

    def open_zip(self, body: Any, path: Path) -> _Opened:
        fields = self.fields(body, path, "zip", ("first", "second"), ())
        below = [
            (self.legacy_input(fields[name], path.child(name)), path.child(name))
            for name in ("first", "second")
        ]
        return _Opened(below, lambda nodes: Zip(*nodes))

    def open_augment(self, body: Any, path: Path) -> _Opened:
        fields = self.fields(body, path, "augment", ("embedding_model", "body", "doc"), ())
        model = fields["embedding_model"]
        self.text(model, path.child("embedding_model"), "the embedding_model of augment")
        place = path.child("doc")
        doc = fields["doc"]
        shape = "an array of a name and {Text: string} or {Binary: [bytes]}"
        if not isinstance(doc, list) or len(doc) != 2:
            raise self.error(place, "not a document", shape, describe(doc))
        self.text(doc[0], place.child(0), "the name of the document")
        content = self.content(doc[1], place.child(1))
        inner = path.child("body")
        return _Opened(
            [(self.legacy_input(fields["body"], inner), inner)],
            lambda nodes: Augment(model, nodes[0], doc[0], content),
        )

    def content(self, value: Any, path: Path) -> str | bytes:
        shape = "an object with the key Text or Binary"
        if not isinstance(value, dict) or list(value) not in (["Text"], ["Binary"]):
            raise self.error(path, "not a document's content", shape, describe(value))
        if "Text" in value:
            self.text(value["Text"], path.child("Text"), "the text of the document")
            return str(value["Text"])
        place = path.child("Binary")
        items = self.array(value["Binary"], place, "the bytes of the document", "an array of bytes")
        for index, item in enumerate(items):
            if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item <= 255:
                raise self.error(
                    place.child(index), "not a byte", "a whole number from 0 to 255", describe(item)
                )
        return bytes(items)

    def open_reduce(self, body: Any, path: Path) -> _Opened:
        fields = self.fields(body, path, "reduce", ("g", "k", "closed"), ())
        self.check(check_count(fields["k"], "the k of reduce", 2), path.child("k"))
        self.check(check_flag(fields["closed"], "closed"), path.child("closed"))
        return _Opened(
            [({"g": fields["g"]}, path)],
            lambda nodes: Reduce(nodes[0], fields["k"], fields["closed"]),
        )

    def open_options(self, body: Any, path: Path) -> _Opened:
        words = {"scope": SCOPE_WORDS, "placement": PLACEMENT_WORDS, "order": ORDER_WORDS}
        fields = self.fields(body, path, "options", ("query",), (*words, "salt"))
        for name, known in words.items():
            self.check(check_word(fields[name], name, known), path.child(name))
        if fields["salt"] is not None:
            self.text(fields["salt"], path.child("salt"), "the salt of options")
        inner = path.child("query")
        query = self.legacy_input(fields.pop("query"), inner)
        return _Opened([(query, inner)], lambda nodes: Options(nodes[0], **fields))

    def open_retrieve(self, body: Any, path: Path) -> _Opened:
        optional = ("limit", "embedding_model")
        fields = self.fields(body, path, "retrieve", ("corpus", "query"), optional)
        self.text(fields["corpus"], path.child("corpus"), "the corpus of retrieve")
        if fields["limit"] is not None:
            check = check_count(fields["limit"], "the limit of retrieve", 1)
            self.check(check, path.child("limit"))
        model = fields["embedding_model"]
        if model is not None:
            place = path.child("embedding_model")
            self.text(model, place, "the embedding_model of retrieve")
        inner = path.child("query")
        query = self.legacy_input(fields["query"], inner)
        return _Opened(
            [(query, inner)],
            lambda nodes: Retrieve(fields["corpus"], nodes[0], fields["limit"], model),
        )

    # --- what shapes are made of -------------------------------------------------------------

    def node(self, value: Any, path: Path) -> tuple[str, Any, Path]:
        """The one key of a node, what it holds, and where that stands."""
        kind, body = self.one_key(value, path, KINDS, "the node's name")
        place = path.child(kind)
        if kind == EXTENSION:
            kind, body = self.one_key(body, place, EXTENSION_KINDS, "the extension's name")
            place = place.child(kind)
            if kind in EXTENSION_KINDS:
                return kind, body, place
            known = tuple(EXTENSION_KINDS)
            message = f"unknown extension{closest(kind, known)}"
            raise self.error(place, message, "one of " + ", ".join(known), describe(kind))
        if kind in KINDS:
            return kind, body, place
        if kind.startswith("kvspan/"):
            raise self.error(place, "unknown version of the extensions", EXTENSION, repr(kind))
        hint = closest(kind, _NAMES)
        raise self.error(place, f"unknown node{hint}", _ONE_OF, describe(kind))

    def one_key(
        self, value: Any, path: Path, kinds: dict[str, type[Node]], name: str
    ) -> tuple[str, Any]:
        one = f"an object with exactly one key, {name}"
        what = "not a query node" if kinds is KINDS else "not an extension node"
        if not isinstance(value, dict):
            raise self.error(path, what, one, describe(value))
        if len(value) != 1:
            error = self.error(path, what, one, describe(value))
            known = [key for key in value if key in kinds or key == EXTENSION]
            if len(known) != 1:
                raise error
            self.accept(error, f"all but {known[0]!r} ignored")
            return known[0], value[known[0]]
        kind, body = next(iter(value.items()))
        return str(kind), body

    def fields(
        self, body: Any, path: Path, kind: str, needs: tuple[str, ...], takes: tuple[str, ...]
    ) -> dict[str, Any]:
        """The values of the keys in needs and takes; None for one in takes that is left out."""
        keys = "an object with " + " and ".join(
            part for part in (", ".join(needs[:-1]), needs[-1]) if part
        )
        if takes:
            keys += " and, if wanted, " + " and ".join(
                part for part in (", ".join(takes[:-1]), takes[-1]) if part
            )
        if not isinstance(body, dict):
            what = kind if kind == "metadata" else f"the value of {kind}"
            raise self.error(path, f"{what} is not an object", keys, describe(body))
        for key in body:
            if key not in needs and key not in takes:
                hint = closest(str(key), (*needs, *takes))
                expected = "one of " + ", ".join((*needs, *takes))
                place = path.child(str(key))
                error = self.error(place, f"unknown key{hint}", expected, describe(key))
                self.accept(error, "ignored")
        for key in needs:
            if key not in body:
                raise self.error(path, f"{kind} has no {key}", keys, describe(body))
        return {key: body.get(key) for key in (*needs, *takes)}

    def settings(self, fields: dict[str, Any], path: Path) -> dict[str, Any]:
        """model, max_tokens and temperature, checked."""
        self.check(check_model(fields["model"]), path.child("model"))
        self.check(check_max_tokens(fields["max_tokens"]), path.child("max_tokens"))
        self.check(check_temperature(fields["temperature"]), path.child("temperature"))
        return {name: fields[name] for name in ("model", "max_tokens", "temperature")}

    def text(self, value: Any, path: Path, what: str) -> None:
        problem = check_text(value, what)
        if problem and self.is_yaml and not isinstance(value, (str, dict, list)):
            problem.expected = "a string (quote it: unquoted, YAML reads something else)"
        self.check(problem, path)

    def array(self, value: Any, path: Path, what: str, expected: str) -> list[Any]:
        if not isinstance(value, list):
            raise self.error(path, f"{what} is not an array", expected, describe(value))
        return value

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

    # --- errors ------------------------------------------------------------------------------

    def error(self, path: Path, message: str, expected: str, found: str) -> UsageError:
        return UsageError(
            message, path=str(path), expected=expected, found=found, source=self.source
        )

    def accept(self, error: UsageError, instead: str) -> None:
        """Warn if lenient, raise if not."""
        if not self.lenient:
            raise error
        warn(f"{error}; {instead}")

    def check(self, problem: UsageError | None, path: Path) -> None:
        if problem:
            problem.path, problem.source = str(path), self.source
            raise problem
