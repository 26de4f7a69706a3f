"""The index of a corpus: its chunks and what finds them, kept on disk until the corpus changes.

An index lies in a folder of the cache that is named after the corpus' place and the settings, in a
folder below it that is named after its key: a digest of the files, the settings and the versions
of what they are cut and searched with. So an index is stale if the key of what is there now is
another one, and is then replaced. A new index is written beside its place and renamed to it, whole
or not at all; of two processes that build the same one, the second to finish keeps what the first
has put there. Each file's digest is in ``meta.json``; an index that does not fit is built anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from kvspan.errors import UsageError
from kvspan.retrieve import search
from kvspan.retrieve.chunking import DEFAULT_SIZE, Chunk, check_size, cut
from kvspan.retrieve.documents import list_files, read_bytes, read_documents
from kvspan.retrieve.search import Bm25, Embeddings, Search

State = Literal["built", "current", "rebuilt"]
# (phase, done, total)
Progress = Callable[[str, int, int], None]
_FOLDER = "retrieval"
_CHUNKS, _BM25, _VECTORS, _META = "chunks.jsonl", "bm25", "vectors.npy", "meta.json"
_NEW = ".new-"  # folders that a process is at work in
_LEFT_SECONDS = 3600  # one that is older than that was left by a process that was killed


@dataclass(frozen=True)
class Settings:
    """chunk_size: most characters of a chunk. embeddings: whether chunks can be found by them."""

    chunk_size: int = DEFAULT_SIZE
    embeddings: bool = False

    def __post_init__(self) -> None:
        check_size(self.chunk_size)


@dataclass(frozen=True)
class Hit:
    """A chunk that was found. score: of the search that found it, higher is better."""

    chunk: Chunk
    score: float


@dataclass
class Index:
    """chunks: of different texts, in the order of their documents.

    documents, repeated: how many there are, and how many chunks were left out because another has
    the same text. key: see the module; empty for an index of no files.
    state: whether it was there and current, or has been built now, in the place of another or not.
    folder: where it is; None if it is kept nowhere. notes: what the user should know.
    """

    chunks: list[Chunk]
    bm25: Bm25
    embeddings: Embeddings | None
    documents: int
    repeated: int = 0
    key: str = ""
    state: State = "built"
    folder: Path | None = None
    notes: list[str] = field(default_factory=list)

    def search(self, query: str, limit: int, how: Search = "bm25") -> list[Hit]:
        """The chunks that fit a query, the best one first, of equally good ones the first first."""
        if how == "bm25":
            found = self.bm25.search(query, limit)
        else:
            assert self.embeddings is not None
            if how == "embedding":
                found = self.embeddings.search(query, limit)
            else:
                depth = max(limit, search.DEPTH)
                rankings = [self.bm25.search(query, depth), self.embeddings.search(query, depth)]
                found = search.fuse([[place for place, _ in one] for one in rankings])[:limit]
        return [Hit(self.chunks[place], score) for place, score in found]


def build(
    chunks: Iterable[Chunk],
    documents: int,
    settings: Settings,
    progress: Progress | None = None,
) -> Index:
    """An index in memory. The chunks must not be none."""
    once: dict[str, Chunk] = {}
    number = 0
    for chunk in chunks:
        number += 1
        once.setdefault(chunk.text, chunk)
    texts = list(once)

    def report(phase: str) -> search.Report | None:
        return None if progress is None else lambda done, total: progress(phase, done, total)

    bm25 = Bm25.build(texts, report("index"))
    vectors = Embeddings.build(texts, report("embed")) if settings.embeddings else None
    if progress:
        progress("embed" if vectors else "index", len(texts), len(texts))
    return Index(list(once.values()), bm25, vectors, documents, number - len(once))


def open_index(
    path: str | os.PathLike[str],
    settings: Settings | None = None,
    *,
    cache: Path | None = None,
    rebuild: bool = False,
    progress: Progress | None = None,
) -> Index:
    """The index of a corpus: the one on disk if it is current, or else a new one, kept there.

    path: a file or a folder, see ``list_files``. cache: the folder indexes are kept in; kvspan's by
    default. rebuild: build it anew in any case. progress: called with (phase, done, total), the
    phases being "read" in files, "index" and "embed" in chunks.

    Raises UsageError for a corpus that is missing, has no text, or has a file that cannot be read;
    KvspanError where an extra is missing.
    """
    settings = settings or Settings()
    files, others = list_files(path)
    read = _Reader(files, progress)
    key = _key(read.digests(), settings)
    notes: list[str] = []
    place = _place(path, settings, cache)
    found = None
    if place is not None and not rebuild:
        found = _load(place / key, settings, notes, str(path))
    if found is None:
        stale = bool(notes) or (place is not None and _has_index(place))
        found = build(read.chunks(settings, str(path)), len(read.sources), settings, progress)
        # A file may have changed since it was first read; what was indexed is what counts.
        key = _key(read.digests(), settings)
        found.documents = read.documents
        found.state = "rebuilt" if stale else "built"
        if read.empty:
            notes.append(f"{path}: {read.empty:,} {_files(read.empty)} without text")
        if place is not None:
            _keep(found, place, key, notes, replace=rebuild)
    elif place is not None:
        found.folder = place / key
    if others:
        notes.append(f"{path}: {others:,} {_files(others)} of other kinds not read")
    found.key, found.notes = key, notes
    return found


def _files(count: int) -> str:
    return "file" if count == 1 else "files"


class _Reader:
    """Reads the files of a corpus and notes their digests."""

    def __init__(self, files: list[tuple[str, Path]], progress: Progress | None) -> None:
        self.files = files
        self.progress = progress or (lambda phase, done, total: None)
        self.sources: dict[str, str] = {}  # name: digest of the content
        self.documents = 0
        self.empty = 0

    def digests(self) -> dict[str, str]:
        for name, path in self.files:
            if name not in self.sources:
                self.sources[name] = hashlib.sha256(read_bytes(path)).hexdigest()
        return self.sources

    def chunks(self, settings: Settings, shown: str) -> Iterable[Chunk]:
        found = False
        for done, (name, path) in enumerate(self.files):
            self.progress("read", done, len(self.files))
            data = read_bytes(path)
            self.sources[name] = hashlib.sha256(data).hexdigest()
            documents = read_documents(name, data, str(path))
            self.documents += len(documents)
            self.empty += not documents
            for document in documents:
                for chunk in cut(document, settings.chunk_size):
                    found = True
                    yield chunk
        self.progress("read", len(self.files), len(self.files))
        if not found:
            raise UsageError("no text in the corpus", source=shown, expected="a file with text")


def _key(sources: dict[str, str], settings: Settings) -> str:
    """Digest of all that an index depends on."""
    versions = {name: version(name) for name in ("bm25s", "sentencex", "PyStemmer")}
    if settings.embeddings:
        versions["embedding"] = search.embedding_version()
    if any(name.lower().endswith(".pdf") for name in sources):
        from kvspan.extras import importing

        with importing("pdf"):
            import pypdf

            versions["pypdf"] = pypdf.__version__
    parts = [search.VERSION, asdict(settings), versions, sorted(sources.items())]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


# --- on disk -------------------------------------------------------------------------------------


def _place(path: str | os.PathLike[str], settings: Settings, cache: Path | None) -> Path | None:
    """The folder of a corpus' indexes; None if there is no home for a cache."""
    if cache is None:
        from kvspan.demo.model import cache_root

        try:
            cache = cache_root() / _FOLDER
        except UsageError:
            return None
    where = os.path.realpath(path)
    words = json.dumps([where, asdict(settings)], sort_keys=True)
    name = "".join(c if c.isascii() and c.isalnum() else "-" for c in os.path.basename(where))[:40]
    return cache / f"{name}-{hashlib.sha256(words.encode()).hexdigest()[:16]}"


