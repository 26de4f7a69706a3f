"""Boundaries among tokens: what is written is what is read, and nothing else is a boundary."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvspan.engine import GenerateRequest
from kvspan.engine.local import LocalEngine
from kvspan.errors import UsageError
from kvspan.parentheses import Parentheses
from serving import ServerProcess
from tiny_models import VOCAB, word_tokenizer

MARKS = Parentheses(pad=0, start=91, sibling=92, end=93)
tokens = st.lists(st.integers(1, 90), max_size=40)


@given(
    anchor=tokens,
    spans=st.lists(st.lists(st.integers(1, 90), min_size=1, max_size=40), min_size=1, max_size=5),
    suffix=tokens,
    block_size=st.sampled_from([1, 2, 16, 32]),
)
def test_what_is_written_is_what_is_read(
    anchor: list[int], spans: list[list[int]], suffix: list[int], block_size: int
) -> None:
    marked = MARKS.encode(anchor, spans, suffix, block_size)
    layout = MARKS.decode(marked, block_size)
    assert layout is not None and layout.num_tokens == len(marked)
    assert len(layout.spans) == len(spans) and layout.block_size == block_size

    def content(lo: int, hi: int) -> list[int]:
        found = layout.token_ids[lo:hi].tolist()
        assert hi == layout.num_tokens or (hi - lo) % block_size == 0
        return [token for token in found if token != MARKS.pad]

    assert content(0, layout.anchor_len) == anchor
    assert [content(lo, hi) for lo, hi in layout.spans] == spans
    assert content(layout.spans[-1][1], layout.num_tokens) == suffix
    # The model reads padding where a boundary stood, and all else as it was sent.
    differing = np.flatnonzero(layout.token_ids != np.asarray(marked))
    assert set(differing % block_size) == {0} and not layout.token_ids[differing].any()
    assert len(differing) == len(spans) + 1
    # Boundaries among the tokens are the ones beside them.
    full = MARKS.decode(marked, block_size, "full")
    assert full is not None and full.spans == ()
    assert np.array_equal(full.token_ids, layout.token_ids)


@given(st.data(), st.sampled_from([2, 4, 16]))
def test_only_the_first_token_of_a_block_is_a_boundary(
    data: st.DataObject, block_size: int
) -> None:
    marked = MARKS.encode(range(1, 20), [range(20, 50), range(50, 55)], range(55, 60), block_size)
    plain = MARKS.decode(marked, block_size)
    inside = [i for i in range(len(marked)) if i % block_size]
    chosen = data.draw(st.lists(st.sampled_from(inside), unique=True))
    for i in chosen:
        marked[i] = data.draw(st.sampled_from([MARKS.start, MARKS.sibling, MARKS.end]))
    layout = MARKS.decode(marked, block_size)
    assert layout is not None and plain is not None and layout.spans == plain.spans
    assert [layout.token_ids[i] for i in chosen] == [marked[i] for i in chosen]


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([91, 1, 2, 3, 91, 1, 2, 3, 93, 1], "token 4: a start token inside a group of spans"),
        ([1, 1, 1, 1, 92, 1, 2, 3], "token 4: a sibling token outside a group of spans"),
        ([91, 1, 1, 1, 93, 1, 2, 3, 93], "token 8: an end token outside a group of spans"),
        ([1, 1, 1, 1, 91, 1, 2, 3], "open at token 4 has no end token"),
    ],
)
def test_boundaries_that_do_not_match(ids: list[int], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        MARKS.decode(ids, 4)


def test_several_groups_with_text_between() -> None:
    ids = [1, 1, 91, 5, 93, 2, 91, 6, 92, 7, 93]
    layout = MARKS.decode(ids, 2)
    assert layout is not None and layout.spans == ((2, 4), (6, 8), (8, 10))
    assert [kind for kind, _, _ in layout.segments()] == [
        "anchor", "span", "text", "span", "span", "text",
    ]  # fmt: skip


def test_ids_that_text_can_become_are_refused() -> None:
    tokenizer = word_tokenizer()
    special = tokenizer.convert_tokens_to_ids("<turn>")
    Parentheses(9, special, VOCAB, VOCAB + 1).check(tokenizer, VOCAB + 2)
    for marks, words in (
        (Parentheses(9, 20, VOCAB, VOCAB + 1), "start: ordinary text can become token 20"),
        (Parentheses(9, special, 3, VOCAB + 1), "sibling: ordinary text can become token 3"),
        (Parentheses(9, special, VOCAB, VOCAB + 2), f"end: expected an id below {VOCAB + 2}"),
    ):
        with pytest.raises(UsageError, match=words):
            marks.check(tokenizer, VOCAB + 2)
    with pytest.raises(UsageError, match="four different token ids"):
        Parentheses(1, 2, 2, 3)
    for text in ("1,2,3", "a,b,c,d", ""):
        with pytest.raises(UsageError, match="PAD,START,SIBLING,END"):
            Parentheses.parse(text)
    with pytest.raises(UsageError, match="suffix holds the boundary token 93"):
        MARKS.encode([1], [[2]], [93], 4)


@pytest.mark.parametrize("unknown", ["<unk>", {"content": "<unk>"}], ids=["text", "object"])
def test_ids_that_are_fine_are_told_by_the_tokenizers_file(
    tiny_folder: Path, tmp_path: Path, unknown: object
) -> None:
    tokenizer = word_tokenizer()
    config = json.loads((tiny_folder / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "unk_token": unknown}))
    assert not MARKS.is_fine_by(tmp_path, VOCAB), "there is no tokenizer.json"
    (tmp_path / "tokenizer.json").write_bytes((tiny_folder / "tokenizer.json").read_bytes())
    found = []
    for ids in itertools.permutations((0, 2, 3, 20, VOCAB, VOCAB + 5), 4):
        marks = Parentheses(*ids)
        fine = True
        try:
            marks.check(tokenizer, VOCAB + 5)
        except UsageError:
            fine = False
        assert marks.is_fine_by(tmp_path, VOCAB + 5) == fine, ids
        found.append(fine)
    assert any(found) and not all(found)
    (tmp_path / "tokenizer.json").write_text("{")
    assert not Parentheses(5, 0, 2, 4).is_fine_by(tmp_path, VOCAB)


def test_on_the_local_server(tiny_folder: Path) -> None:
    """Three special tokens of the tokenizer stand for the boundaries."""
    marks = Parentheses(5, 0, 2, 4)
    spans = [list(range(20, 50)), list(range(60, 70))]
    with LocalEngine.open(str(tiny_folder), kv_cache_gib=0.02) as engine:
        marked = marks.encode(list(range(7, 20)), spans, [30, 31], 16)
        layout = marks.decode(marked, 16)
        assert layout is not None
        expected = engine.run_layout(layout, GenerateRequest((), temperature=0.0, max_tokens=5))
    body = {"model": "tiny", "prompt": marked, "max_tokens": 5, "temperature": 0}
    with ServerProcess(tiny_folder, "--parentheses", "5,0,2,4") as server:
        reply = server.post("/v1/completions", {**body, "kvspan": {"report": True}})
        (choice,) = reply.json["choices"]
        assert choice["text"] == expected.text and choice["kvspan"]["reuse"]["spans"] == 2
        reply = server.post("/v1/completions", {**body, "prompt": marked[:32]})
        assert reply.status == 400 and "has no end token" in reply.error["message"]
