"""Many queries from a file of JSON Lines, answered into another one, in the order they came.

    run_bulk("in.jsonl", "out.jsonl", engine=engine)

A line is a query, or ``{"id": ..., "query": ...}``; the line of its result is
``{"index", "id", "answers", "usage"}`` or ``{"index", "id", "error": {"path", "message", ...}}``.
Blank lines are skipped and have no result.

Queries are read a window at a time. Within a window those that share fragments run close in time
(``kvspan.query.bulk_order``), and what is known is appended to a journal beside the output at once,
so that a run that was killed goes on where it stopped. When a window is done its results go to the
output in the caller's order; the output is thus always the beginning of what it will be. Each query
has a seed of its own, from its place in the file, so no order changes an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvspan.bulk_journal import Journal, has_failed
from kvspan.engine.shared import SharedEngines
from kvspan.errors import KvspanError, UsageError
from kvspan.executor import Opener, Options, arun, derive_seed
from kvspan.query.builders import user
from kvspan.query.bulk_order import fragment_keys, greedy_order
from kvspan.query.context import Context
from kvspan.query.nodes import Node
from kvspan.query.read import from_obj
from kvspan.query.retrieval import desugar_retrieval, retriever_for, retrieves
from kvspan.query.text import parse_json

if TYPE_CHECKING:
    from kvspan.engine import Engine

DEFAULT_WINDOW = 1024  # queries in memory at a time
DEFAULT_PARALLEL = 8  # queries that run at the same time

# What a bulk run takes besides the options of a run.
_BESIDE = ("engine", "open", "window", "parallel", "reorder", "lenient", "overwrite", "on_progress")

# Called with (queries done, queries in all), those of an earlier run included.
OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class BulkSummary:
    """What a bulk run did. resumed: results that an earlier run had left.

    queries, failed: of the whole output; tokens: of this run.
    """

    queries: int
    failed: int
    resumed: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


def run_bulk(
    source: str | os.PathLike[str], output: str | os.PathLike[str], **options: Any
) -> BulkSummary:
    """Answer every query of a file and wait for it. See ``arun_bulk``."""
    return asyncio.run(arun_bulk(source, output, **options))


async def arun_bulk(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    engine: Engine | None = None,
    open: Opener | None = None,
    window: int = DEFAULT_WINDOW,
    parallel: int = DEFAULT_PARALLEL,
    reorder: bool = True,
    lenient: bool = False,
    overwrite: bool = False,
    on_progress: OnProgress | None = None,
    seed: int = 0,
    **options: Any,
) -> BulkSummary:
    """Answer every query of a file.

    source, output: files of JSON Lines. If ``output`` and its journal are there from a run with the
        same source and options, the run goes on; any other ``output`` is an error, unless
        ``overwrite``.
    engine, open, seed, and options: as for ``kvspan.run``; engines stay open for the whole run.
    window: queries that are read and ordered at a time. parallel: queries that run at the same
        time. reorder: False runs them as they come. lenient: see ``kvspan.query.read``.

    A query that cannot be read or run is a result with an error; it stops nothing, and a model that
    cannot be opened is tried once. If that is the option ``model``, which all queries need, its
    error is raised before anything is written. Raises UsageError for files that cannot be read or
    written.
    """
    if window < 1 or parallel < 1:
        raise UsageError("bad window or parallel", expected="1 or more", found="less")
    Options.of({"seed": seed, **options}, _BESIDE)  # all that is wrong with them is said at once
    if options.get("corpora"):  # opened once, not for every query
        paths = options.pop("corpora")
        given = options.get("retriever")
        options["retriever"] = await asyncio.to_thread(retriever_for, user(""), given, paths)
    # What answers depend on: a run with other settings does not go on from this one.
    settings: dict[str, Any] = {"seed": seed, "lenient": lenient}
    for name, value in options.items():
        if isinstance(value, (str, int, float, type(None))) and name != "max_concurrency":
            settings[name] = value
    if (key := getattr(options.get("retriever"), "key", None)) is not None:
        settings["retriever"] = key
    path, out = Path(source), Path(output)
    total, digest = await asyncio.to_thread(_survey, path, settings)
    journal = Journal(out, digest, overwrite, source=path)
    with contextlib.closing(SharedEngines(open)) as opened:
        if total and engine is None and (model := options.get("model")):
            await asyncio.to_thread(opened, model)
        journal.begin()
        with contextlib.closing(journal):
            tally = _Tally(journal.done_before, journal.failed_before)
            report = on_progress or (lambda done, total: None)
            report(journal.done_before, total)
            bulk = _Bulk(engine, opened, lenient, seed, options, parallel, reorder)
            for lines in _windows(path, window, skip=journal.written):
                kept = journal.kept
                missing = [line for line in lines if line[0] not in kept]
                async for result in bulk.run(missing):
                    tally.add(result)
                    journal.add(result)
                    report(tally.resumed + tally.queries, total)
                journal.flush([index for index, _, _ in lines])
            journal.finish()
    return tally.summary(total)


_Line = tuple[int, int, str]  # index among the queries, line number, text


def _read_lines(path: Path) -> Iterator[_Line]:
    index = 0
    try:
        with path.open("rb") as file:
            for number, data in enumerate(file, 1):
                if data.strip():
                    yield index, number, data.decode("utf-8", errors="surrogateescape")
                    index += 1
    except FileNotFoundError:
        raise UsageError("no such file", source=str(path)) from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(f"cannot read the file: {reason}", source=str(path)) from None


def _windows(path: Path, size: int, skip: int) -> Iterator[list[_Line]]:
    lines: list[_Line] = []
    for line in _read_lines(path):
        if line[0] >= skip:
            lines.append(line)
            if len(lines) == size:
                yield lines
                lines = []
    if lines:
        yield lines


def _survey(path: Path, settings: dict[str, Any]) -> tuple[int, str]:
    """Number of queries, and a digest of them and of what their answers depend on."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    total = 0
    for _, _, text in _read_lines(path):
        digest.update(text.encode("utf-8", errors="surrogateescape"))
        total += 1
    return total, digest.hexdigest()


