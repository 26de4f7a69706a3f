"""What a server kept on disk is there for the next one; what is broken there is not used."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hybrid_checks import BASE, ROUNDING, drop_states, tokens
from hybrid_served import HybridServed, difference, save_hybrid
from safetensors.torch import load_file, save_file
from vllm.config import CompilationMode
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from kvspan.errors import UsageError
from kvspan.host import DiskLevel
from kvspan.host.pages import anonymous_memory
from kvspan.vllm.hybrid import support

TRAINED = Path(__file__).resolve().parents[1] / "fixtures" / "tiny_hybrid"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hybrid("qwen3_5", tmp_path_factory.mktemp("model"))


def serve(folder: Path, disk: Path) -> HybridServed:
    extra = {"disk": str(disk), "disk_gib": 1, "host_gib": 0.25, "decay": True}
    return HybridServed(folder, "none", extra=extra)


def test_next_server_finds_what_is_whole(folder: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    prompt = BASE[:700] + tokens(2, 60)
    served = serve(folder, disk)
    served.ask([BASE[:800]], 1)
    (full,) = served.ask([prompt], replay="off")
    config, caches = served.llm.llm_engine.vllm_config, served.connector._kv_cache_config
    served.close()
    files = sorted(disk.rglob("*.kv"))
    assert len(files) > 4
    for mode in (CompilationMode.NONE, CompilationMode.VLLM_COMPILE):
        config.compilation_config.mode = mode
        given = support.options(config)
        with closing(support.make_store(config, caches, given, anonymous_memory).tier) as tier:
            # What other kernels have rounded is not exact.
            assert bool(tier.stored_keys()) == (mode == CompilationMode.NONE)

    served = serve(folder, disk)
    (answer,) = served.ask([prompt])
    assert answer.cached == 759, "the whole prompt but its last token"
    (other,) = served.ask([BASE[:500] + tokens(3, 60)], replay="bounded:1e-3")
    assert other.cached == 500
    assert difference(answer, full) < ROUNDING
    served.close()

    for file in files:
        held = bytearray(file.read_bytes())
        held[len(held) // 2] ^= 1
        file.write_bytes(held)
    served = serve(folder, disk)
    (answer,) = served.ask([prompt])
    assert torch.isfinite(torch.tensor(list(answer.logprobs.values()))).all()
    assert answer.cached == 0
    assert answer.tokens == full.tokens
    served.close()


def test_next_server_finds_a_group_of_its_own(tmp_path: Path) -> None:
    """What a restore within a bound left of the layers that hardly forget."""
    text = [1 + i * i % 200 for i in range(1000)]
    served = serve(TRAINED, tmp_path)
    served.ask([text], 1)
    drop_states(served)
    (answer,) = served.ask([[*text[:700], 3, 5]], 1, replay="bounded:1e-3")
    served.close()
    before = answer.replay["groups"][0]
    served = serve(TRAINED, tmp_path)
    after = []
    for _ in range(2):
        (answer,) = served.ask([[*text[:800], 3, 5]], 1, replay="bounded:1e-3")
        assert answer.cached == 800 and not answer.replay["exact"]
        after.append(answer.replay["groups"][0])
        drop_states(served)  # as if they were evicted
    served.close()
    said = [(group["replayed_tokens"], group["start"]) for group in (before, *after)]
    assert said == [(700, "zero"), (100, "part"), (800, "zero")]


def test_other_weights_under_the_same_name(tmp_path: Path) -> None:
    """A folder that gets other weights: what the old ones computed is not used."""
    folder, disk = save_hybrid("qwen3_5", tmp_path / "model"), tmp_path / "disk"
    served = serve(folder, disk)
    served.ask([BASE[:300]], 1)
    served.close()
    weights = folder / "model.safetensors"
    held = load_file(weights)
    held = {name: tensor * 1.5 if "embed" in name else tensor for name, tensor in held.items()}
    save_file(held, weights, {"format": "pt"})
    served = serve(folder, disk)
    (answer,) = served.ask([BASE[:300]])
    assert answer.cached == 0
    assert served.side.store.tier.stats().ignored["other model"] > 0
    served.close()


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Errors in the log of servers that end before they read a model's weights."""
    said: list[str] = []
    monkeypatch.setattr(support.logger, "error", lambda text, *args: said.append(text % args))

    def read(*args: object) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr(DefaultModelLoader, "load_weights", read)
    return said


def test_folder_of_another_server(folder: Path, tmp_path: Path, said: list[str]) -> None:
    with (
        closing(DiskLevel(tmp_path, 1 << 20, b"another server's")),
        pytest.raises(
            UsageError,
            match=r"extra_config\.disk: .* is in use; expected a folder .*; found process \d+ on ",
        ),
    ):
        serve(folder, tmp_path)
    assert len(said) == 1 and said[0].startswith("kvspan: kv_connector_extra_config.disk: ")


@pytest.mark.parametrize(
    ("extra", "line"),
    [
        ({"host_gb": 1}, "host_gb: unknown setting (did you mean host_gib?); expected decay, "),
        ({"steer": True}, "steer: is for models with attention only, this is one of hybrid models"),
        ({"state_every": -1}, "state_every is out of range; expected a whole number, 1 or more; "),
    ],
    ids=str,
)
def test_settings_are_checked_before_weights_are_read(
    extra: dict[str, object], line: str, folder: Path, said: list[str]
) -> None:
    line = f"kv_connector_extra_config.{line}"
    with pytest.raises(UsageError, match=re.escape(line)):
        HybridServed(folder, "none", extra=extra)
    assert len(said) == 1 and said[0].startswith(f"kvspan: {line}")
