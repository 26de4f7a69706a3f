"""Finding and loading a transformers model and its tokenizer, with errors a user can act on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from kvspan.engine import Progress
from kvspan.engine.attention import IMPLEMENTATION
from kvspan.errors import KvspanError, UsageError

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
PROVIDERS = ("local/", "spnl/")
HUB_TIMEOUT_S = 10
DUPLICATE_WEIGHTS = ["*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "original/*"]


def resolve_model(name: str, progress: Progress | None = None) -> str:
    """The folder of what a user or a query calls a model; downloads or converts it if need be.

    name: a folder, ``demo``, or a hub id; ``local/`` and ``spnl/`` before it are provider names
    and mean this engine. Raises UsageError where there is no such model.
    """
    from kvspan.demo.model import demo_model_path, is_demo_model

    plain = name
    for provider in PROVIDERS:
        if not Path(name).exists():
            plain = plain.removeprefix(provider)
    if is_demo_model(name) or is_demo_model(plain):
        return str(demo_model_path(progress))
    if not plain:
        raise UsageError("model: expected a folder, a hub id or 'demo', got an empty name")
    path = Path(os.path.expanduser(plain))  # Path.expanduser raises for users that do not exist
    if path.exists():
        if not (path / "config.json").is_file():
            raise UsageError(f"model {name}: expected a folder with config.json in it")
        return str(path)
    return _hub_folder(plain)


def _hub_folder(name: str) -> str:
    """A model of the hub as a local folder, from the hub's cache where the hub is out of reach."""
    missing = f"model {name}: there is no such folder, and"
    try:
        info = HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
    except (HFValidationError, RepositoryNotFoundError) as e:
        if isinstance(e, GatedRepoError):
            raise UsageError(f"model {name}: the hub asks for access rights: {_brief(e)}") from e
        raise UsageError(f"{missing} the model hub has no such model; 'demo' needs no hub") from e
    except Exception:  # no network, a proxy's refusal, offline mode: each client has its own class
        info = None
    files = [] if info is None else [file.rfilename for file in info.siblings or ()]
    duplicates = DUPLICATE_WEIGHTS if any(f.endswith(".safetensors") for f in files) else []
    try:
        return snapshot_download(
            name, local_files_only=info is None, ignore_patterns=["*.gguf", "*.onnx", *duplicates]
        )
    except Exception as e:
        if info is None:
            raise UsageError(
                f"{missing} the model hub cannot be reached; 'demo' needs no hub"
            ) from e
        raise KvspanError(f"model {name}: the download failed: {_brief(e)}") from e


def load_tokenizer(name: str, progress: Progress | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer alone: enough to lay out a prompt."""
    path = resolve_model(name, progress)
    with quiet(), _explained(name):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path, trust_remote_code=False
        )
        return tokenizer


def load_config(name: str, progress: Progress | None = None) -> PreTrainedConfig:
    """The config alone, of a decoder-only language model: what is enough to inspect it."""
    path = resolve_model(name, progress)
    with quiet(), _explained(name):
        config: PreTrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=False)
        _check_config(config)
        return config


def load_model(
    name: str, *, dtype: str, device: str, progress: Progress | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A decoder in eval mode with kvspan's attention, and its tokenizer."""
    if dtype != "auto" and dtype not in DTYPES:
        raise UsageError(f"dtype: expected auto or one of {', '.join(DTYPES)}; got {dtype!r}")
    target = _device(device)
    path = resolve_model(name, progress)
    if progress:
        progress("load", 0, 1)
    with quiet(), _explained(name):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        _check_config(config)
        torch_dtype: Any = DTYPES.get(dtype)
        if torch_dtype is None:
            torch_dtype = torch.float32 if target.type == "cpu" else "auto"
        model: PreTrainedModel
        model, info = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=torch_dtype,
            attn_implementation=IMPLEMENTATION,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, with the sizes
        )
        _check_weights(info)
        _check_causal(model)
        model = model.to(target).eval()
    if progress:
        progress("load", 1, 1)
    return model, tokenizer


def _check_config(config: PreTrainedConfig) -> None:
    """Raise KvspanError for what is no decoder-only language model."""
    if config.is_encoder_decoder or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise KvspanError(f"{config.model_type} is not a decoder-only language model")
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if layers is not None and layers < 1:
        raise KvspanError(f"the model has no layers (num_hidden_layers is {layers})")


def _check_weights(info: dict[str, Any]) -> None:
    """Raise KvspanError where transformers has filled in random numbers for weights."""
    if mismatched := sorted(info["mismatched_keys"]):
        name, found, expected = mismatched[0]
        raise KvspanError(
            f"its checkpoint does not fit its config.json: {name}{_more(mismatched)} "
            f"(found {_shape(found)}, expected {_shape(expected)})"
        )
    if missing := sorted(info["missing_keys"]):
        raise KvspanError(f"its checkpoint has no {missing[0]}{_more(missing)}")


def _check_causal(model: PreTrainedModel) -> None:
    """Raise KvspanError if no layer's attention is causal, as in BERT with a head for text."""
    causal = [getattr(module, "is_causal", None) for module in model.modules()]
    if False in causal and True not in causal:
        raise KvspanError(
            f"{type(model).__name__} is not a decoder-only language model: its tokens attend to "
            f"later ones"
        )


def _shape(sizes: Iterable[int]) -> str:
    return f"[{', '.join(map(str, sizes))}]"


def _more(names: Sequence[object]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        target = torch.device(device)
    except RuntimeError:
        target = torch.device("meta")
    if target.type not in ("cpu", "cuda"):
        raise UsageError(f"device: expected auto, cpu or cuda[:N]; got {device!r}")
    if target.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device: got {device!r}, but torch finds no CUDA device")
    return target


@contextlib.contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turn transformers' and safetensors' many ways to fail into one clear line."""
    try:
        yield
    except Exception as e:
        raise KvspanError(f"model {name}: cannot be loaded: {_brief(e)}") from e


def _brief(e: Exception) -> str:
    text = " ".join(str(e).split())
    if isinstance(e, KvspanError):
        return text
    return f"{type(e).__name__}: {text[:300]}"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hold back transformers' own bars and warnings: progress is reported by us."""
    bars = transformers.utils.logging.is_progress_bar_enabled()
    level = transformers.utils.logging.get_verbosity()
    if not os.environ.get("KVSPAN_DEBUG"):
        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
    try:
        yield
    finally:
        if bars:
            transformers.utils.logging.enable_progress_bar()
        transformers.utils.logging.set_verbosity(level)
