"""A tiny model under vLLM with kvspan's connector, and the same model under transformers."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config
from vllm import LLM, RequestOutput, SamplingParams
from vllm.lora.request import LoRARequest

from kvspan.engine import Placement
from kvspan.layout import SpanLayout
from kvspan.vllm.params import KEY, to_params
from kvspan.vllm.prepare import prepare_stages
from span_oracle import span_logprobs

BLOCK = 32
VOCAB = 512
CONNECTOR = {
    "kv_connector": "KvspanConnector",
    "kv_connector_module_path": "kvspan.vllm.connector",
    "kv_role": "kv_both",
}
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "initializer_range": 0.25,  # large: attention must matter, or errors in it stay hidden
}


def save_tiny(name: str, folder: Path) -> Path:
    torch.manual_seed(0)
    config = {"llama": LlamaConfig, "qwen3": Qwen3Config}[name](**SIZES)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    return folder


def scheduler_of(served: Served) -> Any:
    return served.llm.llm_engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]


class Served:
    """Options are vLLM's; connector=None serves without kvspan.

    A process has room for one engine, since vLLM keeps its parallel groups and its connector in
    globals: a new one closes the one before. `shared` is for those who may find theirs closed.
    """

    _live: ClassVar[Served | None] = None

    @classmethod
    def shared(cls, folder: Path, **options: Any) -> Served:
        """The live one if it has this folder and these options, otherwise a new one."""
        if cls._live is None or cls._live.made_of != (folder, options):
            cls._live = Served(folder, **options)
            cls._live.made_of = (folder, options)
        return cls._live

    @classmethod
    def close_live(cls) -> None:
        if cls._live is not None:
            cls._live.close()

    def __init__(
        self,
        folder: Path,
        *,
        num_blocks: int,
        connector: dict[str, Any] | None = CONNECTOR,
        **options: Any,
    ) -> None:
        self.close_live()
        self.made_of: tuple[Path, dict[str, Any]] | None = None
        if connector:
            options["kv_transfer_config"] = connector
        settings: dict[str, Any] = {
            "dtype": "float32",
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "max_model_len": 4096,
            "block_size": BLOCK,
            "max_num_seqs": 16,
            "max_logprobs": VOCAB,
            "disable_log_stats": True,
            "num_gpu_blocks_override": num_blocks,
        }
        # First, since vLLM changes the classes of transformers that it runs some models by; what
        # they ask for then is set below.
        self.reference = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.reference.base_model.do_not_compile = True
        self.llm = LLM(str(folder), **{**settings, **options})
        self.block_size = self.llm.llm_engine.vllm_config.cache_config.block_size
        Served._live = self

    def ask(
        self,
        layouts: Sequence[SpanLayout],
        *,
        prepare: bool = True,
        timeout_s: float = 30.0,
        placement: Placement = "sequential",
        lora: LoRARequest | None = None,
        salt: str | None = None,
    ) -> list[RequestOutput]:
        """One token of each layout, with all log-probabilities; their preparations before."""
        stages = [prepare_stages(layout) if prepare else [] for layout in layouts]
        for i in range(max(map(len, stages), default=0)):
            parts = [part for s in stages if i < len(s) for part in s[i]]
            self._generate(parts, 0, timeout_s, placement, lora, salt)
        logprobs = min(VOCAB, self.reference.config.vocab_size)
        return self._generate(layouts, logprobs, timeout_s, placement, lora, salt)

    def _generate(
        self,
        layouts: Sequence[SpanLayout],
        logprobs: int,
        timeout_s: float,
        placement: Placement = "sequential",
        lora: LoRARequest | None = None,
        salt: str | None = None,
    ) -> list[RequestOutput]:
        extra = {"cache_salt": salt} if salt else {}
        prompts = [{"prompt_token_ids": x.token_ids.tolist(), **extra} for x in layouts]
        params = [
            SamplingParams(
                max_tokens=1,
                temperature=0,
                ignore_eos=True,
                detokenize=False,
                logprobs=logprobs or None,
                extra_args={"kv_transfer_params": to_params(layout, timeout_s, placement) or None},
            )
            for layout in layouts
        ]
        return self.llm.generate(prompts, params, use_tqdm=False, lora_request=lora)  # type: ignore[arg-type]

    def error(
        self, layout: SpanLayout, output: RequestOutput, placement: Placement = "sequential"
    ) -> float:
        """Largest log-probability difference to transformers, over the whole vocabulary."""
        given = output.outputs[0].logprobs
        assert given is not None
        got = torch.tensor([given[0][token].logprob for token in range(VOCAB)])
        return float((got - self.expected(layout, placement)).abs().max())

    def expected(self, layout: SpanLayout, placement: Placement = "sequential") -> torch.Tensor:
        """log-probabilities [vocab] of the first token after the prompt, by transformers."""
        return span_logprobs(self.reference, layout, placement)

    @staticmethod
    def audit(output: RequestOutput) -> dict[str, Any]:
        return dict((output.kv_transfer_params or {}).get(KEY, {}))

    def close(self) -> None:
        if Served._live is self:
            Served._live = None
            self.llm.llm_engine.engine_core.shutdown()
            del self.llm
            gc.collect()
