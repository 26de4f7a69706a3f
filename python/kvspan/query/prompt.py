"""The flat prompt of a generate: messages, and the spans among them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from kvspan.errors import KvspanError, UsageError
from kvspan.query.forms import Monad, Print
from kvspan.query.nodes import Generate, Node, Plus, Text

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True)
class Message:
    """Text of one speaker, never empty.

    answer: what the engine that generated the text gave with it (`GenerateResult.answer`), where
    a span is to be read with the KV it was generated with. Not part of the content.
    """

    role: Role
    text: str
    answer: object = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Span:
    """One movable child of a plus: its messages in order, never none."""

    messages: tuple[Message, ...]


Prompt = tuple[Message | Span, ...]

# The text of an answer, and what the engine gave with it if it is to be a span of its own.
Answered = tuple[str, object]


def to_prompt(
    node: Node, path: str = "$", answers: Iterable[Answered] = (), *, plain: bool = False
) -> Prompt:
    """The input of a generate as a flat prompt.

    path: where the input stands, for the message. answers: of the outermost generates in it, in
    document order. plain: without spans, their messages being the user's.

    seq, par and cross concatenate. Every child of a plus is one Span, nested plus counted as one;
    a plus deeper inside a span is ordinary ordered content of it. An answer in a span that keeps
    its KV ends that span and is one of its own. Empty messages are dropped, and spans without
    messages. Raises UsageError when nothing is left.

    >>> from kvspan.query.builders import cross, plus, system, user
    >>> for part in to_prompt(cross(system("s"), plus("a", plus("b", user(""))), "q")):
    ...     print(part)
    Message(role='system', text='s')
    Span(messages=(Message(role='user', text='a'),))
    Span(messages=(Message(role='user', text='b'),))
    Message(role='user', text='q')
    """
    texts = iter(answers)
    parts: list[Message | Span] = []

    def close(span: list[Message]) -> None:
        if span and plain:
            parts.extend(Message("user", message.text) for message in span)
        elif span:
            parts.append(Span(tuple(span)))
        span.clear()

    # The second field says where a node stands: None outside of any plus, "child" as the child of
    # one, else the list that collects the span's messages. None as the node closes that span.
    stack: list[tuple[Node | None, list[Message] | Literal["child"] | None]] = [(node, None)]
    while stack:
        item, where = stack.pop()
        if item is None:
            close(where)  # type: ignore[arg-type]
        elif where == "child" and not isinstance(item, Plus):
            span: list[Message] = []
            stack += [(None, span), (item, span)]
        elif isinstance(item, Text):
            if item.text:
                message = Message(item.kind, item.text)  # type: ignore[arg-type]
                (where if isinstance(where, list) else parts).append(message)
        elif isinstance(item, Generate):
            answered = next(texts, None)
            if answered is None:
                raise KvspanError("an inner generate has not been run yet", path=path)
            text, made = answered
            if text and isinstance(where, list):
                if made is not None and not plain:
                    close(where)
                    where.append(Message("assistant", text, made))
                    close(where)
                else:
                    where.append(Message("assistant", text))
            elif text:
                parts.append(Message("assistant", text))
        elif isinstance(item, (Monad, Print)):
            continue
        else:
            inside = "child" if isinstance(item, Plus) and where is None else where
            stack.extend((child, inside) for child in reversed(item.children))
    if not parts:
        raise nothing_to_read(path)
    return tuple(parts)


def nothing_to_read(
    path: str, message: str = "empty generate: its input has no text"
) -> UsageError:
    """The error where a model would get an empty prompt."""
    return UsageError(
        message,
        path=path,
        expected="at least one message that is not empty",
        found="none",
    )
