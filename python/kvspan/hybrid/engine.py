"""The embedded engine for hybrid models: ordinary prompts, prefixes reused to the token."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from kvspan.engine import Progress
from kvspan.engine.attention import IMPLEMENTATION
from kvspan.engine.job import Job
from kvspan.engine.local import LocalEngine, memory_bytes, stop_ids
from kvspan.engine.pool import BlockPool
from kvspan.engine.prefill import Prefill
from kvspan.engine.rope import LayerSpec, refused_rope
from kvspan.engine.runner import KVCache
from kvspan.engine.sequence import Sequence
from kvspan.engine.worker import Worker
from kvspan.errors import KvspanError, UsageError
from kvspan.hybrid.groups import layer_map, refusal
from kvspan.hybrid.hidden import HIDDEN_FORMATS, HiddenCache, HiddenFormat
from kvspan.hybrid.pieces import PIECE
from kvspan.hybrid.policy import Policy
from kvspan.hybrid.prefill import HybridCache, HybridPrefill
from kvspan.hybrid.replay import ReplayOptions
from kvspan.hybrid.rows import HybridRunner
from kvspan.hybrid.state import StateStore
from kvspan.layout import PromptEncoder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NO_SPANS = "a hybrid model's recurrent state depends on the order of all that is before"
CHECKPOINT_SHARE = 0.25  # of kv_cache_gib, for checkpoints; a quarter of that again for marks


class HybridWorker(Worker):
    """The worker's steps where a sequence has a recurrent state beside its KV."""

    cache: HybridCache

    def _new_prefill(self, seq: Sequence) -> Prefill:
        return HybridPrefill(seq, self.cache)

    def _decode(self, jobs: list[Job]) -> torch.Tensor:
        steps, prefills = [], [_hybrid(job) for job in jobs]
        for job, prefill in zip(jobs, prefills, strict=True):
            token = job.detokenizer.token_ids[-1]
            steps.append((token, prefill.state.position, prefill.seq.slots, prefill.state))
        logits = self.cache.runner.decode(steps)
        for prefill in prefills:
            prefill.decoded()
        return logits

    def _cache(self, job: Job) -> None:
        ids = job.detokenizer.token_ids
        # The last token went through the model only if another one was asked for after it.
        written = ids if job.at_end else ids[:-1]
        _hybrid(job).keep(written)
        job.written = len(written)

    def _evict(self) -> int:
        count = super()._evict()
        self.cache.checkpoints.clear()
        self.cache.marks.clear()
        return count


def _hybrid(job: Job) -> HybridPrefill:
    prefill = job.prefill
    assert isinstance(prefill, HybridPrefill)
    return prefill


class HybridEngine(LocalEngine):
    """`LocalEngine` for a model that `groups.is_hybrid`.

    replay: how a cached prefix's state is restored, see `policy.Policy.parse`. hidden: the format
    hidden vectors are kept in. checkpoint_interval: tokens between exact states, a multiple of
    256; 0 keeps none. The policy may be changed between requests by `set_replay`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str = "",
        block_size: int = 16,
        kv_cache_gib: float = 1.0,
        progress: Progress | None = None,
        replay: str = "exact",
        hidden: HiddenFormat = "sum",
        checkpoint_interval: int = 1024,
        options: ReplayOptions | None = None,
    ) -> None:
        if block_size < 1:
            raise UsageError(f"block_size: expected at least 1, got {block_size}")
        if hidden not in HIDDEN_FORMATS:
            raise UsageError(f"hidden: expected {', '.join(HIDDEN_FORMATS)}, got {hidden!r}")
        if checkpoint_interval % PIECE or checkpoint_interval < 0:
            raise UsageError(
                f"checkpoint_interval: expected a multiple of {PIECE}, got {checkpoint_interval}"
            )
        if refused := refusal(model.config):
            raise KvspanError(f"model {name}: the embedded engine cannot run it: {refused}")
        model.set_attn_implementation(IMPLEMENTATION)
        self.name = name
        self.progress = progress
        self.tokenizer = tokenizer
        self.encoder = PromptEncoder(tokenizer, block_size)
        self.no_spans = NO_SPANS
        config = model.config.get_text_config()
        self.max_positions = int(config.max_position_embeddings)
        self.runner, states_bytes = _allocate(model, name, block_size, kv_cache_gib, hidden)
        self.pool = BlockPool(self.runner.cache.num_blocks)
        self._check(model)
        self.cache = HybridCache(
            self.pool,
            self.runner,
            StateStore(states_bytes),
            StateStore(states_bytes // 4),
            options=options or ReplayOptions(),
            checkpoint_interval=checkpoint_interval,
            no_reuse=refused_rope(config),
        )
        self.set_replay(replay)
        self._encoding = ThreadPoolExecutor(1, "kvspan-tokenizer")
        self.worker = HybridWorker(
            self.runner,
            self.pool,
            name,
            self.encoder,
            self.max_positions,
            stop_ids(model, tokenizer),
            progress,
        )
        self.worker.cache = self.cache

    def set_replay(self, replay: str | Policy) -> None:
        """The policy of requests that are admitted from now on. Raises UsageError."""
        policy = Policy.parse(replay) if isinstance(replay, str) else replay
        if policy.kind == "exact" and not self.cache.runner.hidden.exact:
            raise UsageError("replay: exact needs hidden vectors in format sum or pair, not int8")
        self.cache.policy = policy


def _allocate(
    model: PreTrainedModel, name: str, block_size: int, kv_cache_gib: float, hidden: HiddenFormat
) -> tuple[HybridRunner, int]:
    """Runner with its pools, and the bytes that are left for checkpoints."""
    config = model.config.get_text_config()
    layers = layer_map(config.layer_types)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    spec = LayerSpec(config.num_key_value_heads, dim, dim, None, torch.empty(0), True)
    specs = [spec] * len(layers.full)
    vectors = (len(layers.streams), config.hidden_size, model.dtype, hidden)
    per_block = KVCache.bytes_per_block(specs, block_size, model.dtype)
    per_block += HiddenCache.bytes_per_token(*vectors) * block_size
    per_block += 4 * len(layers.linear) * config.linear_num_value_heads
    states_bytes = int(CHECKPOINT_SHARE * kv_cache_gib * 2**30)
    blocks_bytes = int(kv_cache_gib * 2**30) - states_bytes - states_bytes // 4
    least, memory = 2 * per_block / (1 - 1.25 * CHECKPOINT_SHARE), memory_bytes(model.device)
    if not least <= kv_cache_gib * 2**30 <= memory:
        raise UsageError(
            f"kv_cache_gib: expected {least / 2**30:.3g} (two blocks of {block_size} tokens) to "
            f"{memory / 2**30:.3g} (all memory), got {kv_cache_gib:g}"
        )
    num_blocks = blocks_bytes // per_block
    try:
        cache = KVCache(specs, num_blocks, block_size, model.dtype, model.device)
        kept = HiddenCache(
            len(layers.streams),
            num_blocks * block_size,
            config.hidden_size,
            model.dtype,
            model.device,
            hidden,
        )
    except RuntimeError as e:
        raise KvspanError(f"no memory for a pool of {kv_cache_gib:g} GiB: {e}") from None
    return HybridRunner(model, cache, kept), states_bytes
