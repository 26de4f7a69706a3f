"""What requests say of their spans: refused in one line where it makes no sense."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from kvspan.errors import UsageError
from kvspan.vllm.bodies import COMPLETIONS, read_body
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


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"span": []}, r"kvspan\.span: unknown field \(did you mean spans\?\); expected spans, sc"),
        ({"replya": "exact"}, r"kvspan\.replya: unknown field \(did you mean replay\?\)"),
        ({"x": 1}, r"kvspan\.x: unknown field; expected spans, scope, placement, timeout_s, id, "),
        ("exact", r"kvspan: expected an object, got str"),
        ({"replay": "exact"}, r"kvspan\.replay: is for hybrid models, which have no spans"),
    ],
    ids=str,
)
def test_unknown_fields_are_named(value: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        from_params({"kvspan": value}, PROMPT, 32)
    body = {"model": "m", "prompt": "a", "kv_transfer_params": {"kvspan": value}}
    reading = read_body(COMPLETIONS, json.dumps(body).encode(), no_layout, 32)
    if "replay" in value:  # which the server does not know better
        assert asyncio.run(reading) is None
        return
    with pytest.raises(UsageError, match=said):
        asyncio.run(reading)


async def no_layout(request: object) -> Any:
    raise AssertionError("no span is marked")


def test_replay_policies() -> None:
    """Of a hybrid: what it is to do is not guessed, and a misspelt policy is not an exact one."""

    def read(policy: object) -> object:
        params = {"kv_transfer_params": {"kvspan": {"replay": policy}}}
        raw = json.dumps({"model": "m", "prompt": "a", **params}).encode()
        return asyncio.run(read_body(COMPLETIONS, raw, no_layout, 32))

    for policy in ("exact", "ratio:0.05", "off"):
        assert read(policy) is None, "left to vLLM as it is"
    for bad in ("ratio:2", "EXACT", None, 5):
        with pytest.raises(UsageError, match=r"kvspan\.replay: unknown replay policy; expected"):
            read(bad)
