"""What `explain` shows: trees, rules, plans and layouts."""

from __future__ import annotations

import numpy as np
import pytest

from kvspan import KvspanError, cross, g, par, plus, seq, system, user
from kvspan.engine import GenerateRequest, plain_server
from kvspan.explain import calls_before, draw_tree, explain, printable, quote, render
from kvspan.layout import SpanLayout
from kvspan.query.nodes import ROOT
from kvspan.query.plan import Barrier, Call, Plan
from kvspan.query.prompt import Span
from kvspan.query.write import dump_json, to_obj
from query_strategies import deep_joins, wide_query


def four_tokens_each(request: GenerateRequest) -> SpanLayout:
    """Every message is one block of four tokens; two tokens of template at the end."""
    spans, tokens = [], 0
    for item in request.prompt:
        if isinstance(item, Span):
            size = 4 * len(item.messages)
            if request.scope != "full":
                spans.append((tokens, tokens + size))
            tokens += size
        else:
            tokens += 4
    ids = np.arange(tokens + 2, dtype=np.int32)
    return SpanLayout(ids, tuple(spans), 4, request.scope)


def test_tree() -> None:
    query = g("M", cross(system("s"), plus(user("a\nb"), par("c")), seq()), 5, 0.5)
    assert draw_tree(query) == [
        "  g M max_tokens=5 temperature=0.5",
        "  └─ cross",
        '     ├─ system "s"',
        "     ├─ plus (2 spans)",
        '     │  ├─ user "a b"',
        "     │  └─ par",
        '     │     └─ user "c"',
        "     └─ seq (empty)",
    ]
    assert draw_tree(query, unicode=False)[2:5] == [
        '     |- system "s"',
        "     |- plus (2 spans)",
        '     |  |- user "a b"',
    ]


def test_many_ways_to_the_same_barrier() -> None:
    """Each of 60 pairs waits for both of the pair before: 2**60 ways to the one call."""
    call = Call(0, ROOT, g("M", "a"))
    firsts = [id - 2 - (id % 2 == 0) for id in range(1, 121)]  # of the pair before
    pairs = [Barrier(id, (max(0, n), max(0, n + 1))) for id, n in enumerate(firsts, 1)]
    plan = Plan(call.node, (call, *pairs), (0,))
    assert calls_before(plan, (119, 120)) == [0]


def test_what_the_rules_of_engines_decided() -> None:
    query = g("M", cross(plus(cross("one", g("M", "a")), "b"), "q"))
    shown = explain(query, order="pinned", layout_for=four_tokens_each)
    lines = render(shown)
    assert "g M, kept as a span" in lines
    assert lines.count("as it was generated") == 1
    assert [part.answer_of for part in shown.layouts[1].parts if part.kind == "span"] == [
        None,
        "$.g.input.cross[0].plus[0].cross[1]",
        None,
    ]
    assert [call.get("kept") for call in shown.plan.to_obj()["calls"]] == [True, None]
    plain = explain(query, capabilities=lambda model: plain_server("http://x/v1"))
    assert "M: the server at http://x/v1 takes plain prompts only" in render(plain)
    assert [part.kind for part in plain.layouts[1].parts] == ["anchor"]
    assert plain.to_obj()["rules"][-1]["reasons"] == [
        "M: the server at http://x/v1 takes plain prompts only"
    ]


def test_long_joins_and_deep_branches_are_cut() -> None:
    wide = draw_tree(wide_query(10_000))
    assert len(wide) == 21
    assert "     │  ├─ ... 9,985 more" in wide
    deep = draw_tree(deep_joins(2000))
    assert any("nodes deeper" in line for line in deep)
    assert max(map(len, deep)) < 200


