"""What requests say of their spans: refused in one line where it makes no sense."""

from __future__ import annotations

from typing import Any

import pytest

from kvspan.errors import UsageError
from kvspan.vllm.params import from_params

PROMPT = list(range(100))


@pytest.mark.parametrize("seconds", [-1, -0.5, float("nan"), float("inf"), 10**400, "3", True, [1]])
def test_timeouts_that_make_no_sense(seconds: Any) -> None:
    value = {"kvspan": {"spans": [[32, 64]], "timeout_s": seconds}}
    with pytest.raises(UsageError, match=r"timeout_s: expected seconds, 0 to 86400; got") as error:
        from_params(value, PROMPT, 32)
    assert len(str(error.value)) < 200


def test_timeouts() -> None:
    for seconds in (0, 0.5, 86_400):
        params = from_params({"kvspan": {"spans": [[32, 64]], "timeout_s": seconds}}, PROMPT, 32)
        assert params is not None and params.timeout_s == seconds
