"""`kvspan index`, and the options for corpora of run, explain, bulk and serve."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest

from fakes import FakeEngine, prompt_text
from faulty_server import FaultyServer, answer, error
from kvspan import cli, cli_index, cli_options
from serving import ServerProcess

QUERY = {"g": {"model": "M", "input": {"cross": [
    {"system": "s"},
    {"kvspan/v1": {"retrieve": {"corpus": "town", "query": {"user": "who keeps bees?"}}}},
    {"user": "who keeps bees?"},
]}}}  # fmt: skip


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVSPAN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "town").mkdir()
    (tmp_path / "town" / "a.txt").write_text("Tomas repairs clocks.")
    (tmp_path / "town" / "b.jsonl").write_text('{"title": "Bees", "text": "Lena keeps bees."}\n')
    (tmp_path / "q.json").write_text(json.dumps(QUERY))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    engine = FakeEngine(lambda request: "Lena.")
    monkeypatch.setattr(cli_options, "open_engine_with", lambda args, model, bars: engine)
    return engine


# --- kvspan index --------------------------------------------------------------------------------


def test_build_inspect_and_find(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["index", "town"]) == 0
    text = capsys.readouterr()
    assert text.out == ""
    first, second = text.err.splitlines()
    assert re.fullmatch(
        r"kvspan: index built: 2 documents, 2 chunks of 21 to 21 characters \(median 21\), "
        r"\d+\.\d\d s",
        first,
    )
    assert Path(second.removeprefix("kvspan: kept in ")).is_dir()

    assert cli.main(["index", "town", "--find", "who keeps bees", "--quiet"]) == 0
    text = capsys.readouterr()
    assert text.err == ""
    head, *body = text.out.splitlines()
    assert re.fullmatch(r"--- b\.jsonl:1, characters 0-16, score 0\.\d+", head)
    assert body == ["Bees", "Lena keeps bees."]

    assert cli.main(["index", "town", "--find", "xylophones"]) == 0
    text = capsys.readouterr()
    assert text.out == ""
    assert text.err.splitlines()[0] == "kvspan: note: nothing fits 'xylophones'"


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["index", "town", "--json"]) == 0
    built = json.loads(capsys.readouterr().out)
    assert cli.main(["index", "town", "--json", "--find", "clocks", "--fragments", "1"]) == 0
    text = capsys.readouterr()
    again = json.loads(text.out)
    assert text.err == ""
    assert (built["state"], again["state"], built["key"]) == ("built", "current", again["key"])
    counts = {"least": 21, "median": 21, "most": 21, "all": 42}
    assert again["characters"] == counts and again["documents"] == again["chunks"] == 2
    assert again["search"] == "bm25" and again["notes"] == [] and again["repeated"] == 0
    (found,) = again["found"]
    assert (found["source"], found["start"], found["end"]) == ("a.txt", 0, 21)
    assert found["text"] == "Tomas repairs clocks." and found["score"] > 0


def test_tokens_and_preparing(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("words.txt").write_text("w1 w2 w3 w4")
    words = ["index", "words.txt", "--model", str(tiny_folder), "--threads", "1"]
    assert (
        cli.main([*words, "--kv-cache-gib", "0.01", "--prepare", "--system", "w9", "--json"]) == 0
    )
    report = json.loads(capsys.readouterr().out)
    assert report["tokens"] == {"least": 4, "median": 4, "most": 4, "all": 4}
    prepared = report["prepared"]
    assert (prepared["chunks"], prepared["tokens"], prepared["computed"]) == (1, 16, 16)
    assert cli.main([*words]) == 0
    assert "4 tokens with " in capsys.readouterr().err


def test_preparing_on_a_server(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    Path("words.jsonl").write_text('{"title": "w9", "text": "w1 w2"}\n"w3 w4 w5"\n')
    words = ["index", "words.jsonl", "--prepare", "--engine", "openai", "--json"]
    words += ["--base-url", f"{server.url}/v1", "--system", "w7 w8", "--salt", "index"]
    for computed in (32, 0):
        assert cli.main([*words, "--model", "other"]) == 0
        prepared = json.loads(capsys.readouterr().out)["prepared"]
        assert (prepared["chunks"], prepared["tokens"], prepared["computed"]) == (2, 32, computed)
        assert prepared["notes"] == []
    assert cli.main([*words, "--model", "nix"]) == 1
    assert "model 'nix' is not served here" in capsys.readouterr().err


def test_preparing_on_a_server_without_queries(capsys: pytest.CaptureFixture[str]) -> None:
    with FaultyServer(error(404, "no such path"), answer("x")) as server:
        words = ["index", "town/a.txt", "--prepare", "--model", "M", "--engine", "openai"]
        assert cli.main([*words, "--base-url", server.url]) == 0
        query, chat = server.requests
    assert query[0] == "/v1/query/execute" and chat[0] == "/v1/chat/completions"
    (message,) = chat[2]["messages"]
    assert message == {"role": "user", "content": "Tomas repairs clocks."}
    note = f"note: {server.url}/query/execute is not there: it takes no span queries"
    assert note in capsys.readouterr().err
    with FaultyServer(answer("not what a query answers")) as server:
        assert cli.main([*words, "--base-url", server.url]) == 1
    assert "/query/execute: the answer is not that of a query" in capsys.readouterr().err


def test_preparing_through_an_engine(
    fake: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli_index, "_token_counts", lambda args, index: None)  # there is no model M
    words = ["index", "town", "--prepare", "--model", "M", "--system", "s", "--salt", "tenant"]
    assert cli.main([*words, "--scope", "isolated"]) == 0
    assert "2 chunks prepared in " in capsys.readouterr().err
    assert sorted(fake.prepared) == ["a.txt[0]", "b.jsonl:1[1]"] and fake.closed == 1
    asked = {prompt_text(request.prompt) for request in fake.requests}
    assert asked == {"s:s [u:Tomas repairs clocks.]", "s:s [u:Bees\nLena keeps bees.]"}
    assert {(r.scope, r.salt, r.max_tokens, r.model) for r in fake.requests} == {
        ("isolated", "tenant", 1, "M")
    }


def test_notes_and_rebuilding(capsys: pytest.CaptureFixture[str]) -> None:
    Path("town/c.txt").write_text("Tomas repairs clocks.")
    Path("town/x.bin").write_bytes(b"\0")
    Path("town/empty.md").write_text("")
    assert cli.main(["index", "town"]) == 0
    err = capsys.readouterr().err
    assert "kvspan: note: town: 1 file without text\n" in err
    assert "kvspan: note: town: 1 file of other kinds not read\n" in err
    assert "kvspan: 1 chunk left out: the same text is there already\n" in err
    assert cli.main(["index", "town", "--rebuild"]) == 0
    assert "kvspan: index built anew: 3 documents, 2 chunks " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere: no such file or folder"),
        (["q.json/x"], "q.json/x: no such file or folder"),
        (["town", "--prepare"], "--prepare needs a model; expected --model ID_OR_PATH"),
        (["town", "--chunk-size", "99"], "argument --chunk-size: expected a whole number, 100 or "),
        (["town", "--search", "web"], "argument --search: invalid choice: 'web'"),
        (["bad.txt"], "bad.txt: not UTF-8; expected UTF-8; found byte 0xff at offset 0"),
        (["bad.pdf"], "bad.pdf: not a PDF file that can be read: "),
        (["empty.txt"], "empty.txt: no text in the corpus; expected a file with text"),
        (["bad.jsonl"], "bad.jsonl:2: not JSON: Expecting value (column 1)"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistakes_are_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("bad.txt").write_bytes(b"\xff\xff")
    Path("bad.pdf").write_bytes(b"%PDF-1.4 broken")
    Path("empty.txt").write_bytes(b"")
    Path("bad.jsonl").write_text('"x"\nx\n')
    for extra in ([], ["--json"]):
        assert cli.main(["index", *words, *extra]) == 2
        text = capsys.readouterr()
        (line,) = text.err.splitlines()
        said = (
            json.loads(line)["error"]["message"] if extra else line.removeprefix("kvspan: error: ")
        )
        assert text.out == "" and said.startswith(message)


def test_what_a_document_says_does_not_steer_a_terminal(capsys) -> None:
    Path("evil.txt").write_text("bees \x1b[2J honey\nand more")
    assert cli.main(["index", "evil.txt", "--find", "bees"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["bees \\x1b[2J honey", "and more"]


# --- run, explain, bulk, serve -------------------------------------------------------------------


def test_run(fake: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "q.json", "--corpus", "town=town"]) == 0
    text = capsys.readouterr()
    assert text.out == "Lena.\n"
    prompt = prompt_text(fake.requests[-1].prompt)
    assert prompt == "s:s [u:Bees\nLena keeps bees.] u:who keeps bees?"
    assert cli.main(["run", "q.json", "--corpus", "town=town/a.txt", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["warnings"] == ["note: nothing in town fits 'who keeps bees?'"]
    assert prompt_text(fake.requests[-1].prompt) == "s:s u:who keeps bees?"


def test_run_with_a_document_of_its_own(
    fake: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    document = {
        "embedding_model": "e5",
        "body": {"user": "bees"},
        "doc": ["a.txt", {"Text": "Bees."}],
    }
    query = {"g": {"model": "M", "input": {"cross": [{"augment": document}, {"user": "x"}]}}}
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(query)))
    assert cli.main(["run", "-"]) == 0
    assert prompt_text(fake.requests[-1].prompt) == "[u:Bees.] u:x"
    assert "note: embedding model e5: not run here; searched with bm25\n" in capsys.readouterr().err


def test_options_reach_the_search(fake: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    Path("many.txt").write_text("Bees are busy here today and every other day. " * 40)
    words = ["run", "q.json", "--corpus", "town=many.txt", "--chunk-size", "200"]
    assert cli.main([*words, "--fragments", "2"]) == 0
    assert prompt_text(fake.requests[-1].prompt).count("[u:Bees") == 1  # the same text, once
    Path("many.txt").write_text("".join(f"Bees number {n}, again {n}. " * 8 for n in range(9)))
    assert cli.main([*words, "--fragments", "2"]) == 0
    assert prompt_text(fake.requests[-1].prompt).count("[u:Bees") == 2
    assert cli.main(["run", "q.json", "--corpus", "town=town", "--search", "hybrid"]) == 0
    assert prompt_text(fake.requests[-1].prompt).count("[u:") == 2
    assert capsys.readouterr().out == "Lena.\n" * 3


UNKNOWN = "q.json: $.g.input.cross[1]: unknown corpus 'town'; expected"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], f"{UNKNOWN} a corpus that was given to the run (--corpus NAME=PATH); found none was"),
        (["--corpus", "city=town"], f"{UNKNOWN} 'city'"),
        (["--corpus", "town"], "argument --corpus: expected NAME=PATH, got 'town'"),
        (["--corpus", "=town"], "argument --corpus: expected NAME=PATH, got '=town'"),
        (["--corpus", "town=x"], "x: no such file or folder"),
        (["--corpus", "a=town", "--corpus", "a=q.json"], "--corpus a is given twice; expected one"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)  # fmt: skip
@pytest.mark.parametrize("command", ["run", "explain"])
def test_bad_corpora(
    command: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([command, "q.json", *words]) == 2
    text = capsys.readouterr()
    assert text.out == "" and text.err.startswith(f"kvspan: error: {message}")
    assert len(text.err.splitlines()) == 1


def test_explain(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["explain", "q.json", "--corpus", "town=town", "--model", str(tiny_folder)]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert 'retrieve from "town"' in out and "desugar_retrieval: " in out
    assert "Plan: 2 generate calls" in out and 'user "Bees Lena keeps bees."' in out
    assert cli.main([*words, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["plan"]["calls"]) == 2


def test_bulk(fake: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    Path("in.jsonl").write_text(f"{json.dumps(QUERY)}\n" * 2)
    assert cli.main(["bulk", "in.jsonl", "-o", "out.jsonl", "--corpus", "town=town"]) == 0
    asked = [r for r in fake.requests if r.path not in fake.prepared]
    assert [prompt_text(r.prompt).count("Lena") for r in asked] == [1, 1]
    assert cli.main(["bulk", "in.jsonl", "-o", "other.jsonl"]) == 1
    (error, _) = (
        json.loads(line)["error"] for line in Path("other.jsonl").read_text().splitlines()
    )
    assert error["message"].startswith("$.g.input.cross[1]: unknown corpus 'town'")


def test_serve(tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("town/words.txt").write_text("w1 w2 w3")
    assert cli.main(["serve", "--model", "M", "--prepare", ""]) == 2
    assert "--prepare has nothing to prepare; expected --corpus" in capsys.readouterr().err
    query = json.dumps(QUERY).replace("who keeps bees?", "w3").replace('"M"', '"tiny"')
    options = ("--corpus", f"town={tmp_path / 'town'}", "--prepare", "s")
    with ServerProcess(tiny_folder, *options) as server:
        # Two of them are the same to this tokenizer: three words that it does not know.
        assert re.search(r"3 chunks prepared in .* s: 48 tokens, 32 of them", server.lines[0])
        reply = server.post("/v1/query/execute?max_tokens=2", json.loads(query))
        assert reply.status == 200
        for call in reply.json["kvspan"]["calls"]:
            reuse = call["reuse"]
            assert (reuse["spans"], reuse["span_hits"], reuse["prepared_tokens"]) == (1, 1, 0)
        other = json.loads(query.replace('"town"', '"city"'))
        refused = server.post("/v1/query/execute", other)
        assert refused.status == 400
        assert (
            refused.error["message"] == "$.g.input.cross[1]: unknown corpus 'city'; expected 'town'"
        )
