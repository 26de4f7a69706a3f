"""The command where something is wrong: one line, the right exit status, nothing on stdout."""

from __future__ import annotations

import io
import json
import sys

import pytest

from cli_queries import QUERY, TWO
from fakes import FakeEngine
from kvspan import KvspanError, UsageError, cli, cli_options
from kvspan.engine import GenerateRequest

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
    "huge blocks": (
        ["explain", "-", "--block-size", "1" + "0" * 20],
        "",
        "argument --block-size: expected a whole number, 1 to 65536, got '1000",
    ),
    "many threads": (
        ["run", "-", "--threads", "1000000000"],
        "",
        "argument --threads: expected a whole number, 1 to 1024, got '1000000000'",
    ),
    "many tokens": (
        ["run", "-", "--max-tokens", "1" + "0" * 20],
        "",
        "argument --max-tokens: expected a whole number, 0 to 2147483647, got '1000",
    ),
    "many calls": (
        ["run", "-", "--concurrency", "1" + "0" * 20],
        "",
        "argument --concurrency: expected a whole number, 1 to 2147483647, got '1000",
    ),
    "port": (["serve", "--port", "70000"], "", "argument --port: expected a whole number, 0 to 65"),
    "body": (
        ["serve", "--max-body-mib", "1e308", "--host", "256.256.256.256"],
        "",
        "cannot listen on 256.256.256.256: ",
    ),
    "nameless page": (
        ["explain", "-", "--html", ""], json.dumps(QUERY), "the page has no name",
    ),
    "nameless output": (["bulk", __file__, "-o", ""], "", "the output has no name; expected a f"),
    "nameless corpus": (["index", ""], "", "the corpus has no name; expected a file or a folder"),
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
