"""Importing what the extras of kvspan install, and saying which one is missing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from kvspan.errors import KvspanError
from kvspan.interrupts import held_interrupts


@contextlib.contextmanager
def importing(extra: str) -> Iterator[None]:
    """For imports of what ``extra`` installs: whole or not at all, and a KvspanError if missing."""
    try:
        with held_interrupts():
            yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("kvspan"):
            raise
        raise KvspanError(
            f"{error.name} is not installed (pip install 'kvspan[{extra}]')"
        ) from error


def engine_extra(model: str) -> str:
    """The extra with all that the embedded engine needs for a model."""
    from kvspan.demo.model import is_demo_model

    return "demo" if is_demo_model(model) else "local"
