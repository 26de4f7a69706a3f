"""``kvspan index``, and the options for corpora of every command that runs queries."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvspan import cli_options, cli_server
from kvspan.errors import UsageError, printable

if TYPE_CHECKING:
    from kvspan.engine import Engine
    from kvspan.engine.local import LocalEngine
    from kvspan.progress import ProgressBars
    from kvspan.query.nodes import Node
    from kvspan.retrieve.corpora import Corpora
    from kvspan.retrieve.index import Index
    from kvspan.retrieve.prepare import Prepared

EPILOG = """\
PATH is a file or a folder of text, Markdown, JSON Lines ({"title", "text"} or a string on a line)
and PDF (extra kvspan[pdf]). Its index is kept in the cache folder and built anew when a file or an
option has changed; `run --corpus NAME=PATH` with the same options finds it there.

  kvspan index docs/                              build or check it
  kvspan index docs/ --find "how are spans ordered?"
  kvspan index docs/ --model demo                 count the tokens of its chunks
  kvspan index docs/ --prepare --model NAME --engine openai --base-url http://127.0.0.1:8000/v1
      have a server compute the keys and values of every chunk before anybody asks

What the embedded engine prepares is gone when the command ends: it then shows what preparing takes.
Give --system the text that stands before the passages in your queries: spans attend to it.
"""


def add_retrieval_options(parser: argparse.ArgumentParser) -> None:
    """Which corpora there are and how they are searched, for every command that runs queries."""
    parser.add_argument(
        "--corpus",
        type=_corpus,
        action="append",
        metavar="NAME=PATH",
        help="file or folder that queries call NAME; may be given several times",
    )
    add_search_options(parser)


def add_search_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--search",
        choices=("bm25", "embedding", "hybrid"),
        default="bm25",
        help="find fragments by their words (bm25, the default), by embeddings, or by both "
        "(hybrid); the last two need the extra kvspan[embedding]",
    )
    add(
        "--fragments",
        type=cli_options.whole(1),
        default=5,
        metavar="N",
        help="fragments that are retrieved where the query sets no limit (default %(default)s)",
    )
    add(
        "--chunk-size",
        type=cli_options.whole(100),
        default=1000,
        metavar="CHARACTERS",
        help="most characters of a fragment, about 4 to a token of English (default %(default)s)",
    )


def _corpus(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise argparse.ArgumentTypeError(f"expected NAME=PATH, got {text!r}")
    return name, os.path.expanduser(path)  # shells leave a ~ after the = as it is


def open_corpora(args: argparse.Namespace, say: Callable[[str], None]) -> Corpora:
    """The retriever that the options describe; their indexes are built with a progress bar."""
    from kvspan.progress import ProgressBars
    from kvspan.retrieve.corpora import Corpora

    paths: dict[str, str] = {}
    for name, path in args.corpus or ():
        if name in paths:
            raise UsageError(f"--corpus {name} is given twice", expected="one path for each name")
        paths[name] = path
    with ProgressBars(args.quiet or args.json) as bars:
        return Corpora(
            paths,
            search=args.search,
            limit=args.fragments,
            chunk_size=args.chunk_size,
            on_note=lambda line: say(f"note: {printable(line)}"),
            progress=bars,
        )


def retriever_of(
    args: argparse.Namespace, query: Node, say: Callable[[str], None]
) -> Corpora | None:
    """The retriever for a query; None where it retrieves nothing and no corpus was named."""
    from kvspan.query.retrieval import retrieves

    return open_corpora(args, say) if args.corpus or retrieves(query) else None


def prepare_corpora(
    args: argparse.Namespace, corpora: Corpora, engine: LocalEngine, say: Callable[[str], None]
) -> None:
    """Compute every chunk of the corpora for prompts that begin with the text of ``--prepare``."""
    import asyncio

    from kvspan.progress import ProgressBars
    from kvspan.retrieve.prepare import prepare_chunks

    chunks = [chunk for name in corpora.paths for chunk in corpora.index(name).chunks]
    started = time.perf_counter()
    with ProgressBars(args.quiet or args.json) as bars:
        prepared = asyncio.run(
            prepare_chunks(
                engine,
                chunks,
                system=args.prepare,
                on_progress=lambda done, total: bars("prepare", done, total),
            )
        )
    say(prepared_line(prepared, time.perf_counter() - started))
    for note in prepared.notes:
        say(f"note: {printable(note)}")
    room = engine.stats().blocks * engine.capabilities().block_size
    if prepared.tokens > room:
        say(
            f"warning: the KV cache holds {room:,} tokens: the chunks that were prepared first are "
            "gone again (--kv-cache-gib)"
        )


def prepared_line(prepared: Prepared, seconds: float) -> str:
    return (
        f"{_many(prepared.chunks, 'chunk')} prepared in {seconds:.1f} s: {prepared.tokens:,} "
        f"tokens, {prepared.computed:,} of them computed now"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add = parser.add_argument
    add("path", metavar="PATH", help="a file or a folder")
    add_search_options(parser)
    add("--rebuild", action="store_true", help="build the index anew even if it is current")
    add("--find", metavar="QUESTION", help="show the fragments that fit a question")
    add("--prepare", action="store_true", help="have the engine compute every chunk (with --model)")
    add(
        "--model",
        type=cli_options.model_name,
        metavar="ID_OR_PATH",
        help="count tokens with its tokenizer; with --prepare, the model that prepares",
    )
    add("--system", default="", metavar="TEXT", help="the text before the passages, for --prepare")
    add("--salt", default="", help="tenant salt, for --prepare")
    add("--scope", choices=("anchored", "isolated"), default="anchored", help="for --prepare")
    cli_options.add_block_size(parser, "for --prepare")
    add(
        "--concurrency",
        type=cli_options.whole(1),
        default=16,
        metavar="N",
        help="chunks prepared at the same time (default %(default)s)",
    )
    add("--json", action="store_true", help="print one JSON object")
    add("--quiet", action="store_true", help="no progress and no notes")
    cli_options.add_engine_options(parser)


def main(args: argparse.Namespace) -> int:
    """Run the command; the exit status."""
    from kvspan.progress import ProgressBars
    from kvspan.retrieve.index import Settings, open_index

    if args.prepare and not args.model:
        raise UsageError("--prepare needs a model", expected="--model ID_OR_PATH")
    started = time.perf_counter()
    settings = Settings(args.chunk_size, embeddings=args.search != "bm25")
    with ProgressBars(args.quiet or args.json) as bars:
        index = open_index(args.path, settings, rebuild=args.rebuild, progress=bars)
    report = _report(args, index, time.perf_counter() - started)
    if args.model:
        report["tokens"] = _token_counts(args, index)
    if args.find is not None:
        hits = index.search(args.find, args.fragments, args.search)
        report["found"] = [
            {"source": hit.chunk.source, "start": hit.chunk.start, "end": hit.chunk.end,
             "score": round(hit.score, 4), "text": hit.chunk.text}
            for hit in hits
        ]  # fmt: skip
        if not hits:
            report["notes"].append(f"nothing fits {' '.join(args.find.split())[:60]!r}")
    prepared = None
    if args.prepare:
        prepared, seconds = _prepare(args, index)
        report["prepared"] = {**asdict(prepared), "seconds": seconds}
        report["notes"] += prepared.notes
    if args.json:
        print(json.dumps(report, ensure_ascii=False, indent=2))
    else:
        _print(args, report, prepared)
    return 0


def _report(args: argparse.Namespace, index: Index, seconds: float) -> dict[str, Any]:
    return {
        "path": args.path,
        "state": index.state,
        "key": index.key,
        "folder": None if index.folder is None else str(index.folder),
        "search": args.search,
        "documents": index.documents,
        "chunks": len(index.chunks),
        "repeated": index.repeated,
        "characters": _spread([len(chunk.text) for chunk in index.chunks]),
        "seconds": round(seconds, 3),
        "notes": index.notes,
    }


def _spread(counts: Sequence[int]) -> dict[str, int]:
    ordered = sorted(counts)
    middle = ordered[(len(ordered) - 1) // 2]
    return {"least": ordered[0], "median": middle, "most": ordered[-1], "all": sum(ordered)}


def _token_counts(args: argparse.Namespace, index: Index) -> dict[str, int] | None:
    """Tokens of the chunks; None for a server's model, whose tokenizer is not here."""
    from kvspan.extras import engine_extra, importing

    if cli_server.is_server(args):
        return None
    with importing(engine_extra(args.model)):
        from kvspan.engine.loading import load_tokenizer
    tokenizer = load_tokenizer(args.model)
    texts = [chunk.text for chunk in index.chunks]
    found = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return _spread([len(ids) for ids in found])


