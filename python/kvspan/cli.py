"""The ``kvspan`` command.

Answers go to stdout and everything else to stderr. Exit status: 0, 2 for a mistake in what was
asked, 1 for a failure, 130 after Ctrl-C. An error is one line; KVSPAN_DEBUG=1 adds the traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from kvspan import __version__, cli_options
from kvspan.errors import KvspanError, UsageError

EXIT_FAILURE, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130
# What the system says of an output that cannot take more.
_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)

_EXAMPLES = """\
examples:
  kvspan demo
      A small real model answers questions over passages, without and with reuse.
  kvspan run query.yaml --model demo
      Run a query; its answer goes to stdout.
  echo '{"user": "The capital of France is"}' | kvspan run - --model demo --max-tokens 8
      Messages alone are a query too: the model goes on from them.
  kvspan explain query.json
      Show the query, how it is rewritten, and where its tokens go. Runs nothing.
  kvspan run query.yaml --corpus notes=notes/
      The query reads what fits its question in the files of notes/ (text, Markdown, PDF, ...).
  kvspan run query.json --json | jq .answers[0]
      Answers, usage, timings, and what was reused, moved and prepared, as one JSON object.

exit status:
  0 done, 1 failed, 2 a mistake in the command line or the query, 130 interrupted by Ctrl-C

environment:
  KVSPAN_CACHE=DIR  keep the converted demo model there (default: ~/.cache/kvspan)
  KVSPAN_DEBUG=1    show the traceback of an error
"""

_RUN_EPILOG = """\
A query file is JSON, YAML or Lisp; '-' reads it from stdin. Several answers are printed one after
the other, each below a line '--- PATH' that names the generate it is from. With --json, stdout gets
nothing but one JSON object, warnings included, and an error is one JSON object on stderr:
{"error": {"kind": "usage" or "failure" or "interrupted", "message": ..., "path": ..., ...}}

--temperature and --max-tokens are for generates that set none of their own; --model replaces the
model of every generate.
"""

_SERVE_EPILOG = """\
OpenAI-compatible: /v1/chat/completions, /v1/completions, /v1/models; span queries: POST them as
JSON to /v1/query/execute (?stream=true). /health needs no key; /metrics is for Prometheus.
A text part of a user message with "kvspan": {"span": true} is a span.

An API key is read from the environment variable KVSPAN_API_KEY, or from --api-key-file; it is
never an option's value, which other users of the machine could see.

SIGTERM and Ctrl-C let running requests finish and refuse new ones (503); a second one ends all.
"""

# Name, help, epilog (None: the module's EPILOG), and the module with add_arguments and main.
_LAZY_COMMANDS: tuple[tuple[str, str, str | None, str], ...] = (
    ("index", "build, search or prepare the index of a corpus", None, "kvspan.cli_index"),
    ("models", "list the models that an engine can run", None, "kvspan.cli_models"),
    (
        "inspect",
        "show what a model's cache costs, and how Tail-Replay fits a hybrid",
        None,
        "kvspan.cli_inspect",
    ),
    (
        "completion",
        "print the script that makes a shell complete kvspan's command line",
        None,
        "kvspan.cli_completion",
    ),
    (
        "serve",
        "serve a model over HTTP, OpenAI-compatible, with spans",
        _SERVE_EPILOG,
        "kvspan.serve.cli",
    ),
    (
        "vllm-args",
        "print the flags and the environment that put kvspan into vLLM",
        None,
        "kvspan.vllm.launch",
    ),
    (
        "demo",
        "watch a real model answer over passages, without and with reuse",
        "Needs the extra kvspan[demo].",
        "kvspan.demo.run",
    ),
)


class _Parser(argparse.ArgumentParser):
    """Reports mistakes as one line, like every other error."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see '{self.prog} -h')")

    def _print_message(self, message: str, file: Any = None) -> None:
        # argparse's own swallows errors, and -h into a full disk would count as done.
        stream = file or sys.stderr
        stream.write(message)
        stream.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status. Prints, and raises nothing but SystemExit for -h."""
    if argv is None and "_ARGCOMPLETE" in os.environ:
        from kvspan import cli_completion

        cli_completion.answer(_parser)
    words = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in words
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a character the terminal cannot show
    if sys.stderr is None:  # closed; print(file=None) would write to stdout
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  as long as the process
    try:
        args, unknown = _parser(words).parse_known_args(words)
        if unknown:
            args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        if sys.stdout is None and words[:1] != ["serve"]:
            raise KvspanError("cannot write the output: stdout is closed")
        status = int(args.command(args) or 0)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except BrokenPipeError:
        _discard_output()  # whoever read it has left: there is nothing to be said
        return EXIT_FAILURE
    except KeyboardInterrupt:
        _debug_traceback()
        return _report(KvspanError("interrupted"), "interrupted", EXIT_INTERRUPTED, as_json)
    except UsageError as error:
        _debug_traceback()
        return _report(error, "usage", EXIT_USAGE, as_json)
    except KvspanError as error:
        _debug_traceback()
        return _report(error, "failure", EXIT_FAILURE, as_json)
    except MemoryError:
        _debug_traceback()
        return _report(KvspanError("out of memory"), "failure", EXIT_FAILURE, as_json)
    except Exception as error:
        _debug_traceback()
        if isinstance(error, OSError) and error.errno in _CANNOT_WRITE:
            what = "the file" if error.filename else "the output"
            if not error.filename:
                _discard_output()
            failure = KvspanError(
                f"cannot write {what}: {error.strerror}", source=error.filename or None
            )
            return _report(failure, "failure", EXIT_FAILURE, as_json)
        text = f"internal error: {type(error).__name__}: {error} (KVSPAN_DEBUG=1 shows where)"
        return _report(KvspanError(text), "failure", EXIT_FAILURE, as_json)


def _discard_output() -> None:
    """What is left in the buffer of stdout must not fail once more when the process ends."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _debug_traceback() -> None:
    if os.environ.get("KVSPAN_DEBUG", "") not in ("", "0"):
        import traceback

        traceback.print_exc()


