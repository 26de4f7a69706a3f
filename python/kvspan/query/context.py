"""What rewrite rules may know besides the tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvspan.engine import Capabilities
from kvspan.query.retrieval import Retriever

Order = Literal["canonical", "pinned", "recent"]
Nested = Literal["answer", "text", "whole"]

ORDERS: tuple[Order, ...] = ("canonical", "pinned", "recent")
NESTED: tuple[Nested, ...] = ("answer", "text", "whole")


ABLE = Capabilities(spans=True, reason="", max_tokens=0, block_size=0, answers=True)


class SpanHistory:
    """Which spans were asked about lately, and in what order: what a cache is likely to hold.

    Runs with ``order="recent"`` read it and add to it. Their prompts, and so their answers, depend
    on the runs before them; that is why no run does so unless it is told to.
    """

    def __init__(self) -> None:
        self.places: dict[bytes, tuple[int, int]] = {}  # digest: minus the prompt's number, place
        self.prompts = 0

    def note(self, digests: Sequence[bytes]) -> None:
        """Note the spans of a prompt in their order."""
        self.prompts += 1
        for place, digest in enumerate(digests):
            self.places[digest] = (-self.prompts, place)


@dataclass(frozen=True)
class Context:
    """Settings of a rewriting.

    default_model: for queries that name none.
    retriever: finds the fragments of augment and retrieve.
    order: whether children of a plus in a prompt are put into their canonical order, or the ones
        that stand in ``history`` first, in the order of the latest prompt that had them.
    nested: what an outer generate reads of a generate in a plus: its answer as it was generated,
        its answer as text like any other, or its whole exchange.
    scope: of calls that no options node says it of; with "full" there are no spans to prepare.
    capabilities: of the engine that runs calls to a model, the same object for the same engine.
        None: nothing is known yet, and every model has an engine of its own that can do all.
    """

    default_model: str | None = None
    retriever: Retriever | None = None
    order: Order = "canonical"
    nested: Nested = "answer"
    scope: str = "anchored"
    history: SpanHistory | None = None
    capabilities: Callable[[str], Capabilities] | None = None

    def can(self, model: str) -> Capabilities:
        """What the engine of a model can do."""
        return ABLE if self.capabilities is None else self.capabilities(model)

    def same_engine(self, a: str, b: str) -> bool:
        """Whether calls to two models are run by one engine."""
        return a == b or (self.capabilities is not None and self.can(a) is self.can(b))
