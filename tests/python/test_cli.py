"""The command: what goes where, exit statuses, one-line errors, interruption."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import kvspan
from fakes import FakeEngine, prompt_text
from kvspan import KvspanError, UsageError, cli, cli_options
from kvspan.engine import GenerateRequest
from kvspan.query.read import from_obj
from kvspan.query.write import to_json, to_yaml
from query_strategies import deep_query, wide_query
from tiny_models import tiny_model, word_tokenizer

HERE = Path(__file__).parent
QUERY = {"g": {"model": "M", "input": {"cross": [{"system": "s"}, {"plus": [{"user": "a"}]}]}}}
TWO = {"plus": [{"g": {"model": "M", "input": {"user": x}}} for x in "ab"]}


def echo(request: GenerateRequest) -> str:
    return f"<{prompt_text(request.prompt)}>"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """What every model opens to, in this process."""
    fake = FakeEngine(answer=echo)
    monkeypatch.setattr(cli_options, "open_engine_with", lambda args, model, bars: fake)
    return fake


@pytest.fixture
def query_file(tmp_path: Path) -> str:
    path = tmp_path / "query.json"
    path.write_text(json.dumps(QUERY))
    return str(path)


def kvspan_process(*words: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvspan", *words],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **env},
    )


def test_answer_on_stdout_and_summary_on_stderr(engine, query_file, capsys) -> None:
    assert cli.main(["run", query_file]) == 0
    out, err = capsys.readouterr()
    assert out == "<s:s [u:a]>\n"
    assert err == (
        "kvspan: 1 call, 2 prompt tokens (1 from the cache, 2 moved, 1 prepared), 11 new tokens, "
        f"first token after 0.25 s, {err.split()[-4]} s in all\n"
    )
    assert cli.main(["run", query_file, "--quiet"]) == 0
    assert capsys.readouterr() == ("<s:s [u:a]>\n", "")


def test_several_answers_are_told_apart(engine, tmp_path, capsys) -> None:
    file = tmp_path / "two.yaml"
    file.write_text(to_yaml(from_obj(TWO)))
    assert cli.main(["run", str(file), "--quiet"]) == 0
    assert capsys.readouterr().out == "--- $.plus[0]\n<u:a>\n--- $.plus[1]\n<u:b>\n"


@pytest.mark.parametrize(
    "text", [json.dumps(QUERY), to_yaml(from_obj(QUERY)), json.dumps(QUERY, indent=1)]
)
def test_query_from_stdin(engine, capsys, monkeypatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert cli.main(["run", "-", "--quiet"]) == 0
    assert capsys.readouterr().out == "<s:s [u:a]>\n"


def test_options_reach_the_engine(engine, tmp_path, capsys) -> None:
    file = tmp_path / "two.json"
    file.write_text(json.dumps(TWO))
    words = "--model X --seed 7 --scope full --placement parallel --temperature 0.25"
    more = "--max-tokens 9 --salt tenant --concurrency 1"
    assert cli.main(["run", str(file), *words.split(), *more.split()]) == 0
    assert engine.most == 1
    request = engine.requests[0]
    assert (request.model, request.scope, request.placement) == ("X", "full", "parallel")
    assert (request.temperature, request.max_tokens, request.salt) == (0.25, 9, "tenant")
    assert request.seed == kvspan.executor.derive_seed(7, "$.plus[0]")


def test_engine_options_reach_open_engine(monkeypatch, query_file, capsys) -> None:
    seen = {}

    def open_engine(model: str, **options):
        seen.update(options, model=model)
        return FakeEngine(answer=echo)

    monkeypatch.setattr(kvspan.engine, "open_engine", open_engine)
    words = "--block-size 64 --kv-cache-gib 0.5 --dtype float32 --device cpu --threads 1"
    assert cli.main(["run", query_file, *words.split()]) == 0
    seen.pop("progress")
    assert seen == {
        "model": "M", "block_size": 64, "kv_cache_gib": 0.5, "dtype": "float32", "device": "cpu",
        "replay": "exact",
    }  # fmt: skip


def test_json_is_one_object_on_stdout(engine, tmp_path, capsys) -> None:
    file = tmp_path / "q.json"
    file.write_text(json.dumps({**QUERY, "note": 1}))
    assert cli.main(["run", str(file), "--json", "--lenient"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    obj = json.loads(out)
    assert obj["answers"] == ["<s:s [u:a]>"]
    assert obj["result"] == {"assistant": "<s:s [u:a]>"}
    (call,) = obj["calls"]
    assert set(call) >= {"path", "text", "usage", "timings", "reuse", "seed", "finish_reason"}
    assert "all but 'g' ignored" in obj["warnings"][0]


def test_lenient_warns_on_stderr(engine, tmp_path, capsys) -> None:
    file = tmp_path / "q.json"
    file.write_text('{"g": {"model": "M", "input": "a"}}')
    assert cli.main(["run", str(file)]) == 2
    assert cli.main(["run", str(file), "--lenient"]) == 0
    err = capsys.readouterr().err.splitlines()
    assert err[1].startswith(f"kvspan: warning: {file}: $.g.input: a string where one node belongs")


@pytest.mark.parametrize("flag", [[], ["--stream"]])
def test_streaming_prints_the_answer_once(engine, query_file, capsys, flag: list[str]) -> None:
    assert cli.main(["run", query_file, "--quiet", *flag]) == 0
    assert capsys.readouterr().out == "<s:s [u:a]>\n"


def test_streaming_prints_pieces_as_they_come(query_file, monkeypatch, capsys) -> None:
    seen: list[str] = []

    class Looking(FakeEngine):
        async def generate(self, request, on_text=None):
            on_text("first ")
            seen.append(capsys.readouterr().out)
            on_text("second")
            return await super().generate(request)

    monkeypatch.setattr(cli_options, "open_engine_with", lambda *_: Looking(answer=echo))
    assert cli.main(["run", query_file, "--stream", "--quiet"]) == 0
    assert seen == ["first "]
    assert capsys.readouterr().out == "second\n"


def test_only_the_answer_of_the_root_is_streamed(engine, tmp_path, capsys) -> None:
    file = tmp_path / "q.json"
    inner = {"g": {"model": "M", "input": {"user": "a"}}}
    file.write_text(json.dumps({"g": {"model": "M", "input": inner}}))
    assert cli.main(["run", str(file), "--stream", "--quiet"]) == 0
    assert capsys.readouterr().out == "<a:<u:a>>\n"
    file.write_text(json.dumps(TWO))
    assert cli.main(["run", str(file), "--stream", "--quiet"]) == 0
    assert capsys.readouterr().out.startswith("--- $.plus[0]\n")


def test_notes_of_the_engine_are_shown_once(query_file, monkeypatch, capsys) -> None:
    class Noting(FakeEngine):
        async def generate(self, request, on_text=None):
            result = await super().generate(request, on_text)
            result.reuse.notes += ["spans not reused: ALiBi", "spans not reused: ALiBi"]
            return result

    monkeypatch.setattr(cli_options, "open_engine_with", lambda *_: Noting())
    assert cli.main(["run", query_file]) == 0
    err = capsys.readouterr().err.splitlines()
    assert err[0] == "kvspan: note: $: spans not reused: ALiBi"
    assert len(err) == 2


USAGE_ERRORS = {
    "missing file": (["run", "none.json"], "", "none.json: no such file"),
    "directory": (["run", "/"], "", "/: cannot read the file: Is a directory"),
    "no name": (["run", ""], "", "the name of the query file is empty; expected a file; found ''"),
    "surrogate": (
        ["run", "-"],
        '{"user": "\\ud800"}',
        "<stdin>: $.user: the value of user is not valid Unicode; expected text without lone "
        "surrogates; found U+D800 at character 1",
    ),
    "malformed json": (["run", "-"], '{"user": ]', "<stdin>: line 1, column 10: malformed JSON"),
    "malformed yaml": (["run", "-"], "user: [", "<stdin>: line 1, column 8: malformed YAML"),
    "nothing": (["run", "-"], "", "<stdin>: the text is empty"),
    "not utf-8": (["run", "-"], "\udcff", "<stdin>: line 1, column 1: the text is not UTF-8"),
    "unknown node": (["run", "-"], '{"usr": "a"}', "<stdin>: $.usr: unknown node (did you mean"),
    "wrong type": (["run", "-"], "user: 3", "<stdin>: $.user: the value of user is not a string"),
    "bad count": (
        ["run", "-"],
        '{"repeat":{"n":-3,"g":{"model":"M","input":{"user":"draft"},"max_tokens":5}}}',
        "<stdin>: $.repeat.n: the n of repeat is not a count; expected a whole number from 0",
    ),
    "empty generate": (
        ["run", "-"],
        '{"g": {"model": "M", "input": {"plus": []}}}',
        "<stdin>: $.g.input: empty generate: its input has no text",
    ),
    "no model": (["run", "-"], "user: hi", "<stdin>: $: the query asks no model anything"),
    "explain too": (["explain", "-"], '{"usr": "a"}', "<stdin>: $.usr: unknown node"),
    "no command": (["frobnicate"], "", "argument COMMAND: invalid choice: 'frobnicate'"),
    "no file": (["run"], "", "the following arguments are required: FILE (see 'kvspan run -h')"),
    "unknown option": (["run", "-", "--modle", "M"], "", "unrecognized arguments: --modle"),
    "option of no command": (["--frob"], "", "unrecognized arguments: --frob"),
    "empty model": (["run", "-", "--model", ""], "", "argument --model: expected a folder, a hub"),
    "demo's model": (["demo", "--model="], "", "argument --model: expected a folder, a hub id"),
    "scope": (["run", "-", "--scope", "x"], "", "argument --scope: invalid choice: 'x'"),
    "temperature": (
        ["run", "-", "--temperature", "nan"],
        "",
        "argument --temperature: expected a number, 0 or more, got 'nan'",
    ),
    "max tokens": (["run", "-", "--max-tokens", "x"], "", "argument --max-tokens: expected a "),
    "seed": (["run", "-", "--seed", "1.5"], "", "argument --seed: expected a whole number, got"),
    "block size": (["explain", "-", "--block-size", "0"], "", "argument --block-size: expected a"),
    "cache": (["run", "-", "--kv-cache-gib", "0"], "", "argument --kv-cache-gib: expected a"),
    "threads": (["run", "-", "--threads", "0"], "", "argument --threads: expected a whole"),
}  # fmt: skip


@pytest.mark.parametrize("case", USAGE_ERRORS)
def test_usage_errors_are_one_line_and_exit_2(case: str, engine, capsys, monkeypatch) -> None:
    words, stdin, message = USAGE_ERRORS[case]
    data = stdin.encode(errors="surrogateescape")
    for flags in ([], ["--json"]):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        assert cli.main([*words, *flags]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1 and "Traceback" not in err
        if flags:
            error = json.loads(err)["error"]
            assert error["kind"] == "usage" and error["exit_status"] == 2
            assert error["message"].startswith(message)
        else:
            assert err.startswith(f"kvspan: error: {message}")
    assert engine.requests == []


def test_json_errors_have_parts(capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"plus": [{"usr": "a"}]}')))
    assert cli.main(["run", "-", "--json"]) == 2
    error = json.loads(capsys.readouterr().err)["error"]
    assert error["path"] == "$.plus[0].usr" and error["found"] == "'usr'"
    assert error["source"] == "<stdin>" and error["expected"].startswith("one of user, system")


@pytest.mark.parametrize(
    ("raised", "status", "message"),
    [
        (KvspanError("the pool\nis full"), 1, "$: the pool is full"),
        (KvspanError("no", path="$.g.input"), 1, "$.g.input: no"),
        (UsageError("too long", path="$", found="9"), 2, "$: too long; found 9"),
        (ZeroDivisionError("x"), 1, "$: generate failed: ZeroDivisionError: x"),
        (MemoryError(), 1, "$: generate failed: MemoryError: "),
    ],
)
def test_failing_calls(query_file, monkeypatch, capsys, raised, status: int, message: str) -> None:
    def fail(request: GenerateRequest) -> str:
        raise raised

    monkeypatch.setattr(cli_options, "open_engine_with", lambda *_: FakeEngine(answer=fail))
    assert cli.main(["run", query_file]) == status
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"kvspan: error: {query_file}: {message}".rstrip() + "\n")


def test_models_that_cannot_be_opened(query_file, monkeypatch, capsys) -> None:
    def missing(args, model, bars):
        raise UsageError(f"model {model}: not found")

    monkeypatch.setattr(cli_options, "open_engine_with", missing)
    assert cli.main(["run", query_file]) == 2
    assert cli.main(["run", query_file, "--model", "other"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"kvspan: error: {query_file}: $.g.model: model M: not found",
        "kvspan: error: model other: not found",
    ]


def test_missing_torch_names_the_extra(query_file, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert cli.main(["run", query_file]) == 1
    assert capsys.readouterr().err == (
        "kvspan: error: torch is not installed (pip install 'kvspan[local]')\n"
    )


def test_bugs_are_one_line_unless_asked(query_file, monkeypatch, capsys) -> None:
    def bug(*_):
        raise AttributeError("no such thing")

    monkeypatch.setattr(cli_options, "open_engine_with", bug)
    assert cli.main(["run", query_file]) == 1
    line = "kvspan: error: internal error: AttributeError: no such thing"
    line += " (KVSPAN_DEBUG=1 shows where)\n"
    assert capsys.readouterr().err == line
    monkeypatch.setenv("KVSPAN_DEBUG", "1")
    assert cli.main(["run", query_file]) == 1
    err = capsys.readouterr().err
    assert err.startswith("Traceback") and err.endswith(line)


def test_help_and_version(capsys) -> None:
    for words, expected in [
        (["--version"], f"kvspan {kvspan.__version__}\n"),
        (["-h"], "examples:"),
        (["run", "-h"], '"kind": "usage"'),
        (["explain", "-h"], "no weights are loaded"),
    ]:
        with pytest.raises(SystemExit) as caught:
            cli.main(words)
        assert caught.value.code == 0
        assert expected in capsys.readouterr().out
    assert cli.main([]) == 2
    assert "usage: kvspan" in capsys.readouterr().err


def test_as_a_process() -> None:
    done = kvspan_process("--version")
    assert (done.returncode, done.stdout) == (0, f"kvspan {kvspan.__version__}\n")
    done = kvspan_process("run", "-", stdin='{"usr": "a"}')
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("kvspan: error: <stdin>: $.usr: unknown node")
    assert done.stderr.count("\n") == 1


def test_reading_a_query_loads_no_torch(tmp_path: Path) -> None:
    # torch cannot even be imported here, and nobody notices before a model is needed.
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    done = kvspan_process("run", "-", stdin="user: [", PYTHONPATH=str(tmp_path))
    assert done.returncode == 2 and "malformed YAML" in done.stderr
    done = kvspan_process("run", "-h", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0


def test_without_torch_explain_still_shows_the_parts(query_file, monkeypatch, capsys) -> None:
    for name in [name for name in sys.modules if name.startswith("kvspan.engine.loading")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert cli.main(["explain", query_file]) == 0
    out = capsys.readouterr().out
    assert "no token counts: torch is not installed (pip install 'kvspan[local]')" in out
    assert 'span 1  user "a"' in out


INTERRUPTED = """
import asyncio, sys
sys.path.insert(0, {here!r})
from fakes import FakeEngine
from kvspan import cli, cli_options

