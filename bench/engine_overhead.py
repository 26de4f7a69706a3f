"""The embedded engine against plain transformers on ordinary prompts: prefill and decode.

Both run the same float32 weights, threads and tokens in the same process, turn by turn; a ratio
above 1 means that kvspan is slower. Plain transformers: SDPA attention, DynamicCache, logits of
the last token only.

    python bench/engine_overhead.py                 # a 100M-parameter Llama of random weights
    python bench/engine_overhead.py --model demo    # or any folder or hub id
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import platform
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
from machine import processor
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, PreTrainedModel

from kvspan.engine import GenerateRequest
from kvspan.engine.loading import load_tokenizer, resolve_model
from kvspan.engine.local import LocalEngine
from kvspan.layout import layout_from_tokens

LLAMA = LlamaConfig(
    vocab_size=8192,
    hidden_size=768,
    intermediate_size=2048,
    num_hidden_layers=12,
    num_attention_heads=12,
    num_key_value_heads=4,
    head_dim=64,
    max_position_embeddings=16384,
)
NEVER = 2**31 - 1  # an end-of-text id that no model draws


class _Bytes:
    """Stands in for a tokenizer where prompts are tokens already."""

    chat_template = None
    bos_token_id = eos_token_id = unk_token_id = None
    all_special_ids: tuple[int, ...] = ()
    all_special_tokens: tuple[str, ...] = ()

    def __call__(self, text: str | list[str], **_: object) -> _Bytes:
        rows = [list(t.encode()) for t in ([text] if isinstance(text, str) else text)]
        self.input_ids = rows[0] if isinstance(text, str) else rows
        return self

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(chr(i % 96 + 32) for i in ids)


def load(name: str | None, attention: str) -> PreTrainedModel:
    if name is None:
        torch.manual_seed(0)
        config = copy.deepcopy(LLAMA)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).float()
    else:
        model = AutoModelForCausalLM.from_pretrained(
            resolve_model(name), dtype=torch.float32, attn_implementation=attention
        )
    model.generation_config.eos_token_id = NEVER
    return model.eval()


@torch.inference_mode()
def run_transformers(
    model: PreTrainedModel, ids: torch.Tensor, new_tokens: int
) -> tuple[float, float, list[int]]:
    """(seconds to the first token, seconds for the others, tokens), greedy."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    options = {name: DynamicCache(config=model.config), "use_cache": True, "logits_to_keep": 1}
    start = time.perf_counter()
    out = [int(model(input_ids=ids[None], **options).logits[0, -1].argmax())]
    first = time.perf_counter()
    for _ in range(new_tokens - 1):
        logits = model(input_ids=torch.tensor([out[-1:]]), **options).logits
        out.append(int(logits[0, -1].argmax()))
    return first - start, time.perf_counter() - first, out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder, hub id or demo (default: a random 100M Llama)")
    parser.add_argument("--tokens", type=int, default=4096, help="prompt length (default 4096)")
    parser.add_argument("--new-tokens", type=int, default=32, help="answer length (default 32)")
    parser.add_argument("--repeats", type=int, default=5, help="turns each (default 5)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    reference = load(args.model, "sdpa")
    tokenizer = load_tokenizer(args.model) if args.model else _Bytes()
    vocab = reference.get_input_embeddings().num_embeddings
    ids = np.random.default_rng(0).integers(5, vocab, args.tokens)
    layout = layout_from_tokens(ids, (), 16)
    request = GenerateRequest(prompt=(), max_tokens=args.new_tokens, temperature=0.0)
    times: dict[str, list[float]] = {
        f"{who} {what}": [] for what in ("prefill", "decode") for who in ("kvspan", "transformers")
    }
    same = 0
    with LocalEngine(load(args.model, "eager"), tokenizer, name="bench", kv_cache_gib=2) as engine:  # type: ignore[arg-type]
        for repeat in range(args.repeats + 1):
            engine.clear_cache()
            ours = engine.run_layout(layout, request)
            prefill, decode, tokens = run_transformers(
                reference, torch.from_numpy(ids), args.new_tokens
            )
            if repeat == 0:
                continue  # warm-up
            times["kvspan prefill"].append(ours.timings.ttft)
            times["kvspan decode"].append(ours.timings.decode / (args.new_tokens - 1))
            times["transformers prefill"].append(prefill)
            times["transformers decode"].append(decode / (args.new_tokens - 1))
            same += tokens == ours.token_ids
            print(f"turn {repeat} of {args.repeats}", file=sys.stderr)
    report = {
        "model": args.model or "llama-100m-random",
        "machine": f"{platform.machine()} {processor()}",
        "threads": args.threads,
        "prompt_tokens": args.tokens,
        "same_answers": f"{same}/{args.repeats}",
        "seconds": {
            name: {"median": statistics.median(v), "min": min(v), "max": max(v)}
            for name, v in times.items()
        },
    }
    for what in ("prefill", "decode"):
        ours_s, theirs_s = (
            statistics.median(times[f"{who} {what}"]) for who in ("kvspan", "transformers")
        )
        report[f"{what}_ratio"] = ours_s / theirs_s
        print(
            f"{what:8} kvspan {ours_s * 1e3:9.1f} ms  transformers {theirs_s * 1e3:9.1f} ms  "
            f"ratio {ours_s / theirs_s:.2f}"
        )
    print(
        f"same greedy answers: {same}/{args.repeats}; {report['machine']}, {args.threads} threads"
    )
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
