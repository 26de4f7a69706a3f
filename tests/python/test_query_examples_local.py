"""Whole queries on the embedded engine with a tiny model: the format's examples and ours."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvspan import cross, g, loads, monad, options, plus, reduce, repeat, run, system, zip_
from kvspan.engine.local import LocalEngine
from test_query_read import EXAMPLES
from tiny_models import tiny_model, word_tokenizer


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    with LocalEngine(tiny_model("llama"), word_tokenizer(), kv_cache_gib=0.02) as engine:
        yield engine


@pytest.mark.parametrize(
    ("number", "answers", "calls"),
    [(1, 1, 1), (2, 1, 1), (3, 3, 3), (4, 2, 2), (5, 1, 1), (6, 1, 5)],
)
def test_the_examples_of_the_format(engine, number: int, answers: int, calls: int) -> None:
    result = run(loads(EXAMPLES[number][0]), engine=engine, max_tokens=4)
    assert (len(result.answers), len(result.calls)) == (answers, calls)
    assert all(call.result.usage.completion_tokens > 0 for call in result.calls)
    again = run(loads(EXAMPLES[number][0]), engine=engine, max_tokens=4)
    assert again.answers == result.answers


def words(first: int, count: int) -> str:
    return " ".join(f"w{first + n}" for n in range(count))


PASSAGES = [words(10 * n, 30) for n in range(5)]


def test_an_equal_set_in_another_order_is_a_prefix_hit(engine) -> None:
    """Placement: canonical order makes moving needless where the set is the same."""
    engine.clear_cache()
    asked = [g("M", cross(system("w1 w2"), plus(order), "w9"), max_tokens=2, temperature=0)
             for order in (PASSAGES, PASSAGES[::-1])]  # fmt: skip
    first, second = (run(query, engine=engine) for query in asked)
    assert second.answers == first.answers
    reuse = second.calls[0].result.reuse
    assert (reuse.prepared_tokens, reuse.moved_tokens) == (0, 0)
    pinned = run(asked[1], engine=engine, order="pinned").calls[0].result.reuse
    assert pinned.prepared_tokens == 0 and pinned.moved_tokens > 0


def test_what_a_monad_prepared_is_found(engine) -> None:
    engine.clear_cache()
    prepare = monad(
        plus(g("M", cross(system("w1 w2"), plus(p)), max_tokens=1, temperature=0) for p in PASSAGES)
    )
    prompt = cross(prepare, system("w1 w2"), plus(PASSAGES), "w9")
    result = run(g("M", prompt, max_tokens=2), engine=engine)
    assert [call.dropped for call in result.calls] == [True] * 5 + [False]
    final = result.calls[-1].result.reuse
    assert (final.spans, final.span_hits, final.prepared_tokens) == (5, 5, 0)


def test_a_tree_of_judges_over_samples(engine) -> None:
    drafts = repeat(5, g("M", words(3, 20), max_tokens=6))
    query = reduce(g("M", cross(system("w7"), plus(drafts), "w8"), max_tokens=4), 2)
    result = run(query, engine=engine)
    assert len(result.calls) == 5 + 2 + 1 + 1
    assert len({call.seed for call in result.calls}) == len(result.calls)


def test_options_and_pairs_run_too(engine) -> None:
    pair = zip_(plus(g("M", "w1", max_tokens=2), g("M", "w2", max_tokens=2)), plus("w3", "w4"))
    result = run(options(g("M", plus(pair), max_tokens=2), scope="full"), engine=engine)
    assert len(result.answers) == 1
    assert result.calls[-1].result.reuse.spans == 0
