"""Tokens that text of users must never become (DESIGN contract 4)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What tokens that steer a model look like, and tags of HTML that Gemma's tokenizer has tokens for.
_MARK = re.compile(r"[<\[{|].*[>\]}|]", re.DOTALL)
_MARKUP = re.compile(
    r"</?(a|b|blockquote|body|caption|code|div|em|footer|h[1-6]|html|i|iframe|li|ol|p|span|strong|"
    r"sub|sup|s|table|tbody|td|tfoot|th|thead|tr|u|ul)>"
)


def reserved_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """The text of each reserved token, by its id.

    Special ones, those the template writes, and whatever else a tokenizer was given that looks like
    a mark of its own, as Gemma's <start_of_image> and Qwen's <|fim_prefix|> do: neither is declared
    special. Blanks, words and the tags of ordinary markup are text.
    """
    template = str(tokenizer.chat_template or "")
    reserved = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    for token_id, token in getattr(tokenizer, "added_tokens_decoder", {}).items():
        text = str(token.content)
        is_mark = _MARK.fullmatch(text.strip()) and not _MARKUP.fullmatch(text.strip())
        if text.strip() and (token.special or text in template or is_mark):
            reserved[token_id] = text
    reserved.pop(tokenizer.unk_token_id, None)
    return reserved
