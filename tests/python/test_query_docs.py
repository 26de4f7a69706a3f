"""The examples in docs/queries.md and docs/retrieval.md work, and their tables are complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fakes import FakeEngine, prompt_text
from kvspan import loads, run
from kvspan.query.extensions import EXTENSION, EXTENSION_KINDS
from kvspan.query.forms import KINDS
from kvspan.query.lisp import to_lisp
from kvspan.query.optimizer import RULES
from kvspan.retrieve.chunking import DEFAULT_SIZE
from kvspan.retrieve.corpora import DEFAULT_LIMIT
from kvspan.retrieve.documents import SUFFIXES
from kvspan.retrieve.search import SEARCHES

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "queries.md").read_text("utf-8")
RETRIEVAL = (DOCS / "retrieval.md").read_text("utf-8")
EXAMPLES = re.findall(r"^```(json|yaml|lisp)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("format", "text"), EXAMPLES, ids=[f"{e[0]}" for e in EXAMPLES])
def test_example(format: str, text: str) -> None:
    query = loads(text, format=format)
    assert loads(to_lisp(query)) == query
    assert loads(text) == query  # the format is found out as well


def test_every_node_and_rule_is_named() -> None:
    for name in (*KINDS, EXTENSION, *EXTENSION_KINDS, *(rule.__name__ for rule in RULES)):
        assert f"`{name}`" in TEXT, name


def test_retrieval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSPAN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "town.md").write_text("Tomas repairs the clocks in Oldtown.")
    ((format, text),) = re.findall(r"^```(yaml)\n(.*?)^```", RETRIEVAL, re.MULTILINE | re.DOTALL)
    engine = FakeEngine()
    run(loads(text, format=format), engine=engine, corpora={"town": tmp_path / "town.md"})
    assert "[u:Tomas repairs the clocks in Oldtown.]" in prompt_text(engine.requests[-1].prompt)
    for name in (*SUFFIXES, *SEARCHES):
        assert f"`{name}`" in RETRIEVAL, name
    assert f"{DEFAULT_SIZE:,} characters" in RETRIEVAL
    assert f"`--fragments`, {DEFAULT_LIMIT})" in RETRIEVAL
