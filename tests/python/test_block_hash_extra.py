"""Extra ranges, field case 13 and the xxh3-128 mode, against the twin in reference.py."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from hash_strategies import IMAGES, ROOT, SPAN_ROOT, Prompt, make_chain, prompts
from kvspan import reference
from kvspan.ops import (
    ExtraRange,
    TokenStore,
    built_with_xxhash,
    digest_fields,
    sha256_isas,
)

BLOCK_SIZES = st.sampled_from([1, 2, 3, 16, 17])
CAT, DOG, _ = IMAGES


def keys_of(tokens: Any, spans: Any = (), extra: Any = (), **options: Any) -> list[bytes]:
    return Prompt(list(tokens), spans, extra).extend(make_chain(**options))


def twin(prompt: Prompt, block_size: int, anchored: bool, **options: Any) -> Any:
    return reference.block_keys(
        prompt.tokens,
        block_size,
        root=ROOT,
        span_root=SPAN_ROOT,
        anchored=anchored,
        spans=prompt.spans,
        extra=prompt.extra,
        **options,
    )


@given(data=st.data(), block_size=BLOCK_SIZES, anchored=st.booleans())
def test_twin(data: st.DataObject, block_size: int, anchored: bool) -> None:
    prompt = data.draw(prompts(block_size))
    expected, digest = twin(prompt, block_size, anchored)
    for isa in sha256_isas():
        chain = make_chain(block_size, anchored=anchored, isa=isa)
        assert prompt.extend(chain) == expected, isa
        assert chain.digest == digest, isa


@given(data=st.data(), block_size=BLOCK_SIZES, cut=st.floats(0, 1))
def test_a_prompt_in_two_calls(data: st.DataObject, block_size: int, cut: float) -> None:
    """As two calls or as one: images of the unfinished block in between are remembered."""
    chain, whole = make_chain(block_size), make_chain(block_size)
    one = data.draw(prompts(block_size))
    two = data.draw(prompts(block_size, start=len(one.tokens)))
    keys = one.extend(chain) + two.extend(chain)
    both = Prompt(one.tokens + two.tokens, one.spans + two.spans, one.extra + two.extra)
    assert both.extend(whole) == keys
    assert whole.digest == chain.digest


class TestFieldCase13:
    """Equal tokens that stand for different things share no keys."""

    TEXT, PLACEHOLDER = list(range(8)), [99] * 8

    def with_image(self, image: bytes, start: int = 8, **options: Any) -> list[bytes]:
        """Keys of: two blocks of text, an image of six tokens among placeholders, text."""
        tokens = self.TEXT + self.PLACEHOLDER + self.TEXT
        return keys_of(tokens, extra=[ExtraRange(start, start + 6, image)], **options)

    def test_different_images_with_equal_placeholders(self) -> None:
        cat, dog = self.with_image(CAT), self.with_image(DOG)
        assert cat[:2] == dog[:2]  # the text before
        assert not set(cat[2:]) & set(dog[2:])
        assert not set(cat[2:]) & set(keys_of(self.TEXT + self.PLACEHOLDER + self.TEXT))

    def test_the_same_image_at_another_offset(self) -> None:
        """Both offsets overlap the same two blocks."""
        assert not set(self.with_image(CAT, start=8)[2:]) & set(self.with_image(CAT, start=9)[2:])

    def test_the_same_image_with_another_length(self) -> None:
        tokens = self.TEXT + self.PLACEHOLDER
        long, short = (keys_of(tokens, extra=[(8, end, CAT)]) for end in (16, 15))
        assert not set(long[2:]) & set(short[2:])

    def test_which_of_two_images_comes_first(self) -> None:
        tokens = self.PLACEHOLDER
        one = keys_of(tokens, extra=[(0, 2, CAT), (2, 4, DOG)])
        two = keys_of(tokens, extra=[(0, 2, DOG), (2, 4, CAT)])
        joined = keys_of(tokens, extra=[(0, 4, digest_fields("mm", CAT, DOG))])
        assert not set(one) & set(two)
        assert not set(one) & set(joined)

    @pytest.mark.parametrize("anchored", [True, False])
    def test_a_span_with_an_image_is_found_wherever_it_stands(self, anchored: bool) -> None:
        """Same span, other placement: same keys. Other image: none in common."""

        def span_keys(image: bytes, before: int) -> list[bytes]:
            tokens = self.TEXT + self.TEXT * before + self.PLACEHOLDER
            start = len(tokens) - 8
            spans = [(8, start), (start, start + 8)]
            extra = [(start + 1, start + 7, image)]
            keys = keys_of(tokens, spans, extra, anchored=anchored)
            return keys[-2:]

        assert span_keys(CAT, 0) == span_keys(CAT, 1) == span_keys(CAT, 3)
        assert not set(span_keys(CAT, 1)) & set(span_keys(DOG, 1))

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            ({"lora": ("sql", 1)}, {"lora": ("sql", 2)}),
            ({"lora": ("sql", 1)}, {}),
            ({"salt": "tenant-a"}, {"salt": "tenant-b"}),
            ({"salt": "tenant-a"}, {}),
        ],
        ids=["lora-same-name-other-id", "lora-or-none", "two-salts", "salt-or-none"],
    )
    def test_lora_and_salt_separate_every_block(
        self, one: dict[str, Any], other: dict[str, Any]
    ) -> None:
        """First block, spans and what follows, images or not."""

        def keys(salt: str | None = None, lora: tuple[str, int] | None = None) -> set[bytes]:
            fields = ("model", salt, *(lora or (None, None)))
            roots = {"root": digest_fields("r", *fields), "span_root": digest_fields("s", *fields)}
            tokens = self.TEXT * 4
            return set(keys_of(tokens, [(8, 16)], [(12, 20, CAT)], **roots))

        assert len(keys(**one)) == 8
        assert keys(**one) == keys(**one)
        assert not keys(**one) & keys(**other)


def test_extra_is_folded_into_the_parent_byte_by_byte() -> None:
    (key,) = keys_of([5, 6, 7, 8], extra=[(1, 3, CAT)])
    parent = hashlib.sha256(
        b"kvspan/1 extra\0\0" + ROOT + CAT + (1).to_bytes(8, "little") + (2).to_bytes(8, "little")
    ).digest()
    tokens = np.array([5, 6, 7, 8], dtype="<u4").tobytes()
    assert key == hashlib.sha256(b"kvspan/1 block\0\0" + parent + tokens).digest()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ([(8, 4, CAT)], r"extra\[0\]: expected start <= end, got \(8, 4\)"),
        ([(0, 9, CAT)], r"extra\[0\]: expected a range within the tokens added, \[0, 8\), got"),
        ([(-1, 2, CAT)], r"extra\[0\]: expected a range within the tokens added"),
        ([(0, 4, CAT), (3, 5, DOG)], r"extra\[1\]: expected sorted, disjoint extra: a start of at"),
        ([(0, 4, CAT), (4, 5, b"dog")], r"extra\[1\]\.digest: expected 32 bytes, got 3"),
    ],
    ids=["reversed", "late", "early", "overlap", "short-digest"],
)
def test_bad_extra(extra: Any, message: str) -> None:
    chain = make_chain()
    with pytest.raises(ValueError, match=message):
        chain.extend(np.arange(8), extra=extra)
    assert chain.num_tokens == 0


@pytest.mark.parametrize(
    "extra",
    [[(0, 4)], [(0, 4, "cat")], [(0.5, 4, CAT)], [(0, 2**70, CAT)], [4], 4, [None]],
    ids=["pair", "str-digest", "float", "huge", "no-rows", "no-sequence", "none"],
)
def test_bad_extra_containers(extra: Any) -> None:
    with pytest.raises(TypeError, match=r"extra: expected a sequence of \(start, end, digest\)"):
        keys_of(range(8), extra=extra)


def xxh3_key(message: bytes) -> bytes:
    return xxhash.xxh3_128_digest(message) + b"kvspan/1 xxh3".ljust(16, b"\0")


if built_with_xxhash():

    class TestTokenStore:
        """The comparison itself is tested in C++, where collisions can be forced."""

        @given(data=st.data(), block_size=BLOCK_SIZES, anchored=st.booleans())
        def test_twin(self, data: st.DataObject, block_size: int, anchored: bool) -> None:
            prompt = data.draw(prompts(block_size))
            chain = make_chain(block_size, anchored=anchored, store=TokenStore())
            expected, digest = twin(prompt, block_size, anchored, digest=xxh3_key)
            assert prompt.extend(chain) == expected
            # With nothing hashed yet, the digest is the caller's root.
            assert chain.digest == digest

        def test_off_by_default(self) -> None:
            assert not any(key.endswith(xxh3_key(b"")[16:]) for key in keys_of(range(64)))

        def test_counts_and_clear(self) -> None:
            store = TokenStore()
            chain = make_chain(store=store)
            chain.extend(np.arange(8))
            make_chain(store=store).extend(np.arange(8))  # seen before
            assert (store.num_entries, store.num_bytes) == (2, 2 * (16 + 32 + 16))
            assert store.num_collisions == 0
            store.clear()
            assert store.num_entries == 0
            with pytest.raises(ValueError, match="cleared since; start a new chain"):
                chain.extend(np.arange(8))
            assert len(make_chain(store=store).extend(np.arange(8))) == 2

        def test_a_chain_keeps_its_store_alive(self) -> None:
            chain = make_chain(store=TokenStore())
            assert [k.tobytes() for k in chain.extend(np.arange(400))] == keys_of(
                range(400), store=TokenStore()
            )

else:

    def test_a_build_without_xxhash_says_so() -> None:
        with pytest.raises(RuntimeError, match="built without xxHash: install its header"):
            TokenStore()
