"""The examples in the docstrings of the query side."""

from __future__ import annotations

import doctest
from importlib import import_module

import pytest

MODULES = [
    "errors",
    "estimate",
    "executor",
    "explain_text",
    "query.builders",
    "query.bulk_order",
    "query.expand",
    "query.lisp",
    "query.nodes",
    "query.optimizer",
    "query.plan",
    "query.read",
    "query.retrieval",
    "query.rules",
    "query.spans",
    "query.text",
    "query.write",
    "retrieve.chunking",
    "retrieve.search",
]


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name: str) -> None:
    failed, tried = doctest.testmod(import_module(f"kvspan.{name}"))
    assert failed == 0
    assert tried > 0
