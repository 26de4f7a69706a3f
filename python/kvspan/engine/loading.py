"""Finding and loading a transformers model and its tokenizer, with errors a user can act on."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
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
PROVIDERS = ("local/", "spnl/")  # prefixes that mean "whatever this engine calls it"


def resolve_model(name: str, progress: Progress | None = None) -> str:
    """A folder, or a hub id, for what a user or a query calls a model."""
    from kvspan.demo.model import demo_model_path, is_demo_model

    if is_demo_model(name):
        return str(demo_model_path(progress))
    for prefix in PROVIDERS:
        name = name.removeprefix(prefix)
    if is_demo_model(name):
        return str(demo_model_path(progress))
    if not name:
        raise UsageError("model: expected a folder, a hub id or 'demo', got an empty name")
    path = Path(name).expanduser()
    if path.exists() and not (path / "config.json").is_file():
        raise UsageError(f"model {name}: expected a folder with config.json in it")
    return str(path) if path.exists() else name


def load_tokenizer(name: str, progress: Progress | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer alone: enough to lay out a prompt."""
    path = resolve_model(name, progress)
    with _quiet(), _explained(name):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path)
        return tokenizer


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
    with _quiet(), _explained(name):
        tokenizer = AutoTokenizer.from_pretrained(path)
        config = AutoConfig.from_pretrained(path)
        torch_dtype: Any = DTYPES.get(dtype)
        if torch_dtype is None:
            torch_dtype = torch.float32 if target.type == "cpu" else "auto"
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=torch_dtype, attn_implementation=IMPLEMENTATION
        )
        model = model.to(target).eval()
    if progress:
        progress("load", 1, 1)
    return model, tokenizer


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
    """Turn transformers' many ways to fail into one clear line."""
    try:
        yield
    except KvspanError:
        raise
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError) as e:
        local = Path(name).expanduser().is_dir()
        if isinstance(e, OSError) and not local and not isinstance(e, MemoryError):
            raise UsageError(
                f"model {name}: not found; expected a folder with config.json, an id that the "
                f"model hub serves, or 'demo'"
            ) from e
        raise KvspanError(f"model {name}: cannot be loaded: {_one_line(e)}") from e
    except Exception as e:  # safetensors raises its own class on corrupt files
        raise KvspanError(f"model {name}: cannot be loaded: {_one_line(e)}") from e


def _one_line(e: Exception) -> str:
    text = " ".join(str(e).split())
    return f"{type(e).__name__}: {text[:300]}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hold back transformers' own bars and warnings: progress is reported by us."""
    bars = transformers.utils.logging.is_progress_bar_enabled()
    level = transformers.utils.logging.get_verbosity()
    hub = logging.getLogger("huggingface_hub")
    hub_level = hub.level
    debug = bool(os.environ.get("KVSPAN_DEBUG"))
    if not debug:
        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
        hub.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        if bars:
            transformers.utils.logging.enable_progress_bar()
        transformers.utils.logging.set_verbosity(level)
        hub.setLevel(hub_level)
