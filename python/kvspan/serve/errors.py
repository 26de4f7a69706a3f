"""What the server says when a request cannot be answered: a status and OpenAI's error object."""

from __future__ import annotations

from typing import Any

from kvspan.engine import PoolTooSmallError, PromptTooLongError
from kvspan.errors import KvspanError, UsageError

INVALID, SERVER = "invalid_request_error", "server_error"


class APIError(Exception):
    """An answer other than 200. retry_after: seconds, for failures that pass."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID,
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.code = code
        self.param = param
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        message = " ".join(str(self).split())
        error = {"message": message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}


class UnknownModelError(UsageError):
    """The server does not serve this model."""


def unknown_model(model: str, served: tuple[str, ...]) -> UnknownModelError:
    return UnknownModelError(
        f"model {model!r} is not served here", expected=" or ".join(map(repr, served))
    )


def to_api_error(error: BaseException) -> APIError:
    """The answer to a request that ended like this.

    The executor puts paths in front of errors, and the first cause then says what kind it is.
    """
    if isinstance(error, APIError):
        return error
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__) is not None and len(causes) < 10:
        causes.append(cause)
    message = str(error)
    if any(isinstance(cause, UnknownModelError) for cause in causes):
        param = getattr(error, "path", None) or "model"
        return APIError(404, message, code="model_not_found", param=param)
    if any(isinstance(cause, (PromptTooLongError, PoolTooSmallError)) for cause in causes):
        return APIError(400, message, code="context_length_exceeded")
    if isinstance(error, UsageError):
        return APIError(400, message, code="invalid_value", param=error.path)
    if isinstance(error, TimeoutError):
        return APIError(504, message or "timed out", type=SERVER, code="timeout")
    if isinstance(error, KvspanError):
        return APIError(500, message, type=SERVER, code="engine_error")
    return APIError(
        500, f"internal error: {type(error).__name__}", type=SERVER, code="internal_error"
    )
