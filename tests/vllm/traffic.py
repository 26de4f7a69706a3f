"""Traffic of many requests at once through vLLM's engine, step by step, with aborts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import torch
from served import BLOCK, VOCAB, Served, scheduler_of
from test_spans import TOLERANCE, make
from vllm import RequestOutput, SamplingParams

from kvspan.engine import Placement
from kvspan.layout import SpanLayout, layout_from_tokens
from kvspan.vllm.params import to_params
from kvspan.vllm.prepare import prepare_stages
from span_oracle import text_logprobs

_names = count()


@dataclass
class Ask:
    """One request of a user's. prepare: whether its spans are asked for beside it."""

    layout: SpanLayout
    kind: str = ""
    max_tokens: int = 1
    prepare: bool = True
    placement: Placement = "sequential"
    timeout_s: float = 0.3
    params: dict[str, Any] = field(default_factory=dict)


def random_ask(rng: np.random.Generator, *, max_tokens: int = 6) -> Ask:
    """Few documents in many orders, sometimes an ordinary twin, sometimes with other bounds."""
    order = rng.integers(0, 6, rng.integers(0, 5)).tolist()
    scope = "isolated" if rng.random() < 0.25 else "anchored"
    tail = int(rng.choice([1, 5, 31, 32, 33, 60]))
    between = 1 if len(order) > 1 and rng.random() < 0.2 else None
    anchor = int(rng.integers(1, 3))
    layout = make(order, scope, tail=tail, anchor=anchor, between=between, seed=3)
    kind = "one token after" if tail == 1 else "text between" if between else "spans"
    if not layout.spans or rng.random() < 0.15:
        layout, kind = layout_from_tokens(layout.token_ids, (), BLOCK), "ordinary twin"
    elif len(order) > 1 and between is None and rng.random() < 0.1:
        whole = (layout.spans[0][0], layout.spans[-1][1])
        layout = layout_from_tokens(layout.token_ids, [whole], BLOCK, layout.scope)
        kind = "other boundaries"
    return Ask(
        layout,
        kind,
        max_tokens=int(rng.integers(1, max_tokens + 1)),
        prepare=rng.random() < 0.7,
        placement="parallel" if rng.random() < 0.2 else "sequential",
        timeout_s=float(rng.choice([0.0, 0.02, 0.3])),
    )


def run(
    served: Served,
    asks: Sequence[Ask],
    *,
    logprobs: int | None = VOCAB,
    abort: Callable[[int, int], bool] = lambda step, i: False,
) -> list[RequestOutput | None]:
    """Asks all at once. abort(step, i): whether ask i is given up before this step; None then."""
    engine = served.llm.llm_engine
    names: list[list[str]] = []
    for ask in asks:
        parts = [part for stage in prepare_stages(ask.layout) for part in stage]
        names.append([])
        for layout in [*(parts if ask.prepare else ()), ask.layout]:
            is_ask = layout is ask.layout
            names[-1].append(f"traffic-{next(_names)}")
            params = SamplingParams(
                max_tokens=ask.max_tokens if is_ask else 1,
                temperature=0,
                ignore_eos=True,
                detokenize=False,
                logprobs=logprobs if is_ask else None,
                extra_args={
                    "kv_transfer_params": to_params(layout, ask.timeout_s, ask.placement) or None
                },
                **(ask.params if is_ask else {}),
            )
            prompt = {"prompt_token_ids": layout.token_ids.tolist()}
            engine.add_request(names[-1][-1], prompt, params)  # type: ignore[arg-type]
    wanted = {group[-1]: i for i, group in enumerate(names)}
    outputs: list[RequestOutput | None] = [None] * len(asks)
    step = 0
    while engine.has_unfinished_requests():
        for i, group in enumerate(names):
            if abort(step, i) and outputs[i] is None:
                engine.abort_request(group)
                wanted.pop(group[-1], None)
        for output in engine.step():
            if output.finished and output.request_id in wanted:
                assert isinstance(output, RequestOutput)
                outputs[wanted[output.request_id]] = output
        step += 1
    engine.step()  # tells the workers what is finished
    return outputs


@dataclass
class Verdict:
    """max_error: largest log-probability difference. wrong: answers with another token."""

    requests: int = 0
    tokens: int = 0
    ties: int = 0
    wrong: int = 0
    max_error: float = 0.0
    fallbacks: int = 0
    moved: int = 0
    computed: int = 0


def judge(served: Served, ask: Ask, output: RequestOutput, verdict: Verdict) -> None:
    """Compares every token of an answer with transformers, given the tokens before it."""
    audit = served.audit(output)
    layout = ask.layout
    verdict.moved += audit.get("moved_tokens", 0) > 0
    verdict.computed += audit.get("computed_tokens", 0) > 0
    if audit.get("fallback"):
        verdict.fallbacks += 1
        layout = layout_from_tokens(layout.token_ids, (), BLOCK)
    tokens = list(output.outputs[0].token_ids)
    given = output.outputs[0].logprobs
    ids = np.concatenate([layout.token_ids, np.asarray(tokens[:-1], np.int32)])
    longer = SpanLayout(ids.astype(np.int32), layout.spans, BLOCK, layout.scope)
    expected = text_logprobs(served.reference, longer, ask.placement)[-len(tokens) :]
    verdict.requests += 1
    verdict.tokens += len(tokens)
    for i, token in enumerate(tokens):
        best, second = expected[i].topk(2).values.tolist()
        if token != int(expected[i].argmax()):
            # At a tie within the tolerance either token is the greedy one.
            tie = best - float(expected[i, token]) <= TOLERANCE and best - second <= TOLERANCE
            verdict.ties += tie
            verdict.wrong += not tie
        if given is not None:
            known = torch.tensor(list(given[i]))
            got = torch.tensor([value.logprob for value in given[i].values()])
            error = float((got - expected[i, known]).abs().max())
            verdict.max_error = max(verdict.max_error, error)


def free_blocks(served: Served) -> int:
    return int(scheduler_of(served).kv_cache_manager.block_pool.get_num_free_blocks())


@contextmanager
def counted_preemptions(served: Served) -> Iterator[list[str]]:
    """Ids of the requests that vLLM preempts meanwhile."""
    scheduler, preempted = scheduler_of(served), []
    original = scheduler._preempt_request

    def count_one(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.request_id)
        return original(request, *args, **kwargs)

    scheduler._preempt_request = count_one
    try:
        yield preempted
    finally:
        scheduler._preempt_request = original
