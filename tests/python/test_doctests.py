"""The examples in the docstrings: every one is what the code says."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path

import pytest

import kvspan

PACKAGE = Path(kvspan.__file__).parent
MODULES = sorted(
    ".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
    for file in PACKAGE.rglob("*.py")
    if ">>> " in file.read_text("utf-8")
)


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name: str) -> None:
    failed, tried = doctest.testmod(import_module(f"kvspan.{name}"))
    assert failed == 0
    assert tried > 0
