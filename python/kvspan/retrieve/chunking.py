"""Cutting documents into chunks that end where sentences do.

A chunk is a piece of its document, as it stands there, of at most ``size`` characters (English has
about four to a token) with what it needs to be understood in front: the headings it stands under
in Markdown, or the title of a JSON Lines document. Every section begins a chunk, so that a change
in one section leaves the chunks of the others, and their cached keys and values, as they are.

Code blocks, list items and table rows are cut only if they are too long for a chunk; paragraphs are
cut between sentences (``sentencex``, which Wikimedia keeps and which knows abbreviations and the
full stops of many scripts), and sentences only if longer than a chunk. Nothing stands in two
chunks, and nothing but white space in none.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from kvspan.errors import UsageError
from kvspan.retrieve.documents import Document

DEFAULT_SIZE = 1000  # characters
MIN_SIZE = 100

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_HEADING = re.compile(r" {0,3}(#{1,6})(?:[ \t]|$)")
_UNDERLINE = re.compile(r" {0,3}(=+|-+)[ \t]*$")
_ITEM = re.compile(r"[ \t]*(?:[-*+\u2022\u2023\u25e6\u2013]|\(?(?:\d{1,4}|[a-zA-Z])[.)])[ \t]+\S")
_TABLE = re.compile(r"[ \t]*\|")
_INDENTED = re.compile(r"(?: {4}|\t)")
# Where a sentence that is too long may be cut: after these, or at white space.
_PAUSES = frozenset(",;:\uff0c\u3001\uff1b\uff1a\u2014")  # the fullwidth ones and the dash too

Range = tuple[int, int]


@dataclass(frozen=True)
class Chunk:
    """A piece of a document. text: what a model is given. source: see ``Document``.

    start, end: where it stands in the document's text, in characters.
    """

    text: str
    source: str
    start: int
    end: int


@dataclass(frozen=True)
class _Block:
    """A stretch of lines. level: of a heading."""

    kind: Literal["heading", "code", "item", "row", "text"]
    start: int
    end: int
    level: int = 0


def check_size(size: int) -> None:
    """Raises UsageError if chunks cannot have that size."""
    if isinstance(size, bool) or not isinstance(size, int) or size < MIN_SIZE:
        raise UsageError(
            "bad chunk size", expected=f"{MIN_SIZE} characters or more", found=repr(size)
        )


def cut(document: Document, size: int = DEFAULT_SIZE) -> list[Chunk]:
    """The chunks of a document, in its order. size: in characters, heading or title included.

    >>> text = "# Town\\n\\nLena keeps bees. Dr. Tomas repairs clocks.\\n\\n## Mill\\n\\nIt turns."
    >>> for chunk in cut(Document("town.md", text, markdown=True)):
    ...     print(repr(chunk.text))
    '# Town\\n\\nLena keeps bees. Dr. Tomas repairs clocks.'
    '# Town\\n## Mill\\n\\nIt turns.'
    """
    check_size(size)
    if document.title and len(document.title) > size // 4:  # too long to be said again and again
        whole = f"{document.title}\n\n{document.text}"
        document = replace(document, text=whole, title=None)
    text = document.text
    chunks: list[Chunk] = []
    for prefix, blocks in _sections(document, size):
        room = size - len(prefix)
        for start, end in _pack(text, blocks, room):
            chunks.append(Chunk(prefix + text[start:end], document.source, start, end))
        if not blocks:  # headings with nothing below: said once, and not lost
            chunks.append(Chunk(prefix.rstrip(), document.source, 0, 0))
    return chunks


# --- sections and blocks -----------------------------------------------------------------------


def _sections(document: Document, size: int) -> Iterator[tuple[str, list[_Block]]]:
    """What stands in front of each chunk of a section, and the blocks of the section.

    A section without blocks is given only if it is the last below its headings.
    """
    text = document.text
    if not document.markdown:
        blocks = list(_blocks(text, markdown=False))
        if blocks:
            yield f"{document.title}\n" if document.title else "", blocks
        return
    path: list[tuple[int, str]] = []
    blocks = []
    for block in _blocks(text, markdown=True):
        line = text[block.start : block.end]
        # What is longer is no heading that could be repeated.
        if block.kind != "heading" or len(line) > size // 8:
            blocks.append(block)
            continue
        if blocks or (path and block.level <= path[-1][0]):
            yield _heading_prefix(path), blocks
            blocks = []
        while path and path[-1][0] >= block.level:
            path.pop()
        path.append((block.level, line.strip()))
    if blocks or path:
        yield _heading_prefix(path), blocks


def _heading_prefix(path: list[tuple[int, str]]) -> str:
    """At most six lines of an eighth of a chunk each."""
    return "\n".join(line for _, line in path) + "\n\n" if path else ""


def _blocks(text: str, markdown: bool) -> Iterator[_Block]:
    """The blocks of a text in order; nothing but white space is between them."""
    lines = list(_lines(text))
    index = 0
    if markdown and lines and text[slice(*lines[0])].rstrip() == "---":
        close = next((n for n in range(1, len(lines))
                      if text[slice(*lines[n])].rstrip() in ("---", "...")), None)  # fmt: skip
        if close is not None:  # settings in front of the text
            yield _Block("code", lines[0][0], lines[close][1])
            index = close + 1
    while index < len(lines):
        start, end = lines[index]
        line = text[start:end]
        if not line.strip():
            index += 1
            continue
        fence = _FENCE.match(line)
        if fence:
            index = _after_fence(text, lines, index, fence[1])
            yield _Block("code", start, lines[index - 1][1])
            continue
        heading = _HEADING.match(line) if markdown else None
        if heading:
            yield _Block("heading", start, end, len(heading[1]))
            index += 1
            continue
        first = index
        kind = _kind_of(line)
        index += 1
        while index < len(lines) and _goes_on(kind, text[slice(*lines[index])], markdown):
            index += 1
        last = text[slice(*lines[index])] if index < len(lines) else ""
        under = _UNDERLINE.match(last) if markdown and kind == "text" else None
        if under and index == first + 1:
            yield _Block("heading", start, end, 1 if under[1][0] == "=" else 2)
            index += 1
        else:
            yield _Block(kind, start, lines[index - 1][1])


def _lines(text: str) -> Iterator[Range]:
    start = 0
    while start < len(text):
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        yield start, end
        start = end + 1


def _after_fence(text: str, lines: list[Range], index: int, opening: str) -> int:
    """The line after a fenced code block; the end of the text if nothing closes it."""
    for place in range(index + 1, len(lines)):
        line = text[slice(*lines[place])].strip()
        if len(line) >= len(opening) and not line.strip(opening[0]):
            return place + 1
    return len(lines)


def _kind_of(line: str) -> Literal["code", "item", "row", "text"]:
    if _ITEM.match(line):
        return "item"
    if _TABLE.match(line):
        return "row"
    return "code" if _INDENTED.match(line) else "text"


def _goes_on(kind: str, line: str, markdown: bool) -> bool:
    """Whether a line belongs to the block before it."""
    if not line.strip() or _FENCE.match(line) or _ITEM.match(line):
        return False
    if kind == "row":
        return False
    if kind == "code":
        return bool(_INDENTED.match(line))
    if markdown and (_HEADING.match(line) or (kind == "text" and _UNDERLINE.match(line))):
        return False
    return not _TABLE.match(line)


# --- packing -----------------------------------------------------------------------------------


def _pack(text: str, blocks: list[_Block], room: int) -> Iterator[Range]:
    """Ranges of at most ``room`` characters, white space at both ends left out."""
    current: Range | None = None
    for block in blocks:
        start, end = _stripped(text, block.start, block.end)
        if current and end - current[0] <= room:
            current = current[0], end
            continue
        # A block that fits a chunk of its own is not cut for the sake of a small rest.
        small = current is not None and current[1] - current[0] < room // 2
        pieces = [(start, end)]
        if end - start > room or (small and block.kind == "text"):
            pieces = list(_pieces(text, block, room))
        for piece in pieces:
            if current and piece[1] - current[0] <= room:
                current = current[0], piece[1]
            else:
                if current:
                    yield current
                current = piece
    if current:
        yield current


def _pieces(text: str, block: _Block, room: int) -> Iterator[Range]:
    """A block in parts of at most ``room`` characters: lines of code, sentences of all else."""
    from sentencex import segment

    body = text[block.start : block.end]
    parts = body.splitlines(keepends=True) if block.kind == "code" else segment("en", body)
    place = block.start
    for part in parts:
        start, end = _stripped(text, place, place + len(part), keep_indent=block.kind == "code")
        place += len(part)
        while end - start > room:
            middle = _cut_at(text, start, start + room)
            piece = _stripped(text, start, middle)
            if piece[0] < piece[1]:  # an indent can be as long as a chunk
                yield piece
            start, end = _stripped(text, middle, end)
        if start < end:
            yield start, end


def _cut_at(text: str, start: int, end: int) -> int:
    """Where to cut what is too long: at white space or a pause in the second half, else at the end.

    A character is not parted from the marks on it.
    """
    for place in range(end, start + (end - start) // 2, -1):
        if text[place].isspace() or text[place - 1] in _PAUSES:
            return place
    for place in range(end, max(start, end - 32), -1):
        if not _joins(text[place]) and text[place - 1] != "\u200d":
            return place
    return end


def _joins(character: str) -> bool:
    return unicodedata.category(character) in ("Mn", "Mc", "Me", "Cf")


def _stripped(text: str, start: int, end: int, keep_indent: bool = False) -> Range:
    while end > start and text[end - 1].isspace():
        end -= 1
    # The spaces that indent a first line belong to it.
    while start < end and text[start].isspace() and not (keep_indent and text[start] in " \t"):
        start += 1
    return start, end
