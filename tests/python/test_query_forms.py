"""What repeat, map, zip, monad, print, options and reduce do when they are run."""

from __future__ import annotations

import asyncio

import pytest

from fakes import FakeEngine, prompt_text
from kvspan import (
    KvspanError,
    UsageError,
    arun,
    assistant,
    cross,
    from_corpus,
    g,
    loads,
    map_,
    monad,
    options,
    par,
    plus,
    print_,
    reduce,
    repeat,
    run,
    seq,
    system,
    zip_,
)
from kvspan.engine import GenerateRequest
from kvspan.executor import SpanHistory, derive_seed
from kvspan.query import expand
from kvspan.query.lisp import to_lisp
from kvspan.query.nodes import Node
from kvspan.query.optimizer import optimize
from kvspan.query.plan import make_plan
from kvspan.query.read import from_json, from_lisp, from_yaml
from kvspan.query.retrieval import Corpus
from kvspan.query.write import to_json, to_yaml
from test_query_read import EXAMPLES


def echo(request: GenerateRequest) -> str:
    return f"<{prompt_text(request.prompt)}>"


def short(request: GenerateRequest) -> str:
    return f"r{len(request.path)}"


@pytest.mark.parametrize(
    ("number", "answers"),
    [
        (1, ["<u:hi>"]),
        (2, ["<s:s [u:docA] [u:docB] u:q>"]),
        (3, ["<u:draft>"] * 3),
        (4, ["<u:a>", "<u:b>"]),
        (5, ["<s:s u:u>"]),
        (6, ["<s:judge" + " [a:<u:write>]" * 4 + ">"]),
    ],
)
def test_the_examples_of_the_format_run(number: int, answers: list[str]) -> None:
    assert run(loads(EXAMPLES[number][0]), engine=FakeEngine(echo)).answers == answers


def test_samples_differ_by_their_seeds_and_say_where_they_are() -> None:
    engine = FakeEngine()
    result = run(g("J", plus(repeat(3, g("M", cross("a", g("N", "b")))))), engine=engine)
    base = "$.g.input.plus[0].repeat"
    paths = [call.path for call in result.calls]
    assert paths == [
        *(p for n in range(3) for p in (f"{base}[{n}].g.input.cross[1]", f"{base}[{n}]")),
        "$",
    ]
    assert {r.path: r.seed for r in engine.requests} == {p: derive_seed(0, p) for p in paths}
    assert len({call.result.text for call in result.calls}) == len(paths)


def test_a_repeat_in_a_repeat() -> None:
    inner = repeat(2, g("M", "x"))
    result = run(repeat(2, g("J", inner)), engine=FakeEngine())
    assert [call.path for call in result.calls if call.model == "M"] == [
        f"$.repeat[{i}].g.input.repeat[{j}]" for i in range(2) for j in range(2)
    ]


def test_too_many_samples_are_one_clear_line(monkeypatch) -> None:
    monkeypatch.setattr(expand, "MAX_NODES", 1000)
    with pytest.raises(UsageError) as caught:
        run(seq("a", repeat(30, g("M", repeat(30, g("M", "x"))))), engine=FakeEngine())
    assert str(caught.value) == (
        "$.seq[1]: repeat and map multiply to too much; expected at most 1,000 nodes; found more"
    )


def test_a_huge_count_is_refused_before_it_is_written_out() -> None:
    with pytest.raises(UsageError, match="repeat and map multiply to too much"):
        run(repeat(2**31 - 1, g("M", "a")), engine=FakeEngine())


def test_pairs_run_side_by_side_and_stay_in_order() -> None:
    engine = FakeEngine(echo)
    query = zip_(map_("M", ["a", "b"]), par(g("N", "c"), "d"))
    result = run(query, engine=engine)
    assert result.answers == ["<u:a>", "<u:c>", "<u:b>"]
    assert result.result == par(
        par(assistant("<u:a>"), assistant("<u:c>")), par(assistant("<u:b>"), "d")
    )
    assert engine.most == 3


def test_pairs_of_different_lengths_are_refused() -> None:
    with pytest.raises(UsageError) as caught:
        run(seq("x", zip_(map_("M", ["a", "b"]), "c")), engine=FakeEngine())
    assert str(caught.value) == (
        "$.seq[1].zip: the two sides of zip are of different lengths; "
        "expected 2 in second, as in first; found 1"
    )


PAIRS = zip_(par("a", "b"), "c")


