"""The demo's passages and questions: each answer stands in one passage, and sizes fit blocks."""

from __future__ import annotations

import pytest

from kvspan.demo.passages import Question, first_line, load, normalize

DATA = load()


def test_there_are_16_passages_and_at_least_one_question_each() -> None:
    titles = [passage.title for passage in DATA.passages]
    assert len(titles) == len(set(titles)) == 16
    assert len(DATA.questions) >= 16
    # `kvspan demo` asks the first ones: as many passages as there are questions, up to all.
    assert len({question.passage for question in DATA.questions[:16]}) == 16


@pytest.mark.parametrize("question", DATA.questions, ids=lambda q: q.answers[0])
def test_answer_stands_in_its_passage_and_nowhere_else(question: Question) -> None:
    for answer in question.answers:
        holding = [
            p.title for p in DATA.passages if f" {normalize(answer)} " in f" {normalize(p.body)} "
        ]
        assert holding == [question.passage]
        for text in (DATA.system, question.text):
            assert normalize(answer) not in normalize(text)


@pytest.mark.parametrize("question", DATA.questions, ids=lambda q: q.answers[0])
def test_question_goes_on_as_its_passage_says(question: Question) -> None:
    body = next(p.body for p in DATA.passages if p.title == question.passage)
    assert f"{question.stem} {question.answers[0]}" in body


@pytest.mark.parametrize(
    ("said", "right"),
    [
        (" Hesper Vallin, a retired map engraver", True),
        ("hesper  VALLIN.", True),
        (" Hesper Vallinger", False),
        (" Hesper", False),
        (" Joss Penhallick\nHesper Vallin", False),
        ("", False),
    ],
)
def test_is_right(said: str, right: bool) -> None:
    question = DATA.questions[0]
    assert question.answers == ("Hesper Vallin",)
    assert question.is_right(said) is right


def test_articles_and_punctuation_do_not_count() -> None:
    kettle = next(q for q in DATA.questions if "Kettle" in q.answers[0])
    assert kettle.is_right(" Widow's Kettle.")
    assert first_line("\n  a b \n c") == "a b"
