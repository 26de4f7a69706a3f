"""``kvspan inspect``: what a model's cache costs, and how Tail-Replay fits it."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from pathlib import Path

from kvspan.errors import UsageError
from kvspan.extras import importing
from kvspan.hybrid.inspect import HeadMemory, Inspection, inspect_config, with_half_lives

EPILOG = """\
MODEL is a folder, a hub id or 'demo'. A folder with nothing but config.json will do: then the
half-lives are left out, for which the weights must read a text (--text, or one of kvspan's own).
"""
SAMPLE_TOKENS = 2048


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from kvspan.cli_options import model_name, whole

    add = parser.add_argument
    add("model", type=model_name, metavar="MODEL", help="a folder, a hub id or 'demo'")
    add("--text", metavar="FILE", help="text that half-lives are measured over")
    add("--no-weights", action="store_true", help="load no weights: no half-lives")
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="type of the cache (auto: the checkpoint's)",
    )
    add("--threads", type=whole(1), metavar="N", help="CPU threads (default: all cores)")
    add("--json", action="store_true", help="print one JSON object")
    add("--quiet", action="store_true", help="no progress")


def main(args: argparse.Namespace) -> int:
    """Run the command; the exit status."""
    text = _read(args.text)
    found = inspect_model(
        args.model, args.dtype, text=text, weights=not args.no_weights, threads=args.threads
    )
    if args.json:
        print(json.dumps(found.to_json(), ensure_ascii=False, indent=2))
    else:
        print("\n".join(_lines(found)))
    return 0


def inspect_model(
    name: str, dtype: str, *, text: str | None, weights: bool, threads: int | None = None
) -> Inspection:
    """An inspection; half-lives too if the model is a known hybrid and its weights are there."""
    with importing("local"):
        import torch

        from kvspan.engine import loading
    if threads:
        torch.set_num_threads(threads)
    found = inspect_config(loading.load_config(name), name, dtype)
    folder = Path(loading.resolve_model(name))
    if found.kind != "hybrid" or not weights or not any(folder.glob("*.safetensors")):
        if text is not None and found.kind != "hybrid":
            raise UsageError(f"--text: model {name} has no recurrent states that could forget")
        return found
    model, tokenizer = loading.load_model(str(folder), dtype="auto", device="cpu")
    model.set_attn_implementation("eager")  # kvspan's own attends to a pool of blocks
    ids = tokenizer(text or _sample(), add_special_tokens=False).input_ids[:SAMPLE_TOKENS]
    if not ids:
        raise UsageError("--text: expected at least one token, found none")
    with loading.quiet():  # transformers says of its linear attention that it is slow
        return with_half_lives(found, model, ids)


def _read(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not a text in UTF-8"
        raise UsageError(f"--text {path}: {why}") from error


def _sample() -> str:
    """A text that comes with kvspan: the demo's passages."""
    from kvspan.demo import passages

    return "\n\n".join(passage.text for passage in passages.load().passages)


def _lines(found: Inspection) -> list[str]:
    """The report for people."""
    kind = {
        "attention": "attention only",
        "hybrid": "hybrid: attention and Gated DeltaNet",
        "unsupported": "not supported",
    }[found.kind]
    lines = [
        f"model       {found.model} ({found.model_type}), {found.num_layers} layers",
        f"kind        {kind}" + (f" ({found.reason})" if found.reason else ""),
    ]
    if found.kv_bytes:
        window = f", {found.window_layers} of its layers for the last {found.window} tokens only"
        window = window if found.window else ""
        lines.append(f"attention   {_size(found.kv_bytes)} a token in {found.dtype}{window}")
    if found.kind != "hybrid":
        return lines
    streams = sum(source is not None for source, _ in found.groups)
    sizes = ", ".join(f"{_size(size)} as {name}" for name, size in found.hidden_bytes.items())
    checkpoint = f"{_size(found.checkpoint_bytes)} for one position"
    if found.break_even_tokens:
        checkpoint += f", as much as the hidden vectors of {found.break_even_tokens} tokens"
    lines += [
        f"hidden      {sizes} a token, {streams} {'stream' if streams == 1 else 'streams'}",
        f"checkpoint  {checkpoint}",
        f"groups      {'; '.join(_group(*group) for group in found.groups)}",
    ]
    if found.half_lives:
        lines.append(f"half-lives  in tokens, over {found.sample_tokens} tokens of text")
        lines += _half_lives(found.half_lives)
    return [*lines, f"policy      {found.policy} ({found.policy_reason})"]


def _group(source: int | None, layers: list[int]) -> str:
    run = str(layers[0]) if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"
    return f"{'embedding' if source is None else source} > {run}"


def _half_lives(heads: list[HeadMemory]) -> list[str]:
    """One line a layer: every head of a few, else the range."""
    lines = []
    for layer, count in Counter(head.layer for head in heads).items():
        values = sorted(head.tokens for head in heads if head.layer == layer)
        if count <= 8:
            said = "  ".join(_tokens(head.tokens) for head in heads if head.layer == layer)
        else:
            middle = _tokens(values[len(values) // 2])
            said = f"{_tokens(values[0])} to {_tokens(values[-1])}, half of them over {middle}"
        lines.append(f"  layer {layer:<4} {said}")
    return lines


def _tokens(value: float) -> str:
    if not math.isfinite(value):
        return "never"
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _size(count: int) -> str:
    for unit, size in (("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
