"""What the host tiers of span and hybrid connectors have in common: memory, and whose files
a folder holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from kvspan.errors import KvspanError, UsageError
from kvspan.host import DiskLevel
from kvspan.vllm.settings import WHERE

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def open_disk(path: str | Path, nbytes: int, fingerprint: bytes) -> DiskLevel:
    """The disk level of the setting `disk`; UsageError where the folder cannot be used."""
    try:
        return DiskLevel(path, nbytes, fingerprint)
    except KvspanError as error:
        raise UsageError(f"{WHERE}.disk: {error}") from None


def check_room(host_bytes: int, least: int, what: str) -> None:
    """UsageError where the setting `host_gib` leaves no room for one entry, or is not to be had.

    The memory is taken at the start, so that no request waits for it: the system ends a process
    that asks for more than there is.
    """
    free = psutil.virtual_memory().available
    if host_bytes > free:
        raise UsageError(
            f"{WHERE}.host_gib: more memory than is free",
            expected=f"{free / 2**30:.3g} or less",
            found=f"{host_bytes / 2**30:.3g}",
        )
    if host_bytes < least:
        raise UsageError(
            f"{WHERE}.host_gib: no room for {what}",
            expected=f"{least / 2**30:.3g} or more",
            found=f"{host_bytes / 2**30:.3g}",
        )


def weights(vllm_config: VllmConfig) -> str:
    """Changes with the weights that a model's name stands for: a folder may get others."""
    model = vllm_config.model_config
    commit = getattr(model.hf_config, "_commit_hash", None)
    load = str(vllm_config.load_config.load_format)
    seed = model.seed if "dummy" in load.lower() else None
    return repr((weight_files(model.model), commit, load, model.quantization, seed))


def weight_files(path: str) -> list[tuple[str, int, int]]:
    """Name, size and time of the files of weights in a folder, or of one file."""
    place = Path(path)
    found = sorted(place.iterdir()) if place.is_dir() else [place]
    stats = [(f.name, f.stat()) for f in found if f.suffix in _WEIGHTS and f.is_file()]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
