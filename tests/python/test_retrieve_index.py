"""Indexes on disk: built once, built anew when stale or damaged, safe from other processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvspan.errors import KvspanError, UsageError
from kvspan.retrieve import index as index_module
from kvspan.retrieve import search
from kvspan.retrieve.index import Index, Settings, open_index


@pytest.fixture
def town(tmp_path: Path) -> Path:
    folder = tmp_path / "town"
    (folder / "people").mkdir(parents=True)
    (folder / "people" / "tomas.md").write_text("# Tomas\n\nTomas repairs the clocks.")
    (folder / "people" / "lena.txt").write_text("Lena keeps bees on the roof of the mill.")
    (folder / "facts.jsonl").write_text('{"title": "Bridge", "text": "Built in 1412."}\n"Bees."\n')
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def kept(cache: Path) -> list[Path]:
    """The folders of all indexes."""
    return sorted(path for path in cache.glob("*/*"))


def texts(index: Index, query: str) -> list[str]:
    return [hit.chunk.text for hit in index.search(query, 5)]


def test_an_index_is_built_once(town: Path, cache: Path) -> None:
    built = open_index(town, cache=cache)
    assert (built.state, built.documents, len(built.chunks), built.notes) == ("built", 4, 4, [])
    assert [chunk.source for chunk in built.chunks] == [
        "facts.jsonl:1", "facts.jsonl:2", "people/lena.txt", "people/tomas.md",
    ]  # fmt: skip
    again = open_index(town, cache=cache)
    assert (again.state, again.key, again.folder) == ("current", built.key, built.folder)
    assert (again.chunks, again.documents) == (built.chunks, 4)
    for query in ("who keeps bees?", "1412", "clock", "nothing"):
        assert again.search(query, 9) == built.search(query, 9)
    assert texts(again, "who repairs clocks") == ["# Tomas\n\nTomas repairs the clocks."]
    assert kept(cache) == [built.folder]


def change(town: Path) -> None:
    (town / "people" / "lena.txt").write_text("Lena keeps goats.")


def add(town: Path) -> None:
    (town / "new.txt").write_text("New.")


def remove(town: Path) -> None:
    (town / "facts.jsonl").unlink()


def rename(town: Path) -> None:
    (town / "facts.jsonl").rename(town / "other.jsonl")


@pytest.mark.parametrize("edit", [change, add, remove, rename], ids=lambda edit: edit.__name__)
def test_a_stale_index_is_replaced(town: Path, cache: Path, edit: Callable[[Path], None]) -> None:
    old = open_index(town, cache=cache)
    edit(town)
    new = open_index(town, cache=cache)
    assert new.state == "rebuilt" and new.key != old.key and new.notes == []
    assert kept(cache) == [new.folder]
    assert open_index(town, cache=cache).state == "current"


def test_touching_a_file_changes_nothing(town: Path, cache: Path) -> None:
    open_index(town, cache=cache)
    os.utime(town / "facts.jsonl", (1, 1))
    assert open_index(town, cache=cache).state == "current"


def test_settings_and_versions_are_part_of_the_key(
    town: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_index(town, cache=cache)
    other = open_index(town, Settings(chunk_size=200), cache=cache)
    vectors = open_index(town, Settings(embeddings=True), cache=cache)
    assert len({first.key, other.key, vectors.key}) == 3 and len(kept(cache)) == 3
    assert vectors.search("beekeeping", 1, "embedding") and vectors.search("bees", 9, "hybrid")
    again = open_index(town, Settings(embeddings=True), cache=cache)
    assert again.state == "current"
    assert again.search("bees", 9, "hybrid") == vectors.search("bees", 9, "hybrid")
    monkeypatch.setattr(search, "VERSION", -1)
    assert open_index(town, cache=cache).state == "rebuilt"


def test_rebuilding_on_request(town: Path, cache: Path) -> None:
    first = open_index(town, cache=cache)
    assert first.folder is not None
    before = (first.folder / "meta.json").stat().st_ino
    again = open_index(town, cache=cache, rebuild=True)
    assert (again.state, again.folder) == ("rebuilt", first.folder)
    assert (first.folder / "meta.json").stat().st_ino != before


DAMAGE = {
    "torn chunks": ("chunks.jsonl", b'["Tomas'),
    "other chunks": ("chunks.jsonl", b'["x", "y", 0, 1]\n'),
    "no meta": ("meta.json", None),
    "torn meta": ("meta.json", b'{"documents": 4'),
    "other meta": ("meta.json", b"[]"),
    "no scores": ("bm25/data.csc.index.npy", None),
    "torn words": ("bm25/vocab.index.json", b"{"),
    "torn vectors": ("vectors.npy", b"\x93NUMPY"),
}


@pytest.mark.parametrize(("name", "data"), DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_index_is_built_anew_and_reported(
    town: Path, cache: Path, name: str, data: bytes | None
) -> None:
    settings = Settings(embeddings=True)
    whole = open_index(town, settings, cache=cache)
    assert whole.folder is not None
    if data is None:
        (whole.folder / name).unlink()
    else:
        (whole.folder / name).write_bytes(data)
    again = open_index(town, settings, cache=cache)
    assert again.state == "rebuilt"
    (note,) = again.notes
    assert note.startswith(f"{town}: its index was damaged and is built anew (")
    assert again.chunks == whole.chunks and kept(cache) == [whole.folder]
    assert open_index(town, settings, cache=cache).state == "current"


def test_what_killed_processes_left_is_removed(town: Path, cache: Path) -> None:
    folder = open_index(town, cache=cache).folder
    assert folder is not None
    for name, age in ((".new-old", 1), (".new-now", None)):
        (folder.parent / name).mkdir()
        if age:
            os.utime(folder.parent / name, (age, age))
    open_index(town, cache=cache, rebuild=True)
    names = sorted(path.name for path in folder.parent.iterdir())
    assert names == [".new-now", folder.name]
    (folder / "meta.json").unlink()
    (town / "new.txt").write_text("x")
    assert open_index(town, cache=cache).state == "rebuilt"


def test_a_cache_that_cannot_be_written_is_done_without(town: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    index = open_index(town, cache=tmp_path / "file" / "cache")
    assert index.folder is None and texts(index, "clocks")
    (note,) = index.notes
    assert note.startswith("the index is not kept: ") and note.endswith(": Not a directory")


def test_equal_chunks_are_kept_once(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "c").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / "c" / name).write_text("The same text.")
    index = open_index(tmp_path / "c", cache=cache)
    assert (index.documents, len(index.chunks), index.repeated) == (2, 1, 1)
    assert index.chunks[0].source == "a.txt"


def test_empty_files_are_noted(town: Path, cache: Path) -> None:
    (town / "empty.txt").write_text(" \n")
    (town / "logo.png").write_bytes(b"\x89PNG")
    assert open_index(town, cache=cache).notes == [
        f"{town}: 1 file without text",
        f"{town}: 1 file of other kinds not read",
    ]
    (town / "only.txt").write_text("")
    with pytest.raises(UsageError, match=r"only.txt: no text in the corpus; expected a file with"):
        open_index(town / "only.txt", cache=cache)
    assert len(kept(cache)) == 1


def test_a_broken_file_is_named_and_nothing_is_kept(town: Path, cache: Path) -> None:
    (town / "people" / "x.jsonl").write_text('"a"\n{"text": 1}\n')
    place = f"{town}/people/x.jsonl:2"
    with pytest.raises(UsageError, match=f"^{place}: not a document; expected a string or an obj"):
        open_index(town, cache=cache)
    assert kept(cache) == []


def test_unreadable_files(town: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(UsageError, match=r"facts.jsonl: cannot read the file: Permission denied$"):
        open_index(town, cache=cache)


def test_a_cache_that_may_not_be_read(
    town: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(real: Any) -> Any:
        def method(path: Path, *args: Any, **options: Any) -> Any:
            if cache in path.parents:
                raise PermissionError(13, "Permission denied")
            return real(path, *args, **options)

        return method

    for name in ("is_dir", "iterdir", "mkdir"):
        monkeypatch.setattr(Path, name, refused(getattr(Path, name)))
    index = open_index(town, cache=cache)
    assert index.state == "built" and index.folder is None
    (note,) = index.notes
    assert note.startswith("the index is not kept: ") and note.endswith("Permission denied")


def test_progress_of_each_phase(town: Path, cache: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    open_index(town, Settings(embeddings=True), cache=cache, progress=lambda *s: seen.append(s))
    assert [phase for phase, done, _ in seen if done == 0] == ["read", "index", "embed"]
    assert ("read", 3, 3) in seen and seen[-1] == ("embed", 4, 4)


def test_a_missing_extra_is_named(town: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_model", None)
    monkeypatch.setitem(sys.modules, "wordllama", None)
    with pytest.raises(KvspanError, match=r"not installed \(pip install 'kvspan\[embedding\]'\)$"):
        open_index(town, Settings(embeddings=True), cache=cache)
    (town / "x.pdf").write_bytes(b"%PDF-1.4")
    monkeypatch.setitem(sys.modules, "pypdf", None)
    with pytest.raises(KvspanError, match=r"not installed \(pip install 'kvspan\[pdf\]'\)$"):
        open_index(town, cache=cache)


_BUILD = """
import json, sys
from pathlib import Path
from kvspan.retrieve.index import open_index

