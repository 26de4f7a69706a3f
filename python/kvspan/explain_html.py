"""An explanation as one self-contained HTML page: no scripts, no network, light and dark."""

from __future__ import annotations

import os
from collections.abc import Iterable
from html import escape
from pathlib import Path

from kvspan import __version__
from kvspan.errors import UsageError, shorten_path
from kvspan.explain import (
    CallLayout,
    Explanation,
    Part,
    calls_before,
    draw_tree,
    printable,
    quote,
)
from kvspan.query.nodes import Node
from kvspan.query.plan import Plan

MAX_CALLS = 60  # calls that are drawn in the plan and laid out
MAX_CELLS = 400  # blocks of a layout that are drawn one by one
_BOX_WIDTH, _BOX_HEIGHT, _GAP_X, _GAP_Y = 190, 46, 60, 14

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5d6b7e; --paper: #f6f7f9; --card: #fff;
  --line: #d9dfe7; --accent: #2f6feb; --anchor: #8a94a6; --span: #2f9e77; --span2: #56b894;
  --text: #d98324; --hit: #fff4d6; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e9f0; --soft: #98a5b8; --paper: #12161c;
  --card: #1a2029; --line: #303947; --accent: #7aa5ff; --anchor: #76829a; --span: #3fb68b;
  --span2: #2c8465; --text: #e39a45; --hit: #3b3317; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 0 0 14px; }
h3 { font-size: 14px; margin: 0 0 2px; overflow-wrap: anywhere; }
.soft { color: var(--soft); } .small { font-size: 13px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 12px;
  padding: 20px 22px; margin-top: 18px; }
.facts { display: flex; flex-wrap: wrap; gap: 10px; margin: 18px 0 0; }
.fact { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 10px 16px; } .fact b { display: block; font-size: 19px; }
.fact span { color: var(--soft); font-size: 12.5px; }
pre { font: 12.5px/1.55 ui-monospace, "DejaVu Sans Mono", monospace; margin: 0;
  overflow: auto; max-height: 520px; background: var(--paper); border: 1px solid var(--line);
  border-radius: 8px; padding: 12px; }
