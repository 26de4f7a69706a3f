"""What a model's cache costs and, for hybrids, how Tail-Replay fits it: from the config alone.

Half-lives are the one thing that needs the weights: how fast a head forgets depends on the tokens
it reads, so that they are measured over a sample text.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from kvspan.errors import KvspanError
from kvspan.hybrid.groups import is_hybrid, layer_map, refusal

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
STATE_BYTES = 4  # recurrent states are float32 in every dtype
SCALE_BYTES = 4  # of an int8 hidden vector
BOUND = 1e-3  # the bound that recommendations are made for
LONGEST_TAIL = 1024  # heads that need more tokens to forget are carried by checkpoints
# Recurrent layers that are not Gated DeltaNet, by the config's attribute that gives them away.
_STATE_SPACE = ("mamba_d_state", "ssm_state_size", "state_size", "mamba_num_heads", "lru_width")


@dataclass(frozen=True)
class HeadMemory:
    """How a head of a linear-attention layer forgets over the sample. tokens: its half-life, by the
    mean log decay; inf if it never forgets."""

    layer: int
    head: int
    tokens: float


@dataclass(frozen=True)
class Inspection:
    """kind: 'attention', 'hybrid' (can be replayed) or 'unsupported'; reason: why it is not.

    Bytes are of dtype, but for the recurrent states (float32). kv_bytes: keys and values of one
    token in all attention layers; window_layers of them keep no more than `window` tokens.
    For hybrids: groups of (attention layer before them or None for the embedding, linear layers);
    hidden_bytes of one token by format; checkpoint_bytes of one exact state of all linear layers;
    break_even_tokens: checkpoints more dense than that take more memory than the hidden vectors.
    """

    model: str
    model_type: str
    kind: str
    reason: str
    dtype: str
    num_layers: int
    kv_bytes: int
    window: int | None = None
    window_layers: int = 0
    groups: list[tuple[int | None, list[int]]] = field(default_factory=list)
    hidden_bytes: dict[str, int] = field(default_factory=dict)
    checkpoint_bytes: int = 0
    break_even_tokens: int = 0
    half_lives: list[HeadMemory] = field(default_factory=list)
    sample_tokens: int = 0
    policy: str = ""
    policy_reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain data; a half-life without end is null."""
        out = asdict(self)
        out["groups"] = [{"source": s, "layers": layers} for s, layers in self.groups]
        for head in out["half_lives"]:
            head["tokens"] = head["tokens"] if math.isfinite(head["tokens"]) else None
        return out


def inspect_config(config: Any, model: str, dtype: str = "auto") -> Inspection:
    """Everything that the config says. dtype: of cache and hidden vectors; auto: the checkpoint's,
    bfloat16 where it names none. Raises KvspanError for what is no decoder with a cache."""
    text = config.get_text_config()
    dtype = _dtype(config, text) if dtype == "auto" else dtype
    common: dict[str, Any] = {
        "model": model,
        "model_type": text.model_type,
        "dtype": dtype,
        "num_layers": _size(text, "num_hidden_layers"),
    }
    if any(getattr(text, name, None) for name in _STATE_SPACE):
        reason = f"its recurrent layers ({text.model_type}) are not Gated DeltaNet"
        return Inspection(kind="unsupported", reason=reason, kv_bytes=0, **common)
    each = _layer_kv_bytes(text, DTYPE_BYTES[dtype])
    if not is_hybrid(config):
        kinds = getattr(text, "layer_types", None) or ["full_attention"] * common["num_layers"]
        windowed = sum(kind in ("sliding_attention", "chunked_attention") for kind in kinds)
        window = getattr(text, "sliding_window", None) if windowed else None
        shared = getattr(text, "num_kv_shared_layers", 0) or 0
        return Inspection(
            kind="attention",
            reason="no linear-attention layers: nothing to replay, its KV is cut at any token",
            kv_bytes=(len(kinds) - shared) * each,
            window=window,
            window_layers=windowed if window else 0,
            **common,
        )
    layers = layer_map(text.layer_types)
    common["kv_bytes"] = len(layers.full) * each
    if why := refusal(config):
        return Inspection(kind="unsupported", reason=f"no adapter for {why}", **common)
    width = _size(text, "hidden_size") * DTYPE_BYTES[dtype]
    hidden = {"sum": width, "pair": 2 * width, "int8": _size(text, "hidden_size") + SCALE_BYTES}
    hidden = {name: len(layers.streams) * size for name, size in hidden.items()}
    checkpoint = len(layers.linear) * _state_bytes(text, DTYPE_BYTES[dtype])
    found = Inspection(
        kind="hybrid",
        reason="",
        groups=[(group.source, list(group.layers)) for group in layers.groups],
        hidden_bytes=hidden,
        checkpoint_bytes=checkpoint,
        break_even_tokens=round(checkpoint / hidden["sum"]) if hidden["sum"] else 0,
        **common,
    )
    return _recommend(found)


