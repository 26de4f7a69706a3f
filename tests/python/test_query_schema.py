"""The published JSON Schema says what the strict reader says, of good and of broken queries."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from kvspan import UsageError, cli
from kvspan.query.nodes import Node
from kvspan.query.read import from_obj
from kvspan.query.write import to_obj
from query_strategies import all_queries

SCHEMA = json.loads((resources.files("kvspan.query") / "schema.json").read_text("utf-8"))
VALIDATOR = Draft202012Validator(SCHEMA)

G = {"model": "M", "input": {"user": "a"}}
U = {"user": "a"}

VALID: list[Any] = [
    {"user": ""},
    {"plus": []},
    {"g": {**G, "max_tokens": None, "temperature": None}},
    {"g": {**G, "max_tokens": 2**31 - 1, "temperature": 1}},
    {"repeat": {"n": 0, "g": G}},
    {"map": {"metadata": {"model": "M", "temperature": 0.5}, "inputs": []}},
    {"zip": {"first": U, "second": {"par": []}}},
    {"monad": {"print": "x"}},
    {"augment": {"embedding_model": "", "body": U, "doc": ["d", {"Text": ""}]}},
    {"augment": {"embedding_model": "e", "body": U, "doc": ["d", {"Binary": [0, 255]}]}},
    {"kvspan/v1": {"reduce": {"k": 2, "closed": False, "g": G}}},
    {"kvspan/v1": {"options": {"query": U}}},
    {"kvspan/v1": {"options": {"query": U, "scope": "full", "salt": "", "order": None}}},
    {"kvspan/v1": {"retrieve": {"corpus": "c", "query": U, "limit": 1}}},
]
INVALID: list[Any] = [
    *(None, 3, "a", [], {}, [U], {"usr": "a"}, {**U, "system": "b"}),
    *({"user": 3}, {"user": None}, {"user": ["a"]}, {"print": {}}, {"seq": U}, {"seq": ["a"]}),
    *({"g": []}, {"g": {"model": "M"}}, {"g": {"input": U}}, {"g": {**G, "model": ""}}),
    *({"g": {**G, "n": 2}}, {"g": {**G, "input": "a"}}, {"g": {**G, "input": [U]}}),
    *({"g": {**G, "max_tokens": n}} for n in (-1, 2**31, 1.5, "5", True)),
    *({"g": {**G, "temperature": t}} for t in (-0.1, "0", False, [])),
    *({"repeat": {"n": n, "g": G}} for n in (-1, 1.5, None, True, "2")),
    *({"repeat": {"n": 2}}, {"repeat": {"g": G}}, {"repeat": {"n": 2, "query": {"g": G}}}),
    *({"repeat": {"n": 2, "g": {"g": G}}}, {"repeat": {"n": 2, "g": U}}),
    *({"map": {"inputs": []}}, {"map": {"metadata": {}, "inputs": []}}),
    *({"map": {"metadata": {"model": "M"}, "inputs": v}} for v in ("a", [3], [U])),
    {"map": {"metadata": {"model": "M", "input": U}, "inputs": []}},
    *({"zip": [U, U]}, {"zip": {"first": U}}, {"zip": {"first": U, "second": "b"}}),
    *({"monad": "a"}, {"monad": []}),
    *(
        {"augment": {"embedding_model": "e", "body": U, "doc": doc}}
        for doc in ("d", ["d"], ["d", "t"], ["d", {"Text": 1}], ["d", {}, {}], [1, {"Text": ""}],
                    ["d", {"Binary": [256]}], ["d", {"Binary": "x"}], ["d", {"Binary": [True]}],
                    ["d", {"Text": "", "Binary": []}])
    ),
    {"augment": {"embedding_model": 1, "body": U, "doc": ["d", {"Text": ""}]}},
    *({"kvspan/v1": v} for v in (U, {}, [], {"reduce": {}}, {"redcue": {}})),
    *({"kvspan/v1": {"reduce": {"k": k, "closed": True, "g": G}}} for k in (1, None, 2.5)),
    {"kvspan/v1": {"reduce": {"k": 2, "g": G}}},
    {"kvspan/v1": {"reduce": {"k": 2, "closed": "yes", "g": G}}},
    {"kvspan/v2": {"reduce": {"k": 2, "closed": True, "g": G}}},
    *({"kvspan/v1": {"options": {"query": U, **o}}} for o in
      ({"scope": "all"}, {"order": 1}, {"salt": 1}, {"placement": "x"}, {"seed": 1})),
    {"kvspan/v1": {"options": {"scope": "full"}}},
    {"kvspan/v1": {"retrieve": {"corpus": "c", "query": U, "limit": 0}}},
    {"kvspan/v1": {"retrieve": {"query": U}}},
    {"reduce": {"k": 2, "closed": True, "g": G}},
]  # fmt: skip


def accepts(value: Any) -> bool:
    try:
        from_obj(value)
    except UsageError as error:
        line = str(error)
        assert "\n" not in line and error.path is not None and error.expected and error.found
        return False
    return True


def test_the_schema_is_a_schema() -> None:
    Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("value", VALID, ids=json.dumps)
def test_both_accept(value: Any) -> None:
    assert VALIDATOR.is_valid(value)
    assert accepts(value)


@pytest.mark.parametrize("value", INVALID, ids=json.dumps)
def test_both_refuse(value: Any) -> None:
    assert not VALIDATOR.is_valid(value)
    assert not accepts(value)


@settings(max_examples=60)
@given(all_queries)
def test_every_query_is_valid(query: Node) -> None:
    assert VALIDATOR.is_valid(to_obj(query))


JUNK = st.sampled_from(
    [*(None, True, -1, 0, 2, 0.5, "", "anchored", [], ["a"], {}, {"user": "x"}, [{"user": "x"}])]
)


@settings(max_examples=300)
@given(all_queries, st.data())
def test_both_say_the_same_of_broken_queries(query: Node, data: st.DataObject) -> None:
    """Somewhere in a good query a value is replaced, or a key removed, added or misspelt."""
    value = to_obj(query)
    places: list[tuple[Any, Any]] = []
    stack: list[Any] = [value]
    while stack:
        container = stack.pop()
        keys = range(len(container)) if isinstance(container, list) else list(container)
        places += [(container, key) for key in keys]
        stack += [container[k] for k in keys if isinstance(container[k], (dict, list))]
    container, key = data.draw(st.sampled_from(places))
    change = data.draw(st.sampled_from(["replace", "remove", "add", "rename"]))
    if change == "replace" or isinstance(container, list):
        container[key] = data.draw(JUNK)
    elif change == "remove":
        del container[key]
    elif change == "add":
        container[data.draw(st.sampled_from(["max_tokens", "n", "user", "salt"]))] = data.draw(JUNK)
    else:
        container[key + "s"] = container.pop(key)
    assert VALIDATOR.is_valid(value) == accepts(value), json.dumps(value)


def test_the_command_prints_it(capsys) -> None:
    assert cli.main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == SCHEMA
