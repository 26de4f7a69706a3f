"""Reading and writing: exact round trips, and errors that name the place."""

from __future__ import annotations

import io
import json
import warnings
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given

from kvspan import UsageError, cross, g, load, loads, map_, plus, repeat, seq, system, user
from kvspan.query import text as text_module
from kvspan.query.lisp import parse_lisp, to_lisp
from kvspan.query.nodes import Node
from kvspan.query.nodes import Path as JsonPath
from kvspan.query.read import QueryWarning, from_json, from_lisp, from_obj, from_yaml
from kvspan.query.text import parse_json, parse_yaml
from kvspan.query.write import dump_json, to_json, to_obj, to_yaml
from query_strategies import all_queries

# The six examples of the query format.
EXAMPLES = {
    1: ('{"g":{"model":"M","input":{"user":"hi"}}}', g("M", "hi")),
    2: (
        '{"g":{"model":"M","input":{"cross":[{"system":"s"},'
        '{"plus":[{"user":"docA"},{"user":"docB"}]},{"user":"q"}]}}}',
        g("M", cross(system("s"), plus("docA", "docB"), "q")),
    ),
    5: (
        '{"g":{"model":"M","input":{"seq":[{"system":"s"},{"user":"u"}]},'
        '"max_tokens":null,"temperature":null}}',
        g("M", seq(system("s"), "u")),
    ),
    3: (
        '{"repeat":{"n":3,"g":{"model":"M","input":{"user":"draft"},"max_tokens":5}}}',
        repeat(3, g("M", "draft", max_tokens=5)),
    ),
    4: ('{"map":{"metadata":{"model":"M"},"inputs":["a","b"]}}', map_("M", ["a", "b"])),
    6: (
        '{"g":{"model":"spnl/M","input":{"seq":[{"system":"judge"},{"plus":[{"repeat":{"n":4,'
        '"g":{"model":"spnl/M","input":{"user":"write"}}}}]}]}}}',
        g("spnl/M", seq(system("judge"), plus(repeat(4, g("spnl/M", "write"))))),
    ),
}


@given(all_queries)
def test_json_round_trip(query: Node) -> None:
    assert from_json(to_json(query)) == query
    assert from_json(to_json(query, indent=2)) == query
    assert from_obj(json.loads(to_json(query))) == query
    assert loads(to_json(query).encode()) == query


@given(all_queries)
@example(cross("a\n", " b\n", "\n", "\n c", "a\n\n", "\ta\nb ", "a\r\nb"))
def test_yaml_round_trip(query: Node) -> None:
    assert from_yaml(to_yaml(query)) == query
    assert loads(to_yaml(query).encode()) == query
    # Other readers see the same, so the files are plain YAML.
    assert yaml.safe_load(to_yaml(query)) == to_obj(query)


@given(all_queries)
def test_lisp_round_trip(query: Node) -> None:
    assert from_lisp(to_lisp(query)) == query
    assert loads(to_lisp(query).encode()) == query
    # A query read from Lisp is the query that its JSON shape says.
    assert parse_lisp(to_lisp(query)) == to_obj(query)


@given(all_queries)
def test_yaml_round_trip_without_libyaml(query: Node) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(yaml, "CSafeLoader", raising=False)
        assert from_yaml(to_yaml(query)) == query


@pytest.mark.parametrize("number", EXAMPLES)
def test_format_examples(number: int) -> None:
    text, expected = EXAMPLES[number]
    assert loads(text) == expected
    assert from_yaml(text) == expected  # JSON is YAML


