"""Trains the small hybrid of tests/fixtures/tiny_hybrid on one CPU core.

    nice python scripts/train_tiny_hybrid.py --out DIR [--minutes 60] [--seed 0]

Text and recall together (see tiny_hybrid_task.py). Recall emerges neither from long contexts nor
from all modes at once, so that both grow: whenever the running accuracy passes 0.85 one mode more,
then twice the keys; while the learning rate goes down, all longer contexts in turn. A checkpoint in
DIR/state.pt every two minutes: the same command goes on from it.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from pathlib import Path
from typing import NamedTuple

import tiny_hybrid_task as task
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3_5TextConfig
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.qwen3_5 import modeling_qwen3_5


class Stage(NamedTuple):
    """Contexts of a batch: how many, their tokens, keys, and modes in use; calm: without text."""

    keys: int
    length: int
    size: int
    modes: int = task.MODES
    calm: bool = False


STAGES = [
    Stage(4, 96, 28, modes=1, calm=True),
    Stage(4, 96, 28, modes=2, calm=True),
    Stage(4, 96, 28, calm=True),
    Stage(8, 160, 18),
    Stage(16, 256, 12),
    Stage(32, 512, 7),
    Stage(48, 1024, 4),
    Stage(48, 2048, 2),
]
LONG = [stage for stage in STAGES if stage.length >= 256]
COOLDOWN_STEPS = 480
PASSED = 0.85


def config() -> Qwen3_5TextConfig:
    """Two groups and the LA layers before them; heads of 64, the least that vLLM's CPU kernels
    take; rotation of few dimensions, so that attention sees little of how recent a token is."""
    return Qwen3_5TextConfig(
        vocab_size=task.VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
    )


def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes as byte-level BPE without merges, and the words of the task as added tokens."""
    names = bytes_to_unicode()
    model = Tokenizer(models.BPE({names[byte]: byte for byte in range(256)}, []))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    model.add_tokens([AddedToken(word, normalized=False) for word in task.words()])
    return PreTrainedTokenizerFast(tokenizer_object=model, clean_up_tokenization_spaces=False)


def set_decays(model: torch.nn.Module) -> None:
    """Half-lives from ten to sixty tokens; the default forgets in two."""
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            attention = layer.linear_attn
            half_lives = torch.logspace(1, math.log10(60), attention.num_v_heads)
            rates = math.log(2) / half_lives
            attention.A_log.data = torch.zeros(attention.num_v_heads)
            attention.dt_bias.data = rates + torch.log(-torch.expm1(-rates))
            attention.in_proj_a.weight.data.mul_(0.2)


