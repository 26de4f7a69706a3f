"""``kvspan bulk``."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from dataclasses import asdict

from kvspan import cli_options

EPILOG = """\
A line of IN is a query in JSON, or {"id": ..., "query": ...}. OUT gets one line for each, in the
same order: {"index", "id", "answers", "usage"}, or {"index", "id", "error"} for a query that could
not be read or run; a --model that cannot be loaded ends the command before OUT is touched. Queries
that share fragments run close in time; that changes no answer.

A run that was interrupted goes on where it stopped when the same command is given again; until it
is complete, OUT.journal lies beside OUT. Exit status: 1 if any query failed.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add = parser.add_argument
    add("file", metavar="IN.jsonl", help="queries, one a line")
    add("-o", "--output", metavar="OUT.jsonl", required=True, help="results, one a line")
    add("--overwrite", action="store_true", help="replace OUT, also that of an unfinished run")
    add(
        "--window",
        type=cli_options.whole(1),
        default=1024,
        metavar="N",
        help="queries in memory, and put in order, at a time (default %(default)s)",
    )
    add(
        "--parallel",
        type=cli_options.whole(1),
        default=8,
        metavar="N",
        help="queries that run at the same time (default %(default)s)",
    )
    add("--no-reorder", action="store_true", help="run queries in the order they come")
    add(
        "--concurrency",
        type=cli_options.whole(1, cli_options.MOST_COUNTED),
        default=16,
        metavar="N",
        help="calls of one query that may run at the same time (default %(default)s)",
    )
    add(
        "--keep-going",
        action="store_true",
        help="after a call of a query has failed, run what does not depend on it; its result then "
        'has "failures" beside "answers"',
    )
    add("--audit", metavar="FILE", help="append a record of every request to FILE (JSON Lines)")
    cli_options.add_query_options(parser)
    cli_options.add_run_options(parser)
    cli_options.add_engine_options(parser)


def _note(args: argparse.Namespace, line: str) -> None:
    if not (args.quiet or args.json):
        print(f"kvspan: {line}", file=sys.stderr, flush=True)


def main(args: argparse.Namespace) -> int:
    """Run the command; the exit status."""
    from kvspan import cli, cli_index
    from kvspan.audit import AuditFile
    from kvspan.bulk import run_bulk
    from kvspan.progress import ProgressBars

    with (
        contextlib.ExitStack() as stack,
        ProgressBars(args.quiet or args.json) as bars,
        ProgressBars(args.quiet or args.json) as loading,
    ):
        audit = stack.enter_context(AuditFile(args.audit)) if args.audit else None
        # Documents that come with the queries need it too, and nobody has read those yet.
        retriever = cli_index.open_corpora(args, lambda line: _note(args, line))
        summary = run_bulk(
            args.file,
            args.output,
            open=lambda model: cli_options.open_engine_with(args, model, loading),
            on_progress=lambda done, total: bars("bulk", done, total),
            window=args.window,
            parallel=args.parallel,
            reorder=not args.no_reorder,
            lenient=args.lenient,
            overwrite=args.overwrite,
            **cli_options.run_options(args),
            retriever=retriever,
            keep_going=args.keep_going,
            on_audit=audit,
        )
    if args.json:
        print(json.dumps(asdict(summary)))
    elif not args.quiet:
        resumed = f", {summary.resumed:,} of them by an earlier run" if summary.resumed else ""
        print(
            f"kvspan: {summary.queries:,} queries{resumed}, {summary.failed:,} failed, "
            f"{summary.prompt_tokens:,} prompt tokens ({summary.cached_tokens:,} from the cache), "
            f"{summary.completion_tokens:,} new tokens; results in {args.output}",
            file=sys.stderr,
        )
    return cli.EXIT_FAILURE if summary.failed else 0
