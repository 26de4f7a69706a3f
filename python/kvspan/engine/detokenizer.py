"""Turning tokens back into text as they come."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase


class Detokenizer:
    """Text of a growing token list; emits only whole characters.

    The text ends before the first of the stop texts. What may turn out to be the start of one is
    held back until that is known, so that nobody gets to see part of it. Nothing is decoded before
    it is needed, and then no token twice but by `finish`.

    cut: whether the text ends before the tokens do.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        on_text: Callable[[str], None] | None,
        stop: Sequence[str] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.on_text = on_text
        self.stop = [text for text in stop if text]
        self.token_ids: list[int] = []
        self.cut = False
        self._longest = max(map(len, self.stop), default=0)
        self._text = ""  # whole characters decoded so far
        self._emitted = 0  # characters of it that were emitted
        self._next = _stream_of(tokenizer)

    def push(self, token_id: int) -> bool:
        """Take one more token; whether the text has come to a stop text."""
        self.token_ids.append(token_id)
        if not (self.on_text or self.stop):
            return False
        new = self._next(token_id)
        if not new:
            return False
        known = len(self._text)
        self._text += new
        end = self._end(self._text, known)
        self.cut = end is not None
        if not self.cut:
            self._emit(self._text, len(self._text) - self._undecided(self._text))
        return self.cut

    def finish(self) -> str:
        """The text; what has not been emitted of it is."""
        text = self._decode()
        end = self._end(text, 0)
        self.cut = end is not None
        text = text[:end]
        # Of a tokenizer whose text changes as more tokens come, the rest would make no sense.
        if text.startswith(self._text[: self._emitted]):
            self._emit(text, len(text))
        return text

    def _decode(self) -> str:
        text = self.tokenizer.decode(self.token_ids, skip_special_tokens=True)
        return text if isinstance(text, str) else "".join(text)

    def _end(self, text: str, known: int) -> int | None:
        """Where the first stop text starts, if one ends after the first ``known`` characters."""
        first = max(0, known - self._longest + 1)
        starts = [at for stop in self.stop if (at := text.find(stop, first)) >= 0]
        return min(starts, default=None)

    def _undecided(self, text: str) -> int:
        """Length of the longest end of the text that a stop text starts with."""
        return max(
            (
                length
                for stop in self.stop
                for length in range(1, min(len(stop), len(text) + 1))
                if text.endswith(stop[:length])
            ),
            default=0,
        )

    def _emit(self, text: str, end: int) -> None:
        if self.on_text and end > self._emitted:
            piece, self._emitted = text[self._emitted : end], end
            self.on_text(piece)


def _stream_of(tokenizer: PreTrainedTokenizerBase) -> Callable[[int], str]:
    """Gets a token; what the text grows by: nothing until its characters are whole."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if isinstance(backend, Tokenizer) and not tokenizer.clean_up_tokenization_spaces:
        stream = DecodeStream(skip_special_tokens=True)

        def step(token_id: int) -> str:
            nonlocal stream
            try:
                return stream.step(backend, token_id) or ""
            except Exception:  # it gives up where a token changes the text before: go on anew
                stream = DecodeStream(skip_special_tokens=True)
                return stream.step(backend, token_id) or ""

        return step
    ids: list[int] = []
    known = ""

    def decode_all(token_id: int) -> str:
        nonlocal known
        ids.append(token_id)
        text = str(tokenizer.decode(ids, skip_special_tokens=True))
        if text.endswith("\ufffd") or not text.startswith(known):
            return ""
        new, known = text[len(known) :], text
        return new

    return decode_all
