"""From a prompt of messages and spans to tokens with span boundaries beside them.

Boundaries are never marker tokens: user text cannot open or close a span or a chat turn (DESIGN
contract 4). Every piece of user text is tokenized alone, with the tokenizer's special tokens
switched off, so that a span's tokens do not depend on its neighbours.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvspan.engine import PLACEMENTS, SCOPES, Placement, Scope
from kvspan.errors import UsageError
from kvspan.query.prompt import Message, Prompt, Span
from kvspan.reserved_tokens import reserved_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SEPARATOR = "\n\n"  # between the pieces of one turn, and between messages of a plain template
# Anchors and spans are filled up to whole blocks with the first of these that is one token. On
# NQ-open with Gemma-3-270M blanks cost nothing; a tokenizer's own pad token, which no model was
# trained to read, costs 0.4 nats per answer token.
PAD_TEXTS = (" ", "\n", ".")
# Answers over answers over ... this deep are read with the KV they were generated with. To compute
# that KV again takes all the prompts below it, so there has to be an end.
MAX_ANSWER_DEPTH = 16


@dataclass(frozen=True, eq=False)
class SpanLayout:
    """Tokens of a prompt and the spans among them.

    token_ids: int32 [num_tokens].
    spans: ([start, end) ...] in tokens, on block boundaries, in order, not overlapping.
    scope: what span tokens attend to. With "full" there are no spans.
    answers: of each span, the answer that it is, if any; () where none is. Scope anchored only.
    Everything before the first span is the anchor. The last token is never inside a span.
    """

    token_ids: npt.NDArray[np.int32]
    spans: tuple[tuple[int, int], ...]
    block_size: int
    scope: Scope = "anchored"
    answers: tuple[Answer | None, ...] = ()

    def __post_init__(self) -> None:
        if self.scope not in SCOPES:
            raise UsageError(f"scope: expected one of {', '.join(SCOPES)}; got {self.scope!r}")
        if self.block_size < 1:
            raise UsageError(f"block_size: expected at least 1, got {self.block_size}")
        if self.token_ids.ndim != 1 or self.num_tokens == 0:
            raise UsageError(f"token_ids: expected [num_tokens >= 1], got {self.token_ids.shape}")
        if self.spans and self.scope == "full":
            raise UsageError("spans: scope 'full' has no spans")
        if self.answers and (len(self.answers) != len(self.spans) or self.scope != "anchored"):
            raise UsageError(
                f"answers: expected one or None for each of {len(self.spans)} anchored spans, "
                f"got {len(self.answers)} in scope {self.scope!r}"
            )
        last = 0
        for i, (start, end) in enumerate(self.spans):
            if start % self.block_size or end % self.block_size or not last <= start < end:
                raise UsageError(
                    f"spans[{i}]: expected [start, end) on multiples of {self.block_size} after "
                    f"token {last}, got [{start}, {end})"
                )
            last = end
        if self.spans and last >= self.num_tokens:
            raise UsageError(
                f"spans: expected at least one token after the last span, which ends at {last} "
                f"of {self.num_tokens}"
            )

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def anchor_len(self) -> int:
        """Tokens before the first span; all of them when there is none."""
        return self.spans[0][0] if self.spans else self.num_tokens

    @property
    def canonical_start(self) -> int:
        """Position of a span's first token when its KV is computed, unless it is an answer."""
        return self.anchor_len if self.scope == "anchored" else 0

    def answer(self, span: int) -> Answer | None:
        """The answer that a span is."""
        return self.answers[span] if self.answers else None

    def continued(self, token_ids: npt.NDArray[np.int32]) -> SpanLayout:
        """The layout with more text at its end."""
        return replace(self, token_ids=np.concatenate([self.token_ids, token_ids]))

    def segments(self) -> list[tuple[str, int, int]]:
        """The prompt as ("anchor" | "span" | "text", start, end), in order, without empty ones."""
        out: list[tuple[str, int, int]] = []
        last = 0
        for start, end in self.spans:
            if start > last:
                out.append(("text" if out else "anchor", last, start))
            out.append(("span", start, end))
            last = end
        if last < self.num_tokens:
            out.append(("text" if self.spans else "anchor", last, self.num_tokens))
        return out

    def positions(self, placement: Placement) -> npt.NDArray[np.int32]:
        """RoPE position of every token, int32 [num_tokens].

        sequential: 0, 1, 2, ... parallel: every span at its canonical position, as if the spans lay
        side by side; text goes on after the longest span before it. Positions never depend on what
        comes later, so that a cached start of a prompt serves every prompt that starts so.
        """
        if placement not in PLACEMENTS:
            raise UsageError(f"placement: expected one of {PLACEMENTS}; got {placement!r}")
        positions = np.arange(self.num_tokens, dtype=np.int32)
        if placement == "sequential" or not self.spans:
            return positions
        base = self.canonical_start
        reach = self.anchor_len  # position after all text and the longest span so far
        for kind, start, end in self.segments():
            if kind == "span":
                positions[start:end] = np.arange(base, base + end - start)
                reach = max(reach, base + end - start)
            elif kind == "text":
                positions[start:end] = np.arange(reach, reach + end - start)
                reach += end - start
        return positions


