"""Lisp: the forms people write, and one clear line for each that is wrong."""

from __future__ import annotations

import pytest

from kvspan import (
    UsageError,
    assistant,
    augment,
    cross,
    from_corpus,
    g,
    load,
    loads,
    map_,
    monad,
    options,
    par,
    plus,
    print_,
    reduce,
    repeat,
    seq,
    system,
    user,
    zip_,
)
from kvspan.query.lisp import to_lisp

FORMS = {
    '(user "a")': user("a"),
    '(seq (system "s") (assistant "x"))': seq(system("s"), assistant("x")),
    "(plus)": plus(),
    '(g M (user "a"))': g("M", "a"),
    '(g org/m-1.5 (user "a") 0.5)': g("org/m-1.5", "a", temperature=0.5),
    '(g M (user "a") nil 5)': g("M", "a", max_tokens=5),
    '(g M (user "a") 0.0 5)': g("M", "a", max_tokens=5, temperature=0),
    '(g "a b" (user "a"))': g("a b", "a"),
    '(g "nil" (user "a"))': g("nil", "a"),
    '(repeat 3 (g M (user "a")))': repeat(3, g("M", "a")),
    '(map M ("a" "b") nil 4)': map_("M", ["a", "b"], max_tokens=4),
    '(zip (par (user "a")) (user "b"))': zip_(par("a"), "b"),
    '(monad (print "x"))': monad(print_("x")),
    '(augment e (user "q") "d" (text "t"))': augment("e", "q", ("d", "t")),
    '(augment e (user "q") "d" (binary 0 255))': augment("e", "q", ("d", b"\x00\xff")),
    '(kvspan/v1 (reduce 2 true (g M (plus (user "a")))))': reduce(g("M", plus("a")), 2),
    '(kvspan/v1 (options (scope full) (salt "a b") (user "a")))': options(
        "a", scope="full", salt="a b"
    ),
    '(kvspan/v1 (retrieve town (user "q") 3))': from_corpus("town", "q", limit=3),
    '(kvspan/v1 (retrieve town (user "q") nil e))': from_corpus("town", "q", embedding_model="e"),
}


@pytest.mark.parametrize("text", FORMS)
def test_forms(text: str) -> None:
    assert loads(text) == FORMS[text]
    assert to_lisp(FORMS[text]) == text


def test_layout_and_comments_are_free(tmp_path) -> None:
    text = """; a judge
    (g judge            ; the model
       (cross (system "pick") (plus (user "a;b") (user "(c)"))
              (user "which\\u003f\n")))"""
    expected = g("judge", cross(system("pick"), plus("a;b", "(c)"), "which?\n"))
    assert loads(text) == expected
    file = tmp_path / "q.lisp"
    file.write_text(text)
    assert load(file) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('(user "a"', "line 1, column 10: malformed Lisp; expected ')'; found the end of the text"),
        ('(user "a"))', "line 1, column 11: malformed Lisp; expected the end of the text"),
        ('(user\n  "a)', "line 2, column 3: malformed Lisp; expected a string in double quotes"),
        ("; only this", "expected '('; found the end of the text"),
        ("()", "line 1, column 1: malformed Lisp; expected the name of a node"),
        ('(usr "a")', "found 'usr' (did you mean user?)"),
        ('(user "a" "b")', "expected (user text); found 2 parts after user"),
        ("(g M)", "expected (g model node [temperature [max_tokens]]); found 1 parts after g"),
        ('(g M "a")', "$.g.input: a string where one node belongs"),
        ('(g M (user "a") hot)', "$.g.temperature: temperature is out of range"),
        ('(g M (user "a") nil 1.5)', "$.g.max_tokens: max_tokens is not a token count"),
        ('(repeat 2 (user "a"))', "expected a g node in it"),
        ('(map M "a")', "$.map.inputs: the inputs of map is not an array"),
        ("(user (a))", "$.user: the value of user is not a string"),
        ('(augment e (user "q") "d" "t")', "expected (text content) or (binary byte ...)"),
        ("(kvspan/v1 (redcue 2))", "expected one of (reduce k closed (g ...))"),
        (
            "(kvspan/v1 (reduce 2))",
            "expected (reduce k closed (g ...)); found 1 parts after reduce",
        ),
        ('(kvspan/v1 (options (scope all) (user "a")))', "options.scope: unknown scope"),
        ('(kvspan/v1 (options scope (user "a")))', "expected (name value) before the node"),
        ('(kvspan/v1 (options (salt "a") (salt "b") (user "a")))', "found a second salt"),
        ("(kvspan/v2 (reduce))", "expected the name of a node"),
        ('(par 3 (user "a"))', "$.par[0]: not a query node"),
        ("(user 1e999)", "the value of user is not a string"),
    ],
)
def test_mistakes_are_one_line(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        loads(text, format="lisp")
    line = str(caught.value)
    assert message in line
    assert "\n" not in line