.two { display: grid; grid-template-columns: 1fr 1fr; gap: 16px; }
.two > div { min-width: 0; } @media (max-width: 860px) { .two { grid-template-columns: 1fr; } }
pre mark { background: var(--hit); color: inherit; display: inline-block; min-width: 100%; }
details { border-top: 1px solid var(--line); padding: 10px 0; } details:first-of-type { border: 0; }
summary { cursor: pointer; } summary code { font-weight: 600; color: var(--accent); }
code { font: 13px ui-monospace, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
details > .two { margin-top: 10px; }
.scroll { overflow-x: auto; }
svg text { font: 12px system-ui, "DejaVu Sans", sans-serif; fill: var(--ink); }
svg .path { fill: var(--soft); font-size: 11px; }
svg rect.call { fill: var(--paper); stroke: var(--line); } svg rect.answer { stroke: var(--accent);
  stroke-width: 2; } svg rect.dropped { stroke-dasharray: 4 3; }
svg path { fill: none; stroke: var(--soft); stroke-width: 1.3; }
svg path.after { stroke-dasharray: 4 3; }
.call { padding: 14px 0 16px; border-top: 1px solid var(--line); } .call:first-of-type { border: 0;
  padding-top: 0; }
.bar { display: flex; height: 26px; border-radius: 6px; overflow: hidden; margin: 10px 0 6px;
  background: var(--line); gap: 1px; }
.bar i { display: block; min-width: 2px; }
.blocks { display: flex; flex-wrap: wrap; gap: 2px; margin: 6px 0 10px; }
.blocks i { width: 13px; height: 13px; border-radius: 3px; }
.anchor { background: var(--anchor); } .span { background: var(--span); }
.span.odd { background: var(--span2); } .text { background: var(--text); }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 3px;
  margin: 0 5px 0 14px; vertical-align: -1px; } .legend i:first-child { margin-left: 0; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th { text-align: left; color: var(--soft); font-weight: 500; }
th, td { padding: 4px 14px 4px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td:last-child { overflow-wrap: anywhere; width: 55%; }
td > i { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 7px; }
"""


def write_html(explanation: Explanation, path: str) -> None:
    """Write the page, whole or not at all. Raises UsageError where it cannot be written."""
    page = to_html(explanation).encode()
    if not path:
        raise UsageError("the page has no name", expected="a file")
    try:
        if os.path.exists(path) and not os.path.isfile(path):  # /dev/stdout, say
            Path(path).write_bytes(page)
            return
        place = Path(os.path.realpath(path))  # a link stays one
        new = place.with_name(f".{place.name}.{os.getpid()}.new")
        try:
            new.write_bytes(page)
            new.replace(place)
        finally:
            new.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot write the page: {reason}", source=path) from None


def to_html(explanation: Explanation) -> str:
    """The page."""
    cost = explanation.cost
    facts = [
        (f"{cost.calls:,}", "call" if cost.calls == 1 else "calls"),
        (f"{cost.rounds:,}", "round" if cost.rounds == 1 else "rounds"),
        (f"{'' if cost.counted else '~'}{cost.prompt_tokens:,}", "prompt tokens"),
        ("unbounded" if cost.new_tokens is None else f"&le; {cost.new_tokens:,}", "new tokens"),
        (escape(explanation.scope), "scope"),
        (escape(explanation.placement), "placement"),
        (str(explanation.block_size), "tokens per block"),
    ]
    boxes = "".join(f'<div class="fact"><b>{big}</b><span>{small}</span></div>'
                    for big, small in facts)  # fmt: skip
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>kvspan explain</title><style>{_STYLE}</style></head><body><main>
<h1>What this query will run</h1>
<div class="soft">kvspan {__version__} &middot; nothing has been run</div>
<div class="facts">{boxes}</div>
{_query_section(explanation)}
{_rules_section(explanation)}
{_plan_section(explanation)}
{_layout_section(explanation)}
</main></body></html>
"""


def _tree(query: Node, other: Node | None = None) -> str:
    """A tree as text; lines that ``other`` has not are marked."""
    lines = [line[2:] for line in draw_tree(query)]
    known = None if other is None else {_bare(line) for line in draw_tree(other)}
    out = (
        f"<mark>{escape(line)}</mark>" if known is not None and _bare(line) not in known
        else escape(line)
        for line in lines
    )  # fmt: skip
    return f"<pre>{chr(10).join(out)}</pre>"


def _bare(line: str) -> str:
    return line.lstrip(" \u2502\u251c\u2514\u2500")


def _query_section(explanation: Explanation) -> str:
    if not explanation.trace:
        return f"<section><h2>Query</h2>{_tree(explanation.query)}</section>"
    before, after = explanation.query, explanation.plan.query
    return (
        '<section><h2>Query</h2><div class="two">'
        f'<div><div class="soft small">as written</div>{_tree(before, after)}</div>'
        f'<div><div class="soft small">as it will run</div>{_tree(after, before)}</div>'
        "</div></section>"
    )


def _rules_section(explanation: Explanation) -> str:
    if not explanation.trace:
        return '<section><h2>Rules</h2><div class="soft">No rule applies.</div></section>'
    rows = []
    before = explanation.query
    for number, fired in enumerate(explanation.trace, 1):
        after = fired.tree or before
        moved = "".join(
            f'<div class="small soft"><code>{escape(shorten_path(str(path)))}</code>: old places '
            f"in the new order {', '.join(map(str, order[:24]))}"
            f"{' ...' if len(order) > 24 else ''}</div>"
            for path, order in fired.moved[:12]
        )
        why = "".join(f'<div class="small soft">{escape(reason)}</div>' for reason in fired.reasons)
        rows.append(
            f"<details><summary>{number}. <code>{fired.rule}</code> "
            f'<span class="soft">{fired.before:,} &rarr; {fired.after:,} nodes.</span> '
            f"{escape(fired.does)}</summary>{moved}{why}"
            f'<div class="two"><div><div class="soft small">before</div>{_tree(before, after)}'
            f'</div><div><div class="soft small">after</div>{_tree(after, before)}</div></div>'
            "</details>"
        )
        before = after
    return f"<section><h2>Rules that fired</h2>{''.join(rows)}</section>"


# --- the plan --------------------------------------------------------------------------------


def _plan_section(explanation: Explanation) -> str:
    plan = explanation.plan
    note = (
        '<div class="soft small">Columns are rounds: calls of one column run side by side. Solid '
        "lines carry answers, dashed ones only say what has to be over. Framed in blue: answers of "
        "the query; dashed boxes: run for the cache alone.</div>"
    )
    more = len(plan.calls) - MAX_CALLS
    if more > 0:
        note += f'<div class="soft small">The first {MAX_CALLS}; {more:,} more are not drawn.</div>'
    return f'<section><h2>Plan</h2>{note}<div class="scroll">{_plan_svg(plan)}</div></section>'


def _plan_svg(plan: Plan) -> str:
    calls = plan.calls[:MAX_CALLS]
    before = {call.id: calls_before(plan, call.after) for call in calls}
    column: dict[int, int] = {}
    rows: dict[int, int] = {}
    place: dict[int, tuple[float, float]] = {}
    for call in calls:
        waits = [*call.inputs, *before[call.id]]
        column[call.id] = 1 + max((column.get(id, 0) for id in waits), default=-1)
        rows[column[call.id]] = rows.get(column[call.id], 0) + 1
    tallest = max(rows.values(), default=1)
    filled: dict[int, int] = {}
    for call in calls:
        at = column[call.id]
        free = (tallest - rows[at]) * (_BOX_HEIGHT + _GAP_Y) / 2
        row = filled.get(at, 0)
        filled[at] = row + 1
        place[call.id] = (4 + at * (_BOX_WIDTH + _GAP_X), 4 + free + row * (_BOX_HEIGHT + _GAP_Y))
    parts: list[str] = []
    for call in calls:
        links = [(id, "input") for id in call.inputs] + [(id, "after") for id in before[call.id]]
        x, y = place[call.id]
        for id, kind in links:
            if id not in place:
                continue
            x0, y0 = place[id][0] + _BOX_WIDTH, place[id][1] + _BOX_HEIGHT / 2
            y1 = y + _BOX_HEIGHT / 2
            middle = (x0 + x) / 2
            curve = f"M{x0:g} {y0:g} C{middle:g} {y0:g} {middle:g} {y1:g} {x:g} {y1:g}"
            parts.append(f'<path class="{kind}" d="{curve}"/>')
    answers = set(plan.answers)
    for call in calls:
        x, y = place[call.id]
        kind = "call answer" if call.id in answers else "call dropped" if call.dropped else "call"
        title = f"{call.id} {_cut(printable(call.node.model), 18)}"
        if call.node.max_tokens:
            title += f" \u2264{call.node.max_tokens}"
        tail = call.path if len(call.path) <= 27 else "..." + call.path[-25:]
        parts.append(
            f'<g><title>{escape(shorten_path(call.path))}</title><rect class="{kind}" x="{x:g}" '
            f'y="{y:g}" width="{_BOX_WIDTH}" height="{_BOX_HEIGHT}" rx="8"/>'
            f'<text x="{x + 11:g}" y="{y + 19:g}">{escape(title)}</text>'
            f'<text class="path" x="{x + 11:g}" y="{y + 36:g}">{escape(printable(tail))}</text></g>'
        )
    width = 8 + (max(column.values(), default=0) + 1) * (_BOX_WIDTH + _GAP_X) - _GAP_X
    height = 8 + tallest * (_BOX_HEIGHT + _GAP_Y) - _GAP_Y
    return (
        f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="calls and what they wait for">{"".join(parts)}</svg>'
    )


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


# --- the layout ------------------------------------------------------------------------------


def _layout_section(explanation: Explanation) -> str:
    legend = (
        '<div class="legend small soft"><i class="anchor"></i>anchor: ordinary text before the '
        'first span<i class="span"></i>spans: computed once, moved where they are needed'
        '<i class="text"></i>text after them: computed every time</div>'
    )
    shown = explanation.layouts[:MAX_CALLS]
    more = len(explanation.layouts) - len(shown)
    rest = f'<div class="soft small">{more:,} more calls are not shown.</div>' if more else ""
    body = "".join(_call(layout, explanation.block_size) for layout in shown)
    return f"<section><h2>Layout</h2>{legend}<br>{body}{rest}</section>"


def _call(layout: CallLayout, block_size: int) -> str:
    head = (
        f"<h3>{escape(printable(shorten_path(layout.path)))}</h3>"
        f'<div class="soft small">with {escape(printable(layout.model))}'
    )
    if layout.num_tokens is not None:
        head += f" &middot; {layout.num_tokens:,} tokens"
    head += "</div>"
    if layout.missing is not None:
        head += f'<div class="soft small">no token counts: {escape(layout.missing)}</div>'
    for path in layout.open[:12]:
        head += (
            f'<div class="soft small">the answer of <code>{escape(printable(shorten_path(path)))}'
            "</code> is not known yet: a placeholder stands for it</div>"
        )
    return f'<div class="call">{head}{_bar(layout)}{_blocks(layout)}{_table(layout)}</div>'


def _classes(parts: Iterable[Part]) -> list[str]:
    """One CSS class per part; neighbouring spans take turns."""
    out: list[str] = []
    spans = 0
    for part in parts:
        spans += part.kind == "span"
        out.append("span odd" if part.kind == "span" and spans % 2 == 0 else part.kind)
    return out


def _bar(layout: CallLayout) -> str:
    cells = []
    shown = layout.parts[:MAX_CELLS]
    for part, css in zip(shown, _classes(shown), strict=True):
        if part.tokens is not None:
            size = part.tokens[1] - part.tokens[0]
        else:
            size = sum(len(message.text) for message in part.messages)
        cells.append(f'<i class="{css}" style="flex:{max(size, 1)}" title="{part.kind}"></i>')
    more = len(layout.parts) - len(shown)
    note = f'<div class="soft small">and {more:,} more parts</div>' if more else ""
    return f'<div class="bar">{"".join(cells)}</div>{note}'


def _blocks(layout: CallLayout) -> str:
    cells: list[str] = []
    for part, css in zip(layout.parts, _classes(layout.parts), strict=True):
        if part.blocks is None:
            return ""
        # A block that two parts share is drawn with the part that begins it.
        start = max(part.blocks[0], len(cells))
        for block in range(start, part.blocks[1]):
            cells.append(f'<i class="{css}" title="block {block}: {part.kind}"></i>')
    more = len(cells) - MAX_CELLS
    note = f'<span class="soft small">and {more:,} more blocks</span>' if more > 0 else ""
    return f'<div class="blocks">{"".join(cells[:MAX_CELLS])}{note}</div>'


def _table(layout: CallLayout) -> str:
    counted = layout.num_tokens is not None
    columns = ["tokens", "count", "blocks", "positions"] if counted else []
    head = "".join(f'<th class="n">{name}</th>' for name in columns)
    rows = []
    spans = 0
    parts = list(zip(layout.parts, _classes(layout.parts), strict=True))
    for index, (part, css) in enumerate(parts):
        spans += part.kind == "span"
        if len(parts) > 40 and index == 30:
            rows.append(f"<tr><td colspan=6>... {len(parts) - 35:,} more</td></tr>")
        if len(parts) > 40 and 30 <= index < len(parts) - 5:
            continue
        name = f"span {spans}" if part.kind == "span" else part.kind
        cells = ""
        if part.tokens and part.blocks and part.positions:
            size = part.tokens[1] - part.tokens[0]
            texts = [_range(part.tokens), f"{size:,}", _range(part.blocks), _range(part.positions)]
            cells = "".join(f'<td class="n">{text}</td>' for text in texts)
        content = ", ".join(f"{m.role} {quote(m.text, 70)}" for m in part.messages[:3])
        if len(part.messages) > 3:
            content += f", ... {len(part.messages) - 3} more"
        if part.answer_of is not None:
            content += " as it was generated"
        content = escape(content) or '<span class="soft">chat template</span>'
        rows.append(f'<tr><td><i class="{css}"></i>{name}</td>{cells}<td>{content}</td></tr>')
    return f"<table><tr><th>part</th>{head}<th>content</th></tr>{''.join(rows)}</table>"


def _range(pair: tuple[int, int]) -> str:
    start, end = pair
    return f"{start:,}" if end == start + 1 else f"{start:,}&ndash;{end - 1:,}"
