"""The host tier's disk level: what survives, what is ignored, and kill -9 at any moment."""

from __future__ import annotations

import logging
import os
import random
import threading
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from kvspan.errors import KvspanError
from kvspan.host import DiskLevel, HostTier

PAGE = 256
MODEL = b"model"


def content(key: bytes, nbytes: int = 1000) -> bytes:
    return random.Random(key).randbytes(nbytes)


def open_tier(
    path: Path, *, pages: int = 16, disk_bytes: int = 1 << 20, read_only: bool = False
) -> HostTier:
    disk = DiskLevel(path, disk_bytes, MODEL, read_only=read_only)
    return HostTier(pages * PAGE, page_bytes=PAGE, disk=disk, max_pending_bytes=1 << 20)


def fetch(tier: HostTier, key: bytes, nbytes: int = 1000) -> bytes | None:
    out = bytearray(nbytes)
    return bytes(out) if tier.get(key, out) else None


def file_of(path: Path, key: bytes) -> Path:
    (file,) = path.glob(f"*/{key.hex()}.kv")
    return file


def stored(path: Path, *keys: bytes) -> None:
    with open_tier(path) as tier:
        for key in keys:
            assert tier.put(key, content(key), cost=5, kind="hidden")


def test_survives_a_restart_and_eviction_from_memory(tmp_path: Path) -> None:
    keys = [b"key %d" % i for i in range(12)]  # three times what memory holds
    with open_tier(tmp_path) as tier:
        for key in keys:
            assert tier.put(key, content(key), cost=1)
            tier.flush()
        assert tier.stats().memory.evictions == 8
        assert all(fetch(tier, key) == content(key) for key in keys)
    with open_tier(tmp_path) as tier:
        assert all(key in tier and tier.nbytes(key) == 1000 for key in keys)
        assert all(fetch(tier, key) == content(key) for key in keys)
        stats = tier.stats()
        assert stats.disk is not None
        assert (stats.disk.entries, stats.disk.hits, stats.misses) == (12, 12, 0)
        assert stats.disk.by_kind == {"span": 12_000}
        assert fetch(tier, keys[-1]) == content(keys[-1])
        assert tier.stats().memory.hits == 1, "what was read from disk is in memory"


def test_read_past_memory_that_has_no_room(tmp_path: Path) -> None:
    stored(tmp_path, b"a")
    with open_tier(tmp_path, pages=4) as tier:
        assert tier.put(b"b", content(b"b"), cost=1) and tier.pin(b"b")
        assert fetch(tier, b"a") == content(b"a")
        assert tier.view(b"a") is None


def test_what_is_still_written_comes_to_disk_at_the_end(tmp_path: Path) -> None:
    """Under its last name: its bytes may change before, and its checksum would be another's."""
    with open_tier(tmp_path) as tier:
        entry = tier.reserve(None, 1000)
        assert entry is not None and entry.publish(b"part", 1.0)
        tier.flush()
        assert not list(tmp_path.glob("*/*.kv"))
        at = 0
        for page in entry.pages:
            page[:] = np.frombuffer(content(b"whole"), np.uint8)[at : at + len(page)]
            at += len(page)
        assert entry.publish(b"whole", 1.0)
        entry.commit()
    with open_tier(tmp_path) as tier:
        assert tier.stored_keys() == [b"whole"]
        assert fetch(tier, b"whole") == content(b"whole")


def test_disk_budget(tmp_path: Path) -> None:
    with open_tier(tmp_path, disk_bytes=5_000) as tier:
        for i in range(10):
            assert tier.put(b"%d" % i, content(b"%d" % i), cost=1)
            tier.flush()
        stats = tier.stats()
        assert stats.disk is not None and stats.disk.bytes <= 5_000
        assert (stats.disk.entries, stats.disk.evictions) == (4, 6)
        assert tier.put(b"wide", bytes(4_000), cost=1)
        tier.flush()
        assert tier.put(b"wider", bytes(4_096), cost=1)
        tier.remove(b"9")
    assert sum(f.stat().st_size for f in tmp_path.glob("*/*")) <= 5_000
    with open_tier(tmp_path, disk_bytes=4_000, pages=20) as tier:
        assert tier.put(b"widest", bytes(5_000), cost=1)
        tier.flush()
        assert tier.stats().refusals == {"disk: too large": 1}
        assert b"9" not in tier


