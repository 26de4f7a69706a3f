"""Retrieval end to end: corpora and documents of queries, on a fake and on the embedded engine."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvspan as kv
from fakes import FakeEngine, prompt_text
from kvspan import cross, from_corpus, g, run, system
from kvspan.bulk import run_bulk
from kvspan.engine.local import LocalEngine
from kvspan.errors import KvspanError, UsageError
from kvspan.query.nodes import Node
from kvspan.query.retrieval import Corpus
from kvspan.retrieve import Corpora, corpora
from kvspan.retrieve.index import open_index
from kvspan.retrieve.prepare import prepare_chunks
from pdf_files import pdf
from tiny_models import tiny_model, word_tokenizer

PEOPLE = """\
# Oldtown

## Clocks

Tomas repairs the clocks. He came in 1990.

## Bees

Lena keeps bees on the roof of the mill.
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSPAN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def town(tmp_path: Path) -> Path:
    file = tmp_path / "town.md"
    file.write_text(PEOPLE)
    return file


def prompts(engine: FakeEngine) -> list[str]:
    """Of the calls that were to answer."""
    return [prompt_text(r.prompt) for r in engine.requests if r.path not in engine.prepared]


# --- what a run retrieves ------------------------------------------------------------------------


def test_a_corpus_by_name(town: Path) -> None:
    engine = FakeEngine()
    query = g("M", cross(system("s"), from_corpus("town", "who keeps bees?"), "who keeps bees?"))
    run(query, engine=engine, corpora={"town": town})
    span = "[u:# Oldtown\n## Bees\n\nLena keeps bees on the roof of the mill.]"
    assert prompts(engine) == [f"s:s {span} u:who keeps bees?"]
    base = "$.g.input.cross[1]['kvspan/v1'].retrieve.fragments"
    assert engine.prepared == [f"{base}[0]"]
    assert prompt_text(engine.requests[0].prompt) == f"s:s {span}"
    kv.run(query, engine=engine, retriever=Corpora({"town": town}))
    assert prompts(engine)[1:] == prompts(engine)[:1]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.md", PEOPLE),
        ("https://example.com/a.md", PEOPLE.encode()),
        ("a.jsonl", '{"title": "Bees", "text": "Lena keeps bees."}\n"Tomas repairs clocks."'),
        ("a.pdf", pdf(["Lena keeps bees."])),
    ],
)
def test_a_document_of_the_query_needs_no_corpus(name: str, content: str | bytes) -> None:
    engine = FakeEngine()
    asked = kv.augment("ollama/mxbai", "who keeps bees?", (name, content))
    result = run(g("M", cross(asked, "who keeps bees?")), engine=engine)
    (prompt,) = prompts(engine)
    assert "Lena keeps bees" in prompt and "Tomas" not in prompt
    assert len(result.answers) == 1 and len(engine.prepared) == 1
    read = asyncio.run(kv.arun(g("M", cross(asked, "who keeps bees?")), engine=engine))
    assert read.answers == result.answers


def test_spnls_own_form_of_augment(town: Path) -> None:
    text = json.dumps(
        {"g": {"model": "M", "input": {"cross": [
            {"augment": {"embedding_model": "e", "body": {"user": "bees"},
                         "doc": ["a.md", {"Text": PEOPLE}]}},
            {"augment": {"embedding_model": "e", "body": {"user": "clocks"},
                         "doc": ["b.txt", {"Binary": list(b"Clocks. ")}]}},
            {"user": "who?"},
        ]}}}
    )  # fmt: skip
    engine = FakeEngine()
    run(kv.loads(text), engine=engine)
    assert prompts(engine) == [
        "[u:# Oldtown\n## Bees\n\nLena keeps bees on the roof of the mill.] [u:Clocks.] u:who?"
    ]


def test_limits_and_embedding_models(tmp_path: Path) -> None:
    file = tmp_path / "many.jsonl"
    file.write_text("".join(f'"bees {n} {"honey " * n}"\n' for n in range(30)))
    notes: list[str] = []
    found = Corpora({"many": file}, limit=3, on_note=notes.append)
    assert len(found.retrieve("bees", Corpus("many"))) == 3
    assert len(found.retrieve("bees", Corpus("many", limit=99))) == 30
    assert found.retrieve("bees", Corpus("many", embedding_model="")) == found.retrieve(
        "bees", Corpus("many")
    )
    for name in ("wordllama", "kvspan/wordllama", "embedding"):
        near = found.hits("insects", Corpus("many", embedding_model=name))
        assert len(near) == 3 and all(0 < hit.score <= 1 for hit in near)
    assert found.retrieve("insects", Corpus("many", embedding_model="bm25")) == []
    assert notes == ["nothing in many fits 'insects'"]
    for _ in range(2):
        found.retrieve("bees", Corpus("many", embedding_model="ollama/mxbai"))
    assert notes[1:] == ["embedding model ollama/mxbai: not run here; searched with bm25"]


