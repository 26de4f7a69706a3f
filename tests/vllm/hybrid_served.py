"""A tiny hybrid of random weights under vLLM with kvspan's connector; stock vLLM is its oracle."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from served import Served
from transformers import (
    AutoModelForCausalLM,
    OlmoHybridConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)
from vllm import LLM, RequestOutput, SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group

VOCAB = 1024
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "initializer_range": 0.06,
}
_ROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "mrope_section": [4, 2, 2],
    "mrope_interleaved": True,
}


def save_hybrid(name: str, folder: Path, **others: Any) -> Path:
    """A tiny hybrid model whose gates remember for tens to thousands of tokens.

    With the initial gates everything is forgotten in two tokens, and no error in a state shows.
    others: of the config, in place of `_SIZES`.
    """
    torch.manual_seed(0)
    sizes = {**_SIZES, **others}
    if name == "qwen3_5":
        config: Any = Qwen3_5TextConfig(**sizes, rope_parameters=_ROPE)
    elif name == "olmo_hybrid":
        del sizes["head_dim"]
        config = OlmoHybridConfig(**{**sizes, "num_attention_heads": 2})
    else:
        config = Qwen3NextConfig(
            **sizes,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
        )
    model = AutoModelForCausalLM.from_config(config)
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            gates = layer.linear_attn
            heads = gates.A_log.numel()
            step = torch.exp(torch.linspace(math.log(3e-4), math.log(3e-2), heads))
            gates.dt_bias.data = step + torch.log(-torch.expm1(-step))
            gates.A_log.data = torch.zeros(heads)
    if name == "olmo_hybrid":
        _save_olmo(model, folder)
    else:
        model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def _save_olmo(model: Any, folder: Path) -> None:
    """In float32, under the names that vLLM reads: they are not those transformers writes."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    weights = {}
    for name, weight in model.state_dict().items():
        if ".conv1d." not in name:
            weights[name] = weight.contiguous()
            continue
        sizes = [model.config.linear_num_key_heads * model.config.linear_key_head_dim] * 2
        parts = weight.split([*sizes, len(weight) - sum(sizes)])
        for letter, part in zip("qkv", parts, strict=True):
            weights[name.replace(".conv1d.", f".{letter}_conv1d.")] = part.contiguous()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@dataclass(frozen=True)
class Answer:
    """cached: prompt tokens that were not computed. replay: kvspan's record of it, if any."""

    tokens: tuple[int, ...]
    logprobs: dict[int, float]
    cached: int
    replay: dict[str, Any]


def answer_of(output: RequestOutput) -> Answer:
    """Of a request with log-probabilities. They are those of its first token."""
    given = output.outputs[0].logprobs
    assert given is not None
    return Answer(
        tuple(output.outputs[0].token_ids),
        {token: value.logprob for token, value in given[0].items()},
        output.num_cached_tokens or 0,
        dict((output.kv_transfer_params or {}).get("kvspan", {})),
    )


class HybridServed:
    """mode: vLLM's mamba_cache_mode, "none" or "align" (the latter with prefix caching)."""

    def __init__(
        self,
        folder: Path,
        mode: str,
        *,
        connector: bool = True,
        extra: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        Served.close_live()  # a process has room for one engine
        if connector:
            options["kv_transfer_config"] = {
                "kv_connector": "KvspanConnector",
                "kv_connector_module_path": "kvspan.vllm.connector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"k_min": 16, "host_gib": 0.5, **(extra or {})},
            }
        settings: dict[str, Any] = {
            "dtype": "bfloat16",
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "max_model_len": 4096,
            "max_num_batched_tokens": 4096,
            "max_num_seqs": 16,
            "enable_prefix_caching": mode == "align",
            "disable_log_stats": True,
            "max_logprobs": 64,
        }
        self.llm = LLM(str(folder), **{**settings, **options})
        runner = os.environ.get("KVSPAN_VLLM_RUNNER", "v1")
        assert self.llm.llm_engine.vllm_config.use_v2_model_runner == (runner == "v2")
        self.mode = mode
        self.core = self.llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
        self.connector: Any = self.core.scheduler.connector

    @property
    def side(self) -> Any:
        """The scheduler's side of the connector."""
        return self.connector.scheduling

    @property
    def replayer(self) -> Any:
        """The worker's."""
        connector: Any = get_kv_transfer_group()
        return connector.working.replayer

    def settle(self) -> None:
        """Steps until vLLM has nothing left to do: what finished requests leave is stored."""
        while self.core.scheduler.has_requests() or self.core.batch_queue:
            self.llm.llm_engine.step()

    def ask(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = 16,
        settle: bool = True,
        **kvspan: Any,
    ) -> list[Answer]:
        """Greedy answers to prompts that are sent together."""
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=0,
            detokenize=False,
            ignore_eos=True,
            logprobs=64,
            extra_args={"kv_transfer_params": {"kvspan": kvspan}} if kvspan else None,
        )
        outputs = self.llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False
        )
        if settle:
            self.settle()
        return [answer_of(output) for output in outputs]

    def forget(self) -> None:
        """Empty vLLM's cache and kvspan's."""
        assert self.llm.reset_prefix_cache() or self.mode == "none"
        if self.connector is not None:
            self.connector.reset_cache()

    @contextmanager
    def chunks_of(self, tokens: int) -> Iterator[None]:
        """Prefill in steps of at most so many tokens."""
        scheduler = self.core.scheduler
        before = scheduler.max_num_scheduled_tokens
        scheduler.max_num_scheduled_tokens = tokens
        try:
            yield
        finally:
            scheduler.max_num_scheduled_tokens = before

    def close(self) -> None:
        self.core.shutdown()
        del self.llm, self.core, self.connector
        gc.collect()


def difference(a: Answer, b: Answer) -> float:
    """Mean difference of the first token's log-probabilities, over the tokens both give."""
    both = a.logprobs.keys() & b.logprobs.keys()
    return sum(abs(a.logprobs[t] - b.logprobs[t]) for t in both) / len(both)