class Endless(FakeEngine):
    async def generate(self, request, on_text=None):
        if on_text:
            on_text("partial")
        print("running", file=sys.stderr, flush=True)
        try:
            await asyncio.sleep(1000)
        finally:
            print("cancelled", file=sys.stderr, flush=True)

    def close(self):
        print("closed", file=sys.stderr, flush=True)

cli_options.open_engine_with = lambda *_: Endless()
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("flags", [[], ["--stream"], ["--json"]], ids=["plain", "stream", "json"])
def test_ctrl_c_ends_cleanly(query_file, flags: list[str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED.format(here=str(HERE)), "run", query_file, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "running\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ("partial\n" if flags == ["--stream"] else "")
    said = err.splitlines()
    assert said[:2] == ["cancelled", "closed"] and len(said) == 3
    if flags == ["--json"]:
        assert json.loads(said[2])["error"]["kind"] == "interrupted"
    else:
        assert said[2] == "kvspan: interrupted"


FLOOD = """
import sys
sys.path.insert(0, {here!r})
from fakes import FakeEngine
from kvspan import cli, cli_options
cli_options.open_engine_with = lambda *_: FakeEngine(answer=lambda request: "word " * 100000)
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("flags", [[], ["--stream"], ["--json"]], ids=["plain", "stream", "json"])
def test_reader_that_leaves(query_file, flags: list[str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", FLOOD.format(here=str(HERE)), "run", query_file, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(5)
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=60) == 1
    assert err == ""


def test_output_that_the_terminal_cannot_show(query_file) -> None:
    script = FLOOD.replace('"word " * 100000', '"caf\\u00e9 \\U0001f99c"')
    done = subprocess.run(
        [sys.executable, "-c", script.format(here=str(HERE)), "run", query_file, "--quiet"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "caf\\xe9 \\U0001f99c\n", "")


def test_very_deep_and_very_wide_queries(engine, tmp_path, capsys) -> None:
    file = tmp_path / "q.json"
    for query in (deep_query(2000), wide_query(10_000)):
        file.write_text(to_json(query))
        assert cli.main(["run", str(file), "--json"]) == 0
        assert len(json.loads(capsys.readouterr().out)["answers"]) == 1
        assert cli.main(["explain", str(file), "--quiet"]) == 0
        assert len(capsys.readouterr().out.splitlines()) < 400


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A saved random model with a word tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model("llama").save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return str(folder)


WORDS = {
    "g": {
        "model": "M",
        "input": {
            "cross": [
                {"system": "w1 w2 w3"},
                {"plus": [{"user": "w4 w5 w6"}, {"user": " ".join(["w7"] * 20)}]},
                {"user": "w8 w9"},
            ]
        },
        "max_tokens": 4,
        "temperature": 0.0,
    }
}


def test_a_real_engine_end_to_end(tiny, tmp_path, capsys) -> None:
    file = tmp_path / "q.json"
    file.write_text(json.dumps(WORDS))
    started = time.perf_counter()
    words = ["run", str(file), "--model", tiny, "--kv-cache-gib", "0.01", "--threads", "1"]
    assert cli.main([*words, "--json"]) == 0
    out, err = capsys.readouterr()
    obj = json.loads(out)
    (call,) = obj["calls"]
    assert err == ""
    assert call["reuse"]["spans"] == 2 and call["reuse"]["prepared_tokens"] == 48
    assert call["usage"]["completion_tokens"] == 4 and call["finish_reason"] == "length"
    assert 0 < call["timings"]["ttft"] <= call["timings"]["total"] <= obj["seconds"]
    assert obj["seconds"] < time.perf_counter() - started
    assert cli.main([*words, "--stream", "--quiet"]) == 0
    assert capsys.readouterr().out == obj["answers"][0] + "\n"


def test_explain_with_a_tokenizer(tiny, tmp_path, capsys) -> None:
    file = tmp_path / "q.json"
    file.write_text(json.dumps(WORDS))
    assert cli.main(["explain", str(file), "--model", tiny]) == 0
    out = capsys.readouterr().out
    rows = [
        line.split()[:5] for line in out.splitlines() if line.startswith(("  anchor", "  span"))
    ]
    assert rows == [
        ["anchor", "0-15", "16", "0", "0-15"],
        ["span", "1", "16-31", "16", "1"],
        ["span", "2", "32-63", "32", "2-3"],
    ]
    assert "48 of them in 2 movable spans" in out
    assert cli.main(["explain", str(file), "--model", tiny, "--json", "--block-size", "4"]) == 0
    obj = json.loads(capsys.readouterr().out)
    assert obj["rewritten"] == WORDS and obj["rules"] == []
    (layout,) = obj["layouts"]
    assert [part["kind"] for part in layout["parts"]] == ["anchor", "span", "span", "text"]
    assert all(part["tokens"][0] % 4 == 0 for part in layout["parts"])
    assert layout["parts"][-1]["tokens"][1] == layout["num_tokens"]


def test_explain_with_a_model_that_is_not_there(query_file, capsys, tmp_path) -> None:
    nothing = str(tmp_path / "nothing")
    (tmp_path / "nothing").mkdir()
    assert cli.main(["explain", query_file, "--model", nothing]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"kvspan: error: model {nothing}: ")
    assert err.count("\n") == 1


def test_errors_and_warnings_cannot_steer_the_terminal(engine, tmp_path, capsys) -> None:
    file = tmp_path / "q\x1b[2J.json"
    file.write_text(json.dumps({"g": {"model": "M\x9b1m", "input": {"user": 3}, "no\x1b": 1}}))
    assert cli.main(["run", str(file)]) == 2
    assert cli.main(["run", str(file), "--lenient"]) == 2
    assert cli.main(["run", "\x1b]0;title\x07\0"]) == 2
    assert cli.main(["run", str(file), "--frob\x1b"]) == 2
    err = capsys.readouterr().err
    assert err.isascii() and err.replace("\n", "").isprintable()
    assert "q\\x1b[2J.json" in err and "\\x1b]0;title\\x07\\x00" in err


def test_failures_that_do_not_stop_a_run_name_the_file(tmp_path, monkeypatch, capsys) -> None:
    def answer(request: GenerateRequest) -> str:
        if request.path == "$.plus[0]":
            raise KvspanError("the pool is full")
        return "fine"

    monkeypatch.setattr(cli_options, "open_engine_with", lambda *_: FakeEngine(answer=answer))
    file = tmp_path / "two.json"
    file.write_text(json.dumps(TWO))
    assert cli.main(["run", str(file), "--keep-going"]) == 1
    out, err = capsys.readouterr()
    assert out == "fine\n"
    assert f"kvspan: error: {file}: $.plus[0]: the pool is full\n" in err


def test_an_unknown_option_points_to_the_help_of_its_command(capsys) -> None:
    for words, command in ((["run", "-"], "kvspan run"), (["demo"], "kvspan demo"), ([], "kvspan")):
        assert cli.main([*words, "--frob"]) == 2
        line = f"kvspan: error: unrecognized arguments: --frob (see '{command} -h')\n"
        assert capsys.readouterr().err == line