index = open_index(sys.argv[1], cache=Path(sys.argv[2]), rebuild=sys.argv[3] == "rebuild")
print(json.dumps([index.state, index.notes, [hit.chunk.text for hit in index.search("bees", 9)]]))
"""


@pytest.mark.parametrize("mode", ["build", "rebuild"])
def test_processes_that_build_the_same_index(town: Path, cache: Path, mode: str) -> None:
    expected = texts(open_index(town, cache=cache.with_name("own")), "bees")
    words = [sys.executable, "-c", _BUILD, str(town), str(cache), mode]
    running = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    for process in running:
        out, _ = process.communicate()
        state, notes, found = json.loads(out)
        assert process.returncode == 0 and found == expected and notes == []
        assert state in ("built", "rebuilt", "current")
    assert len(kept(cache)) == 1
    assert open_index(town, cache=cache).state == "current"


def test_the_second_to_finish_keeps_what_is_there(
    town: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = index_module._write
    inner: list[Index] = []

    def meanwhile(index: Index, folder: Path) -> None:
        write(index, folder)
        if not inner:
            inner.append(index)
            inner.append(open_index(town, cache=cache))

    monkeypatch.setattr(index_module, "_write", meanwhile)
    outer = open_index(town, cache=cache)
    assert outer.folder == inner[1].folder and len(kept(cache)) == 1
    assert outer.notes == [] and open_index(town, cache=cache).state == "current"