def _dtype(config: Any, text: Any) -> str:
    for owner in (text, config):
        name = str(getattr(owner, "dtype", None) or "").removeprefix("torch.")
        if name in DTYPE_BYTES:
            return name
    return "bfloat16"


def _size(config: Any, *names: str) -> int:
    """The first of these attributes that is there. Raises KvspanError if none is a size."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            if isinstance(value, int) and value > 0:
                return value
            break
    raise KvspanError(
        f"{names[0]} in the config of a {config.model_type}: expected a whole number above 0, "
        f"found {getattr(config, names[0], None)!r}"
    )


def _layer_kv_bytes(text: Any, itemsize: int) -> int:
    """Keys and values of one token in one attention layer."""
    if rank := getattr(text, "kv_lora_rank", None):  # latent attention keeps one shared vector
        return int(rank + getattr(text, "qk_rope_head_dim", 0)) * itemsize
    heads = _size(text, "num_attention_heads")
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or _size(text, "hidden_size") // heads
    return 2 * int(kv_heads) * int(head_dim) * itemsize


def _state_bytes(text: Any, itemsize: int) -> int:
    """Recurrent and convolution state of one linear-attention layer."""
    key_heads, value_heads = (
        _size(text, "linear_num_key_heads"),
        _size(text, "linear_num_value_heads"),
    )
    dk, dv = _size(text, "linear_key_head_dim"), _size(text, "linear_value_head_dim")
    rows = _size(text, "linear_conv_kernel_dim") - 1
    channels = 2 * key_heads * dk + value_heads * dv
    return value_heads * dk * dv * STATE_BYTES + rows * channels * itemsize


def with_half_lives(found: Inspection, loaded: Any, ids: list[int]) -> Inspection:
    """The same with half-lives, from a forward pass of the loaded transformers model over ids, and
    the policy that they speak for. Needs torch."""
    import torch

    from kvspan.hybrid.families import family_of

    family = family_of(loaded)
    means: dict[int, list[float]] = {}

    def watch(layer: int) -> Any:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            g, _ = family.gates(layer, *family._gate_inputs(module, hidden[0]))
            means[layer] = g.double().mean(0).tolist()

        return hook

    hooks = [
        family.base.layers[layer].linear_attn.register_forward_pre_hook(
            watch(layer), with_kwargs=True
        )
        for layer in family.map.linear
    ]
    try:
        with torch.inference_mode():
            loaded(input_ids=torch.tensor([ids], device=loaded.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    heads = [
        HeadMemory(layer, head, math.log(2) / -mean if mean < 0 else math.inf)
        for layer, layer_means in sorted(means.items())
        for head, mean in enumerate(layer_means)
    ]
    return _recommend(replace(found, half_lives=heads, sample_tokens=len(ids)))


def tail_tokens(half_life: float, bound: float = BOUND) -> float:
    """Tokens after which a head holds no more than ``bound`` of what it held.

    >>> round(tail_tokens(100.0, 0.125))
    300
    """
    return half_life * math.log2(1 / bound)


def _recommend(found: Inspection) -> Inspection:
    """exact is right for any weights; a bounded replay is worth it where most heads forget soon:
    the others are carried by checkpoints of their own."""
    heads = found.half_lives
    if not heads:
        reason = "what the heads forget is not known without weights; exact fits any model"
        return replace(found, policy="exact", policy_reason=reason)
    short = [head for head in heads if tail_tokens(head.tokens) <= LONGEST_TAIL]
    slow = len(heads) - len(short)
    if slow > len(heads) / 2:
        reason = (
            f"{slow} of {len(heads)} heads need more than {LONGEST_TAIL} tokens to forget all "
            f"but {BOUND:g}"
        )
        return replace(found, policy="exact", policy_reason=reason)
    tail = max(tail_tokens(head.tokens) for head in short)
    reason = f"a tail of {math.ceil(tail)} tokens bounds the error by {BOUND:g}"
    if slow:
        reason += f" but for {slow} of {len(heads)} heads, which checkpoints carry"
    return replace(found, policy=f"bounded:{BOUND:g}", policy_reason=reason)
