"""The page of explain: self-contained, well formed, and safe with whatever texts say."""

from __future__ import annotations

import errno
import os
from html.parser import HTMLParser
from pathlib import Path

import pytest

from kvspan import UsageError, cli, cross, g, monad, plus, reduce, repeat, system
from kvspan.explain import explain
from kvspan.explain_html import to_html, write_html
from kvspan.layout import PromptEncoder
from query_strategies import wide_query
from tiny_models import word_tokenizer

VOID = {"meta", "br"}


class Page(HTMLParser):
    """Checks that every element is closed, and collects tags, attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def count(self, tag: str, css: str = "") -> int:
        return sum(t == tag and css in [*(a.get("class") or "").split(), ""] for t, a in self.tags)


def page_of(query, **options) -> Page:
    encoder = PromptEncoder(word_tokenizer(), 16)
    return Page(to_html(explain(query, layout_for=lambda r: encoder.encode(r.prompt, r.scope),
                                **options)))  # fmt: skip


def test_tree_rules_plan_and_layout() -> None:
    drafts = plus(repeat(4, g("writer", cross("w1", plus("w2", "w3")))))
    page = page_of(reduce(g("judge", cross(system("w4"), drafts, "w5")), 2))
    text = "".join(page.words)
    for rule in ("unroll", "split_reduce", "distribute_plus"):
        assert rule in text
    assert page.count("rect", "call") == 7 and page.count("rect", "answer") == 1
    assert page.count("path", "input") == 6
    assert page.count("details") == 3
    assert page.count("mark") > 0
    assert text.count("not known yet") == 6


def test_effects_are_dashed_and_uncounted_prompts_are_shown() -> None:
    page = Page(to_html(explain(g("M", cross(monad(g("M", "x", max_tokens=1)), plus("a"), "q")))))
    assert page.count("rect", "dropped") == 1
    assert page.count("path", "after") == 1
    assert "no token counts: no model was given" in "".join(page.words)


def test_nothing_is_loaded_and_nothing_runs() -> None:
    page = page_of(wide_query(3))
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object"}
    for _, attributes in page.tags:
        assert not {"src", "href", "onclick", "onload"} & set(attributes)


def test_texts_cannot_break_out() -> None:
    evil = "</pre></title><script>alert(1)</script>\x1b[31m"
    query = g(evil, cross(system(evil), plus(evil, "b"), evil))
    text = to_html(explain(query))
    assert "<script" not in text and "\x1b" not in text
    assert "&lt;script&gt;" in text
    Page(text)


def test_large_queries_make_pages_of_bounded_size() -> None:
    wide, wider = (len(to_html(explain(wide_query(n)))) for n in (500, 5000))
    assert wider < 1.1 * wide
    many = plus(g("M", f"w{n}") for n in range(2000))
    assert page_of(g("J", many)).count("rect", "call") == 60


def test_the_command_writes_it(tmp_path, capsys) -> None:
    query, page = tmp_path / "q.json", tmp_path / "page.html"
    query.write_text(
        '{"g": {"model": "no/such", "input": {"plus": [{"user": "b"}, {"user": "a"}]}}}'
    )
    assert cli.main(["explain", str(query), "--html", str(page)]) == 0
    out, err = capsys.readouterr()
    assert out == "" and err.endswith(f"wrote {page}\n")
    assert "order_spans" in page.read_text("utf-8")
    with pytest.raises(UsageError, match="cannot write the page"):
        write_html(explain(wide_query(1)), str(tmp_path / "no" / "page.html"))


def test_a_page_is_written_whole_or_not_at_all(tmp_path, monkeypatch) -> None:
    shown = explain(g("M", "a"))
    page = tmp_path / "page.html"
    page.write_text("the page before")
    write = Path.write_bytes

    def full(self: Path, data: bytes) -> int:
        write(self, data[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(UsageError, match="cannot write the page: No space left on device"):
        write_html(shown, str(page))
    monkeypatch.undo()
    assert [page] == list(tmp_path.iterdir()) and page.read_text() == "the page before"
    link = tmp_path / "link"
    link.symlink_to(page)
    write_html(shown, str(link))
    assert link.is_symlink() and page.read_text() == to_html(shown)
    with pytest.raises(UsageError, match="cannot write the page: No space left on device"):
        write_html(shown, "/dev/full")
    reads, writes = os.pipe()
    with open(reads, "rb") as pipe:
        write_html(shown, f"/dev/fd/{writes}")
        os.close(writes)
        assert pipe.read().decode() == to_html(shown)
