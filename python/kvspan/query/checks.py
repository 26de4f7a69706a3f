"""What the values in a query must be, and how a message shows one that is not.

Every ``check_...`` returns the error with a value, or None: the caller knows where it stands.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvspan.errors import UsageError

# spnl holds max_tokens in 32 bits; a larger value could not be read back by it.
MAX_MAX_TOKENS = 2**31 - 1


def describe(value: object) -> str:
    """A value as an error message shows it: JSON's words, shortened.

    >>> describe(True), describe([1, 2]), describe("hi"), describe(None), describe({})
    ('true', 'an array of 2', "'hi'", 'null', 'an empty object')
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        # Python refuses to print integers of more than a few thousand digits.
        return (
            repr(value) if isinstance(value, float) or value.bit_length() < 256 else "a huge number"
        )
    if isinstance(value, str):
        return repr(value if len(value) <= 40 else value[:37] + "...")
    if isinstance(value, dict):
        if not value:
            return "an empty object"
        keys = [repr(str(key)[:40]) for key in list(value)[:4]]
        more = ", ..." if len(value) > 4 else ""
        return f"an object with {'key' if len(value) == 1 else 'keys'} {', '.join(keys)}{more}"
    if isinstance(value, (list, tuple)):
        return f"an array of {len(value)}" if value else "an empty array"
    return f"a value of type {type(value).__name__}"


def check_text(text: object, what: str) -> UsageError | None:
    """The error with a text, if any. what: the text's name in the message."""
    if not isinstance(text, str):
        return UsageError(f"{what} is not a string", expected="a string", found=describe(text))
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            return UsageError(
                f"{what} is not valid Unicode",
                expected="text without lone surrogates",
                found=f"U+{ord(text[error.start]):04X} at character {error.start + 1}",
            )
    return None


def check_model(model: object) -> UsageError | None:
    """The error with a model's name, if any."""
    if model == "":
        return UsageError("the model of g is empty", expected="a model's name", found="''")
    return check_text(model, "the model of g")


def check_max_tokens(value: object) -> UsageError | None:
    """The error with this ``max_tokens``, if any."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if value is None or (whole and 0 <= value <= MAX_MAX_TOKENS):  # type: ignore[operator]
        return None
    return UsageError(
        "max_tokens is not a token count",
        expected=f"a whole number from 0 to {MAX_MAX_TOKENS} (0: the engine's default) or null",
        found=describe(value),
    )


def check_temperature(value: object) -> UsageError | None:
    """The error with this ``temperature``, if any."""
    if value is None:
        return None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            if math.isfinite(value) and value >= 0:
                return None
        except OverflowError:  # an integer no float can hold
            pass
    return UsageError(
        "temperature is out of range",
        expected="a finite number, 0 or more, or null",
        found=describe(value),
    )


def check_count(value: object, what: str, least: int) -> UsageError | None:
    """The error with a whole number, if any."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if whole and least <= value <= MAX_MAX_TOKENS:  # type: ignore[operator]
        return None
    return UsageError(
        f"{what} is not a count",
        expected=f"a whole number from {least} to {MAX_MAX_TOKENS}",
        found=describe(value),
    )


def check_flag(value: object, what: str) -> UsageError | None:
    """The error with true or false, if any."""
    if isinstance(value, bool):
        return None
    return UsageError(
        f"{what} is neither true nor false", expected="true or false", found=describe(value)
    )


def check_word(value: object, what: str, words: Sequence[str]) -> UsageError | None:
    """The error with one of a few words (or None), if any."""
    if value is None or (isinstance(value, str) and value in words):
        return None
    return UsageError(f"unknown {what}", expected=" or ".join(words), found=describe(value))


def raise_if(problem: UsageError | None) -> None:
    """Raise the error, if there is one."""
    if problem:
        raise problem


def closest(word: str, words: Sequence[str]) -> str:
    """A hint at the word that was meant, or nothing.

    >>> closest("usr", ("user", "system")), closest("x", ("user", "system"))
    (' (did you mean user?)', '')
    """
    import difflib

    close = difflib.get_close_matches(word.lower(), words, n=1, cutoff=0.6)
    return f" (did you mean {close[0]}?)" if close else ""