@pytest.mark.parametrize(
    ("reason", "damage"),
    [
        ("torn", lambda data: data[:-1]),
        ("torn", lambda data: data[:50]),
        ("torn", lambda data: b""),
        ("torn", lambda data: data + b"x"),
        ("checksum", lambda data: data[:500] + bytes([data[500] ^ 1]) + data[501:]),
        ("checksum", lambda data: data[:-1] + bytes([data[-1] ^ 1])),
        ("foreign", lambda data: b"#!/bin/sh\n" * 100),
        ("other version", lambda data: data[:8] + b"\7" + data[9:]),
        ("checksum", lambda data: data[:12] + b"\7" + data[13:]),
        ("other model", lambda data: data[:16] + b"other" + data[21:]),
    ],
)
def test_bad_files_are_ignored_and_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, reason: str, damage: object
) -> None:
    stored(tmp_path, b"good", b"bad")
    file = file_of(tmp_path, b"bad")
    file.write_bytes(damage(file.read_bytes()))  # type: ignore[operator]
    with caplog.at_level(logging.WARNING), open_tier(tmp_path) as tier:
        assert fetch(tier, b"bad") is None
        assert fetch(tier, b"good") == content(b"good")
        assert tier.stats().ignored == {reason: 1}
        assert b"bad" not in tier
        removed = reason in ("torn", "checksum")
        assert file.exists() != removed
        assert reason in caplog.text
        if removed:
            assert tier.put(b"bad", content(b"bad"), cost=1), "it may be stored again"
    with open_tier(tmp_path) as tier:
        assert fetch(tier, b"bad") == (content(b"bad") if removed else None)
        if reason.startswith("other"):  # the file's place may be taken
            assert tier.put(b"bad", content(b"bad"), cost=1)
            tier.flush()
            disk = tier.stats().disk
            assert disk is not None and (disk.entries, disk.others, disk.others_bytes) == (2, 0, 0)
    if reason.startswith("other"):
        with open_tier(tmp_path) as tier:
            assert fetch(tier, b"bad") == content(b"bad") and not tier.stats().ignored


