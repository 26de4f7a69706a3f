"""Settings of the host tier for spans, and the files of one that is on disk."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from served import BLOCK, Served, scheduler_of
from span_hosted import SMALL, connector, seen_as, tier_of
from test_spans import TOLERANCE, make
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.lora.request import LoRARequest

from kvspan.errors import UsageError
from kvspan.vllm.connector import KvspanConnector, logger
from kvspan.vllm.span_setup import HostSettings, flops, lora_name, open_tier


def test_what_cannot_be_is_said(hosted: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    config, live = hosted.llm.llm_engine.vllm_config, scheduler_of(hosted).connector
    monkeypatch.setattr(config.cache_config, "enable_prefix_caching", False)
    said: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda text, *values: said.append(text % values))
    for role in KVConnectorRole:
        off = KvspanConnector(config, role, live._kv_cache_config)
        assert off._host is None and off._host_settings is None and not off._reason
    assert len(said) == 1 and "nothing on the host (prefix caching is off" in said[0]
    caches = {str(i): cache for i, cache in enumerate(tier_of()._caches)}
    with pytest.raises(UsageError, match=r"host_gib: no room for one block; expected 4.58e-05 or"):
        open_tier(config, HostSettings(1000, "", 0), caches, "cpu_vec", 0)
    with pytest.raises(UsageError, match=r"host_gib: more memory than is free; expected .* or le"):
        open_tier(config, HostSettings(2**60, "", 0), caches, "cpu_vec", 0)


def test_long_spans_are_worth_more_for_each_byte(hosted: Served) -> None:
    config = hosted.llm.llm_engine.vllm_config.model_config.hf_text_config
    each = [flops(config, at, count) / count for at, count in ((0, 32), (64, 32), (64, 4096))]
    # Projections of 64 x 128, 64 x 64 twice and 128 x 64, three of 64 x 96, twice each, 3 layers.
    assert each[0] == 3 * (2 * (64 * 384 + 3 * 64 * 96) + 4 * 128 * 16)
    assert each[0] < each[1] < each[2]


def test_loras_on_disk_are_told_apart(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_model.safetensors").write_bytes(name.encode())
    one, two = (LoRARequest("l", 1, str(tmp_path / name)) for name in ("a", "b"))
    assert lora_name(one, for_disk=False) == lora_name(two, for_disk=False) == "1:l"
    first = lora_name(one, for_disk=True)
    assert first != lora_name(two, for_disk=True) and lora_name(None, for_disk=True) == ""
    (tmp_path / "a" / "adapter_model.safetensors").write_bytes(b"other weights")
    assert lora_name(one, for_disk=True) != first


def test_a_restart_finds_what_is_on_disk(
    llama: Path, tmp_path: Path, counted: Counter[str]
) -> None:
    """All but a file in which a bit has changed, and nothing of other weights."""
    on_disk = connector(disk=str(tmp_path), disk_gib=0.25)
    layout, other = make([2, 3], seed=213), make([3, 2], seed=213, question=1)
    served = Served(llama, connector=on_disk, **SMALL)
    served.ask([layout])
    *kept, broken = (piece.key.hex() for piece in seen_as(served, layout).pieces)
    served.close()
    files = {file.stem: file for file in tmp_path.glob("*/*.kv")}
    assert files.keys() == {*kept, broken}
    data = bytearray(files[broken].read_bytes())
    data[-7] ^= 4
    files[broken].write_bytes(data)
    served = Served(llama, connector=on_disk, **SMALL)
    (output,) = served.ask([other], prepare=False, timeout_s=0.5)
    assert served.error(other, output) <= TOLERANCE
    audit = served.audit(output)
    assert (audit["host_tokens"], audit["computed_tokens"]) == (4 * BLOCK, 2 * BLOCK)
    assert counted["span_tokens_prepared"] == (2 + 4 + 2 + 4) * BLOCK  # at first, and now
    assert counted["host_loads"] == 2
    assert counted["host_load_failures"] == counted["file: checksum"] == 1
    config, tier = served.llm.llm_engine.vllm_config, tier_of()
    caches = {str(i): cache for i, cache in enumerate(tier._caches)}
    served.close()
    settings = HostSettings(1 << 24, str(tmp_path), 1 << 24)
    with closing(open_tier(config, settings, caches, "cpu_vec", 0)) as same:
        assert len(same.tier.stored_keys()) >= 2
    weights = llama / "model.safetensors"
    os.utime(weights, ns=(0, weights.stat().st_mtime_ns + 10**9))
    for told in ((config, "cpu_vec", 0), (config, "cpu_vec", 1), (config, "token_rows", 0)):
        with closing(open_tier(told[0], settings, caches, *told[1:])) as another:
            assert not another.tier.stored_keys()
