"""Reading the files of a corpus, and one line for each that cannot be read."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvspan.errors import UsageError
from kvspan.retrieve.documents import Document, list_files, read_documents
from pdf_files import encrypted, pdf


def test_text_and_markdown() -> None:
    assert read_documents("a.txt", b"\xef\xbb\xbfone\r\ntwo\rthree") == [
        Document("a.txt", "one\ntwo\nthree")
    ]
    assert read_documents("b/a.MD", "# Bäume".encode()) == [
        Document("b/a.MD", "# Bäume", markdown=True)
    ]
    assert read_documents("README", b"plain") == [Document("README", "plain")]
    assert read_documents("a.txt", b"") == [] == read_documents("a.md", b" \n\t\n")


def test_json_lines() -> None:
    lines = [
        {"title": " Old\ntown ", "text": "Tomas\r\nrepairs\u2028clocks.", "id": 7},
        "",
        "a string",
        {"text": "no title", "title": None},
        {"text": " "},
    ]
    data = "\n".join(json.dumps(line, ensure_ascii=False) if line else "" for line in lines)
    assert read_documents("p.jsonl", data.encode()) == [
        Document("p.jsonl:1", "Tomas\nrepairs\u2028clocks.", "Old town"),
        Document("p.jsonl:3", "a string"),
        Document("p.jsonl:4", "no title"),
    ]


def test_pdf() -> None:
    data = pdf(
        ["The bridge was built by", "Master An-", "selm (in 1412)."],
        ["It has UTF-", "8 arches"],
        [],
    )
    (document,) = read_documents("town.pdf", data)
    assert document.text == (
        "The bridge was built by\nMaster Anselm (in 1412).\n\nIt has UTF-\n8 arches"
    )
    assert document == Document("town.pdf", document.text)
    (by_content,) = read_documents("scan", data)
    assert by_content.text == document.text
    assert read_documents("empty.pdf", pdf([])) == []
    (open_to_all,) = read_documents("town.pdf", encrypted(data, ""))
    assert open_to_all.text == document.text


LATIN = "Bäume".encode("latin-1")
BAD = {
    "binary": ("a.txt", bytes(range(256)), "a.txt: not a text file; .*; found binary data"),
    "png": ("a.png", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "a.png: not a text file"),
    "nul": ("a.txt", b"ab\0c", "a.txt: not a text file; .*; found a NUL character at offset 2"),
    "latin-1": ("a.txt", LATIN, "a.txt: not UTF-8; expected UTF-8; found byte 0xe4 at offset 1"),
    "utf-16": ("a.txt", "x".encode("utf-16"), "a.txt: not UTF-8; expected UTF-8; found UTF-16"),
    "json line": ("a.jsonl", b'"x"\n\n{"text": }', r"a.jsonl:3: not JSON: .* \(column 10\)"),
    "json array": ("a.jsonl", b"[1, 2]", "a.jsonl:1: not a document; .*; found an array of 2"),
    "json key": ("a.jsonl", b'{"body": "x"}', "a.jsonl:1: not a document; .*; found no text"),
    "json text": ("a.jsonl", b'{"text": 5}', "a.jsonl:1: not a document; .*; found text: 5"),
    "json title": ("a.jsonl", b'{"text": "x", "title": 1}', "a.jsonl:1: bad title; .* found 1"),
    "json number": ("a.jsonl", b"9" * 9999, "a.jsonl:1: not JSON: "),
    "json depth": ("a.jsonl", b"[" * 99999, "a.jsonl:1: not JSON: nested too deeply"),
    "surrogate": ("a.jsonl", rb'"\ud800"', "a.jsonl:1: half a surrogate pair in the text"),
    "no pdf": ("a.pdf", b"hello", "a.pdf: not a PDF file that can be read: "),
    "empty pdf": ("a.pdf", b"", "a.pdf: not a PDF file that can be read: "),
    "torn pdf": ("a.pdf", pdf(["x"])[:200], "a.pdf: not a PDF file that can be read: "),
    "locked pdf": ("a.pdf", encrypted(pdf(["x"]), "secret"), "a.pdf: the PDF file is encrypted"),
}


@pytest.mark.parametrize(("name", "data", "message"), BAD.values(), ids=BAD.keys())
def test_what_cannot_be_read_is_one_line(name: str, data: bytes, message: str) -> None:
    with pytest.raises(UsageError, match=f"^{message}") as caught:
        read_documents(name, data)
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match=r"^some/where"):
        read_documents(name, data, f"some/where/{name}")


def test_folders(tmp_path: Path) -> None:
    for name in ("b.md", "a/z.TXT", "a/b.jsonl", "c.pdf", "d.png", ".git/x.md", ".hidden.md", "e"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "gone.md").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.txt")
    files, others = list_files(tmp_path)
    assert [name for name, _ in files] == ["a/b.jsonl", "a/z.TXT", "b.md", "c.pdf"]
    assert others == 4 and all(path.read_text() == "x" for _, path in files)
    assert list_files(tmp_path / "d.png") == ([("d.png", tmp_path / "d.png")], 0)


def test_places_without_documents(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere: no such file or folder$"):
        list_files(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"no document in the folder; .*.pdf; found no files$"):
        list_files(tmp_path)
    (tmp_path / "x.png").write_text("")
    with pytest.raises(UsageError, match=r"no document in the folder; .*; found 1 other file$"):
        list_files(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match=r"pipe: neither a file nor a folder$"):
        list_files(tmp_path / "pipe")
