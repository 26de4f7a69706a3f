"""What ``kvspan run``, ``explain`` and ``schema`` do; their options are in :mod:`kvspan.cli`."""

from __future__ import annotations

import argparse
import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from kvspan import cli, cli_index, cli_options
from kvspan.errors import KvspanError, UsageError, printable

if TYPE_CHECKING:
    from kvspan.executor import RunResult
    from kvspan.query.nodes import Node


def _read_query(args: argparse.Namespace) -> tuple[Node, list[str]]:
    """The query, and what the lenient reader has to say about it."""
    from kvspan.query.read import QueryWarning, load, loads

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", QueryWarning)
        if args.file == "-":
            query = loads(_read_stdin(), lenient=args.lenient, source="<stdin>")
        else:
            query = load(args.file, lenient=args.lenient)
    said = [str(warning.message) for warning in caught]
    for line in said:
        _say(args, f"warning: {line}")
    return query, said


def _read_stdin() -> str | bytes:
    if sys.stdin is None:
        raise UsageError("stdin is closed", source="<stdin>")
    try:
        return sys.stdin.buffer.read() if hasattr(sys.stdin, "buffer") else sys.stdin.read()
    except OSError as error:
        raise UsageError(f"cannot read it: {error.strerror}", source="<stdin>") from None


def _say(args: argparse.Namespace, line: str) -> None:
    # With --json, stderr is for one JSON object if anything; warnings are part of the answer.
    if not (args.quiet or args.json):
        print(f"kvspan: {line}", file=sys.stderr, flush=True)


def run_command(args: argparse.Namespace) -> int:
    from kvspan.audit import AuditFile
    from kvspan.estimate import estimate
    from kvspan.executor import plan_query, run
    from kvspan.progress import ProgressBars
    from kvspan.query.nodes import Generate
    from kvspan.query.write import dump_json

    query, said = _read_query(args)

    def note(line: str) -> None:
        said.append(line)
        _say(args, line)

    # Everything that can be wrong with the query is said before a model is loaded.
    retriever = cli_index.retriever_of(args, query, note)
    with _named_after(args.file):
        plan, _ = plan_query(
            query, args.model, order=args.order, nested=args.nested, retriever=retriever
        )
    if len(plan.calls) > 1:
        _say(args, f"running {estimate(plan, max_tokens=args.max_tokens)}")
    one = isinstance(plan.query, Generate)
    root = plan.steps[plan.answers[0]].path if one else None  # type: ignore[union-attr]
    streaming = one and not args.json and (args.stream or sys.stdout.isatty())

    written = False

    def on_text(path: str, text: str) -> None:
        nonlocal written
        if path == root:
            written = True
            sys.stdout.write(text)
            sys.stdout.flush()

    with (
        _named_after(args.file),
        _line_ended(lambda: written),
        ProgressBars(args.quiet or args.json) as bars,
        contextlib.ExitStack() as stack,
    ):
        audit = stack.enter_context(AuditFile(args.audit)) if args.audit else None
        result = run(
            query,
            open=lambda model: cli_options.open_engine_with(args, model, bars),
            on_text=on_text if streaming else None,
            **cli_options.run_options(args),
            retriever=retriever,
            keep_going=args.keep_going,
            on_print=lambda line: _say(args, printable(line)),
            on_audit=audit,
        )
    status = cli.EXIT_FAILURE if result.failures else 0
    plain = _plain_notes(result)
    if args.json:
        print(dump_json({**result.to_obj(), "warnings": [*said, *plain]}, 2))
        return status
    if not streaming:
        _print_answers(result)
    elif not written:
        print()
    for failure in result.failures:
        line = f"kvspan: error: {printable(_source(args.file))}: {failure.message}"
        print(line, file=sys.stderr, flush=True)
    _print_summary(args, result)
    return status


@contextlib.contextmanager
def _named_after(file: str) -> Iterator[None]:
    """Put the file in front of the JSON path of an error."""
    try:
        yield
    except KvspanError as error:
        if error.path and not error.source:
            error.source = _source(file)
        raise


def _source(file: str) -> str:
    return "<stdin>" if file == "-" else file


@contextlib.contextmanager
def _line_ended(written: Callable[[], bool]) -> Iterator[None]:
    """End the line of an answer that was streamed, also when it was cut short."""
    try:
        yield
    finally:
        if written():
            print(flush=True)


def _print_answers(result: RunResult) -> None:
    wanted = set(result.answer_ids)
    answered = [call for call in result.calls if call.id in wanted]
    for call in answered:
        if len(answered) > 1:
            print(f"--- {call.path}")
        print(call.result.text)


def _plain_notes(result: RunResult) -> list[str]:
    """Where an engine has no spans, and why."""
    reasons = [reason for fired in result.trace for reason in fired.reasons]
    return [f"note: plain prompts, no spans: {printable(reason)}" for reason in reasons]


def _print_summary(args: argparse.Namespace, result: RunResult) -> None:
    usage, calls = result.usage, result.calls
    moved = sum(call.result.reuse.moved_tokens for call in calls)
    prepared = sum(call.result.reuse.prepared_tokens for call in calls)
    first = min((call.result.timings.ttft for call in calls), default=0.0)
    notes = dict.fromkeys(
        f"note: {call.path}: {note}" for call in calls for note in call.result.reuse.notes
    )
    for note in [*_plain_notes(result), *notes]:
        _say(args, note)
    _say(
        args,
        f"{len(calls)} {'call' if len(calls) == 1 else 'calls'}, "
        f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} from the cache, "
        f"{moved} moved, {prepared} prepared), {usage.completion_tokens} new tokens, "
        f"first token after {first:.2f} s, {result.seconds:.2f} s in all",
    )


def explain_command(args: argparse.Namespace) -> int:
    from kvspan.engine import plain_server
    from kvspan.explain import TokenizerLayouts, explain, render
    from kvspan.query.write import dump_json

    query, said = _read_query(args)
    layouts = TokenizerLayouts(args.block_size)
    server = plain_server()
    if args.model:
        layouts.load(args.model)  # asked for by name: that it cannot be had is an error

    def note(line: str) -> None:
        said.append(line)
        _say(args, line)

    retriever = cli_index.retriever_of(args, query, note)
    with _named_after(args.file):
        explanation = explain(
            query,
            model=args.model,
            scope=args.scope,
            placement=args.placement,
            block_size=args.block_size,
            layout_for=layouts,
            order=args.order,
            nested=args.nested,
            retriever=retriever,
            capabilities=(lambda model: server) if args.engine == "openai" else None,
        )
    if args.html is not None:
        from kvspan.explain_html import write_html

        write_html(explanation, args.html)
        if not args.json:
            _say(args, f"wrote {args.html}")
            return 0
    if args.json:
        print(dump_json({**explanation.to_obj(), "warnings": said}, 2))
    else:
        sys.stdout.write(render(explanation, unicode=_can_show("├─│└", sys.stdout)))
    return 0


def schema_command(args: argparse.Namespace) -> int:
    from importlib import resources

    sys.stdout.write((resources.files("kvspan.query") / "schema.json").read_text("utf-8"))
    return 0


def _can_show(text: str, stream: Any) -> bool:
    try:
        text.encode(getattr(stream, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
