"""The audit record: what was done to each request before and while it ran.

One JSON object per request, written when the request is over (JSON Lines with ``AuditFile``), for
evaluation and RL runs that have to account for every approximation. The keys:

    path, model, dropped                what was asked; dropped: for its effect on the cache only
    prompt_sha256, messages, spans      the prompt that was sent
    seed, temperature, max_tokens, scope, placement, salted, order, nested
    rules                               names of the rewrite rules that fired on the query
    reordered                           {path, order} of each plus in the prompt that was sorted
    approximated                        notes: what does not equal an ordinary full-attention run
    reused_tokens, moved_tokens, prepared_tokens, computed_tokens, usage, timings, finish_reason
    answers, answer_tokens, answer_reused_tokens, kept_tokens    see `kvspan.engine.Reuse`
    replay                              on hybrid models: policy, tokens and bound per group, bytes
    answer_sha256                       of the text that came back
    error                               instead of all from reused_tokens on, if it failed
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from kvspan.engine import GenerateRequest, GenerateResult
from kvspan.errors import UsageError
from kvspan.query.optimizer import Fired
from kvspan.query.prompt import Message, Prompt, Span


class AuditLog:
    """Makes the records of one run. write: gets each; None makes none."""

    def __init__(
        self,
        write: Callable[[dict[str, Any]], None] | None,
        trace: Sequence[Fired],
        order: str,
        nested: str,
    ) -> None:
        self.write = write
        self.rules = list(dict.fromkeys(fired.rule for fired in trace))
        wanted = write is not None
        self.moved = [(str(p), order) for f in trace for p, order in f.moved if wanted]
        self.order = order
        self.nested = nested

    def begin(self, request: GenerateRequest, dropped: bool) -> dict[str, Any]:
        """The part of a record that is known before the request runs."""
        if self.write is None:
            return {}
        inside = f"{request.path}.g.input"
        return {
            "path": request.path,
            "model": request.model,
            "dropped": dropped,
            "prompt_sha256": _prompt_digest(request.prompt),
            "messages": sum(
                len(item.messages) if isinstance(item, Span) else 1 for item in request.prompt
            ),
            "spans": sum(isinstance(item, Span) for item in request.prompt),
            "seed": request.seed,
            "temperature": request.temperature,
            "max_tokens": request.max_tokens,
            "scope": request.scope,
            "placement": request.placement,
            "salted": bool(request.salt),
            "order": self.order,
            "nested": self.nested,
            "rules": self.rules,
            "reordered": [
                {"path": path, "order": order}
                for path, order in self.moved
                if path.startswith(inside)
            ],
        }

    def end(
        self,
        record: dict[str, Any],
        result: GenerateResult | None = None,
        error: BaseException | None = None,
    ) -> None:
        """Complete and write a record."""
        if self.write is None:
            return
        if result is None:
            cancelled = isinstance(error, asyncio.CancelledError)
            self.write({**record, "error": "cancelled" if cancelled else str(error)})
            return
        reuse = result.reuse
        self.write(
            {
                **record,
                "approximated": _approximations(record, result),
                "reused_tokens": reuse.reused_tokens,
                "moved_tokens": reuse.moved_tokens,
                "prepared_tokens": reuse.prepared_tokens,
                "computed_tokens": reuse.computed_tokens,
                "span_hits": reuse.span_hits,
                "answers": reuse.answers,
                "answer_tokens": reuse.answer_tokens,
                "answer_reused_tokens": reuse.answer_reused_tokens,
                "kept_tokens": reuse.kept_tokens,
                "usage": asdict(result.usage),
                "timings": asdict(result.timings),
                "replay": reuse.replay,
                "finish_reason": result.finish_reason,
                "answer_sha256": hashlib.sha256(result.text.encode()).hexdigest(),
            }
        )


def _approximations(record: dict[str, Any], result: GenerateResult) -> list[str]:
    """What sets the answer apart from that of ordinary full attention over the written query."""
    found = []
    if result.reuse.spans and record["scope"] != "full":
        found.append(f"span tokens attend in scope {record['scope']}")
        if record["placement"] == "parallel":
            found.append("spans share their positions (placement parallel)")
    if result.reuse.answers:
        found.append("inner answers are read as they were generated")
    if record["reordered"]:
        found.append("spans reordered by content")
    if record["nested"] == "whole":
        found.append("inner inputs read beside inner answers (nested whole)")
    if "split_reduce" in record["rules"]:
        found.append("a declared reduction was split into rounds")
    return [*found, *result.reuse.notes]


def _prompt_digest(prompt: Prompt) -> str:
    def words(message: Message) -> list[str]:
        return [message.role, message.text]

    parts = [
        words(item) if isinstance(item, Message) else [words(m) for m in item.messages]
        for item in prompt
    ]
    return hashlib.sha256(json.dumps(parts, ensure_ascii=False).encode()).hexdigest()


class AuditFile:
    """Appends records to a file as JSON Lines, each on disk as soon as it is known."""

    def __init__(self, path: str) -> None:
        try:
            self.file = open(path, "ab", buffering=0)  # noqa: SIM115 (closed by close)
        except OSError as error:
            raise UsageError(
                f"cannot write the audit file: {error.strerror or error}", source=path
            ) from None
        self.path = path

    def __call__(self, record: dict[str, Any]) -> None:
        """Append a record. Raises OSError, which ends any run, where it cannot be written."""
        line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
        written = 0
        try:
            while written < len(line):
                written += self.file.write(line[written:])
        except OSError as error:
            self._take_back(written)
            raise self._named(error) from None

    def _take_back(self, written: int) -> None:
        """A disk that is full takes a part of a record, which no reader could make sense of."""
        with contextlib.suppress(OSError):
            end = self.file.tell()
            if written and end == os.fstat(self.file.fileno()).st_size:  # nobody has gone on
                os.ftruncate(self.file.fileno(), end - written)

    def _named(self, error: OSError) -> OSError:
        return OSError(error.errno, error.strerror, self.path)

    def close(self) -> None:
        try:
            os.fsync(self.file.fileno())
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # what pipes and terminals say
                raise self._named(error) from None
        finally:
            self.file.close()

    def __enter__(self) -> AuditFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