def test_null_and_zero_max_tokens_stay_apart() -> None:
    assert to_obj(from_obj({"g": {"model": "M", "input": {"user": "a"}, "max_tokens": 0}})) == {
        "g": {"model": "M", "input": {"user": "a"}, "max_tokens": 0}
    }
    assert "max_tokens" not in to_obj(g("M", "a"))["g"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            {"g": {"model": "M", "input": {"cross": [{"user": "a"}, {"user": "b"}, {"usr": "c"}]}}},
            "$.g.input.cross[2].usr: unknown node (did you mean user?); expected one of user, "
            "system, assistant, seq, par, cross, plus, g, repeat, map, zip, monad, print, augment, "
            "kvspan/v1; found 'usr'",
        ),
        ({"odd key": 1}, "$['odd key']: unknown node; expected"),
        ({"user": 3}, "$.user: the value of user is not a string; expected a string; found 3"),
        (
            {"user": True},
            "$.user: the value of user is not a string; expected a string; found true",
        ),
        ({"user": None}, "found null"),
        ({"system": ["a"]}, "$.system: the value of system is not a string"),
        ({"user": "\ud800"}, "$.user: the value of user is not valid Unicode"),
        (
            {"plus": {"user": "a"}},
            "$.plus: the value of plus is not an array; expected an array of ",
        ),
        ({"plus": "a"}, "found 'a'"),
        ({"plus": ["a"]}, "$.plus[0]: not a query node; expected an object with exactly one key"),
        (
            {},
            "$: not a query node; expected an object with exactly one key, the node's name; found",
        ),
        ({"user": "a", "system": "b"}, "found an object with keys 'user', 'system'"),
        ("a", "$: not a query node; expected an object with exactly one key"),
        (
            [{"user": "a"}],
            "$: an array where one node belongs; expected one node; found an array of",
        ),
        ({"g": "M"}, "$.g: the value of g is not an object"),
        ({"g": {"model": "M"}}, "$.g: g has no input"),
        ({"g": {"input": {"user": "a"}}}, "$.g: g has no model"),
        ({"g": {"model": "", "input": {"user": "a"}}}, "$.g.model: the model of g is empty"),
        ({"g": {"model": 3, "input": {"user": "a"}}}, "$.g.model: the model of g is not a string"),
        ({"g": {"model": "M", "input": "a"}}, "$.g.input: a string where one node belongs"),
        ({"g": {"model": "M", "input": [{"user": "a"}]}}, "$.g.input: an array where one node"),
        (
            {"g": {"model": "M", "input": {"user": "a"}, "temprature": 1}},
            "$.g.temprature: unknown key (did you mean temperature?); expected one of model, "
            "input, max_tokens, temperature; found 'temprature'",
        ),
        ({"g": {"model": "M", "input": {"user": "a"}, "max_tokens": True}}, "$.g.max_tokens: "),
        ({"g": {"model": "M", "input": {"user": "a"}, "max_tokens": -1}}, "$.g.max_tokens: "),
        ({"g": {"model": "M", "input": {"user": "a"}, "max_tokens": 1.5}}, "found 1.5"),
        ({"g": {"model": "M", "input": {"user": "a"}, "max_tokens": "5"}}, "found '5'"),
        ({"g": {"model": "M", "input": {"user": "a"}, "temperature": -1}}, "$.g.temperature: "),
        ({"g": {"model": "M", "input": {"user": "a"}, "temperature": "hot"}}, "found 'hot'"),
    ],
)
def test_wrong_values_name_path_expected_and_found(value: object, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        from_obj(value, source="query.yaml")
    text = str(caught.value)
    assert text.startswith("query.yaml: $")
    assert message in text
    assert "\n" not in text
    error = caught.value
    assert error.path and error.path.startswith("$") and error.expected and error.found


@pytest.mark.parametrize(
    ("text", "line", "column", "message"),
    [
        ('{"seq":[\n  {"user":"a"},\n]}', 3, 1, "malformed JSON; expected a value; found ']'"),
        ('{"seq":[{"user":"a"}', 1, 21, "expected ',' or ']'; found the end of the text"),
        ('{"user":"a"} {', 1, 14, "expected the end of the text; found '{'"),
        ('{"user" "a"}', 1, 9, "expected ':' after the key"),
        ("{user: }", 1, 2, "expected a key in double quotes; found 'u'"),
        ('{"user":"a', 1, 9, "found unterminated string starting"),
        ('{"user":"a\nb"}', 1, 11, "found invalid control character"),
        ('{"user":"\\x"}', 1, 10, "found invalid \\escape"),
        ('{"user":NaN}', 1, 9, "expected a value; found 'N'"),
        ('{"user":01}', 1, 10, "expected ',' or '}'; found '1'"),
        ('{"user":-}', 1, 9, "expected a value; found '-'"),
        ('{"user":1e999}', 1, 9, "expected a number that a double can hold"),
        ('{"user":' + "9" * 5000 + "}", 1, 9, "expected a number that a double can hold"),
        ("", 1, 1, "expected a value; found the end of the text"),
        ('{"user":"a",\n"user":"b"}', 2, 1, "$.user: the same key twice in one object"),
    ],
)
def test_malformed_json_names_line_and_column(
    text: str, line: int, column: int, message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        loads(text, format="json", source="q.json")
    assert str(caught.value).startswith(f"q.json: line {line}, column {column}: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("fast", [True, False], ids=["libyaml", "python"])
@pytest.mark.parametrize(
    ("text", "line", "column", "message"),
    [
        ("g:\n  model: M\n input: 3", 3, 2, "malformed YAML: while parsing a block mapping"),
        ("user: [", 1, 8, "malformed YAML: while parsing a flow node"),
        ("user: 'a", 1, 9, "malformed YAML: while scanning a quoted scalar"),
        ("user: a\nuser: b", 2, 1, "$.user: the same key twice in one object"),
        ("a: &x [*x]", 1, 8, "$.a[0]: unknown YAML alias"),
        ("user: *x", 1, 7, "$.user: unknown YAML alias"),
        ("user: a\n---\nuser: b", 2, 1, "more than one YAML document"),
        ("user: !!python/name:os x", 1, 7, "could not determine a constructor"),
        ("seq: !mine []", 1, 6, "$.seq: unknown YAML tag; expected plain data"),
        ("? [a]\n: b", 1, 3, "$: a key is not a string"),
        ("1: a", 1, 1, "$: a key is not a string; expected a string; found 1"),
        ("user: 2024-13-45", 1, 7, "$.user: malformed YAML value"),
        ("seq:\n- user: a\x01", 2, 10, "malformed YAML; expected printable text"),
    ],
)
def test_malformed_yaml_names_line_and_column(
    text: str,
    line: int,
    column: int,
    message: str,
    fast: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not fast:
        monkeypatch.delattr(yaml, "CSafeLoader", raising=False)
    with pytest.raises(UsageError) as caught:
        loads(text, format="yaml", source="q.yaml")
    assert str(caught.value).startswith(f"q.yaml: line {line}, column {column}: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["", "\n", "# only a comment\n"])
def test_empty_yaml(text: str) -> None:
    with pytest.raises(UsageError, match="the text is empty; expected one query node"):
        loads(text, source="q.yaml")


@pytest.mark.parametrize(("scalar", "found"), [("3", "3"), ("yes", "true"), ("2024-01-01", "date")])
def test_unquoted_yaml_text_says_to_quote_it(scalar: str, found: str) -> None:
    with pytest.raises(UsageError) as caught:
        loads(f"user: {scalar}")
    assert "quote it" in str(caught.value) and found in str(caught.value)
    assert loads(f'user: "{scalar}"') == user(scalar)


def test_yaml_aliases() -> None:
    text = "cross:\n- plus: &docs\n  - user: a\n  - &one {user: b}\n- seq: *docs\n- *one\n"
    assert loads(text) == cross(plus("a", "b"), seq("a", "b"), user("b"))


def test_yaml_aliases_cannot_explode() -> None:
    lines = ["a0: &a0 [" + ", ".join(["x"] * 10) + "]"]
    for n in range(1, 30):
        lines.append(f"a{n}: &a{n} [" + ", ".join([f"*a{n - 1}"] * 10) + "]")
    with pytest.raises(UsageError, match="aliases expand to too much"):
        parse_yaml("\n".join(lines))


@pytest.mark.parametrize(
    ("text", "query", "said"),
    [
        (
            '{"g":{"model":"M","input":{"user":"a"},"top_p":1}}',
            g("M", "a"),
            "q: $.g.top_p: unknown key; expected one of model, input, max_tokens, temperature; "
            "found 'top_p'; ignored",
        ),
        (
            '{"g":{"model":"M","input":"a"}}',
            g("M", "a"),
            "q: $.g.input: a string where one node belongs; expected one node; found 'a'; "
            "read as a user message",
        ),
        (
            '{"g":{"model":"M","input":[{"user":"a"},{"user":"b"}]}}',
            g("M", cross("a", "b")),
            "read as a cross of its items",
        ),
        ('[{"system":"s"},{"user":"a"}]', cross(system("s"), "a"), "q: $: an array where one node"),
        (
            '{"g":{"model":"M","input":{"plus":["a",{"user":"b"}]}}}',
            g("M", plus("a", "b")),
            "q: $.g.input.plus[0]: a string where one node belongs",
        ),
        ('{"user":"a","user":"b"}', user("b"), "the last one counts"),
        ('{"user":"a","note":"b"}', user("a"), "all but 'user' ignored"),
    ],
)
def test_lenient_forms(text: str, query: Node, said: str) -> None:
    with pytest.raises(UsageError):
        loads(text, source="q")
    with pytest.warns(QueryWarning) as caught:
        assert loads(text, lenient=True, source="q") == query
    assert len(caught) == 1
    assert said in str(caught[0].message)


def test_bare_strings_in_a_bare_array() -> None:
    with pytest.warns(QueryWarning) as caught:
        query = loads('{"g":{"model":"M","input":["a",{"user":"b"},"c"]}}', lenient=True)
    assert query == g("M", cross("a", "b", "c"))
    assert [str(warning.message).split(":")[0] for warning in caught] == [
        "$.g.input",
        "$.g.input.cross[0]",
        "$.g.input.cross[2]",
    ]


def test_lenient_is_silent_about_plain_queries() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for text, query in EXAMPLES.values():
            assert loads(text, lenient=True) == query


@pytest.mark.parametrize("text", ['{"usr":"a"}', '{"user":3}', '{"user":"a","plus":[]}'])
def test_lenient_does_not_guess(text: str) -> None:
    with pytest.raises(UsageError):
        loads(text, lenient=True)


def test_files_go_by_suffix_and_text(tmp_path: Path) -> None:
    query = g("M", cross("a", "é"))
    for name, text in [
        ("q.json", to_json(query)),
        ("q.yaml", to_yaml(query)),
        ("q.YML", to_yaml(query)),
        ("q", to_json(query)),
        ("q.query", to_yaml(query)),
        ("bom.json", "\ufeff" + to_json(query)),
        ("flow", "{g: {model: M, input: {cross: [{user: a}, {user: é}]}}}"),
    ]:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        assert load(path) == query
        assert load(str(path)) == query
        with path.open("rb") as file:
            assert load(file) == query
    assert load(io.StringIO(to_yaml(query))) == query


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    missing = tmp_path / "none.json"
    with pytest.raises(UsageError) as caught:
        load(missing)
    assert str(caught.value) == f"{missing}: no such file"
    with pytest.raises(UsageError, match="cannot read the file: Is a directory"):
        load(tmp_path)
    with pytest.raises(UsageError, match="cannot read the file"):
        load("nul\0byte")
    latin = tmp_path / "latin.json"
    latin.write_bytes('{"user":\n "é"}'.encode("latin-1"))
    with pytest.raises(
        UsageError, match="line 2, column 3: the text is not UTF-8; found byte 0xe9"
    ):
        load(latin)


def test_text_that_is_neither_is_reported_as_what_it_looks_like() -> None:
    with pytest.raises(UsageError, match="malformed JSON"):
        loads('{"user": "a",, }')
    with pytest.raises(UsageError, match="malformed YAML"):
        loads('user: "a')
    with pytest.raises(UsageError, match="the same key twice"):
        loads('{"user": "a", "user": "b"}')


@given(all_queries)
def test_plain_parsers_agree_with_the_standard_ones(query: Node) -> None:
    text = json.dumps(to_obj(query), indent=1)  # with escapes
    assert parse_json(text) == json.loads(text)
    assert json.loads(dump_json(to_obj(query), 3)) == to_obj(query)


def test_plain_values() -> None:
    text = '{"a": [], "b": {}, "c": [true, false, null, -1.5, 2e+20, 0, "x", 12345678901234567890]}'
    assert parse_json(text) == json.loads(text)
    assert parse_json(f" {text}\n") == json.loads(text)
    assert dump_json(json.loads(text)) == text
    with pytest.raises(ValueError, match="JSON compliant"):
        dump_json([float("nan")])


def test_paths_with_odd_keys() -> None:
    path = JsonPath(None, "$").child("a-b").child("").child("c.d").child(0)
    assert str(path) == "$.a-b['']['c.d'][0]"


def test_line_and_column() -> None:
    assert text_module.line_and_column("", 0) == (1, 1)
    assert text_module.line_and_column("a\n\nb", 3) == (3, 1)
