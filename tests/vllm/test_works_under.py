"""Spans beside what else vLLM can do: each against transformers, with what it reuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from host_offloading import OFFLOADING, HostWorker
from http_server import save_chat_model
from safetensors.torch import save_file
from served import CONNECTOR, Served, save_tiny, scheduler_of
from test_spans import TOLERANCE, make
from traffic import Ask, Verdict, free_blocks, judge, random_ask, run
from transformers import AutoModelForCausalLM
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.platforms.cpu import CpuPlatform
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from kvspan.layout import SpanLayout, layout_from_tokens
from kvspan.vllm.params import to_params

HOSTED = {**CONNECTOR, "kv_connector_extra_config": {"host_gib": 0.125}}


@contextmanager
def serving(folder: Path, **options: Any) -> Iterator[Served]:
    settings: dict[str, Any] = {"num_blocks": 300, "max_num_batched_tokens": 1024, **options}
    served = Served(folder, **settings)
    try:
        yield served
    finally:
        served.close()


def check(served: Served, *, reuse: bool = True) -> None:
    """Misses, hits, other orders, no preparation, both placements, and an ordinary twin."""
    first, other = make([0, 1, 2], seed=3), make([2, 3, 0], seed=3, question=1)
    for layout, prepare, placement in (
        (first, True, "sequential"),
        (other, True, "sequential"),
        (make([1, 3, 2, 0], "isolated", seed=3), False, "sequential"),
        (make([1, 2], seed=4, between=1), False, "sequential"),
        (make([3, 1], seed=3), True, "parallel"),
        (layout_from_tokens(first.token_ids, (), 32), True, "sequential"),
    ):
        (output,) = served.ask(
            [layout],
            prepare=prepare and reuse,
            placement=placement,  # type: ignore[arg-type]
            timeout_s=30.0 if prepare else 0.05,
        )
        assert served.error(layout, output, placement) <= TOLERANCE  # type: ignore[arg-type]
        audit = served.audit(output)
        assert audit.get("fallback", "") == ""
        if layout is other:
            assert (audit["moved_tokens"] > 0) is reuse


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("works-under"))


def test_asynchronous_scheduling(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is scheduled before the one before it has run. vLLM leaves that to GPUs: forced."""
    configure = CpuPlatform.check_and_update_config

    def forced(config: VllmConfig) -> None:
        configure(config)
        config.scheduler_config.async_scheduling = True

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", staticmethod(forced))
    sizes = {"num_blocks": 60, "max_model_len": 1024, "max_num_batched_tokens": 90}
    with serving(folder, connector=HOSTED, **sizes) as served:
        scheduler = scheduler_of(served)
        assert isinstance(scheduler, AsyncScheduler)
        check(served)
        free, verdict, rng = free_blocks(served), Verdict(), np.random.default_rng(4)
        for _ in range(8):
            asks = [random_ask(rng) for _ in range(4)]
            for ask, output in zip(asks, run(served, asks, logprobs=5), strict=True):
                assert output is not None
                judge(served, ask, output, verdict)
        assert not verdict.wrong and verdict.max_error <= TOLERANCE
        assert verdict.moved and verdict.computed and free_blocks(served) == free


def test_without_prefix_caching_spans_keep_their_meaning(folder: Path) -> None:
    with serving(folder, enable_prefix_caching=False) as served:
        check(served, reuse=False)


def test_n_and_logprobs(served: Served) -> None:
    layout = make([2, 0, 1], seed=91)
    served.ask([layout])
    params = SamplingParams(
        n=3, max_tokens=3, temperature=1.0, seed=5, ignore_eos=True, detokenize=False, logprobs=3,
        extra_args={"kv_transfer_params": to_params(layout)},
    )  # fmt: skip
    prompt = {"prompt_token_ids": layout.token_ids.tolist()}
    (output,) = served.llm.generate([prompt], [params], use_tqdm=False)  # type: ignore[list-item]
    assert len(output.outputs) == 3
    assert len({tuple(answer.token_ids) for answer in output.outputs}) > 1
    verdict = Verdict()
    for i, answer in enumerate(output.outputs):
        one = type(output)(
            f"{i}", None, layout.token_ids.tolist(), None, [answer], True,
            kv_transfer_params=output.kv_transfer_params,
        )  # fmt: skip
        judge(served, Ask(layout), one, verdict)
    assert verdict.max_error <= TOLERANCE and verdict.tokens == 9


def test_prompt_logprobs_are_refused_by_name(served: Served) -> None:
    layout = make([2, 0], seed=92)
    ask = Ask(layout, prepare=False, params={"prompt_logprobs": 1})
    (output,) = run(served, [ask])
    assert output is not None and "prompt log-prob" in served.audit(output)["fallback"]


def test_structured_output(tmp_path: Path) -> None:
    folder = save_chat_model(tmp_path)
    with serving(folder, skip_tokenizer_init=False, max_logprobs=60) as served:
        layout = make([1, 0, 2], seed=3)
        ids = layout.token_ids % 40 + 7
        layout = SpanLayout(ids, layout.spans, layout.block_size)
        words = ["w7", "w8", "w9"]
        constraint = StructuredOutputsParams(choice=words)
        for question in range(2):
            ids = layout.token_ids.copy()
            ids[-1] = 10 + question
            layout = SpanLayout(ids, layout.spans, layout.block_size)
            ask = Ask(layout, params={"structured_outputs": constraint, "stop_token_ids": [2]})
            (output,) = run(served, [ask], logprobs=None)
            assert output is not None and served.audit(output)["fallback"] == ""
            tokenizer = served.llm.get_tokenizer()
            allowed = torch.tensor([tokenizer.convert_tokens_to_ids(word) for word in words])
            expected = served.expected(layout)
            best = int(allowed[expected[allowed].argmax()])
            assert output.outputs[0].token_ids[0] == best


