"""How queries, plans and results show themselves in a notebook: a small piece of HTML each.

Everything that comes from a query, a model or a document is escaped, and control characters are
shown as text; long lists are cut in the middle, as ``kvspan explain`` does. No scripts, no network.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from kvspan.errors import shorten_path
from kvspan.explain import draw_tree, printable, quote
from kvspan.query.traverse import count_nodes

if TYPE_CHECKING:
    from kvspan.query.nodes import Node
    from kvspan.query.plan import Plan
    from kvspan.results import RunResult

HEAD, TAIL = 12, 3  # rows of a long table that are shown at its two ends
TEXT = 2000  # characters of an answer

_PRE = (
    'style="margin:0;line-height:1.4;white-space:pre-wrap;overflow-wrap:anywhere;'
    'background:transparent"'
)
_SOFT = 'style="opacity:.7"'


def query_text(query: Node) -> str:
    """A small query as the builder calls that make it, a large one as a tree with its parts cut."""
    if count_nodes(query) <= HEAD and len(text := repr(query)) <= TEXT:
        return printable(text)
    return "\n".join(line[2:] for line in draw_tree(query))


def query_html(query: Node) -> str:
    """The query as a tree."""
    count = count_nodes(query)
    head = f"<div {_SOFT}>query of {count:,} node{'' if count == 1 else 's'}</div>"
    return f"{head}{_tree(query)}"


def plan_html(plan: Plan) -> str:
    """The calls of a plan: what each waits for, and which give the answers."""
    answers = set(plan.answers)
    rows = [
        [
            str(call.id),
            shorten_path(call.path),
            call.node.model,
            _ids(call.inputs),
            _ids(call.after),
            "answer" if call.id in answers else "cache only" if call.dropped else "",
        ]
        for call in plan.calls
    ]
    head = f"<div {_SOFT}>plan of {_many(len(plan.calls), 'generate call')}</div>"
    return head + _table(["step", "path", "model", "reads", "after", ""], rows)


def result_html(result: RunResult) -> str:
    """The answers of a run, then what each call took and reused."""
    parts = []
    shown = result.answers if len(result.answers) <= HEAD + TAIL else result.answers[:HEAD]
    for text in shown:
        cut = text if len(text) <= TEXT else f"{text[:TEXT]} ... ({len(text):,} characters)"
        parts.append(f"<pre {_PRE}>{escape(_lines(cut))}</pre>")
    if len(shown) < len(result.answers):
        parts.append(f"<div {_SOFT}>{len(result.answers) - len(shown):,} more answers</div>")
    for failure in result.failures[:HEAD]:
        parts.append(f"<div><b>failed</b> {escape(printable(failure.message))}</div>")
    if len(result.failures) > HEAD:
        parts.append(f"<div><b>failed</b> {len(result.failures) - HEAD:,} more</div>")
    usage = result.usage
    parts.append(
        f"<div {_SOFT}>{_many(len(result.calls), 'call')}, {usage.prompt_tokens:,} prompt tokens "
        f"({usage.cached_tokens:,} from the cache), {usage.completion_tokens:,} new tokens, "
        f"{result.seconds:.2f} s</div>"
    )
    rows = [
        [
            shorten_path(call.path),
            call.model,
            f"{call.result.usage.prompt_tokens:,}",
            f"{call.result.reuse.reused_tokens:,}",
            f"{call.result.reuse.moved_tokens:,}",
            f"{call.result.reuse.prepared_tokens:,}",
            f"{call.result.timings.ttft:.3f}",
            "cache only" if call.dropped else quote(call.result.text, 40),
        ]
        for call in result.calls
    ]
    columns = ["call", "model", "prompt", "reused", "moved", "prepared", "first token, s", "answer"]
    parts.append(f"<details><summary>calls</summary>{_table(columns, rows)}</details>")
    parts.append(f"<details><summary>query as it was run</summary>{_tree(result.query)}</details>")
    return "".join(parts)


def _tree(query: Node) -> str:
    return f"<pre {_PRE}>{escape(chr(10).join(line[2:] for line in draw_tree(query)))}</pre>"


def _table(columns: list[str], rows: list[list[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    lines = []
    cut = len(rows) - HEAD - TAIL if len(rows) > HEAD + TAIL + 1 else 0
    for row in rows[:HEAD] + rows[-TAIL:] if cut else rows:
        cells = "".join(f"<td>{escape(printable(cell))}</td>" for cell in row)
        lines.append(f"<tr>{cells}</tr>")
    if cut:
        lines.insert(HEAD, f'<tr><td colspan="{len(columns)}">... {cut:,} more</td></tr>')
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


def _ids(ids: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ids[:6]))
    return f"{shown}, ... {len(ids) - 6:,} more" if len(ids) > 6 else shown


def _many(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def _lines(text: str) -> str:
    """Text over several lines, without other control characters."""
    return "\n".join(printable(line) for line in text.split("\n"))
