"""``--engine openai`` and what belongs to it, for every command that runs queries."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from kvspan import cli_options
from kvspan.errors import UsageError
from kvspan.extras import importing

if TYPE_CHECKING:
    from kvspan.engine import Engine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which engine runs the query, and the options of a server."""
    add = parser.add_argument
    add(
        "--engine",
        choices=("local", "openai"),
        default="local",
        help="the embedded engine (local, the default), or any OpenAI-compatible server (openai); "
        "its API key is read from KVSPAN_API_KEY or OPENAI_API_KEY",
    )
    add(
        "--base-url",
        metavar="URL",
        help="of the server, for example http://127.0.0.1:8000/v1 (default: OPENAI_BASE_URL, or "
        "OpenAI's own)",
    )
    add(
        "--server-timeout",
        type=cli_options.number(None, "more than 0"),
        default=600.0,
        metavar="SECONDS",
        help="how long a server may be silent (default %(default)g)",
    )
    add(
        "--server-retries",
        type=cli_options.whole(0),
        default=4,
        metavar="N",
        help="further attempts after 429, 5xx and lost connections (default %(default)s)",
    )


def is_server(args: argparse.Namespace) -> bool:
    """Whether the options ask for a server. Raises UsageError where they contradict each other."""
    if getattr(args, "engine", "local") == "openai":
        return True
    if getattr(args, "base_url", None) is not None:
        raise UsageError("--base-url is for servers", expected="--engine openai with it")
    return False


def open_server(args: argparse.Namespace, model: str) -> Engine:
    """The engine that the options describe."""
    from kvspan.engine import open_engine

    with importing("openai"):
        return open_engine(
            model,
            kind="openai",
            base_url=args.base_url,
            timeout=args.server_timeout,
            max_retries=args.server_retries,
            max_concurrency=getattr(args, "concurrency", 16),
        )