def save_adapter(folder: Path, seed: int) -> Path:
    """A LoRA adapter of rank 4 on the attention's projections, strong enough to matter."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(3):
        for name, size in (("q_proj", 128), ("k_proj", 64), ("v_proj", 64)):
            where = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{where}.lora_A.weight"] = torch.randn(4, 64, generator=generator) / 4
            weights[f"{where}.lora_B.weight"] = torch.randn(size, 4, generator=generator) / 4
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "r": 4, "lora_alpha": 4, "bias": "none", "task_type": "CAUSAL_LM",
        "target_modules": ["q_proj", "k_proj", "v_proj"],
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merged(folder: Path, adapter: Path) -> Any:
    """The model with an adapter's product added to its weights."""
    from safetensors.torch import load_file

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    weights = load_file(adapter / "adapter_model.safetensors")
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name in weights:
            if name.endswith("lora_A.weight"):
                where = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                up = weights[name.replace("lora_A", "lora_B")]
                parameters[f"{where}.weight"] += up @ weights[name]
    return model


def test_lora_and_salts_are_in_the_keys(folder: Path, tmp_path: Path) -> None:
    adapters = [save_adapter(tmp_path / f"{i}" / "name", i) for i in (1, 2)]
    requests = [None, *(LoRARequest("name", i, str(a)) for i, a in enumerate(adapters, 1))]
    options = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2, "connector": HOSTED}
    with serving(folder, **options) as served:
        models = [served.reference, *(merged(folder, adapter) for adapter in adapters)]
        first, other = make([0, 1, 2], seed=3), make([2, 1, 0], seed=3, question=1)
        for layout in (first, other):
            for lora, model in zip(requests, models, strict=True):
                served.reference = model
                (output,) = served.ask([layout], lora=lora)
                assert served.error(layout, output) <= TOLERANCE
                assert served.audit(output)["fallback"] == ""
                assert served.audit(output)["moved_tokens"] > 0
        while scheduler_of(served).connector.has_pending_push_work():
            served.ask([layout_from_tokens(np.arange(3, 8), (), 32)])
        assert served.llm.llm_engine.reset_prefix_cache()
        for lora, model in zip(requests, models, strict=True):
            served.reference = model
            (output,) = served.ask([other], lora=lora, prepare=False)
            assert served.error(other, output) <= TOLERANCE
            assert served.audit(output)["host_tokens"] == other.spans[-1][1]
        served.reference = models[0]
        for salt in ("a", "b"):
            (output,) = served.ask([first], prepare=False, timeout_s=0.02, salt=salt)
            # Nothing of another tenant's is found, not even spans: all computed, all the same.
            assert served.audit(output)["moved_tokens"] == 0
            assert output.num_cached_tokens == 0
            assert served.error(first, output) <= TOLERANCE
        (output,) = served.ask([first], salt="a")
        assert (output.num_cached_tokens or 0) > 0


def test_engine_core_in_a_process_of_its_own_and_two_tensor_parallel_workers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    """Each worker keeps its half of the spans on the host."""
    sizes = {"num_blocks": 60, "max_model_len": 1024, "max_num_batched_tokens": 1024}
    with serving(folder, tensor_parallel_size=2, connector=HOSTED, **sizes) as served:
        check(served)
        layout = make([3, 1, 2], seed=3, question=2)
        rng = np.random.default_rng(1)
        for _ in range(4):  # all that the pool has
            ids = rng.integers(3, 500, 25 * 32)
            served.ask([layout_from_tokens(ids, (), 32)])
        (output,) = served.ask([layout], prepare=False)
        assert served.error(layout, output) <= TOLERANCE
        audit = served.audit(output)
        assert audit["computed_tokens"] == 0
        assert audit["host_tokens"] == layout.spans[-1][1]


@pytest.mark.parametrize("order", ["kvspan first", "kvspan last", "kvspan with a host tier"])
def test_beside_vllms_offloading_connector(folder: Path, order: str) -> None:
    """What the pool loses comes back from the host, spans and what follows them included."""
    own = order == "kvspan with a host tier"
    connectors = [HOSTED if own else CONNECTOR, OFFLOADING]
    if order == "kvspan last":
        connectors.reverse()
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": connectors},
    }
    HostWorker.copied.update(stored=0, loaded=0)
    with serving(folder, connector=both, num_blocks=60, max_model_len=1024) as served:
        check(served)
        for seed in (11, 12, 13, 14, 11, 12):  # each needs most of the pool
            for order_of_spans in ([0, 1, 2, 3], [3, 2, 1, 0]):
                layout = make(order_of_spans, seed=seed)
                (output,) = served.ask([layout])
                assert served.error(layout, output) <= TOLERANCE
                assert served.audit(output)["fallback"] == ""
        layout = make([0, 1, 2, 3], seed=13, question=1)
        (output,) = served.ask([layout], prepare=False, timeout_s=2.0)
        assert served.error(layout, output) <= TOLERANCE
        assert HostWorker.copied["stored"] > 0 and (own or HostWorker.copied["loaded"] > 0)
        assert (served.audit(output)["host_tokens"] > 0) is own
