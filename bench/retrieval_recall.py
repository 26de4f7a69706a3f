"""Whether the passage that answers a real question is among the fragments that are retrieved.

    python bench/retrieval_recall.py QUESTIONS.jsonl [MORE_PASSAGES.json ...] [--search hybrid ...]

QUESTIONS: lines of {"question", "ctxs": [{"title", "text", "isgold"}, ...]}, as of
nelson-liu/lost-in-the-middle; MORE_PASSAGES: arrays of {"title", "text"} that answer none. Both may
be .gz. All passages are one corpus, cut as `kvspan index` does; a passage counts as found if one of
its chunks is among the first k. Prints one JSON object; --json FILE keeps it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

from kvspan.retrieve.chunking import DEFAULT_SIZE, cut
from kvspan.retrieve.documents import Document
from kvspan.retrieve.index import Settings, build
from kvspan.retrieve.search import SEARCHES

DEPTHS = (1, 3, 5, 10, 20)


def read(path: Path) -> str:
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("questions", type=Path)
    parser.add_argument("passages", type=Path, nargs="*")
    parser.add_argument("--search", choices=SEARCHES, nargs="+", default=list(SEARCHES))
    parser.add_argument("--chunk-size", type=int, default=DEFAULT_SIZE)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()

    asked: list[tuple[str, tuple[str, str]]] = []
    passages: dict[tuple[str, str], None] = {}
    for line in read(args.questions).splitlines():
        question = json.loads(line)
        for context in question["ctxs"]:
            passage = context["title"], context["text"]
            passages[passage] = None
            if context.get("isgold"):
                asked.append((question["question"], passage))
    for path in args.passages:
        passages.update(dict.fromkeys((p["title"], p["text"]) for p in json.loads(read(path))))

    number_of = {passage: str(number) for number, passage in enumerate(passages)}
    documents = [Document(number_of[title, text], text, title) for title, text in passages]
    started = time.perf_counter()
    chunks = [chunk for document in documents for chunk in cut(document, args.chunk_size)]
    cutting = time.perf_counter() - started
    report: dict[str, Any] = {
        "questions": len(asked),
        "passages": len(passages),
        "chunks": len(chunks),
        "chunk_size": args.chunk_size,
        "cut_s": round(cutting, 2),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs",
        "recall": {},
    }
    for how in args.search:
        started = time.perf_counter()
        index = build(chunks, len(documents), Settings(args.chunk_size, embeddings=how != "bm25"))
        built = time.perf_counter() - started
        started = time.perf_counter()
        found = dict.fromkeys(DEPTHS, 0)
        for question, passage in asked:
            sources = [hit.chunk.source for hit in index.search(question, max(DEPTHS), how)]
            for depth in DEPTHS:
                found[depth] += number_of[passage] in sources[:depth]
        seconds = (time.perf_counter() - started) / len(asked)
        report["recall"][how] = {
            **{f"@{depth}": round(count / len(asked), 4) for depth, count in found.items()},
            "build_s": round(built, 2),
            "ms_per_question": round(seconds * 1e3, 3),
        }
    text = json.dumps(report, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
