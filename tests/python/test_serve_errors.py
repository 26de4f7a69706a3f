"""What the server answers to what is not right: a status, and one error that names the field."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from serving import CHAT, ServerProcess

TEXT = {"model": "tiny", "prompt": "w1 w2", "max_tokens": 4}


QUERY = {"model": "tiny", "input": {"user": "w1"}}


def chat(**fields: Any) -> dict[str, Any]:
    return {**CHAT, **fields}


def part(**fields: Any) -> dict[str, Any]:
    return chat(messages=[{"role": "user", "content": [{"type": "text", "text": "w1", **fields}]}])


WRONG: dict[str, tuple[str, Any, int, str, str | None, str]] = {
    # id: path, body, status, code, param, part of the message
    "not JSON": ("chat/completions", b'{"model": tiny}', 400, "invalid_json", None,
                 "line 1, column 11: malformed JSON"),
    "empty": ("chat/completions", b"", 400, "invalid_json", None, "malformed JSON"),
    "not UTF-8": ("completions", b'{"model": "\xff"}', 400, "invalid_json", None, "byte 11"),
    "same key twice": ("completions", b'{"model": "tiny", "model": "x"}', 400, "invalid_json", None,
                       "the same key twice"),
    "very deep": ("completions", b"[" * 100_000, 400, "invalid_json", None, "malformed JSON"),
    "an array": ("completions", [], 400, "invalid_type", None, "expected a JSON object"),
    "no model": ("completions", {"prompt": "w1"}, 400, "missing_required_parameter", "model",
                 "model: missing"),
    "unknown model": ("chat/completions", chat(model="gpt"), 404, "model_not_found", "model",
                      "model 'gpt' is not served here; expected 'tiny' or 'other'"),
    "no messages": ("chat/completions", chat(messages=[]), 400, "invalid_value", "messages",
                    "at least 1 item"),
    "no text": ("chat/completions", part(text=""), 400, None, "messages", "expected some text"),
    "bad role": ("chat/completions", chat(messages=[{"role": "tool", "content": "w1"}]), 400,
                 "invalid_value", "messages[0].role", "found 'tool'"),
    "image": ("chat/completions", part(type="image_url"), 400, "invalid_value",
              "messages[0].content[0].type", "found 'image_url'"),
    "no content": ("chat/completions", chat(messages=[{"role": "user"}]), 400,
                   "missing_required_parameter", "messages[0].content", "missing"),
    "name": ("chat/completions", chat(messages=[{"role": "user", "content": "w", "name": "x"}]),
             400, "unsupported_parameter", "messages[0].name", "not supported"),
    "bad mark": ("chat/completions", part(kvspan={"span": "yes"}), 400, "invalid_type",
                 "messages[0].content[0].kvspan.span", "found 'yes'"),
    "span of the system": ("chat/completions", chat(messages=[{"role": "system", "content": [
        {"type": "text", "text": "w1", "kvspan": {"span": True}}]}]), 400, "invalid_value",
        "messages[0].content[0].kvspan", "only parts of user messages"),
    "surrogate": ("chat/completions", part(text="\ud800"), 400, "invalid_value",
                  "messages[0].content[0].text", "lone surrogates"),
    "tools": ("chat/completions", chat(tools=[{"type": "function"}]), 400, "unsupported_parameter",
              "tools", "tools: not supported; found an array of 1"),
    "top_p": ("completions", {**TEXT, "top_p": 0.9}, 400, "unsupported_parameter", "top_p", "0.9"),
    "logprobs": ("completions", {**TEXT, "logprobs": 0}, 400, "unsupported_parameter", "logprobs",
                 "not supported"),
    "unknown field": ("chat/completions", chat(max_token=3), 400, "unknown_parameter", "max_token",
                      "unknown field"),
    "unknown option": ("chat/completions", chat(kvspan={"spans": 1}), 400, "unknown_parameter",
                       "kvspan.spans", "unknown field"),
    "bad scope": ("chat/completions", chat(kvspan={"scope": "x"}), 400, "invalid_value",
                  "kvspan.scope", "found 'x'"),
    "hot": ("chat/completions", chat(temperature=2.5), 400, "invalid_value", "temperature",
            "less than or equal to 2"),
    "NaN": ("chat/completions", b'{"model": "tiny", "temperature": NaN}', 400, "invalid_json", None,
            "expected a value"),
    "no tokens": ("chat/completions", chat(max_tokens=0), 400, "invalid_value", "max_tokens", "1"),
    "bad count": ("chat/completions", chat(max_tokens="5"), 400, "invalid_type", "max_tokens",
                  "found '5'"),
    "both limits": ("chat/completions", chat(max_completion_tokens=5), 400, None, "max_tokens",
                    "one of them"),
    "n": ("chat/completions", chat(n=129), 400, "invalid_value", "n", "128"),
    "many answers": ("completions", {**TEXT, "prompt": ["w1"] * 100, "n": 100}, 400,
                     "invalid_value", None, "expected at most 256 answers"),
    "empty stop": ("chat/completions", chat(stop=["x", ""]), 400, "invalid_value", "stop", "empty"),
    "seed": ("chat/completions", chat(seed=2**63), 400, "invalid_value", "seed", "less than"),
    "prompt": ("completions", {**TEXT, "prompt": [1, "w1"]}, 400, "invalid_value", "prompt",
               "expected a text, token ids, or a list of either"),
    "token id": ("completions", {**TEXT, "prompt": [5, 211]}, 400, "invalid_value", "prompt[1]",
                 "prompt[1]: expected a token id from 0 to 210; found 211"),
    "token ids": ("completions", {**TEXT, "prompt": [[5], [5, 2**32 + 5]]}, 400, "invalid_value",
                  "prompt[1][1]", "; found 4294967301"),
    "negative id": ("completions", {**TEXT, "prompt": [-1]}, 400, "invalid_value", "prompt[0]",
                    "; found -1"),
    "too long": ("chat/completions", part(text="w1 " * 5000), 400, "context_length_exceeded", None,
                 "is too long: the model's context is 4096 tokens"),
    "too long a stream": ("completions", {**TEXT, "prompt": "w1 " * 5000, "stream": True}, 400,
                          "context_length_exceeded", None, "is too long"),
    "no query": ("query/execute", {"g": {"model": "tiny", "input": {"usr": "hi"}}}, 400,
                 "invalid_value", "$.g.input.usr", "did you mean user"),
    "query model": ("query/execute", {"g": {"model": "gpt", "input": {"user": "w1"}}}, 404,
                    "model_not_found", "$.g.model", "'gpt' is not served here"),
    "long query": ("query/execute", {"g": {"model": "tiny", "input": {"user": "w1 " * 5000}}}, 400,
                   "context_length_exceeded", None, "$: prompt of"),
    "query option": ("query/execute?sed=1", {"user": "w1"}, 400, "unknown_parameter", "sed",
                     "expected one of stream"),
    "option twice": ("query/execute?seed=1&seed=2", {"user": "w1"}, 400, "invalid_value", "seed",
                     "seed: expected the option once; found it twice"),
    "query seed": ("query/execute?seed=x", {"user": "w1"}, 400, "invalid_value", "seed",
                   "expected a whole number; found 'x'"),
    "query scope": ("query/execute?scope=x", {"user": "w1"}, 400, "invalid_value", "scope",
                    "anchored, isolated, full"),
    "large query": ("query/execute", {"repeat": {"n": 10**9, "g": QUERY}}, 400, "invalid_value",
                    None, "expected at most 4096 generate calls; found 1000000000"),
    "query heat": ("query/execute?temperature=nan", {"user": "w1"}, 400, "invalid_value", None,
                   "temperature is out of range"),
    "no endpoint": ("embeddings", {}, 404, "not_found", None, "POST /v1/embeddings"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_said(server: ServerProcess, wrong: Any) -> None:
    path, body, status, code, param, message = wrong
    reply = server.post(f"/v1/{path}", body)
    assert (reply.status, reply.error["code"], reply.error["param"]) == (status, code, param)
    assert message in reply.error["message"]
    assert reply.error["type"] == "invalid_request_error"


def test_other_methods_and_models(server: ServerProcess) -> None:
    reply = server.get("/v1/chat/completions")
    assert reply.status == 405 and reply.error["code"] == "method_not_allowed"
    assert reply.headers["allow"] == "POST"
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        assert client.models.retrieve("other").id == "other"
        with pytest.raises(openai.NotFoundError, match="'a/b' is not served here"):
            client.models.retrieve("a/b")


NEUTRAL = {
    "top_p": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0, "logit_bias": {}, "tools": [],
    "logprobs": False, "response_format": {"type": "text"}, "parallel_tool_calls": True, "n": None,
    "stop": None, "seed": None, "tool_choice": "none", "store": False, "metadata": {"a": "b"},
    "temperature": None, "stream": None, "stream_options": None, "service_tier": "auto",
}  # fmt: skip


def test_fields_without_effect_are_accepted(server: ServerProcess) -> None:
    message = {"role": "assistant", "content": "w1", "refusal": None, "tool_calls": None,
               "annotations": []}  # fmt: skip
    body = chat(**NEUTRAL, messages=[CHAT["messages"][0], message, CHAT["messages"][0]])
    reply = server.post("/v1/chat/completions", body)
    assert reply.status == 200, reply.data
