"""What rewrite rules may know besides the tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvspan.query.retrieval import Retriever

Order = Literal["canonical", "pinned"]
Nested = Literal["answer", "whole"]

ORDERS: tuple[Order, ...] = ("canonical", "pinned")
NESTED: tuple[Nested, ...] = ("answer", "whole")


@dataclass(frozen=True)
class Context:
    """Settings of a rewriting.

    default_model: for queries that name none.
    retriever: finds the fragments of augment and retrieve.
    native: kinds of nodes that the engine takes as they are ("map", "repeat").
    order: whether children of a plus in a prompt are put into their canonical order.
    nested: what an outer generate reads of a generate in a plus: its answer, or its whole exchange.
    scope: with "full" there are no spans to prepare.
    """

    default_model: str | None = None
    retriever: Retriever | None = None
    native: frozenset[str] = frozenset()
    order: Order = "canonical"
    nested: Nested = "answer"
    scope: str = "anchored"
