"""What is said of versions in several places is one truth."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]


def pins(file: str) -> dict[str, str]:
    lines = (ROOT / file).read_text("utf-8").splitlines()
    found = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in found}


def test_the_oldest_python_is_the_same_everywhere() -> None:
    least = PROJECT["project"]["requires-python"].removeprefix(">=")
    major, minor = least.split(".")
    assert PROJECT["tool"]["ruff"]["target-version"] == f"py{major}{minor}"
    assert PROJECT["tool"]["mypy"]["python_version"] == least
    assert f"Python {least} or newer" in (ROOT / "README.md").read_text("utf-8")
    script = (ROOT / "scripts/system_packages.sh").read_text("utf-8")
    assert re.search(rf"version_info < \({major}, {minor}\)", script)


@pytest.mark.parametrize("extra", ["", *EXTRAS])
def test_every_requirement_has_a_tested_version(extra: str) -> None:
    """The one that the constraints name, and that the requirement allows."""
    known = pins("tests/vllm/constraints.txt" if extra == "vllm" else "constraints.txt")
    for line in EXTRAS[extra] if extra else PROJECT["project"]["dependencies"]:
        wanted = Requirement(line)
        if canonicalize_name(wanted.name) == "kvspan":
            assert wanted.extras <= EXTRAS.keys()
            continue
        assert wanted.specifier.contains(known[canonicalize_name(wanted.name)]), line
