"""The examples in docs/queries.md are queries, and its tables are complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvspan import loads
from kvspan.query.forms import EXTENSION, EXTENSION_KINDS, KINDS
from kvspan.query.lisp import to_lisp
from kvspan.query.optimizer import RULES

TEXT = (Path(__file__).parents[2] / "docs" / "queries.md").read_text("utf-8")
EXAMPLES = re.findall(r"^```(json|yaml|lisp)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("format", "text"), EXAMPLES, ids=[f"{e[0]}" for e in EXAMPLES])
def test_example(format: str, text: str) -> None:
    query = loads(text, format=format)
    assert loads(to_lisp(query)) == query
    assert loads(text) == query  # the format is found out as well


def test_every_node_and_rule_is_named() -> None:
    for name in (*KINDS, EXTENSION, *EXTENSION_KINDS, *(rule.__name__ for rule in RULES)):
        assert f"`{name}`" in TEXT, name
