"""``kvspan inspect``: figures by hand, half-lives in closed form, and what it refuses."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    Gemma3TextConfig,
    JambaConfig,
    LlamaConfig,
    MambaConfig,
    MiniMaxConfig,
    OlmoHybridConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3_5Config,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    T5Config,
)

from kvspan import cli
from kvspan.hybrid.inspect import HeadMemory, Inspection, _recommend, inspect_config

TRAINED = Path(__file__).resolve().parents[1] / "fixtures/tiny_hybrid"
QWEN35_4B: dict[str, Any] = {
    "hidden_size": 2560,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "dtype": "bfloat16",
}
TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
TINY["layer_types"] = TINY["layer_types"][:5]
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}


def folder_with(config: PreTrainedConfig, path: Path) -> str:
    config.save_pretrained(path)
    return str(path)


def inspect_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert cli.main(["inspect", *words, "--json"]) == 0
    out: dict[str, Any] = json.loads(capsys.readouterr().out)
    return out


def test_qwen35_4b_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = inspect_json(capsys, folder_with(Qwen3_5Config(text_config=QWEN35_4B), tmp_path))
    assert (found["kind"], found["dtype"]) == ("hybrid", "bfloat16")
    assert found["kv_bytes"] == 8 * 2 * 4 * 256 * 2 == 32 * 1024
    assert found["hidden_bytes"] == {"sum": 35 * 1024, "pair": 70 * 1024, "int8": 7 * (2560 + 4)}
    state, conv = 32 * 128 * 128 * 4, 3 * (2 * 16 + 32) * 128 * 2
    assert found["checkpoint_bytes"] == 24 * (state + conv) == 51511296  # 49.1 MiB
    assert found["break_even_tokens"] == 1437
    assert found["groups"][0] == {"source": None, "layers": [0, 1, 2]}
    assert found["groups"][-1] == {"source": 27, "layers": [28, 29, 30]}
    assert len(found["groups"]) == 8
    assert found["half_lives"] == [] and found["policy"] == "exact"


def test_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = folder_with(Qwen3_5Config(text_config=QWEN35_4B), tmp_path)
    assert cli.main(["inspect", name]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"model       {name} (qwen3_5_text), 32 layers"
    assert lines[2] == "attention   32.0 KiB a token in bfloat16"
    assert lines[3].startswith("hidden      35.0 KiB as sum, 70.0 KiB as pair, 17.5 KiB as int8")
    assert lines[4] == (
        "checkpoint  49.1 MiB for one position, as much as the hidden vectors of 1437 tokens"
    )
    assert lines[5].startswith("groups      embedding > 0-2; 3 > 4-6; 7 > 8-10;")
    assert lines[6].startswith("policy      exact (")


def test_dtype(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = folder_with(Qwen3_5Config(text_config=QWEN35_4B), tmp_path)
    found = inspect_json(capsys, name, "--dtype", "float32")
    assert found["kv_bytes"] == 64 * 1024
    assert found["hidden_bytes"]["int8"] == 7 * (2560 + 4)


def test_heads_without_a_size_of_their_own() -> None:
    found = inspect_config(OlmoHybridConfig(), "olmo")
    assert found.kv_bytes == 8 * 2 * 3840 * 2
    state, conv = 30 * 96 * 192 * 4, 3 * (2 * 30 * 96 + 30 * 192) * 2
    assert found.checkpoint_bytes == 24 * (state + conv)


def test_attention_only_models() -> None:
    llama = inspect_config(LlamaConfig(num_hidden_layers=4, dtype="float16"), "llama")
    assert (llama.kind, llama.kv_bytes) == ("attention", 4 * 2 * 4096 * 2)
    gemma = Gemma3TextConfig(num_hidden_layers=12, sliding_window=512)
    found = inspect_config(gemma, "gemma")
    assert (found.window, found.window_layers) == (512, 10)
    latent = DeepseekV2Config(num_hidden_layers=3, kv_lora_rank=512, qk_rope_head_dim=64)
    assert inspect_config(latent, "latent").kv_bytes == 3 * (512 + 64) * 2


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (JambaConfig(), "its recurrent layers (jamba) are not Gated DeltaNet"),
        (MambaConfig(), "its recurrent layers (mamba) are not Gated DeltaNet"),
        (MiniMaxConfig(), "no adapter for hybrid models of type minimax"),
    ],
    ids=["jamba", "mamba", "minimax"],
)
def test_hybrids_it_does_not_know_are_named(config: PreTrainedConfig, reason: str) -> None:
    found = inspect_config(config, "other")
    assert found.kind == "unsupported" and found.reason.startswith(reason)
    assert not found.hidden_bytes and not found.policy


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ([], 2, "the following arguments are required: MODEL (see 'kvspan inspect -h')"),
        (["{tmp}/none"], 2, "there is no such folder"),
        (["{tmp}"], 2, "expected a folder with config.json in it"),
        (["{tmp}/t5"], 1, "t5 is not a decoder-only language model"),
        (["{tmp}/llama", "--text", "{tmp}/none"], 2, "--text {tmp}/none: No such file"),
        (["{tmp}/llama", "--text", __file__], 2, "has no recurrent states that could forget"),
        (["{tmp}/zero"], 1, "linear_num_key_heads in the config of a qwen3_5_text: expected a"),
    ],
    ids=["no model", "no folder", "no config", "encoder", "no text", "no states", "zero heads"],
)
def test_errors_are_one_line(
    words: list[str],
    status: int,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    T5Config().save_pretrained(tmp_path / "t5")
    LlamaConfig().save_pretrained(tmp_path / "llama")
    Qwen3_5TextConfig(linear_num_key_heads=0).save_pretrained(tmp_path / "zero")
    words = [word.replace("{tmp}", str(tmp_path)) for word in words]
    assert cli.main(["inspect", *words]) == status
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert said.replace("{tmp}", str(tmp_path)) in err


@pytest.mark.parametrize(
    ("config", "gate"),
    [
        (Qwen3_5TextConfig(**TINY, head_dim=16), "in_proj_a"),
        (Qwen3NextConfig(**TINY, **EXPERTS, head_dim=16), "in_proj_ba"),
        (OlmoHybridConfig(**TINY), "a_proj"),
    ],
    ids=["qwen3_5", "qwen3_next", "olmo_hybrid"],
)
def test_half_lives(
    config: PreTrainedConfig, gate: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a gate that no token moves, a head's half-life is ln 2 / (e^A softplus(dt))."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    wanted = []
    for i in (0, 1, 3, 4):
        layer = model.model.layers[i].linear_attn
        getattr(layer, gate).weight.data.zero_()
        layer.A_log.data = torch.tensor([0.0, 1.0])
        layer.dt_bias.data = torch.tensor([-2.0, -5.0 - i])
        rates = (layer.A_log.exp() * torch.nn.functional.softplus(layer.dt_bias)).tolist()
        wanted += [(i, head, math.log(2) / rate) for head, rate in enumerate(rates)]
    model.save_pretrained(tmp_path)
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    text = tmp_path / "text"
    text.write_text("a b " * 40)
    found = inspect_json(capsys, str(tmp_path), "--text", str(text))
    assert found["sample_tokens"] == 80
    heads = [(head["layer"], head["head"], head["tokens"]) for head in found["half_lives"]]
    assert [head[:2] for head in heads] == [head[:2] for head in wanted]
    assert [head[2] for head in heads] == pytest.approx([head[2] for head in wanted], rel=1e-4)
    assert inspect_json(capsys, str(tmp_path), "--no-weights")["half_lives"] == []


def test_the_trained_hybrid() -> None:
    """In a process of its own: nothing but the report is printed."""
    command = [sys.executable, "-m", "kvspan", "inspect", str(TRAINED)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[3] == "hidden      256 B as sum, 512 B as pair, 132 B as int8 a token, 1 stream"
    assert lines[5] == "groups      embedding > 0-2; 3 > 4-6"
    assert lines[6] == "half-lives  in tokens, over 2048 tokens of text"
    assert [line.split()[:2] for line in lines[7:13]] == [["layer", i] for i in "012456"]
    assert lines[13].startswith("policy      bounded:0.001 (")


@pytest.mark.parametrize(
    ("half_lives", "policy", "reason"),
    [
        ([10.0, 100.0], "bounded:0.001", "a tail of 997 tokens bounds the error by 0.001"),
        ([10.0, 100.0, math.inf], "bounded:0.001", "but for 1 of 3 heads, which checkpoints carry"),
        ([10.0, 5000.0, math.inf], "exact", "2 of 3 heads need more than 1024 tokens"),
    ],
    ids=["all forget", "one never does", "most never do"],
)
def test_recommended_policy(half_lives: list[float], policy: str, reason: str) -> None:
    heads = [HeadMemory(0, i, tokens) for i, tokens in enumerate(half_lives)]
    found = _recommend(Inspection("m", "t", "hybrid", "", "float32", 2, 1, half_lives=heads))
    assert found.policy == policy and reason in found.policy_reason