class _Bulk:
    """Runs windows of queries."""

    def __init__(
        self,
        engine: Engine | None,
        opener: Opener,
        lenient: bool,
        seed: int,
        options: dict[str, Any],
        parallel: int,
        reorder: bool,
    ) -> None:
        self.engine = engine
        self.opener = opener
        self.lenient = lenient
        self.seed = seed
        self.options = options
        self.parallel = parallel
        self.reorder = reorder

    async def run(self, lines: list[_Line]) -> Any:
        """The results of a window, as they come."""
        queries: list[tuple[int, int, Any, Node]] = []
        for index, number, text in lines:
            name: Any = None
            try:
                name, query = self.read(text)
            except KvspanError as error:
                yield _failed(index, name, error, number)
            else:
                queries.append((index, number, name, query))
        order = range(len(queries))
        if self.reorder:
            keys = [await self.keys(query) for *_, query in queries]
            order = greedy_order(keys)  # type: ignore[assignment]
        waiting = iter([queries[place] for place in order])
        running: set[asyncio.Task[dict[str, Any]]] = set()
        try:
            while True:
                while len(running) < self.parallel and (entry := next(waiting, None)) is not None:
                    running.add(asyncio.create_task(self.one(*entry)))
                if not running:
                    return
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    yield task.result()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def keys(self, query: Node) -> frozenset[bytes]:
        """Keys of the fragments a query will read, those that are still to be retrieved included.

        What cannot be retrieved is reported when the query is run.
        """
        retriever = self.options.get("retriever")
        if retriever is not None and retrieves(query):
            with contextlib.suppress(KvspanError):
                context = Context(self.options.get("model"), retriever)
                query = await asyncio.to_thread(desugar_retrieval, query, context)
        return fragment_keys(query)

    def read(self, text: str) -> tuple[Any, Node]:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UsageError("the line is not UTF-8") from None
        value = parse_json(text)
        name = None
        if isinstance(value, dict) and "query" in value:
            extra = sorted(set(value) - {"id", "query"})
            if extra:
                raise UsageError(
                    "unknown key beside the query", expected="id and query", found=repr(extra[0])
                )
            name, value = value.get("id"), value["query"]
        return name, from_obj(value, lenient=self.lenient)

    async def one(self, index: int, number: int, name: Any, query: Node) -> dict[str, Any]:
        seed = derive_seed(self.seed, f"bulk[{index}]")
        try:
            result = await arun(
                query, engine=self.engine, open=self.opener, seed=seed, **self.options
            )
        except KvspanError as error:
            return _failed(index, name, error, number)
        record: dict[str, Any] = {"index": index, "id": name, "answers": result.answers}
        if result.failures:
            record["failures"] = [failure.to_obj() for failure in result.failures]
        return {**record, "usage": asdict(result.usage)}


def _failed(index: int, name: Any, error: KvspanError, number: int) -> dict[str, Any]:
    kind = "usage" if isinstance(error, UsageError) else "failure"
    fields: dict[str, Any] = {"kind": kind, "message": str(error), "input_line": number}
    if isinstance(error, UsageError) and error.path:
        fields["path"] = error.path
    return {"index": index, "id": name, "error": fields}


class _Tally:
    def __init__(self, resumed: int, failed: int) -> None:
        self.resumed, self.failed = resumed, failed
        self.queries = self.prompt = self.cached = self.completion = 0

    def add(self, record: dict[str, Any]) -> None:
        self.queries += 1
        self.failed += has_failed(record)
        usage = record.get("usage", {})
        self.prompt += usage.get("prompt_tokens", 0)
        self.cached += usage.get("cached_tokens", 0)
        self.completion += usage.get("completion_tokens", 0)

    def summary(self, total: int) -> BulkSummary:
        return BulkSummary(
            total, self.failed, self.resumed, self.prompt, self.cached, self.completion
        )
