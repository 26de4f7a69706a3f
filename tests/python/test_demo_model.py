"""The cached demo model: whole or not at all, checked on every start. Small fakes stand in."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvspan.demo import model as demo_model
from kvspan.demo.model import PART_PACKAGES, SUMS_PACKAGE, demo_model_path, is_demo_model
from kvspan.engine import Progress
from kvspan.errors import KvspanError, UsageError

PARTS = [bytes([i]) * 1000 for i in range(4)]
NAME = "tiny.gguf"


def _silent(phase: str, done: int, total: int) -> None:
    pass


def _convert(gguf: Path, target: Path, report: Progress) -> None:
    assert gguf.read_bytes() == b"".join(PARTS)
    (target / "config.json").write_text("{}")
    (target / "model.safetensors").write_bytes(gguf.read_bytes()[::-1])


def _make_packages(site: Path, digest: str) -> None:
    for i, package in enumerate((SUMS_PACKAGE, *PART_PACKAGES)):
        data = site / package / "data"
        data.mkdir(parents=True)
        (site / package / "__init__.py").touch()
        if i == 0:
            (data / "SHA256SUMS").write_text(f"{digest}  {NAME}\n")
        else:
            (data / f"{NAME}.part{i - 1:02d}").write_bytes(PARTS[i - 1])


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Fake packages first on the path, a fake conversion, and an empty cache at ``cache``."""
    site = tmp_path / "site"
    _make_packages(site, hashlib.sha256(b"".join(PARTS)).hexdigest())
    monkeypatch.syspath_prepend(str(site))
    packages = (SUMS_PACKAGE, *PART_PACKAGES)
    real = {package: sys.modules.pop(package) for package in packages if package in sys.modules}
    monkeypatch.setenv("KVSPAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(demo_model, "_convert", _convert)
    yield site
    for package in packages:  # later tests must meet the real ones again
        sys.modules.pop(package, None)
    sys.modules.update(real)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def _folders(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if not path.name.endswith(".lock"))


def test_names() -> None:
    assert is_demo_model("demo")
    assert is_demo_model("gemma-3-270m")
    assert is_demo_model("local/gemma-3-270m")
    assert not is_demo_model("google/gemma-3-270m")


def test_first_start_converts_and_second_does_not(
    site: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    phases: list[tuple[str, int, int]] = []
    folder = demo_model_path(lambda *report: phases.append(report))
    assert (folder / "model.safetensors").stat().st_size == 4000
    assert phases[-1][1:] == (4, 4)
    assert _folders(cache) == [folder.name]

    def fail(*_: object) -> None:
        raise AssertionError("converted again")

    monkeypatch.setattr(demo_model, "_convert", fail)
    assert demo_model_path(_silent) == folder


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", demo_model.MANIFEST])
@pytest.mark.parametrize("damage", [Path.unlink, _truncate, _flip], ids=["gone", "cut", "flipped"])
def test_damaged_cache_is_made_again(
    site: Path, cache: Path, name: str, damage: Callable[[Path], None]
) -> None:
    folder = demo_model_path(_silent)
    damage(folder / name)
    assert demo_model_path(_silent) == folder
    assert (folder / "model.safetensors").read_bytes() == b"".join(PARTS)[::-1]
    assert _folders(cache) == [folder.name]


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt, ""),
        (OSError(28, "No space left on device"), KvspanError, "No space left on device"),
        (RuntimeError("I/O error"), KvspanError, "converting it failed: RuntimeError: I/O error"),
        (ImportError("gguf"), UsageError, "pip install 'kvspan[demo]'"),
    ],
    ids=["ctrl-c", "disk full", "any other", "gguf not installed"],
)
def test_a_conversion_that_fails_leaves_nothing(
    site: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    raised: type[BaseException],
    message: str,
) -> None:
    def convert(gguf: Path, target: Path, report: Progress) -> None:
        (target / "model.safetensors").write_bytes(b"half")
        raise error

    monkeypatch.setattr(demo_model, "_convert", convert)
    with pytest.raises(raised) as caught:
        demo_model_path(_silent)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert _folders(cache) == []


