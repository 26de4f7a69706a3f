"""Checkpoints that cannot be loaded: one clear line each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DistilBertConfig,
    DistilBertForMaskedLM,
    PreTrainedModel,
    RobertaConfig,
    RobertaForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
)

from kvspan import KvspanError, UsageError
from kvspan.engine.loading import load_model, resolve_model
from tiny_models import VOCAB, tiny_model, word_tokenizer

BERT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
}


def saved(folder: Path, model: PreTrainedModel, **changed: Any) -> str:
    """A checkpoint whose config.json says something else than its weights."""
    model.save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | changed
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def load_error(folder: str) -> str:
    with pytest.raises(KvspanError) as caught:
        load_model(folder, dtype="float32", device="cpu")
    start = f"model {folder}: cannot be loaded: "
    assert str(caught.value).startswith(start)
    return str(caught.value)[len(start) :]


def test_a_config_of_other_sizes_names_a_weight_and_both_shapes(tmp_path) -> None:
    folder = saved(tmp_path, tiny_model("llama"), intermediate_size=80)
    assert load_error(folder) == (
        "its checkpoint does not fit its config.json: model.layers.0.mlp.down_proj.weight and 8 "
        "more (found [64, 96], expected [64, 80])"
    )


@pytest.mark.parametrize("layers", [0, -1])
def test_a_model_without_layers(tmp_path, layers: int) -> None:
    folder = saved(tmp_path, tiny_model("llama"), num_hidden_layers=layers)
    assert load_error(folder) == f"the model has no layers (num_hidden_layers is {layers})"


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (lambda: BertForMaskedLM(BertConfig(**BERT)), "BertLMHeadModel"),
        (lambda: RobertaForMaskedLM(RobertaConfig(**BERT)), "RobertaForCausalLM"),
        (
            lambda: DistilBertForMaskedLM(
                DistilBertConfig(vocab_size=VOCAB, dim=32, n_layers=2, n_heads=2, hidden_dim=48)
            ),
            "distilbert",
        ),
        (
            lambda: T5ForConditionalGeneration(
                T5Config(vocab_size=VOCAB, d_model=32, d_kv=16, num_layers=2, num_heads=2, d_ff=48)
            ),
            "t5",
        ),
    ],
    ids=["bert", "roberta", "distilbert", "t5"],
)
def test_models_that_are_no_decoders(tmp_path, model, named: str) -> None:
    error = load_error(saved(tmp_path, model()))
    assert error.startswith(f"{named} is not a decoder-only language model")


def test_the_home_of_nobody_is_an_ordinary_name() -> None:
    with pytest.raises(UsageError, match=r"model ~no-such-user/x: there is no such folder, and"):
        resolve_model("~no-such-user/x")
