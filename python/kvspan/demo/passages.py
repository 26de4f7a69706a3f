"""The demo's text: passages of invented facts, and questions only they can answer.

Nothing in them exists, so a right answer can only have been read. The questions end in the first
words of the answer, because the demo model is a base model: it completes text and was never taught
to follow instructions. For its sake the system text shows one question with its answer, too.
"""

from __future__ import annotations

import importlib.resources
import json
import re
from dataclasses import dataclass
from functools import cache

_ARTICLES = re.compile(r"\b(the|a|an)\b")
_NOT_WORD = re.compile(r"[^a-z0-9 ]+")


@dataclass(frozen=True)
class Passage:
    title: str
    body: str

    @property
    def text(self) -> str:
        """The user message of this passage."""
        return f"Passage: {self.title}\n{self.body}"


@dataclass(frozen=True)
class Question:
    """passage: title of the one passage that holds the answer. answers: any of them is right."""

    passage: str
    question: str
    stem: str
    answers: tuple[str, ...]

    @property
    def text(self) -> str:
        """The last user message; the model goes on after the stem."""
        return f"Question: {self.question}\nAnswer: {self.stem}"

    def is_right(self, text: str) -> bool:
        """Whether the first line of what the model said holds an accepted answer.

        Case, punctuation and articles do not count.
        """
        said = f" {normalize(first_line(text))} "
        return any(f" {normalize(answer)} " in said for answer in self.answers)


@dataclass(frozen=True)
class DemoData:
    system: str
    passages: tuple[Passage, ...]
    questions: tuple[Question, ...]


def first_line(text: str) -> str:
    """The answer proper: a base model goes on with lines of its own.

    >>> first_line(" Hesper Vallin.\\n\\nQuestion: Who")
    'Hesper Vallin.'
    """
    return text.strip().partition("\n")[0].strip()


def normalize(text: str) -> str:
    """Lower-case words without punctuation and articles.

    >>> normalize("The Widow's  Kettle!")
    'widow s kettle'
    """
    return " ".join(_ARTICLES.sub(" ", _NOT_WORD.sub(" ", text.lower())).split())


@cache
def load() -> DemoData:
    """The packaged passages and questions; the first 16 questions ask for one passage each."""
    path = importlib.resources.files(__package__) / "passages.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    return DemoData(
        data["system"],
        tuple(Passage(p["title"], p["text"]) for p in data["passages"]),
        tuple(
            Question(q["passage"], q["question"], q["stem"], tuple(q["answers"]))
            for q in data["questions"]
        ),
    )
