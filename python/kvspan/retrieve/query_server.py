"""Preparing spans on a server that takes span queries: `kvspan serve`, or vLLM with kvspan."""

from __future__ import annotations

import asyncio
from dataclasses import fields
from typing import Any

from kvspan.engine import GenerateRequest, GenerateResult, Reuse, Timings, Usage
from kvspan.engine.openai import OpenAIEngine
from kvspan.engine.openai_errors import EngineStatusError, explained
from kvspan.errors import KvspanError
from kvspan.query.extensions import EXTENSION
from kvspan.query.prompt import Message

PATH = "/query/execute"
_REUSE = {field.name for field in fields(Reuse)}


class QueryServer(OpenAIEngine):
    """An engine that prepares spans as spans, by queries to /v1/query/execute.

    A server that has no such path sees them as plain text, and a note says so.
    """

    async def prepare(self, request: GenerateRequest) -> GenerateResult:
        """Compute the spans of a request and keep them in the server's cache."""
        try:
            answer = await asyncio.wrap_future(self._submit(self._query(request)))
        except EngineStatusError as error:
            if error.status not in (404, 405) or _names_a_model(error.__cause__):
                raise
            result = await super().prepare(request)
            result.reuse.notes.append(f"{self.url}{PATH} is not there: it takes no span queries")
            return result
        try:
            (call, *_) = answer["kvspan"]["calls"]
            reuse = {name: value for name, value in call["reuse"].items() if name in _REUSE}
            usage = {name: call["usage"][name] for name in ("prompt_tokens", "cached_tokens")}
            return GenerateResult("", [], "length", Usage(**usage), Timings(), Reuse(**reuse))
        except (KeyError, TypeError, ValueError):
            raise KvspanError(f"{self.url}{PATH}: the answer is not that of a query") from None

    async def _query(self, request: GenerateRequest) -> Any:
        async with self._slots:
            with explained(self.url, self.timeout, self.max_retries + 1):
                return await self._client.post(PATH, cast_to=object, body=_body(request))


def _names_a_model(error: BaseException | None) -> bool:
    """Whether a refusal is about the model, not about the path."""
    body = getattr(error, "body", None)
    return isinstance(body, dict) and body.get("code") == "model_not_found"


def _body(request: GenerateRequest) -> dict[str, Any]:
    """The request as a query. Its salt is in the body, where no access log sees it."""
    parts: list[dict[str, Any]] = []
    for part in request.prompt:
        if isinstance(part, Message):
            parts.append({part.role: part.text})
        else:
            messages = [{message.role: message.text} for message in part.messages]
            parts.append({"plus": messages if len(messages) == 1 else [{"seq": messages}]})
    said: dict[str, Any] = {"scope": request.scope, "placement": request.placement}
    if request.salt:
        said["salt"] = request.salt
    call = {"model": request.model, "input": {"cross": parts}, "max_tokens": 1, "temperature": 0.0}
    return {EXTENSION: {"options": {**said, "query": {"g": call}}}}