def test_files_of_other_models_count_and_go_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One folder, one budget: what older models and weights left makes room, the oldest first."""
    keys = [b"%d" % i for i in range(4)]
    stored(tmp_path, *keys)
    mine = tmp_path / "aa"
    mine.mkdir()
    (mine / "notes.txt").write_bytes(bytes(50_000))
    size = file_of(tmp_path, b"0").stat().st_size
    for age, key in enumerate(keys):
        os.utime(file_of(tmp_path, key), ns=(10**9 * (100 - age),) * 2)  # the last is the oldest

    def left() -> list[bytes]:
        return [key for key in keys if list(tmp_path.glob(f"*/{key.hex()}.kv"))]

    def used() -> int:
        return sum(file.stat().st_size for file in tmp_path.glob("*/*.kv"))

    budget = 5 * size + 100
    with caplog.at_level(logging.WARNING):
        disk = DiskLevel(tmp_path, budget, b"another model")
    assert "files that are not used: 1 foreign, 4 other model; what other models" in caplog.text
    with HostTier(16 * PAGE, page_bytes=PAGE, disk=disk) as tier:
        for count, expected in enumerate([keys, keys[:3], keys[:2], keys[:1], [], [], []]):
            assert tier.put(b"new%d" % count, content(b"new%d" % count), cost=1)
            tier.flush()
            assert left() == expected
            stats = tier.stats().disk
            assert stats is not None and stats.others == len(expected)
            assert used() == tier.held_bytes()[1] == stats.bytes + stats.others_bytes <= budget
        assert (stats.others_removed, stats.entries, stats.evictions) == (4, 5, 2)
        assert fetch(tier, b"new6") == content(b"new6")
    with closing(DiskLevel(tmp_path, budget, MODEL, read_only=True)) as reader:
        assert reader.stats().others == 5, "who may not write removes nothing"
    with closing(DiskLevel(tmp_path, 2 * size + 20, MODEL)) as disk:
        assert disk.stats().others == 2, "a smaller budget holds from the start"
        assert used() == disk.held_bytes() <= 2 * size + 20
    assert (mine / "notes.txt").exists()


def test_a_file_under_another_name(tmp_path: Path) -> None:
    stored(tmp_path, b"a")
    file = file_of(tmp_path, b"a")
    file.rename(file.with_name(b"b".hex() + ".kv"))
    with open_tier(tmp_path) as tier:
        assert b"a" not in tier and b"b" not in tier
        assert tier.stats().ignored == {"foreign": 1}
        assert tier.counts()[1]["file: foreign"] == 1


def test_damaged_while_open(tmp_path: Path) -> None:
    stored(tmp_path, b"a")
    with open_tier(tmp_path) as tier:
        file = file_of(tmp_path, b"a")
        os.truncate(file, 300)
        assert fetch(tier, b"a") is None and tier.stats().ignored == {"torn": 1}
        assert tier.put(b"all", bytes(16 * PAGE), cost=1), "no memory is lost"


def test_one_owner_and_readers(tmp_path: Path) -> None:
    stored(tmp_path, b"a")
    with open_tier(tmp_path) as owner, open_tier(tmp_path, read_only=True) as reader:
        found = rf"in use; expected a folder that no .*; found process {os.getpid()} on .*; stop"
        with pytest.raises(KvspanError, match=found):
            DiskLevel(tmp_path, 1, MODEL)
        assert fetch(reader, b"a") == content(b"a")
        owner.put(b"b", content(b"b"), cost=1)
        owner.flush()
        assert fetch(reader, b"b") == content(b"b")
        assert reader.put(b"c", content(b"c"), cost=1)
        reader.remove(b"a")
        assert fetch(owner, b"a") == content(b"a") and b"c" not in owner
    with pytest.raises(KvspanError, match=r"cannot use .* as host tier: No such file"):
        DiskLevel(tmp_path / "none", 1, MODEL, read_only=True)


def test_a_full_disk_is_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with open_tier(tmp_path) as tier:
        monkeypatch.setattr(os, "fsync", full)
        assert tier.put(b"a", content(b"a"), cost=1)
        tier.flush()
        monkeypatch.undo()
        assert tier.stats().refusals == {"disk: ENOSPC": 1}
        assert fetch(tier, b"a") == content(b"a")
        assert not list(tmp_path.glob("*/*")), "no temporary file stays"


def test_removed_while_it_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, go_on = threading.Event(), threading.Event()

    def slow(fd: int) -> None:
        started.set()
        assert go_on.wait(60)

    monkeypatch.setattr(os, "fsync", slow)
    with open_tier(tmp_path) as tier:
        tier.put(b"a", content(b"a"), cost=1)
        assert started.wait(60)
        tier.remove(b"a")
        go_on.set()
        tier.flush()
    monkeypatch.undo()
    with open_tier(tmp_path) as tier:
        assert b"a" not in tier


def test_the_disk_may_lag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(os, "fsync", lambda fd: go_on.wait(60))
    disk = DiskLevel(tmp_path, 1 << 20, MODEL)
    with HostTier(16 * PAGE, page_bytes=PAGE, disk=disk, max_pending_bytes=1500) as tier:
        assert tier.put(b"a", content(b"a"), cost=1) and tier.put(b"b", content(b"b"), cost=1)
        assert tier.stats().refusals == {"disk: too much waits": 1}
        go_on.set()
    with open_tier(tmp_path) as tier:
        assert b"a" in tier and b"b" not in tier


def test_threads_load_an_entry_once(tmp_path: Path) -> None:
    stored(tmp_path, b"a")
    answers: list[bytes | None] = []
    with open_tier(tmp_path, pages=4) as tier:
        threads = [
            threading.Thread(target=lambda: answers.append(fetch(tier, b"a"))) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == [content(b"a")] * 8
        stats = tier.stats()
        assert stats.disk is not None
        assert (stats.disk.hits, stats.memory.hits) == (1, 7)


def test_files_are_removed_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that hangs holds up neither a removal nor, for long, who clears all."""
    go_on = threading.Event()
    unlink = Path.unlink

    def slow(path: Path) -> None:
        assert threading.current_thread() is not threading.main_thread() and go_on.wait(60)
        unlink(path)

    stored(tmp_path, b"a", b"b")
    monkeypatch.setattr("kvspan.host.tier._CLEAR_S", 0.01)
    with open_tier(tmp_path) as tier:
        monkeypatch.setattr(Path, "unlink", slow)
        tier.remove(b"a")
        assert b"a" not in tier and b"b" in tier
        assert tier.put(b"a", content(b"new"), cost=1), "it may be stored again at once"
        with caplog.at_level(logging.WARNING):
            tier.clear()
        assert "files were not removed in 0.01 s" in caplog.text and not tier.stored_keys()
        assert len(list(tmp_path.glob("*/*.kv"))) == 2
        assert tier.put(b"b", content(b"other"), cost=1)
        go_on.set()
        tier.flush()
        monkeypatch.undo()
        (left,) = tmp_path.glob("*/*.kv")
        assert left == file_of(tmp_path, b"b") and fetch(tier, b"b") == content(b"other")
        assert tier.held_bytes()[1] == left.stat().st_size
        tier.clear()
        assert not list(tmp_path.glob("*/*.kv")), "where the disk answers, they are gone at once"