def test_what_the_query_asks_for_and_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpora, "embeddings_installed", lambda: False)
    (tmp_path / "c.txt").write_text("Lena keeps bees.")
    notes: list[str] = []
    found = Corpora({"c": tmp_path / "c.txt"}, on_note=notes.append)
    assert found.retrieve("bees", Corpus("c", embedding_model="wordllama")) == ["Lena keeps bees."]
    assert notes == ["embedding search needs kvspan[embedding]; searched with bm25"]


def test_hybrid_search_finds_what_either_finds(tmp_path: Path) -> None:
    file = tmp_path / "c.jsonl"
    file.write_text('"The physician treats patients."\n"Zorblax 77 is a code."\n"Stocks fell."\n')
    both = Corpora({"c": file}, search="hybrid", limit=1)
    assert both.retrieve("Zorblax 77", Corpus("c")) == ["Zorblax 77 is a code."]
    assert both.retrieve("a doctor in a hospital", Corpus("c")) == [
        "The physician treats patients."
    ]
    words = Corpora({"c": file}, limit=1)
    assert words.retrieve("a doctor in a hospital", Corpus("c")) == []
    assert both.key != words.key


def test_documents_are_indexed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    build = corpora.build
    monkeypatch.setattr(
        corpora, "build", lambda chunks, *rest: built.append(1) or build(chunks, *rest)
    )
    found = Corpora()
    for number in range(20):
        for _ in range(2):
            found.retrieve("bees", Corpus("a.txt", f"{number} bees"))
    assert len(built) == 20
    found.retrieve("bees", Corpus("a.txt", "19 bees"))
    assert len(built) == 20
    found.retrieve("bees", Corpus("a.txt", "0 bees"))  # let go of long ago
    assert len(built) == 21


