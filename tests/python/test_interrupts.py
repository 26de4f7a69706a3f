"""Ctrl-C before the command has begun, and while torch is imported; extras that are missing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import kvspan
from kvspan import KvspanError, cli
from kvspan.extras import importing
from kvspan.interrupts import held_interrupts

# Sends SIGINT when the module of this name is about to be imported.
EARLY = """
import os, runpy, sys

class Interrupter:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), 2)

sys.modules.pop({module!r}, None)
sys.meta_path.insert(0, Interrupter())
runpy.run_module("kvspan", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("module", ["kvspan.cli", "signal", "argparse", "kvspan.executor", "yaml"])
@pytest.mark.parametrize("flags", [[], ["--json"]], ids=["plain", "json"])
def test_ctrl_c_during_the_imports_of_the_command(tmp_path, module: str, flags: list[str]) -> None:
    file = tmp_path / "q.yaml"
    file.write_text("user: hi")
    done = subprocess.run(
        [sys.executable, "-c", EARLY.format(module=module), "run", str(file), *flags],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (130, "")
    if flags:
        assert json.loads(done.stderr) == {
            "error": {"kind": "interrupted", "message": "interrupted", "exit_status": 130}
        }
    else:
        assert done.stderr == "kvspan: interrupted\n"


def test_ctrl_c_that_the_shell_has_ignored_stays_ignored() -> None:
    done = subprocess.run(
        [sys.executable, "-c", EARLY.format(module="kvspan.cli"), "--version"],
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert (done.returncode, done.stdout) == (0, f"kvspan {kvspan.__version__}\n")


def test_torch_is_imported_whole_before_ctrl_c_counts(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "import os, signal, sys\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "print('whole', file=sys.stderr, flush=True)\n"
    )
    query = json.dumps({"g": {"model": "M", "input": {"user": "hi"}}})
    for words in (["run", "-"], ["demo"]):
        done = subprocess.run(
            [sys.executable, "-m", "kvspan", *words],
            input=query,
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
        )
        assert done.returncode == 130
        assert done.stderr == "whole\nkvspan: interrupted\n"


def test_held_interrupts_are_delivered_at_the_end() -> None:
    before = signal.getsignal(signal.SIGINT)
    held = False
    with pytest.raises(KeyboardInterrupt), held_interrupts():
        signal.raise_signal(signal.SIGINT)
        held = True
    assert held and signal.getsignal(signal.SIGINT) is before
    with held_interrupts():
        pass
    with pytest.raises(ZeroDivisionError), held_interrupts():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGINT) is before


def test_held_interrupts_on_other_threads_change_nothing() -> None:
    seen = []

    def work() -> None:
        with held_interrupts():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("kvspan.engine.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)


def test_opening_an_engine_without_torch_names_the_extra(without_torch) -> None:
    for model, extra in (("demo", "demo"), ("other", "local")):
        with pytest.raises(KvspanError) as caught:
            kvspan.open_engine(model)
        message = f"torch is not installed (pip install 'kvspan[{extra}]')"
        assert str(caught.value) == message


def test_opening_a_client_without_openai_names_the_extra(monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, "kvspan.engine.openai", raising=False)
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(KvspanError, match=r"openai is not installed \(pip install 'kvspan\[open"):
        kvspan.open_engine("M", kind="openai")


def test_the_demo_without_torch_names_the_extra(without_torch, capsys) -> None:
    assert cli.main(["demo"]) == 1
    message = "kvspan: error: torch is not installed (pip install 'kvspan[demo]')\n"
    assert capsys.readouterr() == ("", message)


def test_what_is_installed_and_broken_is_one_line() -> None:
    with pytest.raises(KvspanError) as caught, importing("local"):
        raise ImportError("libtorch.so: cannot open shared object file", name="torch._C")
    message = (
        "what kvspan[local] installs cannot be imported: libtorch.so: cannot open shared object"
    )
    assert str(caught.value) == f"{message} file"
    with pytest.raises(ImportError, match="cannot import name"), importing("local"):
        from kvspan import not_there  # noqa: F401  a bug of ours is none of the user's business
