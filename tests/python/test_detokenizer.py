"""Text as it comes: whole characters, in linear time, the same in pieces as at once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kvspan.engine.detokenizer import Detokenizer
from tiny_models import word_tokenizer

TEXTS = [
    "plain words, then more words",
    "naïve café: façade",
    "日本語とEmoji 🙂👩\u200d👧 mixed",
    "Ω≈ç√∫µ",
]


def byte_level() -> PreTrainedTokenizerFast:
    """Bytes and a few merges: most characters beyond ASCII are split over tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS[:2] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def byte_fallback() -> PreTrainedTokenizerFast:
    """As SentencePiece has it: words with a mark for the blank, and <0xNN> for what it lacks."""
    vocab = {"<unk>": 0, "▁": 1, "▁plain": 2, "▁words": 3, ",": 4, "a": 5, "b": 6}
    vocab |= {f"<0x{byte:02X}>": 7 + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>")


class Slow:
    """A tokenizer without a stream of its own: bytes of UTF-8."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return bytes(ids).decode("utf-8", "replace")


TOKENIZERS: dict[str, Any] = {
    "byte-level": byte_level(),
    "byte-fallback": byte_fallback(),
    "words": word_tokenizer(),
    "slow": Slow(),
}


def streamed(tokenizer: Any, ids: list[int], stop: tuple[str, ...] = ()) -> tuple[str, list[str]]:
    pieces: list[str] = []
    detokenizer = Detokenizer(tokenizer, pieces.append, stop)
    for token_id in ids:
        if detokenizer.push(token_id):
            break
    return detokenizer.finish(), pieces


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", ["byte-level", "slow"])
def test_characters_come_whole(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = list(text.encode()) if name == "slow" else tokenizer(text).input_ids
    whole, pieces = streamed(tokenizer, ids)
    assert whole == "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert len(pieces) > 3


def test_a_character_of_four_tokens() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer("🙂").input_ids
    assert len(ids) == 4
    detokenizer = Detokenizer(tokenizer, (pieces := []).append)
    for token_id in ids:
        assert not pieces
        detokenizer.push(token_id)
    assert pieces == ["🙂"]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60)
@given(data=st.data())
def test_any_tokens_give_the_same_text_in_pieces_as_at_once(name: str, data: Any) -> None:
    """Also such that are no characters, which models do say; and what ends in half of one."""
    tokenizer = TOKENIZERS[name]
    size = 256 if name == "slow" else len(tokenizer)
    token = st.integers(0, size - 1).map(lambda token_id: [token_id])
    if name == "byte-fallback":  # see the next test
        character = st.characters(codec="utf-8").map(lambda c: [7 + b for b in c.encode()])
        token = character | st.integers(0, 6).map(lambda token_id: [token_id])
    ids = [token_id for tokens in data.draw(st.lists(token, max_size=40)) for token_id in tokens]
    whole, pieces = streamed(tokenizer, ids)
    assert whole == tokenizer.decode(ids, skip_special_tokens=True)
    assert "".join(pieces) == whole


def test_text_that_later_tokens_change() -> None:
    """With byte fallback a run of bytes is text only if all of it is: what was shown was wrong.

    The text is that of all tokens; the stream goes on with what comes.
    """
    whole, pieces = streamed(TOKENIZERS["byte-fallback"], [7 + ord("x"), 7 + 0x80, 2])
    assert whole == "\ufffd\ufffd plain"
    assert pieces == ["x", "plain"]


def test_a_stop_text_that_ends_in_a_split_character() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    text, pieces = streamed(tokenizer, tokenizer("words 🙂 more").input_ids, ("s 🙂", "never"))
    assert text == "word" == "".join(pieces)


def test_an_answer_that_ends_in_half_a_character() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer("a🙂").input_ids[:-1]
    text, pieces = streamed(tokenizer, ids)
    assert pieces[0] == "a" and text == "".join(pieces) == "a\ufffd"


def test_no_token_is_decoded_for_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole text is decoded once, at the end, and stop texts are looked for in what is new."""
    tokenizer = byte_level()
    decode, calls = tokenizer.decode, []

    def counted(ids: list[int], **options: Any) -> str:
        calls.append(len(ids))
        return decode(ids, **options)

    monkeypatch.setattr(tokenizer, "decode", counted)
    ids = tokenizer(" ".join(TEXTS) * 20).input_ids
    text, pieces = streamed(tokenizer, ids, ("not in there",))
    assert calls == [len(ids)]
    assert "".join(pieces) == text
