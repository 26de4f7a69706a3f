"""``kvspan serve``: the embedded engine behind an OpenAI-compatible HTTP API.

    POST /v1/chat/completions   messages through the model's chat template; parts may be spans
    POST /v1/completions        text, or token ids, as they are
    GET  /v1/models
    POST /v1/query/execute      a span query as JSON; ?stream=true for server-sent events
    GET  /health, /metrics

A text part of a user message is a span when it says so; spans keep the order they are sent in:

    {"role": "user", "content": [
        {"type": "text", "text": "a passage", "kvspan": {"span": true}},
        {"type": "text", "text": "the question"}]}

and the field ``kvspan`` of a request says how spans are treated and adds to the answer what was
reused: {"scope": "anchored", "placement": "sequential", "salt": "", "report": true}, all optional.
Fields that kvspan does not support are refused by name unless they have no effect.
"""
