"""Settings of all tests, and a server that several files of tests ask."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from fakes import FakeEngine
    from serving import ServerProcess

# No deadline: a slow machine is no error. Derandomised: a run says the same thing twice.
settings.register_profile("kvspan", deadline=None, derandomize=True)
settings.load_profile("kvspan")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a tiny model."""
    from serving import save_model

    return save_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def server(tiny_folder: Path) -> Iterator[ServerProcess]:
    """A server without a key that calls its model `tiny` and `other`."""
    from serving import ServerProcess

    with ServerProcess(tiny_folder, "--served-model-name", "other") as process:
        yield process


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """What every model opens to for commands that run in this process."""
    from cli_queries import echo
    from fakes import FakeEngine
    from kvspan import cli_options

    fake = FakeEngine(answer=echo)
    monkeypatch.setattr(cli_options, "open_engine_with", lambda args, model, bars: fake)
    return fake


@pytest.fixture
def query_file(tmp_path: Path) -> str:
    from cli_queries import QUERY

    path = tmp_path / "query.json"
    path.write_text(json.dumps(QUERY))
    return str(path)
