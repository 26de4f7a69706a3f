"""The hybrid architectures that the plug-in registers, without an engine."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import KVTransferConfig
from vllm.model_executor.models import qwen3_next
from vllm.model_executor.models.registry import ModelRegistry

from kvspan.vllm import plugin
from kvspan.vllm.hybrid import models

OWN = {"kv_connector": plugin.CONNECTOR, "kv_role": "kv_both"}
OTHER = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}


def transfer(**given: Any) -> KVTransferConfig:
    return KVTransferConfig(**given)


def multi(*connectors: dict[str, Any]) -> KVTransferConfig:
    extra = {"connectors": list(connectors)}
    return transfer(
        kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config=extra
    )


def test_architectures_are_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for one that another plug-in has replaced. A class is loaded when it is asked for."""
    taken = SimpleNamespace(module_name="another.plugin")
    monkeypatch.setitem(ModelRegistry.models, "OlmoHybridForCausalLM", taken)
    plugin.register()
    for name in plugin.HYBRID_MODELS:
        found = ModelRegistry.models[name].module_name  # type: ignore[attr-defined]
        expected = "another.plugin" if name.startswith("Olmo") else plugin.HYBRIDS_MODULE
        assert found == expected


def test_a_class_is_vllms_own_but_for_its_end() -> None:
    own = models.Qwen3NextForCausalLM
    assert issubclass(own, qwen3_next.Qwen3NextForCausalLM)
    assert own.__name__ == "Qwen3NextForCausalLM" and own is models.Qwen3NextForCausalLM
    assert {"vllm_config", "prefix"} <= inspect.signature(own.__init__).parameters.keys()
    with pytest.raises(AttributeError, match="no attribute LlamaForCausalLM"):
        models.LlamaForCausalLM  # noqa: B018


def test_whose_settings() -> None:
    settings = {"hidden": "sum"}
    own = {**OWN, "kv_connector_extra_config": settings}
    assert models.settings_of(None) is None
    assert models.settings_of(transfer(**OTHER)) is None
    assert models.settings_of(transfer(**OWN)) == {}
    assert models.settings_of(transfer(**own)) == settings
    assert models.settings_of(multi(OTHER, own)) == settings
    assert models.settings_of(multi(OTHER)) is None


class Layer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer_type = kind
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, hidden: Any, residual: Any) -> Any:
        return hidden, residual


def model() -> nn.Module:
    whole, decoder = nn.Module(), nn.Module()
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    decoder.layers = nn.ModuleList(Layer(kind) for kind in kinds)
    decoder.embed_tokens = nn.Embedding(4, 8)
    whole.model = decoder
    return whole


def config(given: KVTransferConfig | None, additional: Any = None) -> Any:
    return SimpleNamespace(
        kv_transfer_config=given,
        additional_config=additional or {},
        model_config=SimpleNamespace(
            dtype=torch.bfloat16, hf_text_config=SimpleNamespace(hidden_size=8)
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=32),
    )


def hooks(of: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in of.modules())


@pytest.mark.parametrize("given", [None, transfer(**OTHER)], ids=["none", "another"])
def test_engines_of_others_are_as_they_were(given: KVTransferConfig | None) -> None:
    built, engine = model(), config(given)
    assert models.install(built, engine) is None
    assert hooks(built) == 0 and engine.additional_config == {}


def test_a_part_of_the_layers_is_left_alone() -> None:
    built = model()
    built.model.layers[0] = nn.Identity()  # as vLLM has for layers of other stages
    assert models.install(built, config(transfer(**OWN))) is None
    assert hooks(built) == 0


def test_capture_is_installed_and_keeps_compiled_code_apart() -> None:
    seen = set()
    for extra in ({}, {"hidden": "sum"}):
        built = model()
        engine = config(transfer(**OWN, kv_connector_extra_config=extra), {"theirs": 1})
        capture = models.install(built, engine)
        assert capture is not None and hooks(built) == 1
        assert capture.nbytes == 32 * 8 * 2 * (1 if extra else 2)
        assert engine.additional_config.pop("theirs") == 1
        seen.add(str(engine.additional_config))
    assert len(seen) == 2

    class Hashed:
        theirs = 2

        def compute_hash(self) -> str:
            return "their hash"

    engine = config(transfer(**OWN), Hashed())
    models.install(model(), engine)
    assert engine.additional_config.theirs == 2
    told = engine.additional_config.compute_hash()
    assert told != "their hash" and "their hash" in told
