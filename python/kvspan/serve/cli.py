"""``kvspan serve``."""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import json
import os
import socket
import sys
from pathlib import Path

from kvspan.errors import KvspanError, UsageError
from kvspan.parentheses import PARENTHESES_HELP, Parentheses
from kvspan.progress import ProgressBars

KEY_VARIABLE = "KVSPAN_API_KEY"
_OF_CONNECTOR = ("host_gib", "disk", "disk_gib", "connector_option")  # options with vLLM only


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from kvspan.cli_index import add_retrieval_options
    from kvspan.cli_options import (
        add_block_size,
        add_local_engine_options,
        model_name,
        number,
        whole,
    )
    from kvspan.vllm import launch

    add = parser.add_argument
    add(
        "--engine",
        choices=("local", "vllm"),
        default="local",
        help="the embedded engine (local, the default), or vLLM: then MODEL and vLLM's own flags "
        "come after all options of kvspan",
    )
    add("vllm", nargs=argparse.REMAINDER, metavar="MODEL [vLLM flags]", help="with --engine vllm")
    add("--parentheses", metavar="PAD,START,SIBLING,END", help=PARENTHESES_HELP)
    add(
        "--model",
        type=model_name,
        default="demo",
        metavar="ID_OR_PATH",
        help="any decoder transformers can load (default: %(default)s)",
    )
    add(
        "--served-model-name",
        action="append",
        metavar="NAME",
        help="what requests call the model; may be given several times (default: as --model)",
    )
    add("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    add(
        "--port",
        type=whole(0, 65535),
        default=8000,
        help="0 takes a free one (default %(default)s)",
    )
    add("--api-key-file", metavar="FILE", help="API keys, one a line; any of them is accepted")
    add(
        "--max-requests",
        type=whole(1),
        default=256,
        metavar="N",
        help="answered or waiting at the same time; others get 429 (default %(default)s)",
    )
    add(
        "--max-body-mib",
        type=number(None, "more than 0"),
        default=16,
        metavar="MIB",
        help="largest request body (default %(default)s)",
    )
    add(
        "--timeout",
        type=number(None, "more than 0"),
        default=600,
        metavar="SECONDS",
        help="for a request as a whole (default %(default)s)",
    )
    add(
        "--drain-timeout",
        type=number(0, "0 or more"),
        default=30,
        metavar="SECONDS",
        help="for running requests to finish when the server is stopped (default %(default)s)",
    )
    add_block_size(parser)
    add_local_engine_options(parser)
    launch.add_connector_options(parser, "with --engine vllm: ")
    add_retrieval_options(parser)
    add(
        "--prepare",
        metavar="SYSTEM",
        help="before the first request, compute every chunk of the corpora for prompts that begin "
        "with this system text ('' for none)",
    )
    add("--json", action="store_true", help="say where the server listens as one JSON object")
    add("--quiet", action="store_true", help="no progress, notes or warnings")


def main(args: argparse.Namespace) -> int:
    if args.engine == "vllm":
        return _become_vllm(args)
    if args.vllm:
        args.parser.error(f"unrecognized arguments: {' '.join(args.vllm)}")
    for name in _OF_CONNECTOR:
        if getattr(args, name) != args.parser.get_default(name):
            raise UsageError(f"--{name.replace('_', '-')} has no meaning without --engine vllm")
    from kvspan.cli_index import open_corpora, prepare_corpora
    from kvspan.cli_options import open_engine_with
    from kvspan.extras import importing

    with importing("serve"):
        from kvspan.serve.metrics import engine_metrics
        from kvspan.serve.server import bind, serve, url_of
        from kvspan.serve.service import Service, Settings

    def say(line: str) -> None:
        if not args.quiet:
            with contextlib.suppress(OSError, ValueError):
                print(f"kvspan: {line}", file=sys.stderr, flush=True)

    if args.prepare is not None and not args.corpus:
        raise UsageError("--prepare has nothing to prepare", expected="--corpus NAME=PATH with it")
    keys = read_keys(args.api_key_file)
    names = tuple(dict.fromkeys(args.served_model_name or [args.model]))
    if "" in names:
        raise UsageError("--served-model-name is empty", expected="a model's name")
    corpora = open_corpora(args, say)
    corpora.on_note = None  # what clients ask for is not for the log
    marks = Parentheses.parse(args.parentheses, "--parentheses") if args.parentheses else None
    settings = Settings(
        names=names,
        keys=keys,
        max_body_bytes=int(min(args.max_body_mib, 2**40) * 2**20),
        max_requests=args.max_requests,
        timeout=args.timeout,
        drain=args.drain_timeout,
        retriever=corpora,
        parentheses=marks,
    )
    with contextlib.closing(bind(args.host, args.port)) as listener:
        if not keys and not is_loopback(listener):
            say(
                f"warning: {args.host} can be reached from other machines and no API key is set: "
                f"everybody who reaches it is served (set {KEY_VARIABLE} or --api-key-file)"
            )
        with ProgressBars(args.quiet) as bars:
            engine = open_engine_with(args, args.model, bars)
        from kvspan.engine.local import LocalEngine

        assert isinstance(engine, LocalEngine)
        engine.progress = None  # bars of many requests at once would tell nothing

        def ready() -> None:
            url = url_of(listener)
            if args.json:
                print(json.dumps({"url": url, "models": names, "key": bool(keys)}), flush=True)
            with_key = "with an API key" if keys else "without an API key"
            say(f"serving {', '.join(names)} at {url}/v1, {with_key}")

        try:
            if args.prepare is not None:
                prepare_corpora(args, corpora, engine, say)
            if marks is not None:
                marks.check(engine.tokenizer, engine.vocab_size, "--parentheses")
            serve(Service(engine, settings, engine_metrics(engine)), listener, ready, say)
        finally:
            engine.close()
    say("stopped")
    return 0


def _become_vllm(args: argparse.Namespace) -> int:
    from kvspan.vllm import launch

    of_corpora = ("corpus", "search", "fragments", "chunk_size")  # the plug-in is told of them
    ours = ("command", "engine", "parser", "parentheses", "replay", "vllm")
    for name, value in vars(args).items():
        if name not in (*ours, *of_corpora, *_OF_CONNECTOR) and value != args.parser.get_default(
            name
        ):
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag}: options of vLLM's own go after MODEL")
    if not args.vllm:
        raise UsageError("no model", expected="kvspan serve --engine vllm MODEL [vLLM flags]")
    if args.replay == args.parser.get_default("replay"):
        args.replay = None  # the connector's default as well, and only of hybrid models
    given = launch.connector_settings(args)
    return launch.serve(args.vllm, given, lambda: launch.retrieval_env(args, launch.say))


def read_keys(file: str | None) -> tuple[str, ...]:
    """The keys of the environment and of a file; lines that start with # are none."""
    keys = []
    if (own := os.environ.get(KEY_VARIABLE)) is not None:
        if not own.strip():
            raise UsageError(f"{KEY_VARIABLE} is set and empty", expected="a key, or no variable")
        keys.append(own.strip())
    if file is not None:
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"cannot read the API keys: {reason}", source=file) from None
        found = [key for line in lines if (key := line.strip()) and not key.startswith("#")]
        if not found:
            raise UsageError("no API key in the file", source=file)
        keys += found
    for key in keys:
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise UsageError("an API key holds characters that HTTP cannot send")
    return tuple(keys)


def is_loopback(listener: socket.socket) -> bool:
    try:
        return ipaddress.ip_address(listener.getsockname()[0]).is_loopback
    except ValueError as error:
        raise KvspanError(f"not an address: {error}") from None
