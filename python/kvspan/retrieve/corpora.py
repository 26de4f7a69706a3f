"""The retriever that runs use: corpora by name, and documents that come with a query."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace

from kvspan.errors import UsageError
from kvspan.query.checks import describe
from kvspan.query.retrieval import Corpus, CorpusPaths
from kvspan.retrieve.chunking import DEFAULT_SIZE, cut
from kvspan.retrieve.documents import read_documents
from kvspan.retrieve.index import Hit, Index, Progress, Settings, build, open_index
from kvspan.retrieve.search import EMBEDDING_MODEL, SEARCHES, Search, embeddings_installed

DEFAULT_LIMIT = 5  # fragments
_DOCUMENTS = 16  # of queries, whose indexes are kept in memory


class Corpora:
    """A ``kvspan.query.retrieval.Retriever`` over corpora on disk and documents of queries.

    What it finds depends on the corpus and the question alone, and a chunk is the same text
    whichever question it fits: so its keys and values are there for the next question too.
    """

    def __init__(
        self,
        paths: CorpusPaths | None = None,
        *,
        search: Search = "bm25",
        limit: int = DEFAULT_LIMIT,
        chunk_size: int = DEFAULT_SIZE,
        on_note: Callable[[str], None] | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Open the index of every corpus; those that are missing or stale are built.

        paths: file or folder of each corpus, by the name queries call it.
        search: for nodes that name no embedding model that is known here; "embedding" and "hybrid"
            need the extra kvspan[embedding].
        limit: fragments, for nodes that say no number. chunk_size: most characters of one.
        on_note: called with what the user should know, one line each, every line once.
        progress: called with (phase, done, total) while an index is built.

        Raises UsageError and KvspanError as ``open_index``.
        """
        if search not in SEARCHES:
            raise UsageError("unknown search", expected=" or ".join(SEARCHES), found=repr(search))
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise UsageError("bad limit of fragments", expected="1 or more", found=repr(limit))
        self.paths = dict(paths or {})
        self.search_with: Search = search
        self.limit = limit
        self.settings = Settings(chunk_size, embeddings=search != "bm25")
        self.on_note = on_note
        self._noted: set[str] = set()
        self._progress = progress
        self._lock = threading.Lock()  # indexes are opened and built one at a time
        self._indexes: dict[tuple[str, bool], Index] = {}
        self._documents: OrderedDict[tuple[str, bool, str], Index] = OrderedDict()
        for name in self.paths:
            self.index(name)

    @property
    def key(self) -> str:
        """A digest of all that decides what is found: corpora, settings, versions."""
        embeddings = self.settings.embeddings
        keys = {name: self._indexes[name, embeddings].key for name in self.paths}
        said = [keys, self.search_with, self.limit, self.settings.chunk_size]
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()

    def index(self, name: str, embeddings: bool | None = None) -> Index:
        """The index of a corpus, opened when it is first asked for."""
        if name not in self.paths:
            known = ", ".join(map(repr, sorted(self.paths)))
            raise UsageError(
                f"unknown corpus {name[:80]!r}",
                expected=known or "a corpus that was given to the run (--corpus NAME=PATH)",
                found="none was given" if not known else None,
            )
        if embeddings is None:
            embeddings = self.settings.embeddings
        with self._lock:
            if (name, embeddings) not in self._indexes:
                settings = replace(self.settings, embeddings=embeddings)
                index = open_index(self.paths[name], settings, progress=self._progress)
                self._indexes[name, embeddings] = index
                for note in index.notes:
                    self._note(f"corpus {name}: {note}")
            return self._indexes[name, embeddings]

    def retrieve(self, query: str, corpus: Corpus) -> list[str]:
        """The texts of the fragments that fit a query, the best one first."""
        return [hit.chunk.text for hit in self.hits(query, corpus)]

    def hits(self, query: str, corpus: Corpus) -> list[Hit]:
        """The fragments that fit a query, with where they are from, the best one first."""
        how = self._how(corpus)
        embeddings = how != "bm25"
        if corpus.content is None:
            index = self.index(corpus.name, embeddings or self.settings.embeddings)
        else:
            index = self._document(corpus.name, corpus.content, embeddings)
        found = index.search(query, corpus.limit or self.limit, how)
        if not found:
            self._note(f"nothing in {corpus.name} fits {' '.join(query.split())[:60]!r}")
        return found

    def _how(self, corpus: Corpus) -> Search:
        """How to search: as the query asks if that can be done here, else as usual."""
        asked = corpus.embedding_model or self.search_with
        how: Search = self.search_with
        if asked in SEARCHES:
            how = asked
        elif asked.rpartition("/")[2] == EMBEDDING_MODEL:
            how = "hybrid" if how == "hybrid" else "embedding"
        else:
            self._note(f"embedding model {asked}: not run here; searched with {how}")
        if how != "bm25" and not self.settings.embeddings and not embeddings_installed():
            self._note(f"{how} search needs kvspan[embedding]; searched with {self.search_with}")
            how = self.search_with
        return how

    def _document(self, name: str, content: str | bytes, embeddings: bool) -> Index:
        data = content.encode() if isinstance(content, str) else content
        key = name, embeddings, hashlib.sha256(data).hexdigest()
        with self._lock:
            if key not in self._documents:
                self._documents[key] = self._read(name, data, embeddings)
                while len(self._documents) > _DOCUMENTS:
                    self._documents.popitem(last=False)
            self._documents.move_to_end(key)
            return self._documents[key]

    def _read(self, name: str, data: bytes, embeddings: bool) -> Index:
        shown = f"document {name[:80]!r}"
        try:
            documents = read_documents(name, data, shown)
        except UsageError as error:
            # The document stands in the query: its path is the place, not a file.
            raise UsageError(
                f"{error.source}: {error.message}", expected=error.expected, found=error.found
            ) from None
        size = self.settings.chunk_size
        chunks = [chunk for document in documents for chunk in cut(document, size)]
        if not chunks:
            raise UsageError(f"no text in {shown}", expected="a document with text")
        return build(chunks, len(documents), replace(self.settings, embeddings=embeddings))

    def _note(self, line: str) -> None:
        if self.on_note is not None and line not in self._noted:
            self._noted.add(line)
            self.on_note(line)


def as_retriever(corpora: CorpusPaths | None) -> Corpora:
    """The retriever of a run that was given none. Raises UsageError for what is no mapping."""
    if corpora is not None and not isinstance(corpora, Mapping):
        raise UsageError(
            "bad corpora", expected="a mapping of names to paths", found=describe(corpora)
        )
    return Corpora(corpora)
