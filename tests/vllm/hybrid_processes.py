"""vLLM as it starts by default, engine and worker in processes of their own; see
test_hybrid_killed. Prints the cached tokens of three requests, and waits for its end."""

import sys

from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(
        sys.argv[1],
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=1024,
        enable_prefix_caching=False,
        disable_log_stats=True,
        kv_transfer_config={
            "kv_connector": "KvspanConnector",
            "kv_connector_module_path": "kvspan.vllm.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"host_gib": 0.25},
        },
    )
    base = [7 + 31 * i % 997 for i in range(600)]
    prompts = [base + [1] * 40, base[:500] + [2] * 40, base + [1] * 40]
    cached = []
    for prompt in prompts:
        params = SamplingParams(max_tokens=2, temperature=0, detokenize=False, ignore_eos=True)
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        cached.append(output.num_cached_tokens)
    print("cached", *cached, flush=True)
    sys.stdin.read()
