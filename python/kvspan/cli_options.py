"""Options that several commands share, and what they say to the executor and to engines."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvspan.errors import UsageError
from kvspan.query.checks import MAX_MAX_TOKENS

if TYPE_CHECKING:
    from kvspan.engine import Engine
    from kvspan.progress import ProgressBars


# Beyond these a mistake is more likely than a need, and libraries below end the process.
_MOST_BLOCK_TOKENS, _MOST_THREADS = 65_536, 1024
MOST_COUNTED = MAX_MAX_TOKENS  # of calls, too


def add_query_options(parser: argparse.ArgumentParser) -> None:
    """How queries are read, rewritten and laid out, for every command that does."""
    from kvspan import cli_index

    parser.add_argument(
        "--lenient",
        action="store_true",
        help="warn about unknown keys and legacy forms of spnl instead of refusing them",
    )
    parser.add_argument(
        "--model",
        type=model_name,
        metavar="ID_OR_PATH",
        help="use this model in place of every model in the query",
    )
    parser.add_argument(
        "--scope",
        choices=("anchored", "isolated", "full"),
        default="anchored",
        help="what a span attends to: the text before the first span and itself (anchored, the "
        "default), itself only (isolated), or everything before it (full: nothing is reused)",
    )
    parser.add_argument(
        "--placement",
        choices=("sequential", "parallel"),
        default="sequential",
        help="positions of spans: one after another (sequential, the default), or side by side "
        "(parallel: no key is rotated and no block copied)",
    )
    parser.add_argument(
        "--order",
        choices=("canonical", "pinned"),
        default="canonical",
        help="order of the spans of a plus: by content, so that equal sets are equal prompts "
        "(canonical, the default), or as written (pinned)",
    )
    parser.add_argument(
        "--nested",
        choices=("answer", "text", "whole"),
        default="answer",
        help="what an outer generate reads of an inner one in a plus: its answer, with the KV it "
        "was generated with (the default), its answer as any other span (text), or input and "
        "answer (whole)",
    )
    add_block_size(parser)
    cli_index.add_retrieval_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quiet", action="store_true", help="no progress, notes or warnings")


def add_block_size(
    parser: argparse.ArgumentParser,
    text: str = "tokens per KV block; spans are padded to whole blocks",
) -> None:
    parser.add_argument(
        "--block-size",
        type=whole(1, _MOST_BLOCK_TOKENS),
        default=16,
        metavar="TOKENS",
        help=f"{text} (default %(default)s)",
    )


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """How generates are run, for every command that runs them."""
    add = parser.add_argument
    add("--seed", type=whole(None), default=0, help="seed of the run (default %(default)s)")
    add(
        "--temperature",
        type=number(0, "0 or more"),
        metavar="T",
        help="for generates that set none: 0 is greedy (default 0.6)",
    )
    add(
        "--max-tokens",
        type=whole(0, MOST_COUNTED),
        metavar="N",
        help="for generates that set none (default: the engine's)",
    )
    add("--salt", default="", help="tenant salt: runs with other salts share no cached blocks")


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Which engine, and the options of each, for every command that opens one."""
    from kvspan import cli_server

    cli_server.add_arguments(parser)
    add_local_engine_options(parser)


def add_machine_options(parser: argparse.ArgumentParser) -> None:
    """What the embedded engine may take of the machine."""
    add = parser.add_argument
    add(
        "--kv-cache-gib",
        type=number(None, "more than 0"),
        default=1.0,
        metavar="GIB",
        help="memory for cached keys and values (default %(default)s)",
    )
    add(
        "--threads",
        type=whole(1, _MOST_THREADS),
        metavar="N",
        help="CPU threads (default: all cores)",
    )


def add_local_engine_options(parser: argparse.ArgumentParser) -> None:
    """The options of the embedded engine."""
    add_machine_options(parser)
    add = parser.add_argument
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="type of weights and cache (auto: float32 on CPU, the checkpoint's on a GPU)",
    )
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (default %(default)s)")
    add(
        "--replay",
        type=_replay,
        default="exact",
        metavar="POLICY",
        help="how hybrid models go on from a cached prefix: exact (the default), bounded:EPS (a "
        "relative error of recurrent states) or ratio:R (the last part of the prefix alone)",
    )


def whole(least: int | None, most: int | None = None) -> Any:
    """An argparse type: a whole number, from least on, to most."""

    def parse(text: str) -> int:
        with contextlib.suppress(ValueError):
            value = int(text)
            if (least is None or value >= least) and (most is None or value <= most):
                return value
        bound = "" if least is None else f", {least} or more"
        if most is not None:
            bound = f", {least} to {most}"
        raise argparse.ArgumentTypeError(f"expected a whole number{bound}, got {text!r}")

    return parse


def _replay(text: str) -> str:
    """An argparse type: a policy of `kvspan.hybrid`, as text."""
    from kvspan.hybrid.policy import Policy

    try:
        return str(Policy.parse(text))
    except UsageError as error:
        message = f"expected {error.expected}, got {text!r}"
        raise argparse.ArgumentTypeError(message) from None


def model_name(text: str) -> str:
    """An argparse type: what a model is called. An empty name would mean none was given."""
    if not text:
        raise argparse.ArgumentTypeError("expected a folder, a hub id or a name, got nothing")
    return text


def number(least: float | None, words: str) -> Any:
    """An argparse type: a number from least on, or above 0 for None. words: say so."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        fits = value > 0 if least is None else value >= least
        if not (math.isfinite(value) and fits):
            raise argparse.ArgumentTypeError(f"expected a number, {words}, got {text!r}")
        return value

    return parse


def run_options(args: argparse.Namespace) -> dict[str, Any]:
    """What the options of ``add_run_options`` and ``add_query_options`` say to the executor."""
    return {
        "model": args.model,
        "seed": args.seed,
        "scope": args.scope,
        "placement": args.placement,
        "salt": args.salt,
        "temperature": args.temperature,
        "max_tokens": args.max_tokens,
        "max_concurrency": args.concurrency,
        "order": args.order,
        "nested": args.nested,
    }


def open_engine_with(args: argparse.Namespace, model: str, bars: ProgressBars) -> Engine:
    """The engine that the options of ``add_engine_options`` (and ``--block-size``) describe."""
    from kvspan import cli_server

    if cli_server.is_server(args):
        return cli_server.open_server(args, model)
    from kvspan.engine import open_engine
    from kvspan.extras import engine_extra, importing

    with importing(engine_extra(model)):
        import torch
    if args.threads:
        torch.set_num_threads(args.threads)
    with flags_named():
        return open_engine(
            model,
            block_size=args.block_size,
            kv_cache_gib=args.kv_cache_gib,
            dtype=args.dtype,
            device=args.device,
            progress=bars,
            replay=args.replay,
        )


@contextlib.contextmanager
def flags_named() -> Iterator[None]:
    """Errors about arguments of `open_engine` name the flags that set them.

    >>> with flags_named():
    ...     raise UsageError("kv_cache_gib: expected more")
    Traceback (most recent call last):
    kvspan.errors.UsageError: --kv-cache-gib: expected more
    """
    try:
        yield
    except UsageError as error:
        name, colon, rest = error.message.partition(":")
        if name in ("block_size", "kv_cache_gib", "dtype", "device", "replay"):
            error.message = f"--{name.replace('_', '-')}{colon}{rest}"
        raise
