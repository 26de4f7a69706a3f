"""What can go wrong between the engine and an OpenAI-compatible server, each in one clear line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import openai

from kvspan.errors import KvspanError

KEY_VARIABLES = ("KVSPAN_API_KEY", "OPENAI_API_KEY")


class EngineStatusError(KvspanError):
    """The server refused a call. status: of its HTTP answer; 0 for an error inside a stream."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class StreamBroken(Exception):
    """A stream ended early. text: whether any of it had been handed on by then."""

    def __init__(self, reason: str, text: bool) -> None:
        super().__init__(reason)
        self.text = text


@contextlib.contextmanager
def explained(url: str, timeout: float, attempts: int) -> Iterator[None]:
    """Turn what the client raises into a KvspanError that names the server."""
    try:
        yield
    except KvspanError:
        raise
    except Exception as error:
        raise _explain(error, url, timeout, attempts) from error


def _explain(error: Exception, url: str, timeout: float, attempts: int) -> KvspanError:
    if isinstance(error, openai.APIStatusError):
        status = error.status_code
        hint = ""
        if status in (401, 403):
            hint = f" (the API key is read from {' or '.join(KEY_VARIABLES)})"
        said = _brief(message_of(error))
        return EngineStatusError(f"HTTP {status} from {url}: {said}{hint}", status)
    if isinstance(error, openai.APITimeoutError):
        return KvspanError(f"{url}: no answer within {timeout:g} s{_after(attempts)}")
    if isinstance(error, openai.APIConnectionError):
        cause = error.__cause__ or error
        kind = type(cause).__name__
        return KvspanError(f"{url}: no connection{_after(attempts)}: {kind}: {_brief(cause)}")
    if isinstance(error, StreamBroken):
        return KvspanError(f"{url}: the stream broke: {_brief(error)}")
    malformed = isinstance(error, openai.APIResponseValidationError)
    if isinstance(error, openai.APIError) and not malformed:
        return EngineStatusError(f"{url}: {_brief(error.message)}", 0)
    return KvspanError(
        f"{url}: the answer is not what the protocol says: {type(error).__name__}: {_brief(error)}"
    )


def _after(attempts: int) -> str:
    return f" in {attempts} attempts" if attempts > 1 else ""


def message_of(error: openai.APIStatusError) -> str:
    """What the server itself said, where it said it in the protocol's form."""
    body = error.body
    if isinstance(body, dict) and isinstance(body.get("message"), str):
        return str(body["message"])
    return error.message


def _brief(value: object) -> str:
    return " ".join(str(value).split())[:300]
