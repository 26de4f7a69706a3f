"""Rewriting: rules applied in order until none changes anything, with a trace for ``explain``.

    desugar_chat       a query that asks nothing -> a generate over it, with the default model
    desugar_retrieval  augment, retrieve -> prepared fragments, as the spans of a plus
    unroll             repeat, map -> generates: no engine takes them as they are
    pair_zip           zip -> pairs
    drop_empty         empty messages and joins in a join -> gone
    flatten_plus       plus in plus -> one plus
    flatten_seq        seq in seq -> one seq
    flatten_cross      cross at the end of a cross -> one cross
    order_spans        the spans of a prompt -> in the order of their content, unless pinned
    split_reduce       a declared reduction over many spans -> a tree of small ones
    keep_inputs        an inner generate -> what it read and what it said, on request
    distribute_plus    an inner generate -> a span anchored by its own input, where engines can
    plain_prompts      the spans of a plus -> plain text, where an engine has none

Every rule is in ``kvspan.query.rules``, ``retrieval``, ``spans`` or ``engines``. Only
``split_reduce`` and ``keep_inputs`` change the text of a prompt; ``order_spans`` its order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvspan.engine import Capabilities
from kvspan.errors import KvspanError
from kvspan.query.context import Context as Context
from kvspan.query.context import Nested, Order, SpanHistory
from kvspan.query.engines import distribute_plus, plain_prompts, reasons
from kvspan.query.forms import mark_origins
from kvspan.query.nodes import Node, Path
from kvspan.query.retrieval import Retriever, desugar_retrieval
from kvspan.query.rules import (
    desugar_chat,
    drop_empty,
    flatten_cross,
    flatten_plus,
    flatten_seq,
    pair_zip,
    unroll,
)
from kvspan.query.spans import keep_inputs, moves, order_spans, split_reduce
from kvspan.query.traverse import count_nodes

# Rules shrink the tree or apply once, so a few passes do; a rule that never settles is a bug.
MAX_PASSES = 20

Rule = Callable[[Node, Context], Node]

RULES: tuple[Rule, ...] = (
    desugar_chat,
    desugar_retrieval,
    unroll,
    pair_zip,
    drop_empty,
    flatten_plus,
    flatten_seq,
    flatten_cross,
    order_spans,
    split_reduce,
    keep_inputs,
    distribute_plus,
    plain_prompts,
)


@dataclass(frozen=True)
class Fired:
    """One application of a rule that changed the tree. before, after: numbers of nodes.

    tree: the query after it. moved: for order_spans, the path of each plus it changed and the old
    indexes of its children in their new order. reasons: for plain_prompts, what the engines say.
    """

    rule: str
    does: str
    number: int
    before: int
    after: int
    tree: Node | None = field(default=None, repr=False, compare=False)
    moved: tuple[tuple[Path, list[int]], ...] = ()
    reasons: tuple[str, ...] = ()

    def to_obj(self) -> dict[str, Any]:
        """As JSON values, without the tree."""
        obj: dict[str, Any] = {
            "rule": self.rule,
            "does": self.does,
            "number": self.number,
            "before": self.before,
            "after": self.after,
        }
        if self.moved:
            obj["moved"] = [{"path": str(path), "order": order} for path, order in self.moved]
        if self.reasons:
            obj["reasons"] = list(self.reasons)
        return obj


@dataclass(frozen=True)
class Optimized:
    """The rewritten query and what was done to it, in order."""

    query: Node
    trace: tuple[Fired, ...]


def optimize(
    query: Node,
    *,
    default_model: str | None = None,
    retriever: Retriever | None = None,
    order: Order = "canonical",
    nested: Nested = "answer",
    scope: str = "anchored",
    history: SpanHistory | None = None,
    capabilities: Callable[[str], Capabilities] | None = None,
    rules: Sequence[Rule] = RULES,
) -> Optimized:
    """Apply rules in order, again and again until nothing changes. See ``Context``.

    Generates remember where they stood in ``query`` (``Generate.origin``).
    Raises UsageError if the query asks nothing and there is no default model.

    >>> from kvspan.query.builders import cross, plus
    >>> [fired.rule for fired in optimize(cross(plus("b", "", "a"), "q"), default_model="M").trace]
    ['desugar_chat', 'drop_empty', 'order_spans']
    """
    context = Context(default_model, retriever, order, nested, scope, history, capabilities)
    query = mark_origins(query)
    trace: list[Fired] = []
    size = count_nodes(query)
    for number in range(1, MAX_PASSES + 1):
        changed = False
        for rule in rules:
            new = rule(query, context)
            if new is not query:
                does = (rule.__doc__ or "").partition("\n")[0]
                name = getattr(rule, "__name__", "rule")
                moved = moves(query, context) if rule is order_spans else ()
                said = reasons(new, context) if rule is plain_prompts else ()
                before, size = size, count_nodes(new)
                trace.append(Fired(name, does, number, before, size, new, moved, said))
                query, changed = new, True
        if not changed:
            return Optimized(query, tuple(trace))
    raise KvspanError(
        f"rewrite rules did not settle in {MAX_PASSES} passes: {trace[-1].rule} still fires"
    )