def test_threads_share_a_retriever(town: Path) -> None:
    found = Corpora({"town": town})
    seen: list[list[str]] = []

    def ask() -> None:
        for number in range(10):
            document = Corpus("a.txt", f"{number} bees")
            seen.append(found.retrieve("bees", Corpus("town")) + found.retrieve("bees", document))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 80 and len({tuple(one) for one in seen}) == 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"^\$\.g\.input\.cross\[0\]: unknown corpus 'town'; expected a corpus that was given"),
        ({"corpora": {"city": "."}}, r"unknown corpus 'town'; expected 'city'"),
        ({"corpora": {"town": "nowhere"}}, r"^nowhere: no such file or folder"),
        ({"corpora": ["town"]}, r"^bad corpora; expected a mapping of names to paths; found an ar"),
        ({"corpora": {"town": "."}, "retriever": object()}, "corpora are for the default retrieve"),
    ],
)
def test_bad_corpora_are_one_line(
    options: dict, message: str, town: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(town.parent)
    engine = FakeEngine()
    with pytest.raises(UsageError, match=message):
        run(g("M", cross(from_corpus("town", "bees"), "x")), engine=engine, **options)
    assert engine.requests == []


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.pdf", b"junk", "document 'a.pdf': not a PDF file that can be read: "),
        ("a.bin", bytes(range(256)), "document 'a.bin': not a text file; expected text, or a PDF"),
        ("a.jsonl", '"x"\n{', "document 'a.jsonl':2: not JSON: "),
        ("a.txt", " ", "no text in document 'a.txt'; expected a document with text"),
    ],
)
def test_bad_documents_are_one_line(name: str, content: str | bytes, message: str) -> None:
    query = g("M", cross(kv.augment("e", "bees", (name, content)), "x"))
    with pytest.raises(UsageError) as caught:
        run(query, engine=FakeEngine())
    assert str(caught.value).startswith(f"$.g.input.cross[0]: {message}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"search": "google"}, "unknown search; expected bm25 or embedding or hybrid; found 'goo"),
        ({"limit": 0}, "bad limit of fragments; expected 1 or more; found 0"),
        ({"chunk_size": 9}, "bad chunk size; expected 100 characters or more; found 9"),
    ],
)
def test_bad_settings(options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Corpora(**options)


# --- many queries --------------------------------------------------------------------------------


def test_bulk_puts_questions_about_one_passage_together(tmp_path: Path) -> None:
    corpus = tmp_path / "c.jsonl"
    corpus.write_text('"bees and honey"\n"clocks and time"\n')
    source = tmp_path / "in.jsonl"
    asked = ["honey", "time", "bees", "clocks", "honey bees"]
    source.write_text(
        "".join(
            json.dumps({"g": {"model": "M", "input": {"cross": [
                {"kvspan/v1": {"retrieve": {"corpus": "c", "query": {"user": word}}}},
                {"user": word},
            ]}}}) + "\n"
            for word in asked
        )
    )  # fmt: skip
    engine = FakeEngine(prompt_of)
    out = tmp_path / "out.jsonl"
    found = Corpora({"c": corpus})
    summary = run_bulk(source, out, engine=engine, retriever=found, parallel=1)
    assert summary.failed == 0
    order = [prompt.rpartition("u:")[2] for prompt in prompts(engine)]
    assert order == ["honey", "bees", "honey bees", "time", "clocks"]
    answers = [json.loads(line)["answers"][0] for line in out.read_text().splitlines()]
    assert [answer.rpartition("u:")[2] for answer in answers] == asked

    again = tmp_path / "again.jsonl"
    run_bulk(source, again, engine=FakeEngine(prompt_of), corpora={"c": corpus}, reorder=False)
    assert again.read_text() == out.read_text()


def prompt_of(request) -> str:
    return prompt_text(request.prompt)


def test_bulk_does_not_go_on_with_another_corpus(tmp_path: Path) -> None:
    corpus, source = tmp_path / "c.txt", tmp_path / "in.jsonl"
    corpus.write_text("bees")
    retrieve = {"kvspan/v1": {"retrieve": {"corpus": "c", "query": {"user": "bees"}}}}
    line = json.dumps({"g": {"model": "M", "input": {"cross": [retrieve, {"user": "x"}]}}})
    source.write_text(f"{line}\n{line}\n")
    out = tmp_path / "out.jsonl"

    def killed(request) -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_bulk(source, out, engine=FakeEngine(killed), corpora={"c": corpus})
    corpus.write_text("bees and clocks")
    with pytest.raises(UsageError, match="a journal of another run is there"):
        run_bulk(source, out, engine=FakeEngine(), corpora={"c": corpus})


# --- on the embedded engine ----------------------------------------------------------------------


def words(first: int, count: int) -> str:
    return " ".join(f"w{first + n}" for n in range(count))


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    with LocalEngine(tiny_model("llama"), word_tokenizer(), kv_cache_gib=0.02) as engine:
        yield engine


@pytest.fixture
def passages(tmp_path: Path) -> Path:
    """Six passages; the nth has the words w(30n) to w(30n+24), and each the word w199."""
    file = tmp_path / "passages.jsonl"
    texts = [f"{words(30 * n, 25)} w199" for n in range(6)]
    file.write_text("".join(json.dumps(text) + "\n" for text in texts))
    return file


def ask(question: str, limit: int) -> Node:
    fragments = from_corpus("p", question, limit=limit)
    return g("M", cross(system("w1 w2"), fragments, question), max_tokens=3, temperature=0)


def test_the_next_question_finds_the_passages_of_the_first(engine, passages: Path) -> None:
    engine.clear_cache()
    found = Corpora({"p": passages})
    asked = "w5 w35 w36 w65 w66 w67", "w67 w8 w9 w10 w36"
    first, second = (run(ask(text, 3), engine=engine, retriever=found) for text in asked)
    *_, final = first.calls
    assert (final.result.reuse.spans, final.result.reuse.span_hits) == (3, 3)
    one, two = (found.retrieve(text, Corpus("p", limit=3)) for text in asked)
    assert set(one) == set(two) and one != two  # the same passages, in another order
    for call in second.calls:
        reuse = call.result.reuse
        assert reuse.span_hits == reuse.spans > 0
        assert (reuse.prepared_tokens, reuse.reused_tokens) == (0, reuse.span_tokens)
    engine.clear_cache()
    cold = run(ask(asked[1], 3), engine=engine, retriever=found)
    assert cold.answers == second.answers


def test_what_is_prepared_is_there_for_the_first_question(engine, passages: Path) -> None:
    engine.clear_cache()
    chunks = open_index(passages).chunks
    seen: list[tuple[int, int]] = []
    prepared = asyncio.run(
        prepare_chunks(
            engine, chunks, system="w1 w2", on_progress=lambda *s: seen.append(s), max_concurrency=2
        )
    )
    assert (prepared.chunks, prepared.tokens, prepared.computed) == (6, 6 * 32, 6 * 32)
    assert seen == [(n, 6) for n in range(1, 7)] and prepared.notes == ()
    first = run(ask("w5 w35 w65", 3), engine=engine, corpora={"p": passages})
    for call in first.calls:
        reuse = call.result.reuse
        assert (reuse.span_hits, reuse.prepared_tokens) == (reuse.spans, 0)
    again = asyncio.run(prepare_chunks(engine, chunks, system="w1 w2"))
    assert (again.tokens, again.computed) == (6 * 32, 0)
    other = asyncio.run(prepare_chunks(engine, chunks, system="w1 w3"))
    assert other.computed == 6 * 32  # spans attend to what stands before them


def test_preparing_ends_at_the_first_failure(passages: Path) -> None:
    def fail(request) -> str:
        raise KvspanError("no memory left", path=request.path)

    fake = FakeEngine(fail)
    with pytest.raises(KvspanError, match=r"^passages.jsonl:1\[0\]: no memory left$"):
        asyncio.run(prepare_chunks(fake, open_index(passages).chunks, max_concurrency=1))
    assert len(fake.requests) == 1 and fake.running == 0
