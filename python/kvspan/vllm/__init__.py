"""kvspan on stock vLLM: span requests reuse KV at any position, ordinary requests are untouched.

    LLM(model, kv_transfer_config={"kv_connector": "KvspanConnector",
                                   "kv_connector_module_path": "kvspan.vllm.connector",
                                   "kv_role": "kv_both"})

A request says where its spans are in ``kv_transfer_params`` (see `kvspan.vllm.params`). A span is
only ever computed right after its anchor, by a small request of its own (`kvspan.vllm.prepare`);
the request that uses it waits until it is there and gets a copy with the keys rotated.

Importing this package does not import vLLM.
"""

# vLLM versions that the tests in tests/vllm have passed with. Others may work.
TESTED_VERSIONS = ("0.32.0",)
# An environment variable: the corpora of /v1/query/execute, as JSON with the arguments of
# `kvspan.retrieve.corpora.Corpora`.
CORPORA_VARIABLE = "KVSPAN_CORPORA"
# Hybrid models (`model_type`) whose blocks `kvspan.vllm.hybrid.replay` can run on their own.
HYBRIDS = (
    "qwen3_5_text",
    "qwen3_5",
    "qwen3_5_moe_text",
    "qwen3_5_moe",
    "qwen3_next",
    "olmo_hybrid",
)
