"""Cutting documents into chunks: nothing lost, nothing twice, and cuts where a reader would cut."""

# ruff: noqa: RUF001  marks of other scripts are what is tested

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvspan.demo.passages import load
from kvspan.errors import UsageError
from kvspan.retrieve.chunking import DEFAULT_SIZE, MIN_SIZE, cut
from kvspan.retrieve.documents import Document

# What makes blocks of lines, and lines of text.
_PIECES = st.sampled_from(
    [
        "\n", "\n\n", " ", "    ", "\t", "# ", "## ", "###### ", "#", "```\n", "~~~~\n", "---\n",
        "===\n", "- ", "* ", "1. ", "b) ", "| a | b |\n", "Dr. Ott left. ", "It cost $3.50! ",
        "e.g. this", "これは文です。", "第一句！", "x" * 300, "word " * 60, "\u0301", "\u200d",
        "\ufb01", "\u2028", "\x0b", "\u3000", "😀", "a", ".", "?",
    ]
)  # fmt: skip
_TEXTS = st.lists(_PIECES, max_size=40).map("".join) | st.text(max_size=400)


def _bare(text: str) -> str:
    return "".join(text.split())


@given(_TEXTS, st.booleans(), st.integers(MIN_SIZE, 400))
@example("# " + " " * 100 + "x\n# y", True, MIN_SIZE)
@example("---\na: b\n---\n# x", True, MIN_SIZE)
@example("x" * 1000 + "\u0301" * 50, False, MIN_SIZE)
@example(" " * 300 + "x = 1", False, MIN_SIZE)
def test_nothing_is_lost_or_said_twice(text: str, markdown: bool, size: int) -> None:
    chunks = cut(Document("d", text, markdown=markdown), size)
    assert all(0 < len(chunk.text) <= size for chunk in chunks)
    assert all(chunk.text == chunk.text.strip("\n") for chunk in chunks)
    place = 0
    left = ""
    for chunk in chunks:
        body = text[chunk.start : chunk.end]
        assert chunk.text.endswith(body)
        if body:
            assert chunk.start >= place
            left += text[place : chunk.start]
            place = chunk.end
    left += text[place:]
    if not markdown:
        assert not left.strip()
        return
    # What is in no chunk's own text is a heading, and stands in front of one.
    fronts = [_bare(chunk.text) for chunk in chunks]
    for line in left.split("\n"):
        if line.strip() and set(line.strip()) - set("=-"):
            assert any(_bare(line) in front for front in fronts), line


@given(_TEXTS, st.booleans())
def test_the_same_text_is_cut_the_same_way(text: str, markdown: bool) -> None:
    document = Document("d", text, markdown=markdown)
    assert cut(document, 200) == cut(document, 200)


SENTENCES = {
    "abbreviations": [
        "Dr. Smith met Mr. Jones at 3 p.m. on Jan. 5.",
        "J. K. Rowling wrote it in St. Petersburg, i.e. abroad (see Fig. 3).",
        "It cost $3.50 at example.com, version 1.2.3.",
        '"Did he pay?" she asked.',
    ],
    "hard wrapped": [
        "This sentence goes on\nover the end of its line.",
        "So does this one, which mentions Mr.\nOtt.",
    ],
    "chinese": ["这是第一句话。", "他说：“这是引用吗？”", "第三句很长，有逗号，没有空格！"],
    "japanese": ["これは最初の文です。", "次の文はもっと長いです。", "終わり！"],
    "hindi": ["यह पहला वाक्य है।", "यह दूसरा वाक्य है।"],
    "german": ["Herr Dr. Müller kam um 8 Uhr.", "Er blieb bis zum Abend."],
}


@pytest.mark.parametrize("sentences", SENTENCES.values(), ids=SENTENCES.keys())
def test_cuts_are_between_sentences(sentences: list[str]) -> None:
    space = "" if sentences[0][-1] in "。！" else " "
    text = space.join(sentences * 12)
    chunks = cut(Document("d", text), 160)
    assert len(chunks) > 1
    ends = tuple(sentence.split("\n")[-1] for sentence in sentences)
    starts = tuple(sentence.split("\n")[0] for sentence in sentences)
    for chunk in chunks:
        assert chunk.text.endswith(ends) and chunk.text.startswith(starts), chunk.text
        assert len(chunk.text) > 60


