"""What the small hybrid of tests/fixtures/tiny_hybrid learns, and what it is judged by.

One vocabulary: bytes (0-255), then 64 keys, 64 values, 3 modes and two question marks. Text is the
source of Python's own library; a file is held out by its name, so that no version of Python ever
trains on what another is judged by.

Recall: a record is a key and its value in each mode, ``key value value value``. ``<?> key`` asks
for the value in the mode that holds *now*, which was named some time before, with text and other
questions in between; ``<!>`` asks for the mode itself. The records are spread over the whole
context, attention's work; which mode holds is for the recurrent state to remember.
"""

from __future__ import annotations

import hashlib
import random
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

FIRST_KEY, KEYS = 256, 64
FIRST_VALUE, VALUES = FIRST_KEY + KEYS, 64
FIRST_MODE, MODES = FIRST_VALUE + VALUES, 3  # the convolution sees three tokens back
WHICH_MODE = FIRST_MODE + MODES
QUESTION = WHICH_MODE + 1
VOCABULARY = 448  # the next multiple of 64


def text(held_out: bool) -> bytes:
    """Sources of the standard library, one after another: those trained on, or those held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        skipped = name.startswith(("site-packages/", "dist-packages/", "test/", "idlelib/"))
        if skipped or "/tests/" in name or "/test/" in name:
            continue
        if (hashlib.md5(name.encode()).digest()[0] < 16) == held_out:
            found.append(path.read_bytes())
    return b"\n".join(found)


def words() -> list[str]:
    """How each token after the bytes is written, in the order of their ids."""
    names = [f"<k{i}>" for i in range(KEYS)] + [f"<v{i}>" for i in range(VALUES)]
    names += [f"<m{i}>" for i in range(MODES)] + ["<!>", "<?>"]
    return names + [f"<unused{i}>" for i in range(VOCABULARY - FIRST_KEY - len(names))]


@dataclass
class Recall:
    """One context. ``tokens``; the indices of the ``answers`` in it; ``since``: for each answer,
    how many tokens ago the mode it needs was named."""

    tokens: list[int] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    since: list[int] = field(default_factory=list)


class Writer:
    """Writes a context with a record for each of ``keys`` keys.

    modes: how many are in use. calm: no text in between.
    """

    def __init__(
        self,
        source: bytes,
        keys: int,
        rng: random.Random,
        modes: int = MODES,
        calm: bool = False,
    ) -> None:
        self._source, self._rng, self._modes, self._calm = source, rng, modes, calm
        self._values = {
            key: [rng.randrange(VALUES) for _ in range(MODES)]
            for key in rng.sample(range(KEYS), keys)
        }
        self._keys = list(self._values)
        self._mode, self._named = 0, 0
        self.context = Recall()

    def text(self, length: int) -> None:
        if length > 0:
            start = self._rng.randrange(len(self._source) - length)
            self.context.tokens += self._source[start : start + length]

    def records(self, length: int) -> None:
        """All records, and text between them so that it is ``length`` tokens."""
        spare = 0 if self._calm else max(0, length - len(self._keys) * (1 + MODES))
        cuts = sorted(self._rng.randint(0, spare) for _ in self._keys)
        for key, before, after in zip(self._keys, [0, *cuts], cuts, strict=False):
            self.text(after - before)
            values = [FIRST_VALUE + value for value in self._values[key]]
            self.context.tokens += [FIRST_KEY + key, *values]
        self.text(spare - cuts[-1])

    def name_mode(self) -> None:
        self._mode, self._named = self._rng.randrange(self._modes), len(self.context.tokens)
        self.context.tokens.append(FIRST_MODE + self._mode)

    def questions(self, count: int, of_mode: float = 0.0) -> None:
        """``count`` questions with their answers, a share of them for the mode itself."""
        tokens = self.context.tokens
        for _ in range(count):
            if self._rng.random() < of_mode:
                tokens += [WHICH_MODE, FIRST_VALUE + self._mode]
            else:
                key = self._rng.choice(self._keys)
                tokens += [QUESTION, FIRST_KEY + key, FIRST_VALUE + self._values[key][self._mode]]
            self.context.answers.append(len(tokens) - 1)
            self.context.since.append(len(tokens) - 2 - self._named)

    def question_blocks(self, length: int) -> None:
        """Modes, text and questions until the context has ``length`` tokens (cut there)."""
        rng, context = self._rng, self.context
        self.name_mode()
        while len(context.tokens) < length:
            left = length - len(context.tokens)
            longest = 8 if rng.random() < 0.5 else min(80, max(8, left // 3))
            if not self._calm:
                self.text(rng.randint(0, min(longest, left)))
            self.questions(rng.randint(1, 5), of_mode=0.25)
            if rng.random() < 0.8:
                self.name_mode()
        kept = [i for i, at in enumerate(context.answers) if at < length]
        context.tokens = context.tokens[:length]
        context.answers = [context.answers[i] for i in kept]
        context.since = [context.since[i] for i in kept]

    def end_with_an_answer(self) -> None:
        """Put text at the start in place of what follows the last answer, as modes are named after
        answers."""
        tokens = self.context.tokens
        length, end = len(tokens), self.context.answers[-1] + 1
        start = self._rng.randrange(len(self._source) - length)
        tokens[:] = [*self._source[start : start + length - end], *tokens[:end]]


def training_context(
    source: bytes,
    keys: int,
    length: int,
    rng: random.Random,
    modes: int = MODES,
    calm: bool = False,
) -> Recall:
    """A context to train on: records first, then questions."""
    writer = Writer(source, keys, rng, modes, calm)
    writer.records(int(length * rng.uniform(0.4, 0.65)))
    writer.question_blocks(length)
    return writer.context


def resumed_context(
    source: bytes, keys: int, prefix: int, distance: int, questions: int, rng: random.Random
) -> Recall:
    """A context to be resumed at token ``prefix``: the mode was named ``distance`` tokens before,
    and ``questions`` follow."""
    writer = Writer(source, keys, rng)
    writer.records(int((prefix - distance) * 0.8))
    writer.question_blocks(prefix - distance)
    writer.end_with_an_answer()
    writer.name_mode()
    writer.text(distance - 1)
    writer.context.answers, writer.context.since = [], []
    writer.questions(questions)
    return writer.context