def _prepare(args: argparse.Namespace, index: Index) -> tuple[Prepared, float]:
    import asyncio

    from kvspan.progress import ProgressBars
    from kvspan.retrieve.prepare import prepare_chunks

    with ProgressBars(args.quiet or args.json) as bars:
        engine = _open_engine(args, bars)
        if hasattr(engine, "progress"):
            engine.progress = None  # one bar for all chunks says more than one for each
        started = time.perf_counter()
        try:
            prepared = asyncio.run(
                prepare_chunks(
                    engine,
                    index.chunks,
                    model=args.model,
                    system=args.system,
                    scope=args.scope,
                    salt=args.salt,
                    max_concurrency=args.concurrency,
                    on_progress=lambda done, total: bars("prepare", done, total),
                )
            )
        finally:
            engine.close()
        return prepared, round(time.perf_counter() - started, 3)


def _open_engine(args: argparse.Namespace, bars: ProgressBars) -> Engine:
    """The engine that prepares. A server gets span queries if it takes them."""
    from kvspan.extras import importing

    if not cli_server.is_server(args):
        return cli_options.open_engine_with(args, args.model, bars)
    with importing("openai"):
        from kvspan.retrieve.query_server import QueryServer
    return QueryServer(
        args.model,
        base_url=args.base_url,
        timeout=args.server_timeout,
        max_retries=args.server_retries,
        max_concurrency=args.concurrency,
    )