MARKDOWN = """\
---
title: Town
---
Before any heading.

# Oldtown

Tomas repairs the clocks. He came
in 1990.

## Tools

- a hammer,
  which is old
- a file

  ## not a heading of this level? It is one.

```sh
# no heading
run --all
```

Mills
-----

| mill | since |
|---|---|
| North | 1612 |
"""


def test_headings_stay_with_what_is_below_them() -> None:
    texts = [chunk.text for chunk in cut(Document("t.md", MARKDOWN, markdown=True))]
    assert texts == [
        "---\ntitle: Town\n---\nBefore any heading.",
        "# Oldtown\n\nTomas repairs the clocks. He came\nin 1990.",
        "# Oldtown\n## Tools\n\n- a hammer,\n  which is old\n- a file",
        "# Oldtown\n## not a heading of this level? It is one.\n\n"
        "```sh\n# no heading\nrun --all\n```",
        "# Oldtown\nMills\n\n| mill | since |\n|---|---|\n| North | 1612 |",
    ]


def test_a_change_in_one_section_leaves_the_chunks_of_others() -> None:
    old = {c.text for c in cut(Document("t.md", MARKDOWN, markdown=True))}
    changed = MARKDOWN.replace("He came\nin 1990.", "He came in 1991. " * 90)
    new = {c.text for c in cut(Document("t.md", changed, markdown=True))}
    assert len(old - new) == 1


def test_what_is_code_or_an_item_stays_whole() -> None:
    code = "```\n" + "\n".join(f"step {n}. go on; end." for n in range(12)) + "\n```"
    items = [f"- item {n} has two sentences. Here is the other." for n in range(9)]
    text = "An introduction. " * 10 + "\n\n" + code + "\n\n" + "\n".join(items)
    texts = [chunk.text for chunk in cut(Document("d.md", text, markdown=True), 320)]
    assert any(code in text for text in texts)
    for item in items:
        assert any(item in text.split("\n") for text in texts)


def test_long_code_is_cut_between_lines() -> None:
    lines = [f"    value_{n} = compute({n})  # a. b. c" for n in range(80)]
    chunks = cut(Document("d.md", "```\n" + "\n".join(lines) + "\n```", markdown=True), 300)
    assert len(chunks) > 5
    kept = [line for chunk in chunks for line in chunk.text.split("\n")]
    assert kept[1:-1] == lines  # indented as they were


def test_titles_are_in_front_of_every_chunk() -> None:
    chunks = cut(Document("p.jsonl:1", "One sentence here. " * 40, title="Oldtown"), 200)
    assert len(chunks) > 3 and all(c.text.startswith("Oldtown\nOne ") for c in chunks)
    long = cut(Document("p.jsonl:1", "Text.", title="very " * 30 + "long"), 200)
    assert [c.text for c in long] == ["very " * 30 + "long\n\nText."]


def test_words_are_cut_only_if_they_must_be() -> None:
    (first, *_) = cut(Document("d", "word " * 300), 203)
    assert first.text == " ".join(["word"] * 40)
    chunks = cut(Document("d", "e\u0301" * 400), 101)
    assert all(not chunk.text.startswith("\u0301") for chunk in chunks)
    assert [len(c.text) for c in cut(Document("d", "x" * 250), 100)] == [100, 100, 50]


def test_passages_are_chunks_as_they_are() -> None:
    passages = [passage.text for passage in load().passages]
    longest = max(map(len, passages))
    assert longest > DEFAULT_SIZE
    for passage in passages:
        chunks = cut(Document("p", passage), longest)
        assert [chunk.text for chunk in chunks] == [passage.strip()]
        for chunk in cut(Document("p", passage)):
            assert chunk.text[-1] in '.!?"', chunk.text[-40:]


@pytest.mark.parametrize("size", [0, MIN_SIZE - 1, True, 99.5, "1000"])
def test_sizes_that_make_no_sense(size: object) -> None:
    with pytest.raises(UsageError, match="bad chunk size; expected 100 characters or more"):
        cut(Document("d", "x"), size)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "line",
    ["word ", "word. ", "x", "# ", "```\n", "- ", " ", "\n", "| ", "[", '(a "b. ', "。"],
    ids=repr,
)
def test_a_megabyte_of_one_thing(line: str) -> None:
    """Ends soon only if nothing is gone over again and again."""
    text = line * (2**20 // len(line))
    chunks = cut(Document("d", text, markdown=True))
    assert bool(chunks) == bool(text.strip())
    assert all(len(chunk.text) <= DEFAULT_SIZE for chunk in chunks)