@pytest.mark.parametrize(
    ("query", "place"),
    [
        (PAIRS, "$.zip"),
        (plus(plus("x", plus("y")), PAIRS), "$.plus[1].zip"),
        (plus("", PAIRS), "$.plus[1].zip"),
        (plus(repeat(2, g("M", PAIRS))), "$.plus[0].repeat.g.input.zip"),
        (plus(map_("M", ["x", "y"]), g("M", PAIRS)), "$.plus[1].g.input.zip"),
        (cross("", from_corpus("town", "x"), "q"), "$.cross[1]"),
        (cross("", ""), "$"),
    ],
    ids=["alone", "flattened", "dropped", "repeat", "map", "corpus", "empty"],
)
def test_errors_name_what_was_written_and_not_what_became_of_it(query: Node, place: str) -> None:
    with pytest.raises(UsageError) as caught:
        run(query, engine=FakeEngine(), model="M")
    assert str(caught.value).startswith(f"{place}: ")


def test_a_monad_runs_before_what_reads_beside_it_and_leaves_nothing() -> None:
    engine = FakeEngine(echo)
    query = g("M", cross(monad(plus(g("M", "x", max_tokens=1), g("M", "y"))), plus("x"), "q"))
    result = run(query, engine=engine)
    assert result.answers == ["<[u:x] u:q>"]
    assert engine.prepared == ["$.g.input.cross[0].monad.plus[0]"]
    assert engine.events[-2:] == [("start", "$"), ("end", "$")]
    assert [call.dropped for call in result.calls] == [True, True, False]
    assert run(monad(g("M", "x")), engine=engine).answers == []


def test_the_next_of_a_seq_waits_for_a_monad() -> None:
    engine = FakeEngine()
    run(seq(monad(g("M", "a")), g("M", "b")), engine=engine)
    assert [path for event, path in engine.events if event == "end"] == [
        "$.seq[0].monad",
        "$.seq[1]",
    ]


def test_a_generate_over_effects_alone_is_empty() -> None:
    with pytest.raises(UsageError, match=r"^\$\.g\.input: empty generate"):
        run(g("M", seq(monad(g("M", "a")), print_("x"))), engine=FakeEngine())


def test_lines_come_when_the_run_gets_there() -> None:
    said: list[str] = []
    engine = FakeEngine(lambda request: str(len(said)))
    result = run(
        seq(print_("one"), g("M", "a"), print_("two"), g("M", "b")),
        engine=engine,
        on_print=said.append,
    )
    assert said == ["one", "two"]
    assert result.to_obj()["lines"] == [
        {"path": "$.seq[0]", "text": "one"},
        {"path": "$.seq[2]", "text": "two"},
    ]
    assert result.answers == ["1", "2"]
    assert result.result == seq(assistant("1"), assistant("2"))


def test_options_hold_for_what_is_below_and_the_innermost_counts() -> None:
    engine = FakeEngine()
    inner = options(g("M", "a"), scope="full")
    run(
        options(par(inner, g("M", "b")), scope="isolated", placement="parallel", salt="t"),
        engine=engine,
        salt="run",
    )
    asked = {r.prompt[0].text: (r.scope, r.placement, r.salt) for r in engine.requests}
    assert asked == {"a": ("full", "parallel", "t"), "b": ("isolated", "parallel", "t")}


def test_an_order_pinned_run_is_one_flag_away() -> None:
    query = g("M", cross(plus("b", "a"), "q"))
    assert run(query, engine=FakeEngine(echo)).answers == ["<[u:a] [u:b] u:q>"]
    assert run(query, engine=FakeEngine(echo), order="pinned").answers == ["<[u:b] [u:a] u:q>"]
    pinned = options(query, order="pinned")
    assert run(pinned, engine=FakeEngine(echo)).answers == ["<[u:b] [u:a] u:q>"]


def test_equal_sets_are_equal_prompts() -> None:
    engine = FakeEngine()
    for order in ("abc", "cab", "bca"):
        run(g("M", cross("s", plus(list(order)), plus(plus(o) for o in order), "q")), engine=engine)
    assert len({request.prompt for request in engine.requests}) == 1


def test_cache_aware_order_is_for_those_who_ask() -> None:
    history = SpanHistory()
    engine = FakeEngine(echo)

    def ask(*passages: str) -> str:
        query = g("M", cross("s", plus(list(passages)), "q"))
        return run(query, engine=engine, order="recent", history=history).answers[0]

    assert ask("c", "d") == "<u:s [u:c] [u:d] u:q>"
    # What was asked about lately stands first and in the same order: a longer common prefix.
    assert ask("a", "d", "c", "b") == "<u:s [u:c] [u:d] [u:a] [u:b] u:q>"
    assert ask("b", "e", "c") == "<u:s [u:c] [u:b] [u:e] u:q>"
    assert ask("d", "c") == "<u:s [u:c] [u:d] u:q>"
    with pytest.raises(UsageError, match="order 'recent' needs a history"):
        run(g("M", "a"), engine=engine, order="recent")


# --- retrieval ---------------------------------------------------------------------------------


class Shelf:
    def __init__(self) -> None:
        self.asked: list[tuple[str, Corpus]] = []

    def retrieve(self, query: str, corpus: Corpus) -> list[str]:
        self.asked.append((query, corpus))
        return ["bees", "clocks"]