def chunked_delta_rule(query, key, value, g, beta, *, initial_state, output_final_state, **kwargs):
    """transformers' torch_chunk_gated_delta_rule for training: shorter chunks, one solve.

    query, key [B, T, Hk, dk], value [B, T, Hv, dv], g and beta [B, T, Hv] -> [B, T, Hv, dv].
    """
    assert initial_state is None and not output_final_state
    chunk, length = 32, key.shape[1]
    repeat = value.shape[2] // key.shape[2]
    query = functional.normalize(query, dim=-1) * query.shape[-1] ** -0.5
    key = functional.normalize(key, dim=-1)
    query, key = (x.repeat_interleave(repeat, 2) for x in (query, key))
    padding = -length % chunk

    def chunks(x):  # [B, T, H, ...] -> [B, H, N, chunk, ...]
        x = functional.pad(x.transpose(1, 2), (0, 0) * (x.dim() - 3) + (0, padding))
        return x.unflatten(2, (-1, chunk))

    query, key, value, g, beta = (chunks(x) for x in (query, key, value, g, beta))
    total = g.cumsum(-1)
    above = torch.ones(chunk, chunk, dtype=torch.bool).triu(1)
    decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(above, -torch.inf).exp()
    from_start = total.exp().unsqueeze(-1)
    weighted = key * beta.unsqueeze(-1)
    system = (weighted @ key.transpose(-1, -2)) * decay
    right = torch.cat([value * beta.unsqueeze(-1), weighted * from_start], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    new_values, read_keys = solved.split([value.shape[-1], key.shape[-1]], -1)
    inside = (query @ key.transpose(-1, -2)) * decay
    query = query * from_start
    to_end = (key * (total[..., -1:] - total).exp().unsqueeze(-1)).transpose(-1, -2)
    whole = total[..., -1].exp()[..., None, None]
    state, outputs = None, []
    steps = (new_values, read_keys, query, inside, to_end, whole)
    for new, read, asked, mixed, written, kept in zip(*(x.unbind(2) for x in steps), strict=True):
        if state is None:
            outputs.append(mixed @ new)
            state = written @ new
            continue
        new = new - read @ state
        outputs.append(asked @ state + mixed @ new)
        state = state * kept + written @ new
    return torch.cat(outputs, 2)[:, :, :length].transpose(1, 2), None


def batch(source: bytes, stage: Stage, rng: random.Random):
    """(tokens [B, T], which of them are answers, which are text that follows text)."""
    length, size = stage.length, stage.size
    rows, answers = [], torch.zeros(size, length, dtype=torch.bool)
    for row in range(size):
        if row < size // 6:
            start = rng.randrange(len(source) - length)
            rows.append(list(source[start : start + length]))
            continue
        back = rng.random() < 0.15  # few keys are not forgotten
        keys = rng.choice(STAGES[: STAGES.index(stage) + 1]).keys if back else stage.keys
        context = task.training_context(source, keys, length, rng, stage.modes, stage.calm)
        rows.append(context.tokens)
        answers[row, context.answers] = True
    tokens = torch.tensor(rows)
    is_text = tokens < task.FIRST_KEY
    is_text[:, 1:] &= tokens[:, :-1] < task.FIRST_KEY
    return tokens, answers, is_text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=2e-3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("medium")  # bfloat16 products where the CPU has them
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    modeling_qwen3_5.torch_chunk_gated_delta_rule = chunked_delta_rule

    model = AutoModelForCausalLM.from_config(config()).float()
    set_decays(model)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}],
        lr=args.rate,
        betas=(0.9, 0.95),
    )
    source = task.text(held_out=False)
    step, stage, cooling, spent, accuracy = 0, 0, None, 0.0, 0.0
    saved = args.out / "state.pt"
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, stage, cooling, spent, accuracy = state["progress"]
    began, last_saved = time.monotonic() - spent, time.monotonic()
    log = (args.out / "log.txt").open("a")

    def say(*words: object) -> None:
        line = " ".join(str(word) for word in words)
        print(line, flush=True)
        print(line, file=log, flush=True)

    def save() -> None:
        spent = time.monotonic() - began
        progress = (step, stage, cooling, spent, accuracy)
        torch.save(
            {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "progress": progress,
            },
            args.out / "state.new",
        )
        (args.out / "state.new").replace(saved)

    text_loss = 0.0
    while cooling is None or step < cooling + COOLDOWN_STEPS:
        rng = random.Random(f"{args.seed}/{step}")
        now = STAGES[stage] if cooling is None else LONG[step % len(LONG)]
        tokens, answers, is_text = batch(source, now, rng)
        part = 1.0 if cooling is None else 1 - (step - cooling) / COOLDOWN_STEPS
        for group in optimizer.param_groups:
            group["lr"] = args.rate * min(1, (step + 1) / 100) * max(part, 0.02)
        hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
        wanted = (answers | is_text)[:, 1:]
        logits = model.lm_head(hidden[:, :-1][wanted])
        targets = tokens[:, 1:][wanted]
        losses = functional.cross_entropy(logits, targets, reduction="none")
        is_answer = answers[:, 1:][wanted]
        text, recall = losses[~is_answer].mean(), losses[is_answer].mean()
        (0.5 * text + recall).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        right = (logits.argmax(-1) == targets)[is_answer].float().mean().item()
        accuracy += (right - accuracy) * 0.1
        text_loss += (text.item() - text_loss) * (0.05 if step > 20 else 1)
        minutes = (time.monotonic() - began) / 60
        if step % 20 == 0:
            say(
                f"{step} steps {minutes:.1f} min {tuple(now)} text {text_loss:.3f}"
                f" recall {recall.item():.3f} right {accuracy:.3f}"
            )
        if cooling is None:
            done = accuracy > PASSED and stage == len(STAGES) - 1
            if done or minutes > args.minutes:
                cooling = step
                say(f"{step} steps {minutes:.1f} min: cooling down")
            elif accuracy > PASSED:
                stage, accuracy = stage + 1, 0.0
                say(f"{step} steps {minutes:.1f} min: stage {stage}")
        if time.monotonic() - last_saved > 120:
            save()
            last_saved = time.monotonic()
    save()
    model.to(torch.bfloat16).save_pretrained(args.out / "model")
    tokenizer().save_pretrained(args.out / "model")
    say(f"{step} steps {(time.monotonic() - began) / 60:.1f} min: done")


if __name__ == "__main__":
    main()
