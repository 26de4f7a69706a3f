"""Reading the files of a corpus: text, Markdown, JSON Lines, PDF, and folders of them.

A JSON Lines file has a document on each line: a string, or an object with ``text`` and perhaps
``title`` (other keys are ignored). Whatever cannot be read is one UsageError that names the file.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from kvspan.errors import UsageError
from kvspan.extras import importing
from kvspan.query.checks import describe

TEXT = (".txt", ".text", ".rst")
MARKDOWN = (".md", ".markdown")
JSON_LINES = (".jsonl", ".ndjson")
PDF = (".pdf",)
SUFFIXES = TEXT + MARKDOWN + JSON_LINES + PDF

# A word cut in two at the end of a line; capitals and digits are left alone (UTF-\n8).
_HYPHENATED = re.compile(r"(?<=[a-zß-öø-ÿ])-\n(?=[a-zß-öø-ÿ])")
# The last four: fullwidth marks, and a quotation mark that closes.
_ENDS_SENTENCE = (".", "!", "?", ":", '"', "\u3002", "\uff01", "\uff1f", "\u201d")


@dataclass(frozen=True)
class Document:
    """A text to be cut into chunks. Line ends are ``\\n``.

    source: its file, relative to the corpus, with the line for JSON Lines (``town.jsonl:12``).
    title: stands above each of its chunks. markdown: whether the text is Markdown.
    """

    source: str
    text: str
    title: str | None = None
    markdown: bool = False


def list_files(path: str | os.PathLike[str]) -> tuple[list[tuple[str, Path]], int]:
    """(name, path) of each file of a corpus, in order of names, and how many others there are.

    path: a file, or a folder of which all files with known endings count, also those further down;
    hidden ones and links to folders do not. Raises UsageError where there is nothing to read.
    """
    if not os.fspath(path):  # Path would take it for the folder at hand
        raise UsageError("the corpus has no name", expected="a file or a folder")
    root = Path(path)
    if root.is_dir():
        found, others = _walk(root)
        if not found:
            raise UsageError(
                "no document in the folder",
                source=str(path),
                expected=f"files that end in {', '.join(SUFFIXES)}",
                found=f"{others} other file{'s' * (others > 1)}" if others else "no files",
            )
        return sorted(found), others
    if not root.exists():
        raise UsageError("no such file or folder", source=str(path))
    if not root.is_file():
        raise UsageError("neither a file nor a folder", source=str(path))
    return [(root.name, root)], 0


def _walk(root: Path) -> tuple[list[tuple[str, Path]], int]:
    def failed(error: OSError) -> None:
        raise UsageError(
            f"cannot read the folder: {error.strerror}", source=error.filename or str(root)
        ) from None

    found: list[tuple[str, Path]] = []
    others = 0
    for folder, below, files in os.walk(root, onerror=failed):
        below[:] = [name for name in below if not name.startswith(".")]
        for name in files:
            place = Path(folder, name)
            if name.startswith("."):
                continue
            if place.suffix.lower() in SUFFIXES and place.is_file():
                found.append((place.relative_to(root).as_posix(), place))
            else:
                others += 1
    return found, others


def read_bytes(path: Path) -> bytes:
    """The content of a file. Raises UsageError where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(f"cannot read the file: {reason}", source=str(path)) from None


def read_documents(name: str, data: bytes, shown: str | None = None) -> list[Document]:
    """The documents of a file, none where it has no text.

    name: tells the kind by its ending; files of unknown kinds are text. data: its content.
    shown: what messages call it; ``name`` by default.
    """
    shown = shown or name
    suffix = PurePosixPath(name).suffix.lower()
    if suffix in PDF or data.startswith(b"%PDF-"):
        text = _pdf_text(data, shown)
        return [Document(name, text)] if text.strip() else []
    text = _decode(data, shown)
    if suffix in JSON_LINES:
        return list(_json_lines(text, name, shown))
    return [Document(name, text, markdown=suffix in MARKDOWN)] if text.strip() else []


def _decode(data: bytes, shown: str) -> str:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UsageError("not UTF-8", source=shown, expected="UTF-8", found="UTF-16")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # Text in an old encoding has no NUL bytes; nearly everything else does.
        if b"\0" in data:
            raise UsageError("not a text file", source=shown, expected="text, or a PDF file",
                             found="binary data") from None  # fmt: skip
        raise UsageError(
            "not UTF-8", source=shown, expected="UTF-8",
            found=f"byte 0x{data[error.start]:02x} at offset {error.start}",
        ) from None  # fmt: skip
    if "\0" in text:
        raise UsageError(
            "not a text file",
            source=shown,
            expected="text, or a PDF file",
            found=f"a NUL character at offset {text.index(chr(0))}",
        )
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _json_lines(text: str, name: str, shown: str) -> Iterator[Document]:
    # Not splitlines: JSON strings may hold its other separators, U+2028 for one.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        place = f"{shown}:{number}"
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            problem = f"not JSON: {error.msg} (column {error.colno})"
            raise UsageError(problem, source=place) from None
        except ValueError as error:  # a number of thousands of digits
            raise UsageError(f"not JSON: {error}", source=place) from None
        except RecursionError:
            raise UsageError("not JSON: nested too deeply", source=place) from None
        body, title = _json_text(value, place)
        if body.strip():
            body = body.replace("\r\n", "\n").replace("\r", "\n")
            yield Document(f"{name}:{number}", body, title)


def _json_text(value: Any, place: str) -> tuple[str, str | None]:
    if isinstance(value, str):
        value = {"text": value}
    if not isinstance(value, dict) or not isinstance(value.get("text"), str):
        if isinstance(value, dict):
            found = f"text: {describe(value['text'])}" if "text" in value else "no text"
        else:
            found = describe(value)
        raise UsageError(
            "not a document",
            source=place,
            expected='a string or an object with a string "text"',
            found=found,
        )
    title = value.get("title")
    if title is not None and not isinstance(title, str):
        raise UsageError("bad title", source=place, expected="a string", found=describe(title))
    for text in (value["text"], title or ""):
        if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
            raise UsageError("half a surrogate pair in the text", source=place)
    return value["text"], " ".join(title.split()) if title and title.strip() else None


def _pdf_text(data: bytes, shown: str) -> str:
    with importing("pdf"):
        import pypdf
    import logging

    # It tells of repairs it makes; what cannot be read at all is an exception.
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)
    from io import BytesIO

    try:
        reader = pypdf.PdfReader(BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise UsageError("the PDF file is encrypted", source=shown)
        pages = [page.extract_text() for page in reader.pages]
    except UsageError:
        raise
    except Exception as error:  # a broken file can raise nearly anything in a parser
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(f"not a PDF file that can be read: {reason}", source=shown) from None
    text = ""
    for page in pages:
        page = page.replace("\0", "").replace("\r\n", "\n").strip()
        page = page.encode("utf-8", "replace").decode()  # fonts can map to half a surrogate pair
        if text and page:
            text += "\n\n" if text.endswith(_ENDS_SENTENCE) else "\n"
        text += page
    return _HYPHENATED.sub("", text)
