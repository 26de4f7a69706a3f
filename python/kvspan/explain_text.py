"""An explanation as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvspan.errors import printable, shorten_path
from kvspan.query.extensions import Options, Reduce, Retrieve
from kvspan.query.forms import Augment, Map, Print, Repeat
from kvspan.query.nodes import Generate, Node, Text
from kvspan.query.plan import Call, Plan
from kvspan.query.traverse import count_nodes

if TYPE_CHECKING:
    from kvspan.explain import CallLayout, Explanation

MAX_DEPTH = 40  # levels of a tree that are drawn
HEAD, TAIL = 12, 3  # entries of a long list that are shown at its two ends
TEXT_WIDTH = 60  # characters of a text that are shown


def render(explanation: Explanation, unicode: bool = True) -> str:
    """The explanation as text for a terminal, box-drawing characters only if ``unicode``."""
    lines = ["Query", *draw_tree(explanation.query, unicode), "", "Rewriting"]
    if not explanation.trace:
        lines.append("  no rule applies")
    for fired in explanation.trace:
        change = f"{fired.before} -> {fired.after} nodes"
        lines.append(f"  {fired.rule}: {change}. {fired.does}")
        lines += [f"    {printable(reason)}" for reason in fired.reasons]
        for path, order in fired.moved[:HEAD]:
            old = _list([str(index) for index in order])
            lines.append(f"    {shorten_path(str(path))}: old places in the new order {old}")
        if len(fired.moved) > HEAD:
            lines.append(f"    ... {len(fired.moved) - HEAD:,} more")
    if explanation.trace:
        lines += ["", "Rewritten query", *draw_tree(explanation.plan.query, unicode)]
    lines += ["", *_plan_lines(explanation.plan), f"  Cost: {explanation.cost}"]
    lines += ["", *_layout_lines(explanation)]
    return "\n".join(lines) + "\n"


def draw_tree(query: Node, unicode: bool = True) -> list[str]:
    """One line per node; long joins and deep branches are cut, with a count of what is left out."""
    tee, elbow, bar = ("├─ ", "└─ ", "│  ") if unicode else ("|- ", "`- ", "|  ")
    lines: list[str] = []
    # A node or a remark, the prefix of its own line and of the lines below it, and its depth.
    stack: list[tuple[Node | str, str, str, int]] = [(query, "  ", "  ", 0)]
    while stack:
        item, own, below, depth = stack.pop()
        if isinstance(item, str):
            lines.append(own + item)
            continue
        lines.append(own + _label(item))
        children: list[Node | str] = list(item.children)
        if depth >= MAX_DEPTH and children:
            deeper = count_nodes(item) - 1
            children = [f"... {deeper:,} {_plural(deeper, 'node')} deeper"]
        elif len(children) > HEAD + TAIL + 1:
            cut = len(children) - HEAD - TAIL
            children[HEAD:-TAIL] = [f"... {cut:,} more"]
        for index in range(len(children) - 1, -1, -1):
            last = index == len(children) - 1
            branch, indent = (elbow, "   ") if last else (tee, bar)
            stack.append((children[index], below + branch, below + indent, depth + 1))
    return lines


def _label(node: Node) -> str:
    if isinstance(node, Text):
        return f"{node.kind} {quote(node.text)}"
    if isinstance(node, (Generate, Map)):
        label = f"{node.kind} {printable(node.model)}"
        if isinstance(node, Map):
            label += f" ({len(node.inputs):,} {_plural(len(node.inputs), 'input')})"
        if node.max_tokens is not None:
            label += f" max_tokens={node.max_tokens}"
        if node.temperature is not None:
            label += f" temperature={node.temperature:g}"
        if isinstance(node, Generate):
            label += ", kept as a span" * node.kept + ", plain prompt" * node.plain
        return label
    if isinstance(node, Repeat):
        return f"repeat {node.n:,}"
    if isinstance(node, Print):
        return f"print {quote(node.text)}"
    if isinstance(node, Augment):
        return f"augment document {quote(node.name)}"
    if isinstance(node, Retrieve):
        return f"retrieve from {quote(node.corpus)}"
    if isinstance(node, Reduce):
        return f"reduce k={node.k}" + ("" if node.closed else " (not declared closed)")
    if isinstance(node, Options):
        said = node.said()
        if "salt" in said:
            said["salt"] = "..."  # whose salt it is is nobody's business
        return "options " + printable(" ".join(f"{name}={word}" for name, word in said.items()))
    count = len(node.children)
    if node.kind == "plus":
        return f"plus ({count:,} {_plural(count, 'span')})"
    return node.kind if count else f"{node.kind} (empty)"


def quote(text: str, width: int = TEXT_WIDTH) -> str:
    """The beginning of a text on one line, with its length if it was cut.

    >>> quote("a\\nb"), quote("x" * 100, 8)
    ('"a b"', '"xxxxxxxx..." (100 characters)')
    """
    short = " ".join(text[: 4 * width].split())
    if len(text) <= 4 * width and len(short) <= width:
        return f'"{printable(short)}"'
    return f'"{printable(short[:width])}..." ({len(text):,} characters)'


def _plural(count: int, word: str) -> str:
    return word if count == 1 else word + "s"


def _plan_lines(plan: Plan) -> list[str]:
    calls, answers = plan.calls, set(plan.answers)
    lines = [f"Plan: {len(calls):,} generate {_plural(len(calls), 'call')}"]
    rows = []
    for call in calls:
        waits = [str(id) for id in call.inputs]
        after = [str(id) for id in calls_before(plan, call.after)]
        rows.append(
            [
                str(call.id),
                shorten_path(call.path),
                printable(call.node.model),
                _list(waits) if waits else "-",
                _list(after) if after else "-",
                "yes" if call.id in answers else "",
            ]
        )
    header = ["call", "path", "model", "reads answers of", "starts after", "answer"]
    return lines + _table(header, rows)


def calls_before(plan: Plan, ids: Sequence[int]) -> list[int]:
    """Calls behind the ids of steps; barriers and lines are an inner matter of the plan."""
    found: set[int] = set()
    seen: set[int] = set()  # barriers wait for barriers: there are many ways to the same one
    stack = list(ids)
    while stack:
        step = plan.steps[stack.pop()]
        if isinstance(step, Call):
            found.add(step.id)
        elif step.id not in seen:
            seen.add(step.id)
            stack.extend(step.after)
    return sorted(found)


def _list(words: list[str]) -> str:
    if len(words) <= 6:
        return ", ".join(words)
    return ", ".join([*words[:4], f"... {len(words) - 5} more", words[-1]])


def _layout_lines(explanation: Explanation) -> list[str]:
    lines = [
        f"Layout: scope {explanation.scope}, placement {explanation.placement}, "
        f"blocks of {explanation.block_size} tokens"
    ]
    layouts = list(explanation.layouts)
    cut = 0
    if len(layouts) > HEAD + TAIL + 1:
        cut = len(layouts) - HEAD - TAIL
        layouts[HEAD:-TAIL] = []
    for index, layout in enumerate(layouts):
        if cut and index == HEAD:
            lines.append(f"  ... {cut:,} more calls")
        lines += ["", f"  {shorten_path(layout.path)} with {printable(layout.model)}"]
        if layout.missing is not None:
            lines.append(f"  no token counts: {layout.missing}")
        lines += _part_lines(layout)
        for path in layout.open[:HEAD]:
            lines.append(
                f"  the answer of {shorten_path(path)} is not known yet: "
                "a placeholder stands for it"
            )
    return lines


def _part_lines(layout: CallLayout) -> list[str]:
    counted = layout.num_tokens is not None
    header = ["part", *(["tokens", "count", "blocks", "positions"] if counted else []), "content"]
    rows = []
    spans = 0
    for part in layout.parts:
        spans += part.kind == "span"
        # A prompt without spans is one stretch of ordinary text, not the anchor of anything.
        alone = part.kind == "anchor" and len(layout.parts) == 1
        row = [f"span {spans}" if part.kind == "span" else "prompt" if alone else part.kind]
        if part.tokens and part.blocks and part.positions:
            row += [
                _range(part.tokens),
                str(part.tokens[1] - part.tokens[0]),
                _range(part.blocks),
                _range(part.positions),
            ]
        content = ", ".join(f"{m.role} {quote(m.text, 40)}" for m in part.messages[:3])
        if len(part.messages) > 3:
            content += f", ... {len(part.messages) - 3} more"
        if part.answer_of is not None:
            content += " as it was generated"
        rows.append([*row, content or "(chat template)"])
    lines = _table(header, rows)
    if counted:
        movable = sum(
            p.tokens[1] - p.tokens[0] for p in layout.parts if p.kind == "span" and p.tokens
        )
        share = movable / (layout.num_tokens or 1)
        lines.append(
            f"  {layout.num_tokens:,} tokens, {movable:,} of them in "
            f"{spans:,} movable {_plural(spans, 'span')} ({share:.0%})"
        )
    return lines


def _range(pair: tuple[int, int]) -> str:
    start, end = pair
    return f"{start}" if end == start + 1 else f"{start}-{end - 1}"


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    """Columns in line, two spaces apart; the middle of a long table is left out."""
    cut = 0
    if len(rows) > HEAD + TAIL + 1:
        cut = len(rows) - HEAD - TAIL
        rows = rows[:HEAD] + rows[-TAIL:]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for index, row in enumerate([header, *rows]):
        if cut and index == HEAD + 1:
            lines.append(f"  ... {cut:,} more")
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append(("  " + "  ".join(cells)).rstrip())
    return lines