def _convert_forever(gguf: Path, target: Path, report: Progress) -> None:
    (target / "model.safetensors").write_bytes(b"half")
    time.sleep(600)


def _start_forever() -> None:
    demo_model._convert = _convert_forever
    demo_model_path(_silent)


def test_a_killed_conversion_is_cleared_away_by_the_next(site: Path, cache: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_start_forever)
    process.start()
    deadline = time.monotonic() + 30
    while not list(cache.glob(".*/checkpoint/model.safetensors")):
        assert time.monotonic() < deadline and process.is_alive()
        time.sleep(0.01)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert len(_folders(cache)) == 1  # what it left behind
    folder = demo_model_path(_silent)
    assert _folders(cache) == [folder.name]


def _convert_slowly(gguf: Path, target: Path, report: Progress) -> None:
    _convert(gguf, target, report)
    (target / f"by-{os.getpid()}").touch()
    time.sleep(0.3)


def _start_slowly() -> None:
    demo_model._convert = _convert_slowly
    demo_model_path(_silent)


def test_concurrent_first_starts_convert_once(site: Path, cache: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_start_slowly) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * 4
    (folder,) = cache.glob("gemma*-v*[0-9]")
    assert len(list(folder.glob("by-*"))) == 1
    assert _folders(cache) == [folder.name]


def test_without_locks_the_first_to_finish_wins(
    site: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    def convert(gguf: Path, target: Path, report: Progress) -> None:
        monkeypatch.setattr(demo_model, "_convert", _convert)
        first.append(demo_model_path(_silent))  # another process, while we work
        (first[0] / "of-the-first").touch()
        _convert(gguf, target, report)

    first: list[Path] = []
    monkeypatch.setattr(demo_model.fcntl, "flock", no_locks)
    monkeypatch.setattr(demo_model, "_convert", convert)
    folder = demo_model_path(_silent)
    assert folder == first[0]
    assert (folder / "of-the-first").exists()
    assert _folders(cache) == [folder.name]


def test_damaged_parts(site: Path, cache: Path) -> None:
    _flip(site / PART_PACKAGES[2] / "data" / f"{NAME}.part02")
    with pytest.raises(KvspanError, match=r"damaged: expected SHA-256 .*--force-reinstall"):
        demo_model_path(_silent)
    assert _folders(cache) == []


@pytest.mark.parametrize("package", [SUMS_PACKAGE, PART_PACKAGES[3]])
def test_missing_package(site: Path, package: str) -> None:
    for path in (site / package / "data").iterdir():
        path.unlink()
    with pytest.raises(UsageError, match=r"pip install 'kvspan\[demo\]'"):
        demo_model_path(_silent)


def test_no_packages_at_all(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "SUMS_PACKAGE", "kvspan_no_such_package")
    with pytest.raises(UsageError, match=r"pip install 'kvspan\[demo\]'"):
        demo_model_path(_silent)


def test_disk_too_full_to_begin(site: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "BYTES_NEEDED", 2**62)
    with pytest.raises(KvspanError, match=r"needs .* MiB in the cache folder .* are free"):
        demo_model_path(_silent)
    assert _folders(cache) == []


def test_cache_folder_is_a_file(site: Path, cache: Path) -> None:
    cache.write_text("in the way")
    with pytest.raises(KvspanError, match=r"cannot write .* KVSPAN_CACHE"):
        demo_model_path(_silent)
    assert cache.read_text() == "in the way"


def test_cache_folder_of_nobody(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSPAN_CACHE", "~no-such-user/kvspan")
    with pytest.raises(UsageError, match=r"no home directory .* found ~no-such-user/kvspan"):
        demo_model_path(_silent)
