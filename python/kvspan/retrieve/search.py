"""Finding chunks: by their words (BM25), by what they are about (embeddings), or by both.

BM25 is ``bm25s``: in numpy alone, kept up, a wheel of 76 kB that is pure Python, and its scores are
exact. (``tantivy`` is an engine of its own with files, segments and a query language of its own;
``rank-bm25`` scores by loops in Python and has been left alone since 2022.)

Embeddings are those of ``wordllama``, which brings its 16 MB of weights in its wheel, so that
nothing is downloaded when it runs; ``fastembed``, ``sentence-transformers`` and ``model2vec`` fetch
theirs.
"""

from __future__ import annotations

import logging
import re
import threading
import unicodedata
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from kvspan.errors import KvspanError
from kvspan.extras import importing

if TYPE_CHECKING:
    from numpy.typing import NDArray

Search = Literal["bm25", "embedding", "hybrid"]
SEARCHES: tuple[Search, ...] = ("bm25", "embedding", "hybrid")
EMBEDDING_MODEL = "wordllama"

# Part of an index's key: another way to cut or to count words needs another index.
VERSION = 1

# Rank fusion: 1 / (FUSION + rank), ranks from 1. The usual 60 is for lists of many systems; of two,
# 10 finds the passage of a question of NQ-open more often (bench/retrieval_recall.py).
FUSION = 10
DEPTH = 100  # of each list that is fused
_BATCH = 256  # texts embedded at a time

# Scripts that put no spaces between words: their pairs of neighbours count as words.
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff"
)
# Marks that are part of a word and no letters for `re`.
_MARKS = "\u0300-\u036f\u0591-\u05c7\u0610-\u061a\u064b-\u065f\u0900-\u0dff"
_WORD = re.compile(rf"[{_UNSPACED}]+|(?:[^\W_{_UNSPACED}]+|[{_MARKS}]+)+")
_UNSPACED_START = re.compile(rf"[{_UNSPACED}]")

Report = Callable[[int, int], None]


def words(text: str) -> list[str]:
    """The words of a text as BM25 counts them: folded in case and width, stems of English ones.

    >>> words("The clocks' REPAIRED rotary_dim"), words("東京の天気")
    (['the', 'clock', 'repair', 'rotari', 'dim'], ['東京', '京の', 'の天', '天気'])
    """
    return _stems(_raw_words(text))


def query_words(text: str) -> list[str]:
    """The words of a question, without those that every text has, if others remain.

    >>> query_words("What does she repair?"), query_words("who is it")
    (['repair'], ['who', 'is', 'it'])
    """
    asked = _raw_words(text)
    return _stems([word for word in asked if word not in _COMMON] or asked)


# Without them more questions find their passage (bench/retrieval_recall.py).
_COMMON = frozenset(
    re.findall(
        r"\w+",
        "a an and are as at be been but by can could did do does for from had has have he her his "
        "how i if in into is it its me my no not of on or our she so such that the their them then "
        "there these they this those to was we were what when where which who whom whose why will "
        "with would you your",
    )
)


def _raw_words(text: str) -> list[str]:
    found: list[str] = []
    for word in _WORD.findall(unicodedata.normalize("NFKC", text).casefold()):
        if _UNSPACED_START.match(word):
            found += [word[n : n + 2] for n in range(len(word) - 1)] or [word]
        else:
            found.append(word)
    return found


# A stemmer is not for two threads at once, and takes longer to make than to stem a passage.
_stemmers = threading.local()


def _stems(found: list[str]) -> list[str]:
    if not hasattr(_stemmers, "english"):
        import Stemmer

        _stemmers.english = Stemmer.Stemmer("english")
    return list(_stemmers.english.stemWords(found))


def best(scores: NDArray[np.float32], limit: int) -> list[int]:
    """The places of the ``limit`` highest scores, of equals the first first."""
    return [int(place) for place in np.argsort(-scores, kind="stable")[:limit]]


def fuse(rankings: Sequence[Sequence[int]]) -> list[tuple[int, float]]:
    """Reciprocal rank fusion: places with their scores, the best one first, of equals the first.

    >>> [place for place, _ in fuse([[3, 1, 2], [1, 4]])]
    [1, 3, 4, 2]
    """
    scores: dict[int, float] = {}
    for ranking in rankings:
        for rank, place in enumerate(ranking, 1):
            scores[place] = scores.get(place, 0.0) + 1 / (FUSION + rank)
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))


