"""The audit record: one line per request, with all that sets it apart from an ordinary run."""

from __future__ import annotations

import errno
import hashlib
import json
import os

import pytest

from fakes import FakeEngine
from kvspan import (
    KvspanError,
    UsageError,
    cli,
    cli_options,
    cross,
    g,
    monad,
    plus,
    reduce,
    run,
    system,
)
from kvspan.audit import AuditFile
from kvspan.engine import GenerateRequest
from kvspan.query.write import to_json


def records_of(query, engine=None, **options) -> list[dict]:
    records: list[dict] = []
    run(query, engine=engine or FakeEngine(), on_audit=records.append, **options)
    return records


def test_one_record_per_request_says_what_was_done() -> None:
    query = g("M", cross(system("s"), plus("b", "a"), "q"), max_tokens=3, temperature=0)
    (record,) = records_of(query, seed=4, salt="tenant")
    timings = record.pop("timings")
    assert timings["total"] == 0.5
    answer = FakeEngine()
    result = run(query, engine=answer, seed=4)
    assert record == {
        "path": "$",
        "model": "M",
        "dropped": False,
        "prompt_sha256": record["prompt_sha256"],
        "messages": 4,
        "spans": 2,
        "seed": result.calls[0].seed,
        "temperature": 0.0,
        "max_tokens": 3,
        "scope": "anchored",
        "placement": "sequential",
        "salted": True,
        "order": "canonical",
        "nested": "answer",
        "rules": ["order_spans"],
        "reordered": [{"path": "$.g.input.cross[1].plus", "order": [1, 0]}],
        "approximated": [
            "span tokens attend in scope anchored",
            "spans reordered by content",
        ],
        "reused_tokens": 0,
        "moved_tokens": 2,
        "prepared_tokens": 1,
        "computed_tokens": 0,
        "span_hits": 0,
        "usage": {"prompt_tokens": 4, "completion_tokens": 8, "cached_tokens": 2},
        "replay": None,
        "finish_reason": "stop",
        "answers": 0,
        "answer_tokens": 0,
        "answer_reused_tokens": 0,
        "kept_tokens": 0,
        "answer_sha256": hashlib.sha256(result.answers[0].encode()).hexdigest(),
    }
    assert "tenant" not in json.dumps(record)  # whose cache it was is not for the record


def test_everything_can_be_switched_off() -> None:
    query = g("M", cross(system("s"), plus("b", "a"), "q"))
    (record,) = records_of(query, scope="full", order="pinned")
    assert record["approximated"] == []
    assert record["reordered"] == []


def test_equal_prompts_have_equal_digests() -> None:
    (one,) = records_of(g("M", cross(plus("b", "a"), "q")))
    (two,) = records_of(g("M", cross(plus("a", plus("b")), "q")))
    (three,) = records_of(g("M", cross("a", "b", "q")))
    assert one["prompt_sha256"] == two["prompt_sha256"] != three["prompt_sha256"]


def test_reductions_effects_and_inner_inputs_are_named() -> None:
    judge = g("J", cross(monad(g("M", "x", max_tokens=1)), plus("a", "b", "c")))
    records = records_of(reduce(judge, 2), placement="parallel")
    assert [r["dropped"] for r in records].count(True) == len(records) - 2
    final = records[-1]["approximated"]
    assert "a declared reduction was split into rounds" in final
    assert "spans share their positions (placement parallel)" in final
    whole = records_of(g("J", plus(g("M", "a"))), nested="whole")
    assert "inner inputs read beside inner answers (nested whole)" in whole[-1]["approximated"]


def test_failures_are_recorded_too() -> None:
    def answer(request: GenerateRequest) -> str:
        raise KvspanError("out of luck")

    records: list[dict] = []
    with pytest.raises(KvspanError):
        run(g("M", "a"), engine=FakeEngine(answer), on_audit=records.append)
    assert [(r["path"], r["error"]) for r in records] == [("$", "$: out of luck")]


def test_the_file_is_appended_to(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(cli_options, "open_engine_with", lambda args, model, bars: FakeEngine())
    query, log = tmp_path / "q.json", tmp_path / "audit.jsonl"
    query.write_text(to_json(plus(g("M", "a"), g("M", "b"))))
    for _ in range(2):
        assert cli.main(["run", str(query), "--audit", str(log), "--order", "pinned"]) == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["path"] for line in lines] == ["$.plus[0]", "$.plus[1]"] * 2
    assert all(line["order"] == "pinned" for line in lines)
    assert "kvspan: running 2 calls in 1 round, " in capsys.readouterr().err
    with pytest.raises(UsageError, match="cannot write the audit file"):
        AuditFile(str(tmp_path / "no" / "file"))


@pytest.mark.parametrize("keep_going", [[], ["--keep-going"]], ids=["", "keep going"])
def test_a_file_that_takes_no_more_ends_the_run(keep_going, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(cli_options, "open_engine_with", lambda args, model, bars: FakeEngine())
    query = tmp_path / "q.json"
    query.write_text(to_json(g("M", "a")))
    assert cli.main(["run", str(query), "--audit", "/dev/full", *keep_going]) == 1
    message = "/dev/full: cannot write the file: No space left on device"
    assert capsys.readouterr() == ("", f"kvspan: error: {message}\n")


def test_a_record_is_in_the_file_or_not(tmp_path) -> None:
    """A disk takes as much of a record as fits."""
    with AuditFile(str(tmp_path / "log")) as audit:
        audit({"n": 1})
        real = audit.file

        class Full:
            """Room for five bytes more."""

            def write(self, data: bytes) -> int:
                if len(data) == len(b'{"n": 2}\n'):
                    return int(real.write(data[:5]))
                raise OSError(errno.ENOSPC, "No space left on device")

            def __getattr__(self, name: str) -> object:
                return getattr(real, name)

        audit.file = Full()  # type: ignore[assignment]
        with pytest.raises(OSError, match="No space left on device"):
            audit({"n": 2})
        audit.file = real
        audit({"n": 3})
    assert [json.loads(line)["n"] for line in (tmp_path / "log").read_text().splitlines()] == [1, 3]


def test_records_go_down_a_pipe() -> None:
    reads, writes = os.pipe()
    with open(reads, "rb") as pipe:
        with AuditFile(f"/dev/fd/{writes}") as audit:
            audit({"n": 1})
        os.close(writes)
        assert json.loads(pipe.read()) == {"n": 1}


def test_a_command_that_keeps_going_fails_in_the_end(tmp_path, monkeypatch, capsys) -> None:
    def answer(request: GenerateRequest) -> str:
        if request.prompt[0].text == "bad":
            raise KvspanError("out of luck")
        return "fine"

    monkeypatch.setattr(
        cli_options, "open_engine_with", lambda args, model, bars: FakeEngine(answer)
    )
    query = tmp_path / "q.json"
    query.write_text(to_json(plus(g("M", "bad"), g("M", "good"))))
    assert cli.main(["run", str(query), "--keep-going"]) == 1
    out, err = capsys.readouterr()
    assert out == "fine\n"
    assert "$.plus[0]: out of luck\n" in err
    assert cli.main(["run", str(query), "--keep-going", "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["failures"][0]["path"] == "$.plus[0]"
