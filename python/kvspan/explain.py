"""What would be run: the query, the rules that fire on it, the calls, and where their tokens go.

Nothing is run and no weights are loaded; a tokenizer is enough to count tokens and blocks, and
without one the parts of each prompt are shown as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from kvspan.engine import GenerateRequest, Placement, Scope
from kvspan.errors import KvspanError, shorten_path
from kvspan.errors import printable as printable
from kvspan.estimate import Estimate, estimate
from kvspan.executor import plan_query
from kvspan.explain_text import calls_before as calls_before
from kvspan.explain_text import draw_tree as draw_tree
from kvspan.explain_text import quote as quote
from kvspan.explain_text import render as render
from kvspan.extras import engine_extra, importing
from kvspan.query.context import ABLE
from kvspan.query.nodes import Node
from kvspan.query.optimizer import Fired
from kvspan.query.plan import Call, Plan
from kvspan.query.prompt import Message, Prompt, Span, to_prompt
from kvspan.query.write import to_obj

if TYPE_CHECKING:
    from kvspan.layout import PromptEncoder, SpanLayout

# Gives the layout of a request; raises KvspanError where it cannot.
LayoutFor = Callable[[GenerateRequest], "SpanLayout"]


@dataclass(frozen=True)
class Part:
    """A stretch of a prompt. Half-open ranges of tokens and of blocks; None without a tokenizer.

    positions: RoPE positions of the first token and after the last, in the chosen placement.
    answer_of: path of the call whose answer it is, with the KV it will be generated with.
    """

    kind: Literal["anchor", "span", "text"]
    messages: tuple[Message, ...]
    tokens: tuple[int, int] | None = None
    blocks: tuple[int, int] | None = None
    positions: tuple[int, int] | None = None
    answer_of: str | None = None

    def to_obj(self) -> dict[str, Any]:
        """As JSON values; what is not known is left out."""
        known = {key: value for key, value in vars(self).items() if value is not None}
        return {**known, "messages": tuple({"role": m.role, "text": m.text} for m in self.messages)}


@dataclass(frozen=True)
class CallLayout:
    """Layout of one call. missing: why there are no token counts, if there are none.

    open: paths of the calls whose answers stand in the prompt and are not known yet; a short
    placeholder is counted for each.
    """

    path: str
    model: str
    parts: tuple[Part, ...]
    num_tokens: int | None = None
    open: tuple[str, ...] = ()
    missing: str | None = None

    def to_obj(self) -> dict[str, Any]:
        """As JSON values."""
        return {**asdict(replace(self, parts=())), "parts": [part.to_obj() for part in self.parts]}


@dataclass(frozen=True)
class Explanation:
    """All that ``kvspan explain`` shows."""

    query: Node
    plan: Plan
    trace: tuple[Fired, ...]
    scope: Scope
    placement: Placement
    block_size: int
    layouts: tuple[CallLayout, ...] = field(default=())

    @property
    def cost(self) -> Estimate:
        """Calls, rounds and tokens, before anything has run."""
        return estimate(self.plan, [layout.num_tokens for layout in self.layouts])

    def to_obj(self) -> dict[str, Any]:
        """As JSON values; nested as deeply as the query is, so write it with ``dump_json``."""
        return {
            "query": to_obj(self.query),
            "rules": [fired.to_obj() for fired in self.trace],
            "rewritten": to_obj(self.plan.query),
            "plan": self.plan.to_obj(),
            "cost": self.cost.to_obj(),
            "scope": self.scope,
            "placement": self.placement,
            "block_size": self.block_size,
            "layouts": [layout.to_obj() for layout in self.layouts],
        }


def explain(
    query: Node,
    *,
    model: str | None = None,
    scope: Scope = "anchored",
    placement: Placement = "sequential",
    block_size: int = 16,
    layout_for: LayoutFor | None = None,
    **rewriting: Any,
) -> Explanation:
    """Explain a query without running it.

    model: used instead of every model the query names. layout_for: gives token layouts; without it
    (or where it raises KvspanError) the parts come without counts.
    rewriting: order, nested, corpora and retriever, as for ``kvspan.run``.
    """
    if model is not None and rewriting.get("capabilities") is None:
        rewriting["capabilities"] = lambda name: ABLE  # one engine for all models that are named
    plan, trace = plan_query(query, model, scope=scope, **rewriting)
    layouts = []
    for call in plan.calls:
        inputs = [step for id in call.inputs if isinstance(step := plan.steps[id], Call)]
        open_paths = tuple(step.path for step in inputs)
        answers = [
            (f"<answer of {shorten_path(step.path)}>", step.path if step.node.kept else None)
            for step in inputs
        ]
        where, plain = f"{call.path}.g.input", call.node.plain
        prompt = to_prompt(call.node.input, where, answers, plain=plain)
        request = GenerateRequest(
            prompt=prompt,
            model=model or call.node.model,
            scope=call.options.get("scope", scope),  # type: ignore[arg-type]
            placement=call.options.get("placement", placement),  # type: ignore[arg-type]
            path=call.path,
        )
        layouts.append(_call_layout(request, open_paths, layout_for))
    return Explanation(query, plan, trace, scope, placement, block_size, tuple(layouts))


class TokenizerLayouts:
    """Layouts from the tokenizers of the models that requests name; each is loaded once."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._encoders: dict[str, PromptEncoder | KvspanError] = {}

    def load(self, model: str) -> PromptEncoder:
        """Raises UsageError or KvspanError where the tokenizer cannot be had."""
        if model not in self._encoders:
            try:
                self._encoders[model] = _load_encoder(model, self.block_size)
            except KvspanError as error:
                self._encoders[model] = error
        encoder = self._encoders[model]
        if isinstance(encoder, KvspanError):
            raise encoder
        return encoder

    def __call__(self, request: GenerateRequest) -> SpanLayout:
        return self.load(request.model).encode(request.prompt, request.scope)


