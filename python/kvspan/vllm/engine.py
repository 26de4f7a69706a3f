"""vLLM's own engine client as an engine of kvspan's, for queries on vLLM's server."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm import RequestOutput, SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind

from kvspan.engine import (
    Capabilities,
    GenerateRequest,
    GenerateResult,
    Placement,
    Reuse,
    Timings,
    Usage,
)
from kvspan.engine.limits import check_request
from kvspan.errors import KvspanError, UsageError
from kvspan.layout import PromptEncoder, SpanLayout
from kvspan.parentheses import Parentheses
from kvspan.vllm.params import KEY, PROBE, to_params
from kvspan.vllm.preparing import TIMEOUT_S, Preparation, Preparer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm.engine.protocol import EngineClient
    from vllm.lora.request import LoRARequest

DEFAULT_MAX_TOKENS = 2048  # where a request leaves it open, as on the embedded engine


@dataclass(frozen=True)
class VllmState:
    alive: bool


class VllmEngine:
    """Implements `kvspan.engine.Engine` on a running vLLM.

    tokenizer: the engine's own copy of it, or None. reason: why spans are not reused, or "".
    parentheses: boundaries in prompts of tokens that clients made, if they are on.
    """

    def __init__(
        self, client: EngineClient, tokenizer: PreTrainedTokenizerBase | None, reason: str = ""
    ) -> None:
        self.client = client
        self.reason = reason
        self.told = False
        self.parentheses: Parentheses | None = None
        self.preparer = Preparer()
        config = client.vllm_config
        self.max_positions = int(config.model_config.max_model_len)
        self.block_size = int(config.cache_config.block_size)
        self.encoder = None if tokenizer is None else PromptEncoder(tokenizer, self.block_size)
        # Long prompts take the tokenizer a while, and it must not be used by two threads at once.
        self._encoding = ThreadPoolExecutor(1, "kvspan-tokenizer")

    async def probe(self) -> str:
        """Ask the scheduler with a request of one span what it does with spans: "" if it reuses.

        Sets `told` where the connector itself gave the reason, and has said so in the log.
        """
        parallel = self.client.vllm_config.parallel_config
        if parallel.data_parallel_size > 1 and not parallel.data_parallel_external_lb:
            return "data parallelism: spans prepared on one engine are not on the others"
        if self.max_positions <= self.block_size + 1:
            return f"the context of {self.max_positions} tokens has no room for a block and a word"
        ids = np.zeros(self.block_size + 1, dtype=np.int32)
        layout = SpanLayout(ids, ((0, self.block_size),), self.block_size)
        params = _sampling(layout, "sequential", 1)
        async for output in self.stream(layout, params, f"{PROBE}{uuid.uuid4().hex}"):
            audit = audit_of(output)
            if output.finished:
                if audit is None:
                    return "kvspan's connector is not loaded (see `kvspan vllm-args`)"
                self.told = bool(refused_in(audit))
                return refused_in(audit)
        raise KvspanError("vLLM gave no answer to a first request")

    # --- kvspan.engine.Engine --------------------------------------------------------------------

    async def generate(
        self, request: GenerateRequest, on_text: Callable[[str], None] | None = None
    ) -> GenerateResult:
        return await self.generate_layout(await self.lay_out(request), request, on_text)

    async def prepare(self, request: GenerateRequest) -> GenerateResult:
        return await self.generate(replace(request, max_tokens=1, temperature=0.0))

    def capabilities(self) -> Capabilities:
        return Capabilities(
            spans=not self.reason,
            reason=self.reason,
            max_tokens=self.max_positions,
            block_size=self.block_size,
        )

    def close(self) -> None:
        self._encoding.shutdown(wait=False)

    # --- what the server asks beyond that --------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        return int(self.client.model_config.get_vocab_size())

    def stats(self) -> VllmState:
        return VllmState(alive=self.client.is_running)

    async def lay_out(self, request: GenerateRequest) -> SpanLayout:
        if self.encoder is None:
            raise UsageError("the server runs without a tokenizer (--skip-tokenizer-init)")
        scope = "full" if self.reason else request.scope
        return await asyncio.get_running_loop().run_in_executor(
            self._encoding,
            lambda: self._encoder().encode(request.prompt, scope, chat=request.chat),
        )

    def _encoder(self) -> PromptEncoder:
        assert self.encoder is not None
        return self.encoder

    async def generate_layout(
        self,
        layout: SpanLayout,
        request: GenerateRequest,
        on_text: Callable[[str], None] | None = None,
    ) -> GenerateResult:
        started = time.perf_counter()
        name = f"kvspan-{uuid.uuid4().hex}"
        params = self._params(layout, request, name)
        text, ids, last, first_at = "", [], None, 0.0
        async with self.beside(
            layout, salt=request.salt, placement=request.placement, name=name
        ) as prepared:
            async for output in self._explained(layout, params, name, request):
                (answer,) = output.outputs
                if not first_at and answer.token_ids:
                    first_at = time.perf_counter()
                    prepared.begun.set()
                ids += answer.token_ids
                piece = answer.text
                if piece and not text:
                    piece = self._first_piece(piece, ids)
                text += piece
                if piece and on_text is not None:
                    on_text(piece)
                last = output
        reason = last.outputs[0].finish_reason if last is not None else None
        if last is None or reason not in ("stop", "length"):
            raise KvspanError(f"vLLM ended the request: {reason}", path=request.path)
        off = self.reason if request.scope != "full" else ""
        cached = last.num_cached_tokens or 0
        reuse = reuse_of(layout, prepared, cached, audit_of(last) or {}, off)
        now = time.perf_counter()
        return GenerateResult(
            text=text,
            token_ids=ids,
            finish_reason=reason,
            usage=Usage(
                prompt_tokens=layout.num_tokens,
                completion_tokens=len(ids),
                cached_tokens=layout.num_tokens - reuse.computed_tokens,
            ),
            timings=Timings(ttft=first_at - started, decode=now - first_at, total=now - started),
            reuse=reuse,
        )

    def _first_piece(self, piece: str, ids: list[int]) -> str:
        """vLLM puts the blank between prompt and answer in front of the answer; kvspan has none."""
        if piece.startswith(" ") and not self._decode(ids).startswith(" "):
            return piece[1:]
        return piece

    def _decode(self, ids: list[int]) -> str:
        return str(self._encoder().tokenizer.decode(ids, skip_special_tokens=True))

    # --- vLLM ------------------------------------------------------------------------------------

    def beside(
        self,
        layout: SpanLayout,
        *,
        salt: str | None = None,
        lora: LoRARequest | None = None,
        placement: Placement = "sequential",
        name: str = "",
    ) -> Any:
        """`Preparer.beside` with requests to this engine."""

        async def run(part: SpanLayout) -> int:
            cached = 0
            one = f"{name}-prepare-{uuid.uuid4().hex[:8]}"
            params = _sampling(part, placement, 1, prepare_for=name)
            async for output in self.stream(part, params, one, salt=salt, lora=lora):
                cached = output.num_cached_tokens or 0
            return cached

        if self.reason:
            layout = SpanLayout(layout.token_ids, (), layout.block_size)
        domain = (salt or "", lora.lora_name if lora else "", placement)
        return self.preparer.beside(layout, run, domain)

    def stream(
        self,
        layout: SpanLayout,
        params: SamplingParams,
        name: str,
        *,
        salt: str | None = None,
        lora: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        prompt = tokens_input(layout.token_ids.tolist(), cache_salt=salt or None)
        outputs: AsyncGenerator[RequestOutput, None] = self.client.generate(
            prompt, params, name, lora_request=lora
        )
        return outputs

    async def _explained(
        self, layout: SpanLayout, params: SamplingParams, name: str, request: GenerateRequest
    ) -> AsyncGenerator[RequestOutput, None]:
        try:
            async for output in self.stream(layout, params, name, salt=request.salt):
                yield output
        except (VLLMClientError, ValueError) as error:
            raise UsageError(str(error), path=request.path) from error
        except Exception as error:
            raise KvspanError(f"{type(error).__name__}: {error}", path=request.path) from error

    def _params(self, layout: SpanLayout, request: GenerateRequest, name: str) -> SamplingParams:
        """What is wrong with a request is said in the words of the embedded engine."""
        temperature, context = request.temperature or 0.0, self.max_positions
        room = context - layout.num_tokens
        check_request(request, layout, vocab_size=self.vocab_size, room=room, context=context)
        return _sampling(
            layout,
            request.placement,
            min(request.max_tokens or DEFAULT_MAX_TOKENS, room),
            id=name,
            temperature=temperature,
            stop=list(request.stop),
            seed=request.seed % 2**63 if temperature else None,
        )


def reuse_of(
    layout: SpanLayout,
    prepared: Preparation,
    cached: int,
    audit: Mapping[str, Any],
    off: str = "",
) -> Reuse:
    """What became of a prompt's tokens. cached: tokens that vLLM found. off: why spans are off."""
    fallback = refused_in(audit)
    notes = [f"spans not reused: {reason}" for reason in dict.fromkeys((fallback, off)) if reason]
    replay = dict(audit) if "policy" in audit else None
    if replay is not None and not replay.get("exact", True):
        notes.append(f"recurrent state rebuilt approximately ({replay['policy']})")
    span_tokens = sum(end - start for start, end in layout.spans)
    # Of each span, the tokens that were computed for this request: by itself, or beforehand.
    computed = [max(0, end - max(start, cached)) for start, end in layout.spans]
    missed = span_tokens if fallback else min(sum(computed) + prepared.tokens, span_tokens)
    hits = sum(
        not fallback and not count and layout.token_ids[a:b].tobytes() not in prepared.missed
        for (a, b), count in zip(layout.spans, computed, strict=True)
    )
    return Reuse(
        spans=len(layout.spans),
        span_hits=hits,
        span_tokens=span_tokens,
        reused_tokens=span_tokens - missed,
        moved_tokens=int(audit.get("moved_tokens", 0)),
        prepared_tokens=missed,
        computed_tokens=min(layout.num_tokens - cached + prepared.computed, layout.num_tokens),
        replay=replay,
        notes=notes,
    )


def _sampling(
    layout: SpanLayout,
    placement: Placement,
    max_tokens: int,
    *,
    id: str = "",
    prepare_for: str = "",
    **more: Any,
) -> SamplingParams:
    transfer = to_params(layout, TIMEOUT_S, placement, id=id, prepare_for=prepare_for)
    return SamplingParams(
        **{"temperature": 0.0, **more},
        max_tokens=max_tokens,
        output_kind=RequestOutputKind.DELTA,
        extra_args={"kv_transfer_params": transfer} if transfer else None,
    )


def refused_in(audit: Mapping[str, Any]) -> str:
    """Why the connector, or that for hybrid models, did not do what a request asked; or ""."""
    return str(audit.get("fallback") or audit.get("refused") or "")


def audit_of(output: RequestOutput) -> dict[str, Any] | None:
    """What the connector says of a request, once it is over."""
    audit = (output.kv_transfer_params or {}).get(KEY)
    return dict(audit) if isinstance(audit, dict) else None
