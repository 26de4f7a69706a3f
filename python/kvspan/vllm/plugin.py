"""Entry points that vLLM finds by itself: what is on in every process, and in its HTTP server.

``vllm.general_plugins`` makes the connector known by its name. ``vllm.endpoint_plugins`` adds
``POST /v1/query/execute`` and prepares the spans of requests to vLLM's own completions; vLLM loads
it only where the environment variable VLLM_PLUGINS names ``kvspan``.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import os
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from kvspan.errors import UsageError
from kvspan.parentheses import Parentheses
from kvspan.vllm import CORPORA_VARIABLE

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.datastructures import State
    from starlette.types import Receive, Scope, Send
    from vllm.engine.protocol import EngineClient

    from kvspan.retrieve.corpora import Corpora
    from kvspan.serve.metrics import Metrics
    from kvspan.vllm.engine import VllmEngine

logger = logging.getLogger("vllm.kvspan")

NAME = "kvspan"  # of both entry points, as VLLM_PLUGINS names them
CONNECTOR = "KvspanConnector"
MODULE = "kvspan.vllm.connector"
# Hybrid architectures, and the modules of vLLM's that have their classes.
HYBRID_MODELS = {
    name: f"vllm.model_executor.models.{module}"
    for module, names in {
        "qwen3_next": ("Qwen3NextForCausalLM",),
        "qwen3_5": (
            "Qwen3_5ForCausalLM",
            "Qwen3_5MoeForCausalLM",
            "Qwen3_5ForConditionalGeneration",
            "Qwen3_5MoeForConditionalGeneration",
        ),
        "olmo_hybrid": ("OlmoHybridForCausalLM",),
    }.items()
    for name in names
}
HYBRIDS_MODULE = "kvspan.vllm.hybrid.models"
QUERY_PATH = "/v1/query/execute"
# What of vLLM's server the endpoint stands on, beside the plug-in interface itself.
SERVER_HOOKS = (
    "vllm.engine.protocol:EngineClient.generate",
    "vllm.inputs:tokens_input",
    "vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion.render_completion_request",
    "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat.render_chat_request",
    "vllm.entrypoints.openai.models.serving:OpenAIServingModels",
)


def register() -> None:
    """Let ``kv_connector`` be `KvspanConnector` without a module path. May be called again.

    Also puts the attention backend that `kvspan.vllm.attention` needs in the place of vLLM's, and
    the hybrid models of `kvspan.vllm.hybrid.models`, unless another plug-in has replaced those.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    backend = "kvspan.vllm.attention.SpanCPUAttentionBackend"
    register_backend(AttentionBackendEnum.CPU_ATTN, backend)
    try:
        KVConnectorFactory.get_connector_class_by_name(CONNECTOR)
    except ValueError:
        KVConnectorFactory.register_connector(CONNECTOR, MODULE, CONNECTOR)
    for name, module in HYBRID_MODELS.items():
        if getattr(ModelRegistry.models.get(name), "module_name", None) == module:
            ModelRegistry.register_model(name, f"{HYBRIDS_MODULE}:{name}")


class EndpointPlugin:
    """See `vllm.plugins.endpoint_plugins.interface`."""

    name = NAME
    required_tasks = ("generate",)

    def attach_router(self, app: Starlette) -> None:
        from starlette.routing import Route

        from kvspan.vllm.middleware import SpanMiddleware

        app.router.routes.append(Route(QUERY_PATH, _Query(), methods=["POST"]))
        # Inside vLLM's own middleware, which it adds later: only requests with a key get here.
        app.add_middleware(SpanMiddleware)

    async def init_state(
        self, engine_client: EngineClient | None, state: State, args: Namespace
    ) -> None:
        if engine_client is None:
            return
        from kvspan.vllm.support import missing_hook

        if name := missing_hook(SERVER_HOOKS):
            logger.error("kvspan: %s is off: this vLLM has no %s", QUERY_PATH, name)
            return
        from kvspan.serve.service import Service, Settings
        from kvspan.vllm.engine import VllmEngine

        engine = VllmEngine(engine_client, _tokenizer(engine_client, state))
        engine.parentheses = _parentheses(engine_client, engine)
        engine.reason = await engine.probe()
        names = tuple(args.served_model_name or [args.model])
        state.kvspan = Service(engine, Settings(names=names, retriever=_corpora()), _metrics())
        if engine.reason:
            say = logger.info if engine.told else logger.warning  # one warning is enough
            say("kvspan: %s is there, spans are not reused: %s", QUERY_PATH, engine.reason)
        else:
            logger.info(
                "kvspan: %s is on; spans of all requests are prepared by the server", QUERY_PATH
            )


def _corpora() -> Corpora | None:
    """What queries may retrieve from, if the server was started with corpora."""
    text = os.environ.get(CORPORA_VARIABLE)
    if not text:
        return None
    from kvspan.retrieve.corpora import Corpora

    return Corpora(**json.loads(text))


@functools.cache
def _metrics() -> Metrics:
    """In vLLM's own registry, and so on its /metrics. A process can have only one of them."""
    from prometheus_client import REGISTRY

    from kvspan.serve.metrics import Metrics

    return Metrics(REGISTRY)


def _tokenizer(client: EngineClient, state: State) -> Any:
    """A copy of the server's tokenizer, which no other thread uses, with its chat template."""
    tokenizer = copy.deepcopy(client.renderer.tokenizer)
    template = state.online_renderer.chat_template
    if tokenizer is not None and template:
        tokenizer.chat_template = template
    return tokenizer


def _parentheses(client: EngineClient, engine: VllmEngine) -> Parentheses | None:
    """Boundaries in prompts of tokens, if ``kv_connector_extra_config`` sets their ids."""
    transfer = client.vllm_config.kv_transfer_config
    text = transfer.kv_connector_extra_config.get("parentheses") if transfer else None
    if text is None:
        return None
    if engine.encoder is None:
        raise UsageError("parentheses: the server runs without a tokenizer to check them against")
    found = Parentheses.parse(str(text))
    found.check(engine.encoder.tokenizer, engine.vocab_size)
    return found


class _Query:
    """The ASGI application of `QUERY_PATH`: the one of kvspan's own server."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from kvspan.serve.app import Endpoint, error_response, read_query
        from kvspan.serve.errors import SERVER, APIError

        service = getattr(scope["app"].state, "kvspan", None)
        if service is None:
            off = APIError(503, f"{QUERY_PATH} is off: the server's log says why", type=SERVER)
            await error_response(off)(scope, receive, send)
            return
        await Endpoint(service, QUERY_PATH, read_query)(scope, receive, send)