def test_texts_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[31mb\u202e") == "a\\x1b[31mb\\u202e"
    assert "\x1b" not in render(explain(g("\x1b[2J", cross("\x1b]0;x\x07"))))
    assert quote("") == '""'
    assert quote("word " * 1000).endswith('..." (5,000 characters)')


def test_parts_with_tokens() -> None:
    query = g("M", cross(system("s"), plus("a", seq("b", "c")), "between", plus("d"), "q"))
    (layout,) = explain(query, layout_for=four_tokens_each).layouts
    found = [(part.kind, [m.text for m in part.messages], part.tokens) for part in layout.parts]
    assert found == [
        ("anchor", ["s"], (0, 4)),
        ("span", ["a"], (4, 8)),
        ("span", ["b", "c"], (8, 16)),
        ("text", ["between"], (16, 20)),
        ("span", ["d"], (20, 24)),
        ("text", ["q"], (24, 30)),
    ]
    assert [part.blocks for part in layout.parts][2] == (2, 4)
    parallel = explain(query, layout_for=four_tokens_each, placement="parallel").layouts[0]
    assert [part.positions for part in parallel.parts] == [
        (0, 4), (4, 8), (4, 12), (12, 16), (4, 8), (16, 22),
    ]  # fmt: skip


def test_parts_without_an_anchor_and_without_a_question() -> None:
    (layout,) = explain(g("M", plus("a", "b")), layout_for=four_tokens_each).layouts
    assert [(part.kind, part.messages and part.messages[0].text) for part in layout.parts] == [
        ("span", "a"),
        ("span", "b"),
        ("text", ()),
    ]
    text = render(explain(g("M", plus("a", "b")), layout_for=four_tokens_each))
    assert "(chat template)" in text and "10 tokens, 8 of them in 2 movable spans (80%)" in text


def test_full_scope_is_one_prompt() -> None:
    explanation = explain(g("M", cross("a", plus("b"))), scope="full", layout_for=four_tokens_each)
    (layout,) = explanation.layouts
    assert [part.kind for part in layout.parts] == ["anchor"]
    assert '  prompt  0-9     10     0-2     0-9        user "a", user "b"' in render(explanation)


def test_without_a_tokenizer_the_reason_is_given() -> None:
    def missing(request: GenerateRequest) -> SpanLayout:
        raise KvspanError(f"model {request.model}: not found")

    explanation = explain(g("M", cross(system("s"), plus("a"), "q")), layout_for=missing)
    (layout,) = explanation.layouts
    assert layout.missing == "model M: not found" and layout.num_tokens is None
    assert [part.kind for part in layout.parts] == ["anchor", "span", "text"]
    assert "no token counts: model M: not found" in render(explanation)


def test_rules_plan_and_placeholders_are_shown() -> None:
    query = g("M", seq("judge", "", plus(g("A", "x"), plus(g("B", "y"))), g("C", "z")))
    text = render(explain(query))
    lines = text.splitlines()
    assert (
        "  drop_empty: 12 -> 11 nodes. Children of joins that hold no text and ask nothing " in text
    )
    assert any(line.startswith("  flatten_plus: 11 -> 10 nodes.") for line in lines)
    assert "Plan: 4 generate calls" in lines
    (last,) = [line for line in lines if line.split()[:3] == ["4", "$", "M"]]
    assert last.split()[3:] == ["0,", "1,", "3", "-", "yes"]
    (third,) = [line for line in lines if line.split()[:1] == ["3"]]
    assert third.split() == ["3", "$.g.input.seq[3]", "C", "-", "0,", "1"]
    assert "the answer of $.g.input.seq[2].plus[0] is not known yet" in text
    assert "no rule applies" in render(explain(g("M", "a")))


def test_as_json() -> None:
    query = g("M", cross("a", "", plus("b")))
    obj = explain(query, layout_for=four_tokens_each, block_size=4).to_obj()
    assert obj["query"] == to_obj(query)
    assert obj["rewritten"] == to_obj(g("M", cross("a", plus("b"))))
    assert [fired["rule"] for fired in obj["rules"]] == ["drop_empty"]
    assert obj["plan"]["answers"] == [0]
    (layout,) = obj["layouts"]
    assert layout["parts"][1] == {
        "kind": "span",
        "messages": ({"role": "user", "text": "b"},),
        "tokens": (4, 8),
        "blocks": (1, 2),
        "positions": (4, 8),
    }
    dump_json(obj)


@pytest.mark.parametrize("shape", [wide_query(10_000), deep_joins(2000)], ids=["wide", "deep"])
def test_large_queries_fit_on_a_few_screens(shape) -> None:
    explanation = explain(shape, layout_for=four_tokens_each)
    text = render(explanation)
    assert len(text.splitlines()) < 400
    dump_json(explanation.to_obj())
