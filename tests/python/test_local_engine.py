"""The embedded engine against transformers: hit, miss, move and eviction give one answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvspan import ops
from kvspan.engine import GenerateRequest, GenerateResult
from kvspan.engine.local import LocalEngine
from kvspan.engine.sequence import Sequence, SpanRef
from kvspan.layout import SpanLayout, layout_from_tokens
from kvspan.ops import BlockChain
from span_oracle import one_pass_logprobs, span_logprobs
from tiny_models import VOCAB, configs, tiny_model, word_tokenizer

TOLERANCE = 1e-4  # max abs log-probability, float32
GREEDY = GenerateRequest(prompt=(), max_tokens=1, temperature=0.0, return_logprobs=True)


def open_tiny(name: str, block_size: int, num_blocks: int = 400) -> LocalEngine:
    model = tiny_model(name)
    config = configs()[name]
    layers, heads, dim = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
    size = layers * heads * dim * 2 * 4 * block_size
    return LocalEngine(
        model,
        word_tokenizer(),
        name=name,
        block_size=block_size,
        kv_cache_gib=(num_blocks + 0.5) * size / 2**30,
    )


def make_layout(
    block_size: int,
    order: list[int],
    scope: str = "anchored",
    question: int = 0,
    lengths: tuple[int, ...] = (1, 3, 2, 4),
    middle: bool = False,
) -> SpanLayout:
    """An anchor, spans in the given order, perhaps text and spans after, and a question."""
    rng = np.random.default_rng(7)
    docs = [rng.integers(3, VOCAB, n * block_size) for n in lengths]
    anchor = rng.integers(3, VOCAB, 2 * block_size)
    between = rng.integers(3, VOCAB, block_size)
    tail = np.random.default_rng(100 + question).integers(3, VOCAB, block_size + 5)
    parts, spans, at = [anchor], [], len(anchor)
    for i, doc in enumerate(order):
        if middle and i == 2:
            parts.append(between)
            at += len(between)
        parts.append(docs[doc])
        spans.append((at, at + len(docs[doc])))
        at += len(docs[doc])
    return layout_from_tokens(np.concatenate([*parts, tail]), spans, block_size, scope)  # type: ignore[arg-type]


def ask(engine: LocalEngine, layout: SpanLayout, placement: str = "sequential") -> GenerateResult:
    return engine.run_layout(layout, replace(GREEDY, placement=placement))  # type: ignore[arg-type]


def difference(result: GenerateResult, expected: torch.Tensor) -> float:
    assert result.first_logprobs is not None
    return float(np.abs(result.first_logprobs - expected.numpy()).max())


@pytest.fixture(scope="module", params=[16, 64], ids=lambda n: f"block{n}")
def block_size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module", params=list(configs()))
def setting(
    request: pytest.FixtureRequest, block_size: int
) -> Iterator[tuple[LocalEngine, object]]:
    with open_tiny(request.param, block_size) as engine:
        yield engine, tiny_model(request.param, "eager")


@pytest.mark.parametrize("placement", ["sequential", "parallel"])
@pytest.mark.parametrize("scope", ["anchored", "isolated"])
def test_hit_is_miss(setting, block_size: int, scope: str, placement: str) -> None:
    engine, model = setting
    engine.clear_cache()
    runs = [
        ("miss", make_layout(block_size, [0, 1, 2, 3], scope)),
        ("hit", make_layout(block_size, [0, 1, 2, 3], scope)),
        ("new question", make_layout(block_size, [0, 1, 2, 3], scope, question=1)),
        ("reordered", make_layout(block_size, [3, 1, 0, 2], scope)),
        ("repeated span", make_layout(block_size, [2, 0, 2, 1], scope)),
        ("text between", make_layout(block_size, [1, 3, 0, 2], scope, middle=True)),
        ("partly evicted", make_layout(block_size, [2, 3, 1, 0], scope)),
    ]
    for label, layout in runs:
        if label == "partly evicted":
            evicted = engine.pool.evict(engine.pool.num_cached // 2)
            assert evicted > 0
        result = ask(engine, layout, placement)
        assert difference(result, span_logprobs(model, layout, placement)) <= TOLERANCE, label
        spans = sum(end - start for start, end in layout.spans)
        assert result.reuse.reused_tokens + result.reuse.prepared_tokens == spans
        if label == "miss":
            assert result.reuse.reused_tokens == 0
            assert result.usage.cached_tokens == 0
        if label in ("hit", "new question", "reordered"):
            assert result.reuse.prepared_tokens == 0, label
        if label == "hit":
            assert result.reuse.moved_tokens == 0
            assert result.reuse.computed_tokens <= block_size
        if label == "reordered" and placement == "sequential":
            assert result.reuse.moved_tokens > 0
        if placement == "parallel":
            assert result.reuse.moved_tokens == 0


@pytest.mark.parametrize("scope,placement", [("anchored", "parallel"), ("isolated", "sequential")])
def test_oracle_agrees_with_a_single_masked_pass(
    setting, block_size: int, scope, placement
) -> None:
    """Where one transformers pass can express a span prompt, all three agree."""
    engine, model = setting
    layout = make_layout(block_size, [3, 0, 1, 2], scope, middle=True)
    expected = one_pass_logprobs(model, layout, placement)
    assert float((span_logprobs(model, layout, placement) - expected).abs().max()) <= TOLERANCE
    assert difference(ask(engine, layout, placement), expected) <= TOLERANCE


def test_scopes_and_rotation_matter(setting, block_size: int) -> None:
    """The tests above can tell: other scopes and placements give other answers."""
    _, model = setting
    layouts = [make_layout(block_size, [0, 1, 2, 3], scope) for scope in ("anchored", "isolated")]
    layouts.append(layout_from_tokens(layouts[0].token_ids, (), block_size))
    answers = [span_logprobs(model, layout, "sequential") for layout in layouts]
    answers.append(span_logprobs(model, layouts[0], "parallel"))
    for i, a in enumerate(answers):
        for b in answers[i + 1 :]:
            assert float((a - b).abs().max()) > 100 * TOLERANCE


def test_moving_without_rotation_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with the rotation left out, a reordered prompt gives another answer."""
    run_plan = ops.run_plan

    def copy_only(plan, keys, values, inv_freq, **options):
        run_plan(plan, keys, values, [torch.empty(0) for _ in inv_freq], **options)

    monkeypatch.setattr("kvspan.engine.runner.ops.run_plan", copy_only)
    with open_tiny("llama", 16) as engine:
        layout = make_layout(16, [3, 1, 0, 2])
        expected = span_logprobs(tiny_model("llama"), layout, "sequential")
        assert difference(ask(engine, layout), expected) > 100 * TOLERANCE


