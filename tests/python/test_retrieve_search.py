"""Words, BM25, embeddings and their fusion."""

# ruff: noqa: RUF001  letters of other scripts are what is tested

from __future__ import annotations

import logging
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvspan.demo.passages import load
from kvspan.retrieve import search
from kvspan.retrieve.search import Bm25, Embeddings, best, fuse, query_words, words

TEXTS = ["Tomas repairs the clocks in Oldtown.", "Lena keeps bees.", "Bees, bees and honey.", "..."]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Bees' BEES bee", ["bee", "bee", "bee"]),
        ("ﬁne ＡＢＣ", ["fine", "abc"]),
        ("rotary_dim=64, v1.2", ["rotari", "dim", "64", "v1", "2"]),
        ("naïve Straße ΣΟΦΟΣ", ["naïv", "strass", "σοφοσ"]),
        ("東京 x 水", ["東京", "x", "水"]),
        ("ภาษา", ["ภา", "าษ", "ษา"]),
        ("हिन्दी में", ["हिन्दी", "में"]),
        ("!?… _ ", []),
    ],
)  # fmt: skip
def test_words(text: str, expected: list[str]) -> None:
    assert words(text) == expected


def test_common_words_count_if_there_are_no_others() -> None:
    assert query_words("Who is the beekeeper?") == ["beekeep"]
    assert query_words("Who is it?") == ["who", "is", "it"]


def test_bm25_is_its_formula() -> None:
    texts = ["bees clocks", "bees bees mill", "mill", "honey"]
    found = dict(Bm25.build(texts).search("bees", 9))
    lengths = [2, 3, 1, 1]
    mean = sum(lengths) / 4
    idf = math.log(1 + (4 - 2 + 0.5) / (2 + 0.5))
    expected = {}
    for place, count in ((0, 1), (1, 2)):
        weight = count / (count + 1.5 * (1 - 0.75 + 0.75 * lengths[place] / mean))
        expected[place] = idf * weight
    assert found == pytest.approx(expected, rel=1e-5)


def test_bm25_finds_what_shares_words(tmp_path: Path) -> None:
    built = Bm25.build(TEXTS)
    built.save(tmp_path / "bm25")
    for bm25 in (built, Bm25.load(tmp_path / "bm25")):
        assert [place for place, _ in bm25.search("who is keeping a bee?", 9)] == [1, 2]
        assert [place for place, _ in bm25.search("who is keeping a bee?", 1)] == [1]
        assert bm25.search("zebras", 9) == [] == bm25.search("", 9) == bm25.search("...", 9)


@pytest.mark.parametrize("texts", [["..."], ["a"], ["same", "same"]])
def test_small_corpora(texts: list[str], tmp_path: Path) -> None:
    Bm25.build(texts).save(tmp_path / "bm25")
    bm25 = Bm25.load(tmp_path / "bm25")
    assert [place for place, _ in bm25.search(texts[0], 5)] == [
        place for place, text in enumerate(texts) if text != "..."
    ]


def test_equally_good_texts_come_in_their_order() -> None:
    found = Bm25.build(["x bees", "y bees", "z bees", "x"] * 5).search("bees", 99)
    assert [place for place, _ in found] == [n for n in range(20) if n % 4 != 3]
    assert best(np.array([1, 3, 2, 3], np.float32), 3) == [1, 3, 2]


@given(st.lists(st.lists(st.integers(0, 9), unique=True, max_size=9), max_size=3))
def test_fusion_is_reciprocal_ranks(rankings: list[list[int]]) -> None:
    scores = dict(fuse(rankings))
    assert set(scores) == {place for ranking in rankings for place in ranking}
    for place, score in scores.items():
        ranks = [ranking.index(place) + 1 for ranking in rankings if place in ranking]
        assert score == pytest.approx(sum(1 / (search.FUSION + rank) for rank in ranks))
    assert list(scores.items()) == sorted(scores.items(), key=lambda item: (-item[1], item[0]))


def test_embeddings_find_what_is_meant(tmp_path: Path) -> None:
    texts = ["The doctor treats patients in the hospital.", "The chef cooks soup.", "Stocks fell."]
    built = Embeddings.build(texts)
    assert built.vectors.dtype == np.float32 and built.vectors.shape[0] == 3
    assert np.linalg.norm(built.vectors, axis=1) == pytest.approx(np.ones(3), rel=1e-5)
    built.save(tmp_path / "vectors.npy")
    for embeddings in (built, Embeddings.load(tmp_path / "vectors.npy")):
        for query, place in (("physician", 0), ("kitchen meal", 1), ("finance market", 2)):
            assert embeddings.search(query, 3)[0][0] == place
        assert embeddings.search("", 3) == []


def test_a_text_is_embedded_the_same_in_any_batch() -> None:
    """Padding is not part of it, or two indexes of the same chunk would differ."""
    alone = search.embed(["bees"])
    beside = search.embed(["bees", "a much longer text about clocks and their repair " * 9])
    assert np.allclose(alone[0], beside[0], atol=1e-6)


def test_the_embedding_model_leaves_logging_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    before = list(root.handlers), root.level
    monkeypatch.setattr(search, "_model", None)
    search.embed(["x"])
    assert (list(root.handlers), root.level) == before


def test_real_questions_find_their_passage() -> None:
    """The demo's passages: one answers each of its first questions."""
    data = load()
    bm25 = Bm25.build([passage.text for passage in data.passages])
    asked = data.questions[:16]
    first = [data.passages[bm25.search(q.question, 1)[0][0]].title for q in asked]
    assert first == [question.passage for question in asked]