def test_fragments_are_prepared_and_then_read() -> None:
    engine, shelf = FakeEngine(echo), Shelf()
    query = g("M", cross(system("s"), from_corpus("town", "who?", limit=2), "who?"))
    result = run(query, engine=engine, retriever=shelf)
    assert result.answers == ["<s:s [u:bees] [u:clocks] u:who?>"]
    assert shelf.asked == [("who?", Corpus("town", limit=2))]
    base = "$.g.input.cross[1]['kvspan/v1'].retrieve.fragments"
    assert sorted(engine.prepared) == [f"{base}[0]", f"{base}[1]"]
    assert prompt_text(engine.requests[0].prompt) == "s:s [u:bees]"


def test_retrieval_that_cannot_be_is_one_line() -> None:
    query = g("M", cross(from_corpus("town", "who?"), "who?"))
    with pytest.raises(UsageError, match=r"^\$\.g\.input\.cross\[0\]: unknown corpus 'town'"):
        run(query, engine=FakeEngine())

    class Broken:
        def retrieve(self, query: str, corpus: Corpus) -> list[str]:
            raise OSError("no disk")

    with pytest.raises(KvspanError, match=r"^\$\.g\.input\.cross\[0\]: retrieval failed: OSError"):
        run(query, engine=FakeEngine(), retriever=Broken())
    with pytest.raises(UsageError, match="what retrieve is to search for asks a model"):
        run(g("M", from_corpus("town", g("M", "x"))), engine=FakeEngine(), retriever=Shelf())


# --- failures ----------------------------------------------------------------------------------


def broken(request: GenerateRequest) -> str:
    if request.prompt[0].text.startswith("bad"):
        raise KvspanError("out of luck")
    return "ok"


def test_a_run_that_keeps_going_loses_only_what_reads_the_failure() -> None:
    bad, good = g("M", "bad"), g("M", "good")
    query = par(g("J", cross("judge", plus(bad, good))), good, g("M", "bad too"))
    result = run(query, engine=FakeEngine(broken), keep_going=True)
    assert result.answers == ["ok"]
    assert [(f.path, f.cause) for f in result.failures] == [
        ("$.par[0].g.input.cross[1].plus[0]", None),
        ("$.par[0]", "$.par[0].g.input.cross[1].plus[0]"),
        ("$.par[2]", None),
    ]
    assert result.failures[0].message.endswith("plus[0]: out of luck")
    assert "not run: it reads the answer of $.par[0].g.input" in result.failures[1].message
    # What failed is left in place: the outcome is a query that can be run again.
    assert result.result == par(g("J", cross("judge", plus(bad, good))), assistant("ok"),
                                g("M", "bad too"))  # fmt: skip
    assert result.to_obj()["failures"][1]["cause"] == "$.par[0].g.input.cross[1].plus[0]"
    with pytest.raises(KvspanError, match="out of luck"):
        run(query, engine=FakeEngine(broken))


def test_cancelling_a_run_cancels_the_whole_tree() -> None:
    async def main() -> list[tuple[str, str]]:
        engine = FakeEngine(gate=asyncio.Event())
        records: list[dict] = []
        query = g("J", plus(repeat(3, g("M", "x"))))
        task = asyncio.create_task(arun(query, engine=engine, on_audit=records.append))
        while engine.running < 3:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [record["error"] for record in records] == ["cancelled"] * 3
        return engine.events

    assert [event for event, _ in asyncio.run(main())] == ["start"] * 3 + ["cancel"] * 3


# --- depth -------------------------------------------------------------------------------------


def deep(kind: str, depth: int):
    query = g("M", "x")
    for _ in range(depth):
        query = {
            "repeat": lambda q: g("M", repeat(1, q)),
            "zip": lambda q: g("M", zip_(q, "y")),
            "monad": lambda q: g("M", cross(monad(q), "y")),
            "options": lambda q: g("M", options(q, scope="full")),
            "reduce": lambda q: reduce(g("M", plus(q, "a", "b")), 2),
        }[kind](query)
    return query


@pytest.mark.parametrize("kind", ["repeat", "zip", "monad", "options", "reduce"])
def test_two_thousand_levels_are_no_problem(kind: str) -> None:
    query = deep(kind, 2000)
    assert len(make_plan(optimize(query).query).calls) >= 2001
    for write, read in ((to_json, from_json), (to_lisp, from_lisp)):
        assert read(write(query)) == query
    query = deep(kind, 200)  # YAML's own reader is slow; test_query_nodes has it read 2,000 levels
    assert from_yaml(to_yaml(query)) == query


def test_deep_samples_run() -> None:
    assert len(run(deep("repeat", 1000), engine=FakeEngine(short, ticks=0)).calls) == 1001
