"""Requests to vLLM's own completions, as far as spans are concerned.

A body may say where its spans are in ``kv_transfer_params`` (see `kvspan.vllm.params`), or mark
parts of chat messages in the form kvspan's own server takes (see `kvspan.serve`). Marked parts are
laid out by kvspan and handed to vLLM as token ids; everything else is left to vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from kvspan.engine import GenerateRequest, Placement
from kvspan.errors import UsageError
from kvspan.layout import SpanLayout
from kvspan.parentheses import Parentheses
from kvspan.query.checks import describe
from kvspan.serve.answers import chat_prompt
from kvspan.serve.errors import APIError
from kvspan.serve.schema import ChatRequest, CompletionRequest, Extension, read
from kvspan.vllm.hybrid.policy import parse_policy
from kvspan.vllm.params import KEY, fields_of, from_params, to_params
from kvspan.vllm.preparing import TIMEOUT_S

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# What changes how vLLM renders messages, with the values that change nothing.
RENDERING: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "mm_processor_kwargs": ({},),
    "reasoning_effort": ("none",),
    "tools": ([],),
    "truncate_prompt_tokens": (),
}


@dataclass
class SpanBody:
    """A request with spans. body: what vLLM gets. layout: of its prompt, if that is known yet.

    params: what the request says of its spans itself. report: the answer is to say what was reused.
    """

    body: dict[str, Any]
    layout: SpanLayout | None
    salt: str | None
    placement: Placement = "sequential"
    report: bool = False
    params: dict[str, Any] = field(default_factory=dict)

    def lay_out(self, token_ids: list[int], block_size: int) -> SpanLayout | None:
        """The layout of the prompt once vLLM has said what its tokens are."""
        found = from_params(self.params, token_ids, block_size)
        return found.layout if found else None


LayOut = Callable[[GenerateRequest], Awaitable[SpanLayout]]


async def read_body(
    path: str,
    raw: bytes,
    lay_out: LayOut,
    block_size: int,
    parentheses: Parentheses | None = None,
) -> SpanBody | None:
    """The request if it has to do with spans. Raises APIError or UsageError if that makes no sense.

    What vLLM cannot read either is left to vLLM, which says so.
    """
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(body, dict):
        return None
    found = _Found(body)
    told = fields_of(found.transfer) or {}
    if "replay" in told:  # of hybrid models
        parse_policy(told["replay"], f"kv_transfer_params.{KEY}.replay")
    if path == CHAT and _is_marked(body.get("messages")):
        return await _marked(found, lay_out)
    prompt = body.get("prompt")
    if path == COMPLETIONS and parentheses is not None and _is_token_ids(prompt):
        assert isinstance(prompt, list)
        layout = parentheses.decode(prompt, block_size, found.extension().scope)
        if layout is not None:
            return found.with_layout(layout, prompt=layout.token_ids.tolist())
    if found.params is None or (isinstance(found.params, dict) and not found.params.get("spans")):
        return found.salted()
    if path == COMPLETIONS and isinstance(prompt, list) and not _is_token_ids(prompt):
        raise APIError(
            400,
            f"prompt: expected one prompt with kv_transfer_params.{KEY}; found {describe(prompt)}",
            code="invalid_value",
            param="prompt",
        )
    return found.declared(prompt if path == COMPLETIONS else None, block_size)


class _Found:
    """A body that may have spans. params: what it says of them in kv_transfer_params."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.body = body
        transfer = body.get("kv_transfer_params")
        self.transfer: dict[str, Any] = transfer if isinstance(transfer, dict) else {}
        self.params = self.transfer.get(KEY)

    def extension(self) -> Extension:
        """The field ``kvspan`` of the request, in the form kvspan's own server takes."""
        value = self.body.get(KEY)
        body = {"model": "", "prompt": "-", **({} if value is None else {KEY: value})}
        return read(CompletionRequest, body).kvspan

    def salted(self) -> SpanBody | None:
        """An ordinary request that brings a salt: with it, its blocks are nobody else's."""
        if self.body.get(KEY) is None or not (salt := self.extension().salt):
            return None
        body = {name: value for name, value in self.body.items() if name != KEY}
        return SpanBody({**body, "cache_salt": salt}, None, salt)

    def with_layout(self, layout: SpanLayout, **changes: Any) -> SpanBody:
        """A request that is laid out. changes: of its body."""
        if self.params is not None:
            raise APIError(
                400,
                f"kv_transfer_params.{KEY}: the spans are marked in the prompt as well",
                code="invalid_value",
                param=f"kv_transfer_params.{KEY}",
            )
        extension = self.extension()
        body = {name: value for name, value in self.body.items() if name != KEY}
        body.update(changes)
        spans = to_params(layout, TIMEOUT_S, extension.placement)
        transfer = {**self.transfer, **body.get("kv_transfer_params", {}), **spans}
        body["kv_transfer_params"] = transfer or None
        salt = extension.salt or body.get("cache_salt")
        if salt:
            body["cache_salt"] = salt
        return SpanBody(body, layout, salt, extension.placement, report=extension.report)

    def declared(self, prompt: Any, block_size: int) -> SpanBody:
        """A request that says itself where its spans are. prompt: if it is known here."""
        extension = self.extension()
        params = {KEY: self.params}
        ids = prompt if _is_token_ids(prompt) else None
        # What is wrong with the declaration is found before vLLM has looked at the text.
        checked = from_params({KEY: {**_mapping(self.params), "spans": []}}, [], block_size)
        assert checked is None
        placement = _mapping(self.params).get("placement", "sequential")
        found = from_params(params, ids, block_size) if ids is not None else None
        body = {name: value for name, value in self.body.items() if name != KEY}
        salt = extension.salt or body.get("cache_salt")
        if salt:
            body["cache_salt"] = salt
        layout = found.layout if found else None
        return SpanBody(body, layout, salt, placement, extension.report, params)


async def _marked(found: _Found, lay_out: LayOut) -> SpanBody:
    """A chat whose parts are marked: laid out here, with the model's own chat template."""
    body = found.body
    fields = {name: body[name] for name in ("messages", KEY) if body.get(name) is not None}
    asked = read(ChatRequest, {"model": "", **fields})
    for name, neutral in RENDERING.items():
        value = body.get(name)
        if value is not None and value not in neutral:
            raise APIError(
                400,
                f"{name}: not supported beside parts that are marked as spans; found "
                f"{describe(value)}",
                code="unsupported_parameter",
                param=name,
            )
    extension = found.extension()
    prompt = chat_prompt(asked)
    layout = await lay_out(GenerateRequest(prompt, scope=extension.scope, path="messages"))
    plain = [
        {**message, "content": [_without_mark(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in body["messages"]
    ]
    # vLLM takes the tokens of a chat that were made elsewhere in this field.
    transfer = {"prompt_token_ids": layout.token_ids.tolist()}
    return found.with_layout(layout, messages=plain, kv_transfer_params=transfer)


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(
            f"kv_transfer_params.{KEY}: expected an object, got {type(value).__name__}"
        )
    return value


def _without_mark(part: Any) -> Any:
    return {name: value for name, value in part.items() if name != KEY}


def _is_marked(messages: Any) -> bool:
    """Whether any part has a mark, right or wrong."""
    if not isinstance(messages, list):
        return False
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    return any(
        isinstance(part, dict) and part.get(KEY) is not None
        for content in contents
        if isinstance(content, list)
        for part in content
    )


def _is_token_ids(prompt: Any) -> bool:
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(isinstance(token, int) and not isinstance(token, bool) for token in prompt)
    )