def _report(error: KvspanError, kind: str, status: int, as_json: bool) -> int:
    line = f"kvspan: {'' if kind == 'interrupted' else 'error: '}{error}"
    if as_json:
        fields: dict[str, Any] = {"kind": kind, "message": str(error), "exit_status": status}
        for name in ("source", "path", "line", "column", "expected", "found"):
            value = getattr(error, name, None)
            if value is not None:
                fields[name] = value
        line = json.dumps({"error": fields}, ensure_ascii=False)
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)
    return status


# --- the command line ------------------------------------------------------------------------


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="kvspan",
        description="Span queries: say which parts of a prompt may move, and have them reused.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"kvspan {__version__}")
    parser.set_defaults(command=lambda args: _no_command(parser), parser=parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_run(commands)
    _add_explain(commands)
    _add_bulk(commands)
    _add_schema(commands)
    for name, help, epilog, module in _LAZY_COMMANDS:
        _add_lazy(commands, words, name, help, epilog, module)
    return parser


def _no_command(parser: argparse.ArgumentParser) -> int:
    parser.print_help(sys.stderr)
    return EXIT_USAGE


def _add_command(commands: Any, name: str, help: str, epilog: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help,
        description=help,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(parser=parser)
    return parser


def _add_query(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="query in JSON, YAML or Lisp; '-' is stdin")
    cli_options.add_query_options(parser)


def _add_run(commands: Any) -> None:
    from kvspan import cli_query

    parser = _add_command(commands, "run", "run a query and print its answer", _RUN_EPILOG)
    _add_query(parser)
    add = parser.add_argument
    cli_options.add_run_options(parser)
    add(
        "--stream",
        action="store_true",
        help="print the answer as it comes also when stdout is no terminal (queries whose root "
        "is one generate)",
    )
    add(
        "--concurrency",
        type=cli_options.whole(1, cli_options.MOST_COUNTED),
        default=16,
        metavar="N",
        help="calls that may run at the same time (default %(default)s)",
    )
    add(
        "--keep-going",
        action="store_true",
        help="after a failure, run what does not depend on it; exit status 1",
    )
    add("--audit", metavar="FILE", help="append a record of every request to FILE (JSON Lines)")
    cli_options.add_engine_options(parser)
    parser.set_defaults(command=cli_query.run_command)


def _add_explain(commands: Any) -> None:
    from kvspan import cli_query

    parser = _add_command(
        commands,
        "explain",
        "show how a query is rewritten, planned and laid out; run nothing",
        "Token counts need the tokenizer of the query's model (or of --model); no weights are "
        "loaded.\nWithout one, the parts of each prompt are shown, and why they are not counted.",
    )
    _add_query(parser)
    parser.add_argument(
        "--html",
        metavar="FILE",
        help="write one self-contained page instead: tree, rules, plan and block layout",
    )
    parser.add_argument(
        "--engine",
        choices=("local", "openai"),
        default="local",
        help="for the embedded engine (local, the default) or for a server without spans (openai)",
    )
    parser.set_defaults(command=cli_query.explain_command)


def _add_bulk(commands: Any) -> None:
    from kvspan import cli_bulk

    parser = _add_command(
        commands, "bulk", "answer many queries from a file of JSON Lines", cli_bulk.EPILOG
    )
    cli_bulk.add_arguments(parser)
    parser.set_defaults(command=cli_bulk.main)


def _add_schema(commands: Any) -> None:
    from kvspan import cli_query

    help = "print the JSON Schema of queries"
    parser = _add_command(commands, "schema", help, "For editors and other programs.")
    parser.add_argument("--json", action="store_true", help="no difference: it is JSON")
    parser.set_defaults(command=cli_query.schema_command)


def _add_lazy(
    commands: Any, words: Sequence[str], name: str, help: str, epilog: str | None, module: str
) -> None:
    """A command that brings its own options; its module is not imported for any other command."""
    parser = _add_command(commands, name, help, epilog or "")
    if words[:1] == [name]:
        brought = import_module(module)
        parser.epilog = brought.EPILOG if epilog is None else epilog
        brought.add_arguments(parser)
        parser.set_defaults(command=brought.main)
