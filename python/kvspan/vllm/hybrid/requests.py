"""Requests as the scheduler's side of the hybrid connector sees them: what they ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvspan.errors import UsageError
from kvspan.vllm.hybrid.orders import Restore
from kvspan.vllm.hybrid.plans import Plan
from kvspan.vllm.hybrid.policy import Policy, parse_policy
from kvspan.vllm.hybrid.store import root_key
from kvspan.vllm.hybrid.support import Options
from kvspan.vllm.hybrid.tracking import Track, Written
from kvspan.vllm.params import KEY, fields_of

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(eq=False)
class Tracked:
    """A request of vLLM's. waited: steps that it was held back for blocks.

    reads: times that it waited for files since it was admitted last; read_until: to wait for them.
    loaded: what its restore in the coming step does.
    """

    request: Request
    track: Track
    ordinary_hasher: Any
    waited: int = 0
    reads: int = 0
    read_until: float = 0.0
    loaded: tuple[Plan, Restore, Written] | None = None


def asked_policy(request: Request, options: Options) -> Policy | None:
    """The replay that a request asks for; None where it leaves that to the server.

    Raises:
        UsageError: for fields that make no sense, or a policy that this server cannot keep.
    """
    told = fields_of(request.kv_transfer_params) or {}
    if "replay" not in told:
        return None
    where = f"kv_transfer_params.{KEY}.replay"
    policy = parse_policy(told["replay"], where, options.k_min)
    if policy.name == "bounded" and not options.decay:
        raise UsageError(
            f"{where}: bounded needs a server that keeps decays",
            expected="its option decay to be true", found="false",
        )  # fmt: skip
    if policy.name == "exact" and not options.exact_hidden:
        raise UsageError(
            f"{where}: exact needs a server that keeps exact hidden vectors",
            expected="its option hidden to be pair", found="sum",
        )  # fmt: skip
    return policy


def not_replayed(request: Request) -> str:
    """Why nothing is kept or restored for a request of this kind; "" where it is."""
    if (fields_of(request.kv_transfer_params) or {}).get("spans"):
        return "spans need KV that may move, and recurrent state can not"
    if request.mm_features or request.prompt_embeds is not None:
        return "multimodal inputs or embeddings"
    if request.pooling_params is not None:
        return "pooling"
    return ""


def root_of(request: Request, page: int) -> bytes:
    """The parent of the first page of a request's prompt. page: tokens of one."""
    lora = request.lora_request
    return root_key(
        request.cache_salt,
        # The path, too: what is on disk may be read by a server with another LoRA of that name.
        f"{lora.lora_int_id}:{lora.lora_name}:{lora.lora_path}" if lora else "",
        page,
    )