def _has_index(place: Path) -> bool:
    try:
        return any(not one.name.startswith(_NEW) for one in place.iterdir())
    except OSError:
        return False


def _load(folder: Path, settings: Settings, notes: list[str], shown: str) -> Index | None:
    """The index in a folder; None if there is none, or a damaged one, which is put away."""
    try:
        if not folder.is_dir():
            return None
    except OSError:  # not ours to look into: nothing will be kept there either, and that is noted
        return None
    try:
        meta = json.loads((folder / _META).read_bytes())
        for name, digest in meta["files"].items():
            if _digest(folder / name) != digest:
                raise ValueError(f"{name} has changed")
        lines = (folder / _CHUNKS).read_bytes().splitlines()
        return Index(
            [Chunk(*json.loads(line)) for line in lines],
            Bm25.load(folder / _BM25),
            Embeddings.load(folder / _VECTORS) if settings.embeddings else None,
            documents=meta["documents"],
            repeated=meta["repeated"],
            state="current",
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if folder.is_dir():  # else another process has replaced it just now
            reason = " ".join(str(error).split())
            notes.append(f"{shown}: its index was damaged and is built anew ({reason})")
            _remove(folder)
        return None


def _keep(index: Index, place: Path, key: str, notes: list[str], replace: bool) -> None:
    """Put an index in its place, and those it replaces away."""
    try:
        place.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=_NEW, dir=place))
        try:
            _write(index, work)
            if replace:
                _remove(place / key)
            try:
                work.rename(place / key)
            except OSError:
                if not (place / key).is_dir():  # else another process was there first
                    raise
        finally:
            shutil.rmtree(work, ignore_errors=True)
        index.folder = place / key
        _tidy(place, key)
    except OSError as error:
        notes.append(f"the index is not kept: {place}: {error.strerror or error}")


def _write(index: Index, folder: Path) -> None:
    with (folder / _CHUNKS).open("w", encoding="ascii") as file:
        for chunk in index.chunks:
            file.write(json.dumps([chunk.text, chunk.source, chunk.start, chunk.end]) + "\n")
    index.bm25.save(folder / _BM25)
    if index.embeddings is not None:
        index.embeddings.save(folder / _VECTORS)
    files = {
        file.relative_to(folder).as_posix(): _digest(file)
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }
    meta = {"documents": index.documents, "repeated": index.repeated, "files": files}
    (folder / _META).write_text(json.dumps(meta), encoding="ascii")


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _tidy(place: Path, key: str) -> None:
    """Put away indexes that have been replaced, and what killed processes have left."""
    for old in place.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process tidies up too
            at_work = (
                old.name.startswith(_NEW) and time.time() - old.stat().st_mtime < _LEFT_SECONDS
            )
            if old.name != key and not at_work:
                _remove(old)


def _remove(folder: Path) -> None:
    """Out of the way in one step, for other processes, then gone."""
    with contextlib.suppress(OSError):
        away = Path(tempfile.mkdtemp(prefix=_NEW, dir=folder.parent))
        try:
            folder.rename(away / folder.name)
        finally:
            shutil.rmtree(away, ignore_errors=True)
