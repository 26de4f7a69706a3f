"""Prompts and plans: what a tree means before anything is run."""

from __future__ import annotations

import pytest
from hypothesis import given

from kvspan import KvspanError, UsageError, assistant, cross, g, par, plus, seq, system, user
from kvspan.query.nodes import Generate, Node, Text
from kvspan.query.plan import Barrier, Call, Plan, make_plan, put_answers
from kvspan.query.prompt import Message, Span, to_prompt
from kvspan.query.traverse import walk
from query_strategies import queries


def u(text: str) -> Message:
    return Message("user", text)


@pytest.mark.parametrize(
    ("node", "prompt"),
    [
        (user("a"), (u("a"),)),
        (cross(system("s"), assistant("t")), (Message("system", "s"), Message("assistant", "t"))),
        (plus("a", "b"), (Span((u("a"),)), Span((u("b"),)))),
        (plus("a"), (Span((u("a"),)),)),
        (plus("a", plus("b", plus("c"))), (Span((u("a"),)), Span((u("b"),)), Span((u("c"),)))),
        (plus(seq("a", "b"), "c"), (Span((u("a"), u("b"))), Span((u("c"),)))),
        (plus(cross("a", plus("b", "c"), "d")), (Span((u("a"), u("b"), u("c"), u("d"))),)),
        (plus(par("a", par(plus(plus("b"))))), (Span((u("a"), u("b"))),)),
        (cross("a", plus(), "b"), (u("a"), u("b"))),
        (cross("a", plus("", cross(), plus("")), "b"), (u("a"), u("b"))),
        (
            seq(par("a", cross("b")), "", plus("c", ""), "d"),
            (u("a"), u("b"), Span((u("c"),)), u("d")),
        ),
        (cross(plus("a"), plus("b")), (Span((u("a"),)), Span((u("b"),)))),
        (user(" "), (u(" "),)),
    ],
)
def test_prompts(node: Node, prompt: tuple) -> None:
    assert to_prompt(node) == prompt


@pytest.mark.parametrize("node", [user(""), plus(), cross(plus(), seq("", par())), plus(plus(""))])
def test_empty_prompts(node: Node) -> None:
    with pytest.raises(UsageError) as caught:
        to_prompt(node, "$.seq[3].g.input")
    assert caught.value.path == "$.seq[3].g.input"
    assert str(caught.value).startswith("$.seq[3].g.input: empty generate: its input has no text")
    with pytest.raises(UsageError, match=r"^\$.cross\[1\].g.input: empty generate"):
        make_plan(cross("a", g("M", node)))


def test_inner_generates_have_to_be_run_first() -> None:
    with pytest.raises(KvspanError, match="an inner generate has not been run yet"):
        to_prompt(g("M", "a"))


@given(queries)
def test_prompts_keep_every_text_in_order(query: Node) -> None:
    query = put_answers(query, ["answer"] * 100)
    texts = [node.text for _, node in walk(query) if isinstance(node, Text) and node.text]
    if not texts:
        return
    prompt = to_prompt(query)
    found: list[str] = []
    for item in prompt:
        messages = item.messages if isinstance(item, Span) else (item,)
        assert messages
        found += [message.text for message in messages]
    assert found == texts


def waits(plan: Plan) -> dict[str, set[str]]:
    """Per path of a call, the paths of the calls that are over before it starts."""
    before: list[set[str]] = []
    for step in plan.steps:
        mine: set[str] = set()
        for id in step.waits_for:
            assert id < step.id
            mine |= before[id]
            earlier = plan.steps[id]
            if isinstance(earlier, Call):
                mine.add(earlier.path)
        before.append(mine)
    return {step.path: before[step.id] for step in plan.steps if isinstance(step, Call)}


def test_seq_and_cross_wait_and_par_and_plus_do_not() -> None:
    for join, ordered in [(seq, True), (cross, True), (par, False), (plus, False)]:
        plan = make_plan(join(g("M", "a"), "between", g("M", "b")))
        first, second = plan.calls
        assert waits(plan)[second.path] == ({first.path} if ordered else set())
        assert plan.answers == (first.id, second.id)


