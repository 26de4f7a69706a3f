"""Importing what the extras of kvspan install, and saying which one is missing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from kvspan.errors import KvspanError
from kvspan.interrupts import held_interrupts


@contextlib.contextmanager
def importing(extra: str) -> Iterator[None]:
    """For imports of what ``extra`` installs: whole or not at all.

    Raises KvspanError for what is missing, or is there and broken.
    """
    try:
        with held_interrupts():
            yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("kvspan"):
            raise
        raise KvspanError(
            f"{error.name} is not installed (pip install 'kvspan[{extra}]')"
        ) from error
    except ImportError as error:  # versions that do not go together, a shared library that is gone
        if (error.name or "").startswith("kvspan"):
            raise
        raise KvspanError(f"what kvspan[{extra}] installs cannot be imported: {error}") from error


def engine_extra(model: str) -> str:
    """The extra with all that the embedded engine needs for a model."""
    from kvspan.demo.model import is_demo_model

    return "demo" if is_demo_model(model) else "local"