def _load_encoder(model: str, block_size: int) -> PromptEncoder:
    with importing(engine_extra(model)):
        from kvspan.engine.loading import load_tokenizer
        from kvspan.layout import PromptEncoder
    return PromptEncoder(load_tokenizer(model), block_size)


def _call_layout(
    request: GenerateRequest, open_paths: tuple[str, ...], layout_for: LayoutFor | None
) -> CallLayout:
    groups = _groups(request.prompt, request.scope)
    missing: str | None = "no model was given"
    if layout_for is not None:
        try:
            layout = layout_for(request)
        except KvspanError as error:
            missing = str(error)
        else:
            parts = tuple(_counted(layout, groups, request.placement))
            return CallLayout(request.path, request.model, parts, layout.num_tokens, open_paths)
    parts = tuple(
        Part(kind, messages, answer_of=_answer_of(messages))
        for kind, messages in groups
        if messages
    )
    return CallLayout(request.path, request.model, parts, None, open_paths, missing)


_Group = tuple[Literal["anchor", "span", "text"], tuple[Message, ...]]


def _answer_of(messages: tuple[Message, ...]) -> str | None:
    answer = messages[0].answer if len(messages) == 1 else None
    return answer if isinstance(answer, str) else None


def _groups(prompt: Prompt, scope: Scope) -> list[_Group]:
    """The prompt as an anchor (may be empty), then spans with the text between them."""
    spans = scope != "full"
    groups: list[_Group] = [("anchor", ())]
    for item in prompt:
        if isinstance(item, Span) and spans:
            groups.append(("span", item.messages))
            continue
        messages = item.messages if isinstance(item, Span) else (item,)
        kind, before = groups[-1]
        if kind == "span":
            groups.append(("text", messages))
        else:
            groups[-1] = (kind, before + messages)
    return groups


def _counted(layout: SpanLayout, groups: list[_Group], placement: Placement) -> Iterable[Part]:
    positions = layout.positions(placement)
    size = layout.block_size
    left = iter(groups)
    group: _Group | None = next(left, None)
    for kind, start, end in layout.segments():
        messages: tuple[Message, ...] = ()
        # Segments without a group are template text; groups without a segment had no tokens.
        while group is not None and group[0] != kind and (kind == "span" or group[0] == "anchor"):
            group = next(left, None)
        if group is not None and group[0] == kind:
            messages = group[1]
            group = next(left, None)
        yield Part(
            kind,  # type: ignore[arg-type]
            messages,
            (start, end),
            (start // size, -(-end // size)),
            (int(positions[start]), int(positions[end - 1]) + 1),
            _answer_of(messages),
        )
