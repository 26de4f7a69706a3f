"""Block keys against the hashlib twin, and what they must and must not depend on."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvspan import reference
from kvspan.ops import BlockChain, digest_fields, sha256_isas

ROOT = digest_fields("test-root", "model")
SPAN_ROOT = digest_fields("test-span", "model")


def keys_of(
    tokens: Any,
    spans: Sequence[tuple[int, int]] = (),
    *,
    block_size: int = 4,
    root: bytes = ROOT,
    span_root: bytes = SPAN_ROOT,
    anchored: bool = True,
    isa: str = "auto",
) -> list[bytes]:
    chain = BlockChain(block_size, root=root, span_root=span_root, anchored=anchored, isa=isa)
    keys = chain.extend(np.asarray(tokens, dtype=np.int64), spans)
    assert keys.dtype == np.uint8
    assert keys.shape == (len(tokens) // block_size, 32)
    return [key.tobytes() for key in keys]


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, list[int], list[tuple[int, int]]]:
    """A block size, tokens, and spans between some of the block boundaries, a few of them empty."""
    block_size = draw(st.sampled_from([1, 2, 3, 16, 17]))
    num_blocks = draw(st.integers(0, 12))
    cuts = draw(st.lists(st.integers(0, num_blocks), max_size=8).map(sorted))
    pairs = list(zip(cuts[::2], cuts[1::2], strict=False))
    spans = [(start * block_size, end * block_size) for start, end in pairs]
    size = num_blocks * block_size + draw(st.integers(0, block_size - 1))
    tokens = draw(st.lists(st.integers(0, 2**32 - 1), min_size=size, max_size=size))
    return block_size, tokens, spans


@given(prompt=prompts(), anchored=st.booleans(), isa=st.sampled_from(sha256_isas()))
def test_twin(
    prompt: tuple[int, list[int], list[tuple[int, int]]], anchored: bool, isa: str
) -> None:
    block_size, tokens, spans = prompt
    chain = BlockChain(block_size, root=ROOT, span_root=SPAN_ROOT, anchored=anchored, isa=isa)
    keys = chain.extend(np.array(tokens, dtype=np.int64), spans)
    expected, digest = reference.block_keys(
        tokens, block_size, root=ROOT, span_root=SPAN_ROOT, anchored=anchored, spans=spans
    )
    assert [key.tobytes() for key in keys] == expected
    assert chain.digest == digest
    assert chain.num_tokens == len(tokens)


@given(prompt=prompts(), data=st.data())
def test_any_split_into_calls(
    prompt: tuple[int, list[int], list[tuple[int, int]]], data: st.DataObject
) -> None:
    block_size, tokens, spans = prompt
    expected = keys_of(tokens, spans, block_size=block_size)
    # A call may end anywhere but inside a span.
    places = [i for i in range(len(tokens) + 1) if not any(a < i < b for a, b in spans)]
    cuts = sorted(data.draw(st.lists(st.sampled_from(places), max_size=5)))
    chain = BlockChain(block_size, root=ROOT, span_root=SPAN_ROOT, anchored=True)
    keys: list[bytes] = []
    for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        inside = [(a, b) for a, b in spans if a < b and start <= a and b <= end]
        part = np.array(tokens[start:end], dtype=np.int64)
        keys += [key.tobytes() for key in chain.extend(part, inside)]
    assert keys == expected


def test_token_by_token_as_in_decode() -> None:
    chain = BlockChain(4, root=ROOT, span_root=SPAN_ROOT, anchored=True)
    shapes = [chain.extend(np.array([i], dtype=np.int32)).shape[0] for i in range(10)]
    assert shapes == [0, 0, 0, 1, 0, 0, 0, 1, 0, 0]


@pytest.mark.parametrize(
    "make",
    [
        lambda x: np.array(x, dtype=np.int32),
        lambda x: np.array(x, dtype=np.int64),
        lambda x: np.repeat(np.array(x, dtype=np.int32), 3)[::3],
        lambda x: np.array(x[::-1], dtype=np.int64)[::-1],
        lambda x: torch.tensor(x, dtype=torch.int32),
        lambda x: torch.tensor(x),
        lambda x: torch.tensor(x).repeat_interleave(2)[::2],
    ],
    ids=["int32", "int64", "strided", "reversed", "torch-int32", "torch-int64", "torch-strided"],
)
def test_token_containers(make: Any) -> None:
    tokens = list(range(100, 123))
    chain = BlockChain(4, root=ROOT, span_root=SPAN_ROOT, anchored=True)
    assert [k.tobytes() for k in chain.extend(make(tokens))] == keys_of(tokens)


def test_read_only_tokens() -> None:
    tokens = np.arange(8, dtype=np.int32)
    tokens.setflags(write=False)
    chain = BlockChain(4, root=ROOT, span_root=SPAN_ROOT, anchored=True)
    assert [k.tobytes() for k in chain.extend(tokens)] == keys_of(range(8))


class TestSpans:
    """A system message of 8 tokens, three passages, a question."""

    def setup_method(self) -> None:
        self.anchor = list(range(8))
        self.a = [100 + i for i in range(8)]
        self.b = [200 + i for i in range(12)]
        self.c = [300 + i for i in range(4)]
        self.question = [7, 8, 9, 10]

    def keys(
        self, *passages: list[int], anchored: bool = True, anchor: list[int] | None = None
    ) -> tuple[list[bytes], list[list[bytes]], list[bytes]]:
        """Keys of the anchor, of each passage, and of the question."""
        tokens = list(self.anchor if anchor is None else anchor)
        spans = []
        for passage in passages:
            spans.append((len(tokens), len(tokens) + len(passage)))
            tokens += passage
        keys = keys_of(tokens + self.question, spans, anchored=anchored)
        inside = [keys[start // 4 : end // 4] for start, end in spans]
        return keys[: spans[0][0] // 4], inside, keys[spans[-1][1] // 4 :]

    def test_position_and_company_do_not_matter(self) -> None:
        _, (a, b, c), _ = self.keys(self.a, self.b, self.c)
        _, (c_2, a_2, b_2), _ = self.keys(self.c, self.a, self.b)
        _, (b_3,), _ = self.keys(self.b)
        assert (a, b, c) == (a_2, b_2, c_2)
        assert b == b_3

    def test_what_follows_depends_on_the_order(self) -> None:
        questions = [
            self.keys(self.a, self.b)[2],
            self.keys(self.b, self.a)[2],
            self.keys(self.a)[2],
            self.keys(self.a, self.a)[2],
        ]
        assert len({tuple(q) for q in questions}) == len(questions)

    def test_anchored_spans_depend_on_the_anchor(self) -> None:
        other = [*self.anchor[:-1], 99]
        assert self.keys(self.a)[1] != self.keys(self.a, anchor=other)[1]
        assert self.keys(self.a)[1] != self.keys(self.a, anchor=[])[1]

    def test_isolated_spans_do_not(self) -> None:
        other = [*self.anchor[:-1], 99]
        isolated = self.keys(self.a, anchored=False)[1]
        assert isolated == self.keys(self.a, anchored=False, anchor=other)[1]
        assert isolated == self.keys(self.a, anchored=False, anchor=[])[1]
        assert isolated != self.keys(self.a)[1]

    def test_text_between_spans_is_no_part_of_the_anchor(self) -> None:
        tokens = [*self.anchor, *self.a, 50, 51, 52, 53, *self.a]
        keys = keys_of(tokens, [(8, 16), (20, 28)])
        assert keys[2:4] == keys[5:7]

    def test_adjacent_spans_are_not_one_span(self) -> None:
        tokens = self.anchor + self.a
        assert keys_of(tokens, [(8, 16)])[3] != keys_of(tokens, [(8, 12), (12, 16)])[3]

    def test_ordinary_prompts_never_share_keys_with_span_prompts(self) -> None:
        """Even with equal roots: only the anchor, which is computed as in any prompt, is shared."""
        tokens = self.anchor + self.a + self.b + self.question
        for span_root in (SPAN_ROOT, ROOT):
            for anchored in (True, False):
                spans = [(8, 16), (16, 28)]
                with_spans = keys_of(tokens, spans, span_root=span_root, anchored=anchored)
                ordinary = keys_of(tokens, span_root=span_root)
                assert with_spans[:2] == ordinary[:2]
                assert not set(with_spans[2:]) & set(ordinary)
                for start in (8, 16):  # nor with a prompt that begins with the span's tokens
                    assert not set(with_spans[2:]) & set(keys_of(tokens[start:]))

    def test_empty_spans_change_nothing(self) -> None:
        tokens = self.anchor + self.a
        expected = keys_of(tokens, [(8, 16)])
        assert keys_of(tokens, [(0, 0), (8, 8), (8, 16), (16, 16)]) == expected
        assert keys_of(tokens, [(4, 4)]) == keys_of(tokens)

    def test_span_at_the_very_start_and_of_one_block(self) -> None:
        assert keys_of(self.a, [(0, 8)])[0] != keys_of(self.a)[0]
        alone = keys_of(self.c, [(0, 4)], anchored=False)
        assert alone == keys_of(self.c + self.c, [(4, 8)], anchored=False)[1:]


@pytest.mark.parametrize("field", range(5), ids=["model", "salt", "lora", "mm", "scope"])
def test_every_root_field_separates_all_keys(field: int) -> None:
    """Two salts, or a LoRA of the same name with another id, share neither prefix nor span keys."""
    fields: list[str | bytes | int | None] = ["llama", "tenant-a", "adapter:1", None, "anchored"]
    others: list[str | bytes | int | None] = ["qwen", "tenant-b", "adapter:2", b"img", "isolated"]
    changed = [*fields]
    changed[field] = others[field]

    def keys(values: list[str | bytes | int | None]) -> set[bytes]:
        root, span_root = digest_fields("prefix", *values), digest_fields("span", *values)
        return set(keys_of(range(16), [(4, 12)], root=root, span_root=span_root))

    assert len(keys(fields)) == 4
    assert not keys(fields) & keys(changed)


def test_span_root_alone_separates_spans_and_what_follows() -> None:
    one = keys_of(range(16), [(4, 12)])
    two = keys_of(range(16), [(4, 12)], span_root=digest_fields("other"))
    assert one[0] == two[0]
    assert not set(one[1:]) & set(two[1:])


class TestDigestFields:
    def test_different_fields_give_different_roots(self) -> None:
        lists: list[tuple[Any, ...]] = [
            (), ("",), (b"",), (None,), (0,), ("0",), (b"0",), (False,), ("False",), ("None",),
            ("a", "bc"), ("ab", "c"), ("abc",), ("a", "b", "c"), ("a", None, "bc"), (1,), (True,),
            (-1,), (2**200,), ("a\0b",), ("é",), ("é".encode(),),
        ]  # fmt: skip
        roots = {digest_fields("d", *fields) for fields in lists}
        assert len(roots) == len(lists)
        assert all(len(root) == 32 for root in roots)

    def test_the_domain_matters_and_is_no_field(self) -> None:
        assert digest_fields("a", "b") != digest_fields("b", "a")
        assert digest_fields("a") != digest_fields("", "a")

    def test_preimage(self) -> None:
        preimage = (
            b"kvspan/1 fields\0"
            b"s" + (1).to_bytes(8, "little") + b"d"
            b"i" + (2).to_bytes(8, "little") + b"42"
            b"n" + (0).to_bytes(8, "little")
        )
        assert digest_fields("d", 42, None) == hashlib.sha256(preimage).digest()

    def test_other_types_are_refused(self) -> None:
        with pytest.raises(TypeError, match="expected str, bytes, int or None, got float"):
            digest_fields("d", 1.5)  # type: ignore[arg-type]


def test_ten_thousand_spans_cost_what_their_tokens_cost() -> None:
    def seconds(num_spans: int) -> float:
        tokens = np.arange(16 * num_spans, dtype=np.int32)
        spans = [(16 * i, 16 * i + 16) for i in range(num_spans)]
        best = float("inf")
        for _ in range(5):
            chain = BlockChain(16, root=ROOT, span_root=SPAN_ROOT, anchored=True)
            start = time.perf_counter()
            assert chain.extend(tokens, spans).shape == (num_spans, 32)
            best = min(best, time.perf_counter() - start)
        return best

    # Linear is a factor of 10; quadratic would be 100.
    assert seconds(10_000) < 40 * seconds(1_000)


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([(2, 8)], r"spans\[0\]: expected multiples of block_size 4, got \(2, 8\)"),
        ([(4, 10)], r"spans\[0\]: expected multiples of block_size 4, got \(4, 10\)"),
        ([(8, 4)], r"spans\[0\]: expected start <= end, got \(8, 4\)"),
        ([(0, 8), (4, 12)], r"spans\[1\]: expected sorted, disjoint spans: a start of at least 8"),
        ([(8, 12), (0, 4)], r"spans\[1\]: expected sorted, disjoint spans: a start of at least 12"),
        ([(8, 20)], r"spans\[0\]: expected a range within the tokens added, \[0, 16\), got"),
        ([(-4, 4)], r"spans\[0\]: expected a range within the tokens added, \[0, 16\), got"),
    ],
    ids=["start-unaligned", "end-unaligned", "reversed", "overlap", "unsorted", "late", "early"],
)
def test_bad_spans(spans: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        keys_of(range(16), spans)


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        (np.array([1, -2]), ValueError, r"token_ids\[1\]: expected an id in \[0, 4294967295\]"),
        (np.array([2**32]), ValueError, r"token_ids\[0\]: .* got 4294967296"),
        (np.array([[1]]), ValueError, r"token_ids: expected shape \[num_tokens\], got \[1, 1\]"),
        (np.array([1.0]), TypeError, "token_ids: expected int32 or int64, got float64"),
        (np.array([1], np.uint8), TypeError, "token_ids: expected int32 or int64, got uint8"),
        ([1, 2], TypeError, "token_ids: expected a numpy array or a tensor .* got list"),
        ("text", TypeError, "token_ids: expected a numpy array or a tensor .* got str"),
    ],
    ids=["negative", "too-large", "2-d", "float", "uint8", "list", "str"],
)
def test_bad_tokens(tokens: Any, error: type[Exception], message: str) -> None:
    chain = BlockChain(4, root=ROOT, span_root=SPAN_ROOT, anchored=True)
    with pytest.raises(error, match=message):
        chain.extend(tokens)
    assert chain.num_tokens == 0


@pytest.mark.parametrize(
    "spans", [[(0, 4)], [[0, 4]], ((np.int64(0), np.int32(4)),), np.array([[0, 4]])], ids=repr
)
def test_span_containers(spans: Any) -> None:
    assert keys_of(range(8), spans) == keys_of(range(8), [(0, 4)])


@pytest.mark.parametrize("spans", [[(0.5, 4)], [(0, 4, 8)], [4], 4, [("0", "4")]], ids=repr)
def test_bad_span_containers(spans: Any) -> None:
    with pytest.raises(TypeError, match=r"spans: expected a sequence of \(start, end\) pairs"):
        keys_of(range(8), spans)


def test_one_chain_from_several_threads() -> None:
    """Calls are serialised: whatever their order, equal tokens give one chain of keys."""
    chain = BlockChain(4, root=ROOT, span_root=SPAN_ROOT, anchored=True)
    part = np.full(4 * 997, 7, dtype=np.int64)
    with ThreadPoolExecutor(4) as threads:
        parts = list(threads.map(lambda _: chain.extend(part), range(16)))
    found = {key.tobytes() for keys in parts for key in keys}
    assert found == set(keys_of([7] * (16 * len(part))))


def test_bad_chains() -> None:
    with pytest.raises(ValueError, match="root: expected 32 bytes, got 5"):
        BlockChain(4, root=b"short", span_root=SPAN_ROOT, anchored=True)
    with pytest.raises(ValueError, match="span_root: expected 32 bytes, got 0"):
        BlockChain(4, root=ROOT, span_root=b"", anchored=True)
    with pytest.raises(ValueError, match="block_size: expected 1 to 1048576 tokens, got 0"):
        BlockChain(0, root=ROOT, span_root=SPAN_ROOT, anchored=True)
    with pytest.raises(ValueError, match="isa: expected auto, scalar, sha_ni or armv8, got 'x'"):
        BlockChain(4, root=ROOT, span_root=SPAN_ROOT, anchored=True, isa="x")
