"""What notebooks show: escaped, short, and nothing that steers a terminal."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest

from fakes import FakeEngine
from kvspan import cross, g, monad, par, plus, run, system, user
from kvspan.errors import KvspanError
from kvspan.query.plan import make_plan

EVIL = "<script>alert('x')</script>\x1b[2J & \u202e"


class _Checked(HTMLParser):
    """Every element is one of ours, and closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[Any]) -> None:
        assert tag in ["div", "pre", "table", "tr", "th", "td", "b", "details", "summary"]
        assert {name for name, _ in attrs} <= {"style", "colspan"}
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


class Printer:
    def __init__(self) -> None:
        self.shown = ""

    def text(self, text: str) -> None:
        self.shown += text


def pretty(query: Any) -> str:
    printer = Printer()
    query._repr_pretty_(printer, False)
    return printer.shown


def shown(thing: Any) -> str:
    html = thing._repr_html_()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u202e]", html)
    return _Checked(html).text


def test_queries() -> None:
    query = g(EVIL, cross(system(EVIL), plus("a", "b"), EVIL))
    text = shown(query)
    assert "query of 7 nodes" in text and "<script>" in text and "\\x1b[2J" in text
    assert shown(user("hi")) == 'query of 1 nodeuser "hi"'
    assert pretty(user("a\nb\x1b")) == r"user('a\nb\x1b')"
    assert pretty(query) == repr(query)


@pytest.mark.parametrize("wide", [True, False])
def test_large_queries_are_short(wide: bool) -> None:
    query: Any = user("x" * 9999)
    for number in range(3000):
        query = query if wide else cross(query, str(number))
    if wide:
        query = plus(query, *(f"passage {n}" for n in range(3000)))
    assert len(query._repr_html_()) < 9000 and (" more" if wide else " deeper") in shown(query)
    assert len(pretty(query)) < 9000
    plan = make_plan(par(g("M", f"q{n}") for n in range(3000)))
    assert repr(plan) == "<Plan: 3000 calls, 3000 of them answers>"
    assert "... 2,985 more" in shown(plan) and len(plan._repr_html_()) < 9000


def test_plans() -> None:
    plan = make_plan(cross(monad(g("M", "warm")), g(EVIL, plus(g("M", "in"), "x"))))
    text = shown(plan)
    assert "plan of 3 generate calls" in text and "cache only" in text and "answer" in text
    assert EVIL.split("\x1b")[0] in text and len(repr(plan)) < 80


def test_results() -> None:
    query = par(g("M", f"q{n}") for n in range(40))
    result = run(query, engine=FakeEngine(lambda request: EVIL + "y" * 5000))
    text = shown(result)
    assert text.count("<script>") >= 12 and "28 more answers" in text and "40 calls, " in text
    assert f"({len(EVIL) + 5000:,} characters)" in text and len(result._repr_html_()) < 60_000
    assert len(repr(result)) < 100 and "\n" not in repr(result)


def test_results_with_failures() -> None:
    def refuse(request: Any) -> str:
        raise KvspanError(EVIL)

    result = run(g("M", "x"), engine=FakeEngine(refuse), keep_going=True)
    assert "failed $: <script>" in shown(result) and "1 failure" in repr(result)
