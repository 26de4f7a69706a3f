"""What the tests of the command have in common: two queries, and an engine for every model."""

from __future__ import annotations

from pathlib import Path

from fakes import prompt_text
from kvspan.engine import GenerateRequest

HERE = Path(__file__).parent
QUERY = {"g": {"model": "M", "input": {"cross": [{"system": "s"}, {"plus": [{"user": "a"}]}]}}}
TWO = {"plus": [{"g": {"model": "M", "input": {"user": x}}} for x in "ab"]}


def echo(request: GenerateRequest) -> str:
    return f"<{prompt_text(request.prompt)}>"