def test_a_call_waits_for_the_calls_in_its_input_only() -> None:
    plan = make_plan(par(g("M", par(g("M", "a"), g("M", g("M", "b")))), g("M", "c")))
    assert waits(plan) == {
        "$.par[0].g.input.par[0]": set(),
        "$.par[0].g.input.par[1].g.input": set(),
        "$.par[0].g.input.par[1]": {"$.par[0].g.input.par[1].g.input"},
        "$.par[0]": {
            "$.par[0].g.input.par[0]",
            "$.par[0].g.input.par[1]",
            "$.par[0].g.input.par[1].g.input",
        },
        "$.par[1]": set(),
    }
    outer = next(call for call in plan.calls if call.path == "$.par[0]")
    assert [plan.steps[id].path for id in outer.inputs] == [
        "$.par[0].g.input.par[0]",
        "$.par[0].g.input.par[1]",
    ]


def test_order_reaches_into_and_out_of_joins() -> None:
    a, b, c, d, e = (g("M", name) for name in "abcde")
    plan = make_plan(seq(par(a, seq(b, c)), plus(g("M", d), e)))
    before = waits(plan)
    first = {"$.seq[0].par[0]", "$.seq[0].par[1].seq[0]", "$.seq[0].par[1].seq[1]"}
    assert before["$.seq[0].par[0]"] == set()
    assert before["$.seq[0].par[1].seq[1]"] == {"$.seq[0].par[1].seq[0]"}
    assert before["$.seq[1].plus[0].g.input"] == first
    assert before["$.seq[1].plus[0]"] == first | {"$.seq[1].plus[0].g.input"}
    assert before["$.seq[1].plus[1]"] == first


def naive_waits(query: Node) -> dict[str, set[str]]:
    """The rules of `make_plan` by plain recursion, with all pairs written out."""
    found: dict[str, set[str]] = {}

    def visit(node: Node, path: str, before: set[str]) -> set[str]:
        if isinstance(node, Generate):
            below = visit(node.input, path + ".g.input", before)
            found[path] = before | below
            return below | {path}
        inside: set[str] = set()
        for index, child in enumerate(node.children):
            ordered = node.kind in ("seq", "cross")
            inside |= visit(
                child, f"{path}.{node.kind}[{index}]", before | inside if ordered else before
            )
        return inside

    visit(query, "$", set())
    return found


@given(queries)
def test_plans_agree_with_the_naive_rules(query: Node) -> None:
    try:
        plan = make_plan(query)
    except UsageError:
        return
    assert waits(plan) == naive_waits(query)
    assert sum(len(step.waits_for) for step in plan.steps) <= 3 * len(plan.steps)


def test_edges_stay_few_between_large_joins() -> None:
    half = [g("M", f"{n}") for n in range(500)]
    plan = make_plan(g("M", seq(plus(half), plus(half), par(half))))
    assert sum(len(step.waits_for) for step in plan.steps) <= 3 * len(plan.steps)
    assert sum(isinstance(step, Barrier) for step in plan.steps) == 2


def test_plan_as_plain_data() -> None:
    plan = make_plan(g("A", seq(g("B", "x", 3), g("C", "y", temperature=0.5))))
    call = {"max_tokens": None, "temperature": None, "inputs": [], "after": []}
    assert plan.to_obj() == {
        "calls": [
            {**call, "id": 0, "path": "$.g.input.seq[0]", "model": "B", "max_tokens": 3},
            {**call, "id": 1, "path": "$.g.input.seq[1]", "model": "C", "temperature": 0.5}
            | {"after": [0]},
            {**call, "id": 2, "path": "$", "model": "A", "inputs": [0, 1]},
        ],
        "barriers": [],
        "answers": [2],
    }


def test_answers_take_the_place_of_the_outermost_generates() -> None:
    query = seq(g("M", plus(g("M", "inner"), "b")), cross("c", g("M", "d")), "e")
    done = put_answers(query, ["first", "second"])
    assert done == seq(assistant("first"), cross("c", assistant("second")), "e")
    assert put_answers(user("no generate"), []) == user("no generate")