class Bm25:
    """BM25 over texts (Lucene's variant, k1 1.5, b 0.75)."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @classmethod
    def build(cls, texts: Sequence[str], report: Report | None = None) -> Bm25:
        """report: called with (texts done, texts in all)."""
        model = _bm25s().BM25()
        counted = []
        for number, text in enumerate(texts):
            if report and number % 1000 == 0:
                report(number, len(texts))
            counted.append(words(text))
        if not any(counted):  # nothing but punctuation, which bm25s cannot index
            return cls(None)
        model.index(counted, show_progress=False)
        return cls(model)

    def save(self, folder: Path) -> None:
        folder.mkdir()
        if self._model is not None:
            self._model.save(str(folder), show_progress=False)

    @classmethod
    def load(cls, folder: Path) -> Bm25:
        if not any(folder.iterdir()):
            return cls(None)
        return cls(_bm25s().BM25.load(str(folder), show_progress=False))

    def search(self, query: str, limit: int) -> list[tuple[int, float]]:
        """(place, score) of texts that share a word with the query, the best one first."""
        known = self._model.vocab_dict if self._model is not None else {}
        asked = [word for word in query_words(query) if word in known]
        if not asked:
            return []
        scores = self._model.get_scores(asked)
        return [(place, float(scores[place])) for place in best(scores, limit) if scores[place] > 0]


def _bm25s() -> Any:
    import bm25s

    logging.getLogger("bm25s").setLevel(logging.WARNING)  # it sets DEBUG itself
    return bm25s


class Embeddings:
    """Cosine similarity to a query. vectors: float32 [texts, dimensions], of length 1 (or 0)."""

    def __init__(self, vectors: NDArray[np.float32]) -> None:
        self.vectors = vectors

    @classmethod
    def build(cls, texts: Sequence[str], report: Report | None = None) -> Embeddings:
        """report: called with (texts done, texts in all)."""
        parts = []
        for start in range(0, len(texts), _BATCH):
            if report:
                report(start, len(texts))
            parts.append(embed(list(texts[start : start + _BATCH])))
        return cls(np.concatenate(parts))

    def save(self, file: Path) -> None:
        np.save(file, self.vectors, allow_pickle=False)

    @classmethod
    def load(cls, file: Path) -> Embeddings:
        return cls(np.load(file, allow_pickle=False))

    def search(self, query: str, limit: int) -> list[tuple[int, float]]:
        """(place, cosine) of the nearest texts, the best one first; none for a query of nothing."""
        (vector,) = embed([query])
        if not vector.any():
            return []
        scores = self.vectors @ vector
        return [(place, float(scores[place])) for place in best(scores, limit)]


def embed(texts: list[str]) -> NDArray[np.float32]:
    """float32 [texts, dimensions], each of length 1; zeros for a text without tokens.

    Raises KvspanError if the extra is not installed.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        vectors = np.asarray(_embedder().embed(texts, norm=True), dtype=np.float32)
    return np.nan_to_num(vectors)


_model: Any = None
_loading = threading.Lock()  # what is done to the handlers below is not for two threads at once


def _embedder() -> Any:
    with _loading:
        return _load_embedder()


def _load_embedder() -> Any:
    global _model
    if _model is None:
        # Importing it turns on the log lines of every library; that is not its business.
        root = logging.getLogger()
        handlers, level = list(root.handlers), root.level
        try:
            with importing("embedding"):
                import wordllama
        finally:
            root.handlers[:] = handlers
            root.setLevel(level)
        folder = Path(wordllama.__file__).parent
        try:  # it looks for its own tokenizer in the wrong folder, unless told
            _model = wordllama.WordLlama.load(cache_dir=folder, disable_download=True)
        except Exception as error:
            raise KvspanError(f"the embedding model cannot be loaded: {error}") from error
    return _model


def embeddings_installed() -> bool:
    """Whether the extra is there."""
    return find_spec("wordllama") is not None


def embedding_version() -> str:
    """Which weights: part of an index's key. Raises KvspanError if the extra is not installed."""
    from importlib.metadata import version

    _embedder()
    return f"{EMBEDDING_MODEL} {version('wordllama')}"