@dataclass(frozen=True, eq=False)
class Answer:
    """What a model generated, as a span whose KV is that of its generation.

    Its anchor is the prompt it was generated after, wherever the span stands: the KV is a function
    of that prompt and of its own tokens (DESIGN contract 1), whether it was kept or is computed
    again.

    prompt, placement: the prompt. token_ids: int32 [num_tokens], without the token that ended it.
    digest: 32 bytes, of all that its KV depends on besides token_ids.
    domain: what the cache keys of its request began with; requests of other domains read its text.
    """

    prompt: SpanLayout
    placement: Placement
    token_ids: npt.NDArray[np.int32]
    digest: bytes
    domain: Hashable
    depth: int = 1

    @property
    def start(self) -> int:
        """RoPE position of the first token as it was generated."""
        return int(self.prompt.positions(self.placement)[-1]) + 1


@dataclass(frozen=True)
class _Piece:
    text: str
    is_span: bool = False
    is_template: bool = False  # special tokens in it count
    answer: Answer | None = None


class PromptEncoder:
    """Renders prompts with a tokenizer's own chat template, or a plain one for base models.

    A span is content of the user turn it stands in. Consecutive messages of one role share a turn;
    pieces of a turn are separated by a blank line. The plain template is the tokenizer's BOS and
    the texts of all messages, separated by blank lines.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, block_size: int) -> None:
        self.tokenizer = tokenizer
        self.block_size = block_size
        self._reserved = reserved_tokens(tokenizer)
        self.pad_id = self._find_pad_id()
        probe = list(tokenizer("a").input_ids)
        bos = tokenizer.bos_token_id
        self._plain_prefix = [bos] if bos is not None and probe[:1] == [bos] else []
        self._separator = self._encode([_Piece(SEPARATOR)])[0]

    def _find_pad_id(self) -> int:
        pads = self._encode([_Piece(text) for text in PAD_TEXTS])
        for ids in pads:
            if len(ids) == 1 and ids[0] != self.tokenizer.unk_token_id:
                return ids[0]
        raise UsageError("the tokenizer has no token for a blank, a newline or a full stop")

    def encode(
        self,
        prompt: Prompt,
        scope: Scope = "anchored",
        *,
        chat: bool = True,
        domain: Hashable = None,
    ) -> SpanLayout:
        """Lay out a prompt. Scope "full" gives the ordinary prompt: no spans and no padding.

        chat: whether to use the chat template, if there is one. domain: of the request's cache
        keys; without one, answers in the prompt are read as text.
        """
        turns = _turns(prompt, domain if scope == "anchored" else None)
        if chat and self.tokenizer.chat_template:
            pieces, tokens = self._chat_pieces(turns), []
        else:
            pieces = _join([piece for _, turn in turns for piece in turn])
            tokens = list(self._plain_prefix)
        spans: list[tuple[int, int]] = []
        answers: list[Answer | None] = []
        in_spans = scope != "full"
        for piece, ids in zip(pieces, self._encode(pieces), strict=True):
            if piece.is_span and in_spans and ids:
                self._pad(tokens)
                start = len(tokens)
                tokens += ids
                self._pad(tokens)
                spans.append((start, len(tokens)))
                answers.append(piece.answer)
            else:
                tokens += ids
        if not tokens:
            raise UsageError("prompt: expected at least one token, got an empty prompt")
        if spans and spans[-1][1] == len(tokens):
            tokens.append(self.pad_id)  # the answer is predicted from a token that sees all spans
        ids32 = np.asarray(tokens, dtype=np.int32)
        known = tuple(answers) if any(answers) else ()
        return SpanLayout(ids32, tuple(spans), self.block_size, scope, known)

    def answer_tokens(self, token_ids: Iterable[int]) -> npt.NDArray[np.int32]:
        """An answer's tokens as they stand in a span, in whole blocks: int32 [num_tokens]."""
        tokens = [*token_ids, *self._separator]
        self._pad(tokens)
        return np.asarray(tokens, dtype=np.int32)

    def may_be_span(self, token_ids: Iterable[int]) -> bool:
        """Whether none of the tokens could pass for a part of the chat template."""
        return self._reserved.keys().isdisjoint(token_ids)

    def _pad(self, tokens: list[int]) -> None:
        tokens += [self.pad_id] * (-len(tokens) % self.block_size)

    def _encode(self, pieces: Sequence[_Piece]) -> list[list[int]]:
        """Token ids of each piece, tokenized alone; an answer has its own."""
        out: list[list[int]] = [
            [*piece.answer.token_ids.tolist(), *self._separator] if piece.answer else []
            for piece in pieces
        ]
        for is_template in (True, False):
            rows = [
                i
                for i, p in enumerate(pieces)
                if p.is_template == is_template and p.text and not p.answer
            ]
            if not rows:
                continue
            texts = [pieces[i].text for i in rows]
            encoded = self.tokenizer(
                texts,
                add_special_tokens=False,
                split_special_tokens=not is_template,
                verbose=False,
            )
            for i, ids in zip(rows, encoded.input_ids, strict=True):
                out[i] = list(ids)
                if not is_template and not self._reserved.keys().isdisjoint(out[i]):
                    out[i] = self._encode_broken(pieces[i].text)
        return out

    def _encode_broken(self, text: str) -> list[int]:
        """Text with the name of a reserved token in it that the tokenizer took for the token."""
        names = sorted(self._reserved.values(), key=len, reverse=True)
        cuts = [0]
        for match in re.finditer("|".join(map(re.escape, names)), text):
            cuts.append((match.start() + match.end()) // 2)
        cuts.append(len(text))
        ids: list[int] = []
        for start, end in itertools.pairwise(cuts):
            encoded = self.tokenizer(
                text[start:end], add_special_tokens=False, split_special_tokens=True, verbose=False
            )
            ids += encoded.input_ids
        if found := sorted(self._reserved.keys() & set(ids)):
            name = self._reserved[found[0]]
            raise UsageError(f"prompt: the tokenizer cannot read {name!r} in it as plain text")
        return ids

    def _chat_pieces(self, turns: list[tuple[str, list[_Piece]]]) -> list[_Piece]:
        """The chat template's own text around the turns' contents, which it never gets to see."""
        around = self._render(turns, "kvspan-content")
        # A template that uses a content in any other way than as it is would let marks through.
        if around != self._render(turns, "another, longer mark"):
            raise UsageError("the model's chat template changes a message or uses it twice")
        out = [_Piece(around[0], is_template=True)]
        for (_, turn), after in zip(turns, around[1:], strict=True):
            out += [*_join(turn), _Piece(after, is_template=True)]
        return out

    def _render(self, turns: list[tuple[str, list[_Piece]]], mark: str) -> list[str]:
        """What the template writes before, between and after contents that are all marks."""
        contents = [f"{mark} {i};" for i in range(len(turns))]
        messages = [
            {"role": role, "content": content}
            for (role, _), content in zip(turns, contents, strict=True)
        ]
        try:
            rendered = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except Exception as e:  # whatever the template's own raise_exception makes of it
            roles = ", ".join(role for role, _ in turns)
            raise UsageError(f"the model's chat template refuses turns ({roles}): {e}") from None
        out = []
        rest = str(rendered)
        for (role, _), content in zip(turns, contents, strict=True):
            before, found, rest = rest.partition(content)
            if not found:
                raise UsageError(f"the model's chat template drops or reorders the {role} message")
            out.append(before)
        return [*out, rest]


def to_turns(prompt: Prompt) -> list[tuple[str, str]]:
    """The prompt as (role, text) turns: what an engine shows the model that has no spans.

    >>> to_turns((Message("system", "s"), Span((Message("user", "a"),)), Message("user", "q")))
    [('system', 's'), ('user', 'a\\n\\nq')]
    """
    return [
        (role, SEPARATOR.join(piece.text for piece in pieces))
        for role, pieces in _turns(prompt, None)
    ]


def _turns(prompt: Prompt, domain: Hashable) -> list[tuple[str, list[_Piece]]]:
    turns: list[tuple[str, list[_Piece]]] = []
    for item in prompt:
        role = "user" if isinstance(item, Span) else item.role
        if not turns or turns[-1][0] != role:
            turns.append((role, []))
        answer = _answer(item, domain) if isinstance(item, Span) else None
        turns[-1][1].append(_Piece(_text(item), isinstance(item, Span), answer=answer))
    return turns


def _answer(span: Span, domain: Hashable) -> Answer | None:
    """The answer that a span is, where its KV may be used."""
    answer = span.messages[0].answer if len(span.messages) == 1 else None
    if not isinstance(answer, Answer) or domain is None or answer.domain != domain:
        return None
    return answer if answer.depth <= MAX_ANSWER_DEPTH else None


def _text(item: Message | Span) -> str:
    if isinstance(item, Message):
        return item.text
    return SEPARATOR.join(message.text for message in item.messages)


def _join(pieces: Iterable[_Piece]) -> list[_Piece]:
    """Separators belong to the piece before them; a span always has its own."""
    out = list(pieces)
    for i, piece in enumerate(out):
        if piece.is_span or i + 1 < len(out):
            out[i] = replace(piece, text=piece.text + SEPARATOR)
    return out


def layout_from_tokens(
    token_ids: Any, spans: Sequence[tuple[int, int]], block_size: int, scope: Scope = "anchored"
) -> SpanLayout:
    """A layout from tokens the caller made: any integer sequence, spans on block boundaries.

    Raises UsageError for what is neither, and for ids that int32 cannot hold.
    """
    ids = np.asarray(token_ids)
    if ids.size and not np.issubdtype(ids.dtype, np.integer):
        raise UsageError(f"token_ids: expected integers, got {ids.dtype}")
    if (wrong := ids[(ids < 0) | (ids >= 2**31)]).size:
        raise UsageError(f"token_ids: expected 0 to {2**31 - 1}, got {wrong[0]}")
    pairs = tuple((int(start), int(end)) for start, end in spans)
    return SpanLayout(ids.astype(np.int32), pairs, block_size, scope)
