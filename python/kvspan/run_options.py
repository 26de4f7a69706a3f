"""How to run a query: the options of ``kvspan.run`` but for its engines, checked."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from kvspan.engine import PLACEMENTS, SCOPES, Placement, Scope
from kvspan.errors import UsageError
from kvspan.query.checks import (
    check_count,
    check_max_tokens,
    check_temperature,
    closest,
    describe,
    raise_if,
)
from kvspan.query.context import NESTED, ORDERS, Nested, Order, SpanHistory
from kvspan.query.retrieval import CorpusPaths, Retriever

if TYPE_CHECKING:
    from kvspan.engine import Engine

DEFAULT_TEMPERATURE = 0.6  # spnl's, for generates that set none
DEFAULT_CONCURRENCY = 16

# Opens an engine for a model's name.
Opener = Callable[[str], "Engine"]
# Gets the JSON path of a generate and the next piece of its answer.
OnText = Callable[[str, str], None]
# Gets the line of a print node.
OnPrint = Callable[[str], None]
# Gets the record of a request, as JSON values, when it is over.
OnAudit = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Options:
    """How to run a query; see ``run``."""

    model: str | None = None
    seed: int = 0
    scope: Scope = "anchored"
    placement: Placement = "sequential"
    salt: str = ""
    temperature: float | None = None
    max_tokens: int | None = None
    max_concurrency: int = DEFAULT_CONCURRENCY
    order: Order = "canonical"
    nested: Nested = "answer"
    keep_going: bool = False
    retriever: Retriever | None = None
    corpora: CorpusPaths | None = None
    history: SpanHistory | None = None
    on_print: OnPrint | None = None
    on_audit: OnAudit | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any], beside: Sequence[str] = ()) -> Options:
        """Options by name; beside: what else the caller takes, for the message.

        Raises UsageError for a name that is none, and for a bad value.
        """
        names = {option.name for option in fields(cls)}
        for name in options:
            if name not in names:
                known = (*beside, *(option.name for option in fields(cls)))
                raise UsageError(
                    f"unknown option {name!r}{closest(name, known)}",
                    expected="one of " + ", ".join(known),
                )
        return cls(**options)

    def __post_init__(self) -> None:
        checks: tuple[tuple[str, str, tuple[str, ...]], ...] = (
            ("scope", self.scope, SCOPES),
            ("placement", self.placement, PLACEMENTS),
            ("order", self.order, ORDERS),
            ("nested", self.nested, NESTED),
        )
        for name, value, words in checks:
            if value not in words:
                raise UsageError(f"unknown {name}", expected=" or ".join(words), found=repr(value))
        whole = isinstance(self.seed, int) and not isinstance(self.seed, bool)
        if not whole:
            raise UsageError("bad seed", expected="a whole number", found=describe(self.seed))
        if not isinstance(self.salt, str):
            raise UsageError("bad salt", expected="a string", found=describe(self.salt))
        if self.order == "recent" and self.history is None:
            raise UsageError(
                "order 'recent' needs a history", expected="history=SpanHistory()", found="none"
            )
        if self.model is not None and not (isinstance(self.model, str) and self.model):
            found = describe(self.model)
            raise UsageError("bad model", expected="a model's name, or None", found=found)
        raise_if(check_count(self.max_concurrency, "max_concurrency", 1))
        raise_if(check_temperature(self.temperature) or check_max_tokens(self.max_tokens))


def derive_seed(seed: int, path: str) -> int:
    """Seed of the call at ``path``: below 2**63, the same wherever and whenever it is run.

    It depends on the path as written, not on the plan, so that rewriting changes no sample.

    >>> derive_seed(0, "$") == derive_seed(0, "$"), derive_seed(0, "$") == derive_seed(1, "$")
    (True, False)
    """
    digest = hashlib.sha256(f"kvspan call seed\0{seed}\0{path}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
