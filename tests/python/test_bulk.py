"""Bulk runs: order of results, locality, resuming after a kill, errors, bounded memory."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import FakeEngine, digest_answer, prompt_text
from kvspan import KvspanError, UsageError, bulk, cli, cli_options, cross, g, plus
from kvspan.bulk import run_bulk
from kvspan.query.bulk_order import fragment_keys, greedy_order
from kvspan.query.write import to_json, to_obj

SLOW = """
import asyncio, sys
sys.path.insert(0, {tests!r})
from fakes import FakeEngine, digest_answer
from kvspan.bulk import run_bulk

log, most = open(sys.argv[3], "a"), int(sys.argv[4])

class Slow(FakeEngine):
    async def generate(self, request, on_text=None):
        await asyncio.sleep(0.02)
        if len(self.requests) >= most:  # however late the kill comes, it meets a run
            await asyncio.sleep(1000)
        log.write(str(request.seed) + chr(10))
        log.flush()
        return await super().generate(request)

run_bulk(sys.argv[1], sys.argv[2], engine=Slow(), window=16, parallel=3)
"""


def write_queries(path: Path, count: int, seed: int = 0) -> Path:
    """Questions over four of twelve passages each."""
    rng = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for n in range(count):
            passages = rng.sample(range(12), 4)
            query = g("M", cross("s", plus(f"passage {p}" for p in passages), f"question {n}"))
            file.write(to_json(query) + "\n")
    return path


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_results_come_in_the_order_of_the_queries(tmp_path) -> None:
    source = write_queries(tmp_path / "in.jsonl", 50)
    engine = FakeEngine(lambda request: request.prompt[-1].text)
    steps: list[tuple[int, int]] = []
    options = {"window": 20, "on_progress": lambda *step: steps.append(step)}
    summary = run_bulk(source, tmp_path / "out.jsonl", engine=engine, **options)
    results = read(tmp_path / "out.jsonl")
    assert [r["index"] for r in results] == list(range(50))
    assert [r["answers"] for r in results] == [[f"question {n}"] for n in range(50)]
    assert (summary.queries, summary.failed, summary.resumed) == (50, 0, 0)
    assert summary.prompt_tokens == sum(r["usage"]["prompt_tokens"] for r in results)
    assert steps == [(n, 50) for n in range(51)]
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "out.jsonl"]
    ran = [r.prompt[-1].text for r in engine.requests]
    assert ran != [f"question {n}" for n in range(50)]  # they did not run in that order


@pytest.mark.parametrize("settings", [{"reorder": False}, {"window": 3}, {"parallel": 1}], ids=str)
def test_no_order_changes_an_answer(tmp_path, settings) -> None:
    source = write_queries(tmp_path / "in.jsonl", 30)
    run_bulk(source, tmp_path / "a.jsonl", engine=FakeEngine())
    run_bulk(source, tmp_path / "b.jsonl", engine=FakeEngine(), **settings)
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()


def test_every_query_has_a_seed_of_its_own(tmp_path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text((to_json(g("M", "same")) + "\n") * 3)
    answers = []
    for seed in (0, 0, 1):
        run_bulk(source, tmp_path / "out.jsonl", engine=FakeEngine(), seed=seed, overwrite=True)
        answers.append([r["answers"][0] for r in read(tmp_path / "out.jsonl")])
    assert answers[0] == answers[1] != answers[2]
    assert len(set(answers[0])) == 3


@pytest.mark.parametrize("after", [1, 7, 16, 17, 40])
def test_a_killed_run_goes_on_without_redoing_or_losing_any(tmp_path, after: int) -> None:
    source = write_queries(tmp_path / "in.jsonl", 48)
    out, log = tmp_path / "out.jsonl", tmp_path / "log"
    script = SLOW.format(tests=str(Path(__file__).parent))
    words = [sys.executable, "-c", script, str(source), str(out), str(log)]
    process = subprocess.Popen([*words, str(after + 5)])
    while process.poll() is None and (not log.exists() or len(log.read_text().split()) < after):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    journal = (tmp_path / "out.jsonl.journal").read_bytes().split(b"\n")[1:-1]
    finished = {json.loads(line)["index"] for line in journal}
    if out.exists():
        finished |= {json.loads(line)["index"] for line in out.read_bytes().split(b"\n")[:-1]}
    assert len(finished) >= after - 3 - 1  # all but what was running

    log.unlink()
    subprocess.run([*words, "1000"], check=True)
    seeds = set(map(int, log.read_text().split()))
    seed_of = {bulk.derive_seed(bulk.derive_seed(0, f"bulk[{n}]"), "$"): n for n in range(48)}
    assert {seed_of[seed] for seed in seeds} == set(range(48)) - finished
    run_bulk(source, tmp_path / "whole.jsonl", engine=FakeEngine())
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert not (tmp_path / "out.jsonl.journal").exists()


def test_failures_of_the_part_before_a_kill_count(tmp_path) -> None:
    source = write_queries(tmp_path / "in.jsonl", 4)
    lines = source.read_text().splitlines()
    source.write_text("\n".join(["{}", *lines[:2], "[]", *lines[2:]]) + "\n")
    out, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    assert run_bulk(source, whole, engine=FakeEngine()).failed == 2
    results = whole.read_text().splitlines(keepends=True)
    _, digest = bulk._survey(source, {"seed": 0, "lenient": False})
    out.write_text("".join(results[:2]))
    (tmp_path / "out.jsonl.journal").write_text(f'{{"run": "{digest}"}}\n{results[3]}')
    summary = run_bulk(source, out, engine=FakeEngine())
    assert (summary.queries, summary.resumed, summary.failed) == (6, 3, 2)
    assert out.read_text() == whole.read_text()


@given(st.data())
def test_a_run_cut_at_any_byte_goes_on(tmp_path_factory, data) -> None:
    """The files as a kill may leave them: cut anywhere, or the last window in both of them."""
    folder = tmp_path_factory.mktemp("cut")
    source = write_queries(folder / "in.jsonl", 9)
    run_bulk(source, folder / "whole.jsonl", engine=FakeEngine())
    whole = (folder / "whole.jsonl").read_bytes()
    lines = whole.splitlines(keepends=True)
    _, digest = bulk._survey(source, {"seed": 0, "lenient": False})
    windows = data.draw(st.integers(0, 3)) * 3
    kept = data.draw(st.lists(st.sampled_from(range(9)), unique=True))
    kept = [n for n in kept if max(windows - 3, 0) <= n < windows + 3]
    journal = b'{"run": "%s"}\n' % digest.encode() + b"".join(lines[n] for n in kept)
    journal += lines[8][: data.draw(st.integers(0, 30))]
    (folder / "out.jsonl.journal").write_bytes(journal)
    extra = b"" if windows == 9 else lines[windows][: data.draw(st.integers(0, 30))]
    (folder / "out.jsonl").write_bytes(b"".join(lines[:windows]) + extra)
    engine = FakeEngine()
    summary = run_bulk(source, folder / "out.jsonl", engine=engine, window=3)
    assert (folder / "out.jsonl").read_bytes() == whole
    assert summary.resumed == windows + sum(n >= windows for n in kept) == 9 - len(engine.requests)


def test_errors_are_results(tmp_path) -> None:
    def answer(request) -> str:
        if "bad luck" in prompt_text(request.prompt):
            raise KvspanError("out of luck")
        return "ok"

    lines = [
        to_json(g("M", "fine")),
        "{not json",
        '{"g": {"model": "M", "input": {"usr": "a"}}}',
        "",
        json.dumps({"id": "x7", "query": to_obj(g("M", "bad luck"))}),
        json.dumps({"id": "x8", "query": {"user": "no model"}}),
        json.dumps({"id": [1], "query": to_obj(g("M", "fine")), "extra": 1}),
    ]
    source = tmp_path / "in.jsonl"
    source.write_bytes("\n".join(lines).encode() + b'\n{"user": "\xff"}\n')
    summary = run_bulk(source, tmp_path / "out.jsonl", engine=FakeEngine(answer))
    results = read(tmp_path / "out.jsonl")
    assert [r["index"] for r in results] == list(range(7))
    assert [r["id"] for r in results] == [None, None, None, "x7", "x8", None, None]
    assert results[0]["answers"] == ["ok"]
    messages = [r["error"]["message"] for r in results[1:]]
    assert messages[0].startswith("line 1, column 2: malformed JSON")
    assert messages[1].startswith("$.g.input.usr: unknown node")
    assert messages[2] == "$: out of luck"
    assert messages[3].startswith("$: the query asks no model anything")
    assert messages[4] == "unknown key beside the query; expected id and query; found 'extra'"
    assert messages[5] == "the line is not UTF-8"
    assert [r["error"].get("input_line") for r in results[1:]] == [2, 3, 5, 6, 7, 8]
    assert (summary.queries, summary.failed) == (7, 6)


def test_a_model_that_cannot_be_opened_is_tried_once(tmp_path) -> None:
    tried: list[str] = []

    def opener(model: str) -> FakeEngine:
        tried.append(model)
        if model == "bad":
            raise KvspanError("model bad: cannot be loaded")
        return FakeEngine()

    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    models = ("bad", "M", "bad", "bad", "M")
    source.write_text("".join(to_json(g(model, "hello")) + "\n" for model in models))
    summary = run_bulk(source, out, open=opener)
    assert sorted(tried) == ["M", "bad"] and (summary.queries, summary.failed) == (5, 3)
    assert ["answers" in record for record in read(out)] == [model == "M" for model in models]
    # All queries need this one: there is nothing to go on with, and no result to keep.
    before = out.read_bytes()
    for target in (out, tmp_path / "new.jsonl"):
        tried.clear()
        with pytest.raises(KvspanError, match="model bad: cannot be loaded"):
            run_bulk(source, target, open=opener, model="bad", overwrite=True)
        assert tried == ["bad"]
    assert out.read_bytes() == before and sorted(os.listdir(tmp_path)) == ["in.jsonl", "out.jsonl"]


def test_keep_going_is_an_option_of_the_command(tmp_path, monkeypatch) -> None:
    def answer(request) -> str:
        if "bad luck" in prompt_text(request.prompt):
            raise KvspanError("out of luck")
        return "ok"

    monkeypatch.setattr(cli_options, "open_engine_with", lambda *_: FakeEngine(answer))
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(to_json(plus(g("M", "fine"), g("M", "bad luck"))))
    words = ["bulk", str(source), "-o", str(out), "--overwrite", "--quiet"]
    assert cli.main(words) == 1 and "answers" not in read(out)[0]
    assert cli.main([*words, "--keep-going"]) == 1
    (record,) = read(out)
    assert record["answers"] == ["ok"] and len(record["failures"]) == 1


def test_an_unknown_option_is_said_before_anything_is_written(tmp_path) -> None:
    source = write_queries(tmp_path / "in.jsonl", 1)
    said = r"^unknown option 'paralel' \(did you mean parallel\?\); expected one of engine, open, "
    with pytest.raises(UsageError, match=said):
        run_bulk(source, tmp_path / "out.jsonl", engine=FakeEngine(), paralel=2)
    assert os.listdir(tmp_path) == ["in.jsonl"]


def test_a_full_disk_leaves_nothing_that_is_in_the_way(tmp_path, monkeypatch) -> None:
    source, out = write_queries(tmp_path / "in.jsonl", 4), tmp_path / "out.jsonl"

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError, match="cannot write the output: No space left on device"):
        run_bulk(source, out, engine=FakeEngine())
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["in.jsonl"]
    out.touch()  # by a run that was killed before its first step
    assert run_bulk(source, out, engine=FakeEngine()).queries == 4
    assert len(read(out)) == 4


def test_what_is_not_of_this_run_is_left_alone(tmp_path) -> None:
    source, out = write_queries(tmp_path / "in.jsonl", 4), tmp_path / "out.jsonl"
    out.write_text("precious\n")
    with pytest.raises(UsageError, match="the output is there already"):
        run_bulk(source, out, engine=FakeEngine())
    assert out.read_text() == "precious\n"
    out.unlink()
    for head in ("[]\n", "not JSON\n", '{"run": "other"}\n'):
        (tmp_path / "out.jsonl.journal").write_text(head)
        with pytest.raises(UsageError, match="a journal of another run is there"):
            run_bulk(source, out, engine=FakeEngine())
    assert run_bulk(source, out, engine=FakeEngine(), overwrite=True).queries == 4
    with pytest.raises(UsageError, match="no such file"):
        run_bulk(tmp_path / "missing", tmp_path / "o", engine=FakeEngine())
    with pytest.raises(UsageError, match="cannot write the output"):
        run_bulk(source, tmp_path / "no" / "o", engine=FakeEngine())


def test_overwrite_replaces_nothing_but_results(tmp_path) -> None:
    source = write_queries(tmp_path / "in.jsonl", 4)
    queries = source.read_text()
    (tmp_path / "link.jsonl").symlink_to(source)
    for out in (source, tmp_path / "link.jsonl"):
        with pytest.raises(UsageError, match="would replace the queries"):
            run_bulk(source, out, engine=FakeEngine(), overwrite=True)
    journal = source.rename(tmp_path / "out.jsonl.journal")
    with pytest.raises(UsageError, match="would replace the queries"):
        run_bulk(journal, tmp_path / "out.jsonl", engine=FakeEngine(), overwrite=True)
    assert journal.read_text() == queries
    os.mkfifo(tmp_path / "pipe")
    for out in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(UsageError, match="not a regular file"):
            run_bulk(journal, out, engine=FakeEngine(), overwrite=True)
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_second_run_keeps_away_from_an_output_that_is_being_written(tmp_path, overwrite) -> None:
    source, out = write_queries(tmp_path / "in.jsonl", 4), tmp_path / "out.jsonl"
    refused: list[str] = []

    def again(done: int, total: int) -> None:
        if done == 2:
            with pytest.raises(UsageError, match="another run is writing the output") as error:
                run_bulk(source, out, engine=FakeEngine(), overwrite=overwrite)
            refused.append(str(error.value))

    # Progress is reported on the run's own event loop; the second run needs one of its own.
    with ThreadPoolExecutor(1) as pool:
        run_bulk(
            source,
            out,
            engine=FakeEngine(),
            on_progress=lambda done, total: pool.submit(again, done, total).result(),
        )
    assert len(refused) == 1
    assert [record["index"] for record in read(out)] == [0, 1, 2, 3]


def test_no_more_than_a_window_is_in_memory(tmp_path, monkeypatch) -> None:
    source = write_queries(tmp_path / "in.jsonl", 40)
    sizes: list[int] = []
    monkeypatch.setattr(bulk, "greedy_order", lambda f: sizes.append(len(f)) or greedy_order(f))
    most = 0
    add = bulk.Journal.add

    def counted(self, record) -> None:
        nonlocal most
        add(self, record)
        most = max(most, len(self.kept))

    monkeypatch.setattr(bulk.Journal, "add", counted)
    run_bulk(source, tmp_path / "out.jsonl", engine=FakeEngine(ticks=0), window=7)
    assert sizes == [7, 7, 7, 7, 7, 5]
    assert most == 7


# --- the order ---------------------------------------------------------------------------------


@given(st.lists(st.frozensets(st.sampled_from("abcdef"), max_size=4), max_size=12))
def test_greedy_order_is_what_it_says(fragments) -> None:
    order = greedy_order([frozenset(f.encode() for f in keys) for keys in fragments])
    assert sorted(order) == list(range(len(fragments)))
    left = set(range(len(fragments)))
    before: frozenset[str] = frozenset()
    for index in order:
        best = max((len(before & fragments[i]) for i in left), default=0)
        assert index == min(i for i in left if len(before & fragments[i]) == best)
        left.discard(index)
        before = fragments[index]


def test_ordering_brings_shared_fragments_together(tmp_path) -> None:
    def overlap(engine: FakeEngine) -> int:
        spans = [{s for s in r.prompt if hasattr(s, "messages")} for r in engine.requests]
        return sum(len(a & b) for a, b in pairwise(spans))

    source = write_queries(tmp_path / "in.jsonl", 60)
    plain, ordered = FakeEngine(), FakeEngine()
    run_bulk(source, tmp_path / "a", engine=plain, reorder=False, parallel=1)
    run_bulk(source, tmp_path / "b", engine=ordered, parallel=1)
    assert overlap(ordered) > 1.5 * overlap(plain)


def test_fragments_count_with_their_anchor() -> None:
    a = fragment_keys(g("M", cross("s", plus("x", "y"), plus("z"), "q")))
    assert len(a) == 3
    assert fragment_keys(g("M", cross("s", plus("y", "x")))) < a
    assert not fragment_keys(g("M", cross("t", plus("x")))) & a
    assert not fragment_keys(g("N", cross("s", plus("x")))) & a


# --- the command -------------------------------------------------------------------------------


def test_the_command(tmp_path, capsys, monkeypatch) -> None:
    opened: list[str] = []

    def open_engine(args, model, bars):
        opened.append(model)
        return engines[-1]

    engines = [FakeEngine(digest_answer)]
    monkeypatch.setattr(cli_options, "open_engine_with", open_engine)
    source, out = write_queries(tmp_path / "in.jsonl", 5), tmp_path / "out.jsonl"
    words = ["bulk", str(source), "-o", str(out), "--audit", str(tmp_path / "audit.jsonl")]
    assert cli.main(words) == 0
    text = capsys.readouterr()
    assert text.out == ""
    assert text.err.startswith("kvspan: 5 queries, 0 failed, ")
    assert opened == ["M"] and engines[0].closed == 1
    assert len(read(tmp_path / "audit.jsonl")) == 5
    assert cli.main(words) == 2
    assert "the output is there already (--overwrite replaces it)" in capsys.readouterr().err
    assert cli.main([*words, "--overwrite", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["queries"] == 5
    source.write_text("{}\n")
    assert cli.main([*words, "--overwrite"]) == 1
