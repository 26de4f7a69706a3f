"""Hybrid models that vLLM compiles: capture is part of the compiled code, and so are replays.

Once as vLLM's CPU build compiles, in one graph, and once through the backend that it uses on GPUs,
which cuts the graph at attention and compiles the pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hybrid_checks import (
    BASE,
    ROUNDING,
    SUFFIX,
    Watched,
    check_mixed_batch,
    check_split_prefill,
    drop_states,
    tokens,
)
from hybrid_served import HybridServed, difference, save_hybrid
from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
from vllm.config import CompilationMode
from vllm.platforms.cpu import CpuPlatform

from kvspan.vllm.hybrid.capture import stream

LINEAR, FULL = "linear_attention", "full_attention"
LAYERS = {"num_hidden_layers": 4, "layer_types": [LINEAR, FULL, LINEAR, LINEAR]}
SPLIT_AT = [
    "vllm::unified_attention_with_output",
    "vllm::unified_kv_cache_update",
    "vllm::cpu_gdn_attention_core",
]
ROOM = 2048  # tokens of a step


def compile_in_pieces(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Options of the engine, once vLLM lets its CPU platform use this backend."""
    allowed = CpuPlatform.check_and_update_config

    def forced(vllm_config: Any) -> None:
        allowed(vllm_config)
        compilation = vllm_config.compilation_config
        compilation.mode, compilation.compile_sizes = CompilationMode.VLLM_COMPILE, []

    patch.setattr(CpuPlatform, "check_and_update_config", staticmethod(forced))
    # It names operations that the CPU build does not have.
    patch.setattr(FixFunctionalizationPass, "__call__", lambda self, graph: None)
    options = {"mode": 3, "splitting_ops": SPLIT_AT, "cudagraph_mode": "NONE"}
    passes = ("fuse_norm_quant", "fuse_act_quant", "fuse_attn_quant", "fuse_rope_kvcache_cat_mla")
    return {"compilation_config": {**options, "pass_config": dict.fromkeys(passes, False)}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(
    scope="module",
    params=[("qwen3_5", "none", True), ("qwen3_5", "align", False), ("qwen3_next", "none", False)],
    ids=["pieces", "graph", "experts"],
)
def served(request: pytest.FixtureRequest, folder: Path) -> Iterator[HybridServed]:
    name, mode, pieces = request.param
    model = save_hybrid(name, folder / name, **LAYERS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_DISABLE_COMPILE_CACHE", "1")
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        options = compile_in_pieces(patch) if pieces else {}
        served = HybridServed(
            model, mode, enforce_eager=False, max_num_batched_tokens=ROOM, **options
        )
        yield served
        served.close()
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _fresh(served: HybridServed) -> None:
    served.forget()


def test_it_is_compiled(served: HybridServed, request: pytest.FixtureRequest) -> None:
    compilation = served.llm.llm_engine.vllm_config.compilation_config
    pieces = compilation.mode == CompilationMode.VLLM_COMPILE
    assert pieces == ("pieces" in request.node.name) and compilation.backend == "inductor"
    assert served.replayer._model.compiled
    assert all(runner._model.compiled for runner in served.replayer._runners.values())


@pytest.mark.parametrize("m", [64, 255, 777, 1531])
def test_exact_is_a_split_prefill(
    served: HybridServed, m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, all of it replayed: with the kernels of eager execution it is not."""
    check_split_prefill(served, Watched(served, monkeypatch), m)


def test_replays_in_parts(served: HybridServed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay that is longer than a step, of a donor that was computed in steps as long."""
    for runner in served.replayer._runners.values():
        monkeypatch.setattr(runner, "most", 256)
    watched = Watched(served, monkeypatch)
    with served.chunks_of(256):
        state = watched.donor(BASE[:777])
    drop_states(served)
    (answer,) = served.ask([BASE[:777] + tokens(2, SUFFIX)], 1)
    assert answer.replay["replayed"] == 777
    assert watched.restored == [state]


def test_restores_among_fresh_requests(
    served: HybridServed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding steps are captured as well."""
    answers = check_mixed_batch(served, Watched(served, monkeypatch), (100, 777, 1531), 2)
    second = BASE[:100] + tokens(120, 32) + list(answers[0].tokens) + tokens(5, 50)
    (again,) = served.ask([second])
    assert again.cached == 132 + 23 and again.replay["replayed"] == 0
    served.forget()
    (full,) = served.ask([second], replay="off")
    assert difference(again, full) < ROUNDING


def test_buffers_stay_where_they_are(served: HybridServed) -> None:
    capture = served.replayer.capture
    rows = capture.rows(stream(1))
    assert rows.shape == (ROOM, 2 * 128)
    before, place = rows[:40].clone(), rows.data_ptr()
    served.ask([tokens(9, 40)], 1)
    assert rows.data_ptr() == place and not torch.equal(rows[:40], before)
    assert rows.isfinite()[:40].all()
