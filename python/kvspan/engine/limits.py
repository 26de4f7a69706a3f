"""What every engine that lays out its own prompts refuses, in the same words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvspan.engine import GenerateRequest, PromptTooLongError
from kvspan.errors import UsageError

if TYPE_CHECKING:
    from kvspan.layout import SpanLayout


def check_request(
    request: GenerateRequest, layout: SpanLayout, *, vocab_size: int, room: int, context: int
) -> None:
    """Raise UsageError for settings and tokens that no model, or not this one, can take.

    vocab_size: the model's token ids are below it. room: new tokens that have a position behind the
    prompt. context: tokens of prompt and answer together.
    """
    path = request.path
    temperature = request.temperature or 0.0
    if not 0 <= temperature < float("inf"):
        raise UsageError(
            "bad temperature", path=path, expected="a finite number, 0 or more",
            found=f"{temperature}",
        )  # fmt: skip
    if request.max_tokens is not None and request.max_tokens < 1:
        found = str(request.max_tokens)
        raise UsageError("bad max_tokens", path=path, expected="1 or more, or None", found=found)
    lowest, highest = int(layout.token_ids.min()), int(layout.token_ids.max())
    if lowest < 0 or highest >= vocab_size:
        raise UsageError(
            "token ids that the model does not have",
            path=path,
            expected=f"0 to {vocab_size - 1}",
            found=str(lowest if lowest < 0 else highest),
        )
    if room < 1:
        raise PromptTooLongError(
            f"prompt of {layout.num_tokens} tokens is too long: the model's context is {context} "
            "tokens, prompt and answer together",
            path=path,
        )