def _print(args: argparse.Namespace, report: dict[str, Any], prepared: Prepared | None) -> None:
    for hit in report.get("found", ()):
        place = f"{hit['source']}, characters {hit['start']:,}-{hit['end']:,}"
        print(f"--- {printable(place)}, score {hit['score']:g}")
        print(_shown(hit["text"]))
    if args.quiet:
        return

    def say(line: str) -> None:
        print(f"kvspan: {line}", file=sys.stderr, flush=True)

    for note in report["notes"]:
        say(f"note: {printable(note)}")
    characters = report["characters"]
    said = {"current": "index is current", "built": "index built", "rebuilt": "index built anew"}
    say(
        f"{said[report['state']]}: {_many(report['documents'], 'document')}, "
        f"{_many(report['chunks'], 'chunk')} of {characters['least']:,} to {characters['most']:,} "
        f"characters (median {characters['median']:,}), {report['seconds']:.2f} s"
    )
    if report["repeated"]:
        say(f"{_many(report['repeated'], 'chunk')} left out: the same text is there already")
    tokens = report.get("tokens")
    if tokens:
        say(
            f"{tokens['all']:,} tokens with {printable(args.model)}, {tokens['least']:,} to "
            f"{tokens['most']:,} a chunk (median {tokens['median']:,})"
        )
    if prepared is not None:
        say(prepared_line(prepared, report["prepared"]["seconds"]))
    say(f"kept in {report['folder']}" if report["folder"] else "not kept on disk")


def _many(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def _shown(text: str) -> str:
    """Line by line, without what could steer a terminal."""
    return "\n".join(printable(line) for line in text.split("\n"))
