"""The bodies of requests. Whatever is not here is refused by name, or has no effect.

``NEUTRAL`` lists fields of OpenAI's API that kvspan does not support, with the values under which
they change nothing, since clients like to send those. ``IGNORED`` ones describe the caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from kvspan.engine import Placement, Scope
from kvspan.query.checks import check_text, describe
from kvspan.serve.errors import APIError

IGNORED = ("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "parallel_tool_calls": (False, True),
    "prediction": (),
    "presence_penalty": (0,),
    # A hint to models that have the notion, sent by clients (spnl's among them) to all.
    "reasoning_effort": ("none", "minimal", "low", "medium", "high", "xhigh"),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "top_p": (1,),
    "verbosity": (),
    "web_search_options": (),
}
# Of messages; what the API itself returns is accepted back.
NEUTRAL_IN_MESSAGES: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "name": (),
    "refusal": (),
    "tool_calls": ([],),
}
MAX_CHOICES = 128
MAX_STOPS = 16
SEED_BITS = 63


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class SpanMark(_Body):
    """span: whether the part may be computed once and reused wherever it stands."""

    span: bool


class TextPart(_Body):
    type: Literal["text"]
    text: str
    kvspan: SpanMark | None = None

    @field_validator("text")
    @classmethod
    def _is_unicode(cls, value: str) -> str:
        return _unicode(value)


class ChatMessage(_Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: list[TextPart]

    @field_validator("content", mode="before")
    @classmethod
    def _one_part(cls, value: Any) -> Any:
        return [{"type": "text", "text": value}] if isinstance(value, str) else value


class Extension(_Body):
    """How spans are treated (see kvspan.engine.GenerateRequest); report: say what was reused."""

    scope: Scope = "anchored"
    placement: Placement = "sequential"
    salt: str = ""
    report: bool = False


class StreamOptions(_Body):
    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class _Request(_Body):
    model: str
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    seed: int | None = Field(None, ge=-(2**SEED_BITS), lt=2**SEED_BITS)
    temperature: float = Field(1.0, ge=0, le=2)
    max_tokens: int | None = Field(None, ge=1)
    stop: list[str] = Field([], max_length=MAX_STOPS)
    stream: bool = False
    stream_options: StreamOptions | None = None
    kvspan: Extension = Extension()

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("stop")
    @classmethod
    def _no_empty_stop(cls, value: list[str]) -> list[str]:
        if "" in value:
            raise ValueError("a stop text is empty")
        return value

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(_Request):
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)


class CompletionRequest(_Request):
    """prompt: texts, or lists of token ids; one is an ordinary request."""

    prompt: list[str] | list[list[int]]
    max_tokens: int | None = Field(16, ge=1)  # OpenAI's default

    @field_validator("prompt", mode="before")
    @classmethod
    def _several(cls, value: Any) -> Any:
        values = [value] if isinstance(value, str) else value
        if isinstance(values, list) and values:
            if all(_is_id(item) for item in values):
                return [values]
            if len(values) > MAX_CHOICES:
                raise ValueError(f"at most {MAX_CHOICES} prompts")
            if all(isinstance(item, str) and item for item in values):
                return [_unicode(item) for item in values]
            if all(isinstance(item, list) and item and all(map(_is_id, item)) for item in values):
                return values
        raise ValueError("expected a text, token ids, or a list of either, none of them empty")


T = TypeVar("T", bound=BaseModel)


def read(kind: type[T], body: Any) -> T:
    """The request that a body holds. Raises APIError (400), which names the field."""
    if not isinstance(body, dict):
        raise APIError(400, f"expected a JSON object; found {describe(body)}", code="invalid_type")
    known = kind.model_fields
    body = _without_neutral(body, known, NEUTRAL, "", IGNORED)
    # For these, null is as good as nothing.
    body = {name: value for name, value in body.items() if value is not None}
    messages = body.get("messages")
    if isinstance(messages, list):
        body["messages"] = [
            _without_neutral(
                message, ChatMessage.model_fields, NEUTRAL_IN_MESSAGES, f"messages[{index}]."
            )
            if isinstance(message, dict)
            else message
            for index, message in enumerate(messages)
        ]
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _explain(error) from None


def _without_neutral(
    values: dict[str, Any],
    known: Mapping[str, Any],
    neutral: dict[str, tuple[Any, ...]],
    place: str,
    ignored: tuple[str, ...] = (),
) -> dict[str, Any]:
    """The values without those that change nothing. Raises APIError for those that would."""
    out = {}
    for name, value in values.items():
        if name in known:
            out[name] = value
        elif name in neutral:
            if value is not None and not any(_same(value, other) for other in neutral[name]):
                raise APIError(
                    400,
                    f"{place}{name}: not supported; found {describe(value)}",
                    code="unsupported_parameter",
                    param=f"{place}{name}",
                )
        elif name not in ignored:
            out[name] = value  # pydantic refuses it
    return out


def _same(a: Any, b: Any) -> bool:
    return bool(a == b) and isinstance(a, bool) == isinstance(b, bool)


def _explain(error: ValidationError) -> APIError:
    first = error.errors(include_url=False)[0]
    place = ""
    for step in first["loc"]:
        place += f"[{step}]" if isinstance(step, int) else f".{step}" if place else str(step)
    kind, message = first["type"], first["msg"]
    found = f"; found {describe(first['input'])}"
    if kind == "extra_forbidden":
        return APIError(
            400, f"{place}: unknown field{found}", code="unknown_parameter", param=place
        )
    if kind == "missing":
        return APIError(400, f"{place}: missing", code="missing_required_parameter", param=place)
    message = message.removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    return APIError(400, f"{place}: {message}{found}", code=code, param=place)


def _unicode(text: str) -> str:
    if problem := check_text(text, "the text"):
        raise ValueError(str(problem))
    return text


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