def test_merged_domains_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: were span blocks keyed like ordinary ones, an ordinary prompt would err."""
    extend = BlockChain.extend
    monkeypatch.setattr(BlockChain, "extend", lambda self, ids, *_: extend(self, ids))
    monkeypatch.setattr(Sequence, "text_key", lambda self, block: ("placed", self.hashes[block]))
    monkeypatch.setattr(SpanRef, "table_keys", lambda self: [("placed", key) for key in self.keys])
    with open_tiny("llama", 16) as engine:
        layout = make_layout(16, [1, 3, 2, 0])
        ask(engine, layout)
        ordinary = layout_from_tokens(layout.token_ids, (), 16)
        expected = span_logprobs(tiny_model("llama"), ordinary, "sequential")
        assert difference(ask(engine, ordinary), expected) > 100 * TOLERANCE


def test_ordinary_prompt_never_reads_span_kv(setting, block_size: int) -> None:
    engine, model = setting
    engine.clear_cache()
    layout = make_layout(block_size, [1, 3, 2, 0])
    ask(engine, layout)
    ordinary = layout_from_tokens(layout.token_ids, (), block_size)
    result = ask(engine, ordinary)
    assert difference(result, span_logprobs(model, ordinary, "sequential")) <= TOLERANCE
    assert result.usage.cached_tokens == layout.anchor_len  # the anchor is ordinary prefix
    again = ask(engine, layout)
    assert difference(again, span_logprobs(model, layout, "sequential")) <= TOLERANCE
