"""Prompts of tokens with span boundaries among them: the parenthesised encoding of the paper.

For clients that make their tokens themselves (arXiv 2511.02749, "query tokenization"): a start
token opens a group of spans, a sibling token stands between two of them, and an end token closes
the group, all of them only where they are the first token of a block; padding fills up blocks.

    anchor... pad | START span... pad | SIBLING span... pad | END question...

Boundaries belong beside the tokens (DESIGN contract 4), so decoding takes them out: the model reads
padding in their place. Nobody but the client may be able to write one, which is why ids that the
tokenizer makes of ordinary text are refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvspan.engine import Scope
from kvspan.errors import UsageError
from kvspan.layout import SpanLayout, layout_from_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PARENTHESES_HELP = (
    "token ids that stand for span boundaries in prompts of token ids (off by default)"
)


@dataclass(frozen=True)
class Parentheses:
    """The ids. pad may be any token of the model; the others must mean nothing else."""

    pad: int
    start: int
    sibling: int
    end: int

    def __post_init__(self) -> None:
        _check_ids((self.pad, self.start, self.sibling, self.end), "parentheses")

    @classmethod
    def parse(cls, text: str, where: str = "parentheses") -> Parentheses:
        """PAD,START,SIBLING,END. where: what messages call them.

        >>> Parentheses.parse("0,5,6,7")
        Parentheses(pad=0, start=5, sibling=6, end=7)
        """
        try:
            pad, start, sibling, end = (int(word) for word in text.split(","))
        except ValueError:
            raise UsageError(
                f"{where}: bad token ids", expected="PAD,START,SIBLING,END", found=repr(text)
            ) from None
        _check_ids((pad, start, sibling, end), where)
        return cls(pad, start, sibling, end)

    def is_fine_by(self, folder: Path, vocab_size: int) -> bool:
        """Whether `check` surely finds nothing, by the tokenizer's own file in a model's folder.

        That takes milliseconds, and transformers seconds to import. False: ask `check`.
        """
        try:
            from tokenizers import Tokenizer

            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            config = json.loads((folder / "tokenizer_config.json").read_bytes())
            unknown = config.get("unk_token")
            if isinstance(unknown, dict):
                unknown = unknown["content"]
        except Exception:  # the library's errors are of no kind of their own
            return False
        added = tokenizer.get_added_tokens_decoder()
        special = {id for id, token in added.items() if token.special and token.content != unknown}
        text = set(tokenizer.get_vocab(with_added_tokens=True).values()) - special
        marks = {self.start, self.sibling, self.end}
        return max(self.pad, *marks) < vocab_size and not marks & text

    def check(
        self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, where: str = "parentheses"
    ) -> None:
        """Raises UsageError for ids the model has not, or that ordinary text can become.

        Special tokens never come of text that is tokenized as text (``split_special_tokens``), nor
        do ids that the model has and the tokenizer has not.
        """
        special = set(tokenizer.all_special_ids)
        special |= {
            token_id
            for token_id, token in getattr(tokenizer, "added_tokens_decoder", {}).items()
            if token.special
        }
        known = set(tokenizer.get_vocab().values())
        for name in ("pad", "start", "sibling", "end"):
            token_id = getattr(self, name)
            if token_id >= vocab_size:
                raise UsageError(
                    f"{where}: {name}: expected an id below {vocab_size}, got {token_id}"
                )
            if name == "pad" or token_id not in known:
                continue
            text = tokenizer.convert_ids_to_tokens(token_id)
            if token_id not in special or token_id == tokenizer.unk_token_id:
                raise UsageError(
                    f"{where}: {name}: ordinary text can become token {token_id} ({text!r}); "
                    f"expected a special token or one that the tokenizer does not have"
                )

    def encode(
        self,
        anchor: Sequence[int],
        spans: Sequence[Sequence[int]],
        suffix: Sequence[int],
        block_size: int,
    ) -> list[int]:
        """Tokens of a prompt whose spans stand side by side. None of them may hold a boundary."""
        for name, part in (("anchor", anchor), *(("a span", s) for s in spans), ("suffix", suffix)):
            if found := {self.start, self.sibling, self.end} & set(part):
                raise UsageError(f"parentheses: {name} holds the boundary token {found.pop()}")
        if not spans:
            return [*anchor, *suffix]
        out = list(anchor)
        for i, span in enumerate(spans):
            self._fill(out, block_size)
            out += [self.sibling if i else self.start, *span]
        self._fill(out, block_size)
        return [*out, self.end, *suffix]

    def _fill(self, out: list[int], block_size: int) -> None:
        out += [self.pad] * (-len(out) % block_size)

    def decode(
        self, token_ids: Sequence[int], block_size: int, scope: Scope = "anchored"
    ) -> SpanLayout | None:
        """The layout that the tokens describe, or None where no block starts with a boundary.

        Raises UsageError for boundaries that do not match, with the token they stand at.
        """
        ids = np.asarray(token_ids)
        heads = ids[::block_size]
        marks = np.flatnonzero(np.isin(heads, (self.start, self.sibling, self.end)))
        if not len(marks):
            return None
        spans: list[tuple[int, int]] = []
        opened: int | None = None  # where the span at hand starts
        for block in marks.tolist():
            at, mark = block * block_size, int(heads[block])
            if (mark == self.start) != (opened is None):
                name = {self.start: "a start", self.sibling: "a sibling", self.end: "an end"}[mark]
                where = "inside" if opened is not None else "outside"
                raise UsageError(f"parentheses: token {at}: {name} token {where} a group of spans")
            if opened is not None:
                spans.append((opened, at))
            opened = None if mark == self.end else at
        if opened is not None:
            raise UsageError(
                f"parentheses: the group of spans that is open at token {opened} has no end token"
            )
        plain = np.array(ids)
        plain[marks * block_size] = self.pad
        return layout_from_tokens(plain, () if scope == "full" else spans, block_size, scope)


def _check_ids(ids: tuple[int, ...], where: str) -> None:
    if len(set(ids)) != len(ids) or min(ids) < 0:
        raise UsageError(f"{where}: expected four different token ids, got {ids}")
