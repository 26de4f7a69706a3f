"""What the small hybrid of tests/fixtures/tiny_hybrid learns, and what it is judged by.

One vocabulary: bytes (0-255), then 64 keys, 64 values, 4 modes and a question mark. Text is the
source of Python's own library; a file is held out by its name, so that no version of Python ever
trains on what another is judged by.

Recall: records ``key value`` are written under the mode named last before them; a key has another
value in every mode. ``? key`` asks for the value in the mode that holds *now*. Which values there
are is spread over the whole context (attention's work); which mode holds is a thing to remember
since it was named, with text in between (the recurrent state's work).
"""

from __future__ import annotations

import hashlib
import random
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

FIRST_KEY, KEYS = 256, 64
FIRST_VALUE, VALUES = FIRST_KEY + KEYS, 64
FIRST_MODE, MODES = FIRST_VALUE + VALUES, 4
QUESTION = FIRST_MODE + MODES
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
    names += [f"<m{i}>" for i in range(MODES)] + ["<?>"]
    return names + [f"<unused{i}>" for i in range(VOCABULARY - FIRST_KEY - len(names))]


@dataclass
class Recall:
    """One context. ``tokens``; the indices of the ``answers`` in it; ``since``: for each answer,
    how many tokens ago the mode it needs was named."""

    tokens: list[int] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    since: list[int] = field(default_factory=list)


class Writer:
    """Writes contexts of ``records`` records: ``modes`` values for each of the keys."""

    def __init__(self, source: bytes, records: int, modes: int, rng: random.Random) -> None:
        self._source, self._rng = source, rng
        self._calm = records <= 8  # as easy as can be: no text in between
        keys = rng.sample(range(KEYS), records // modes)
        self._modes = rng.sample(range(MODES), modes)
        self._value = {(m, k): rng.randrange(VALUES) for m in self._modes for k in keys}
        self._keys = keys
        self._mode, self._named = self._modes[0], 0
        self.context = Recall()

    def text(self, length: int) -> None:
        if length > 0:
            start = self._rng.randrange(len(self._source) - length)
            self.context.tokens += self._source[start : start + length]

    def name_mode(self) -> None:
        self._mode, self._named = self._rng.choice(self._modes), len(self.context.tokens)
        self.context.tokens.append(FIRST_MODE + self._mode)

    def records(self, length: int) -> None:
        """Every record once, in blocks of one mode, and text so that it is ``length`` tokens."""
        rng, blocks = self._rng, []
        for mode in self._modes:
            keys = rng.sample(self._keys, len(self._keys))
            while keys:
                size = rng.randint(1, 8)
                blocks.append((mode, keys[:size]))
                keys = keys[size:]
        rng.shuffle(blocks)
        if self._calm:
            length = 0
        spare = max(0, length - sum(1 + 2 * len(keys) for _, keys in blocks))
        cuts = sorted(rng.randint(0, spare) for _ in blocks)
        for (mode, keys), before, after in zip(blocks, [0, *cuts], cuts, strict=False):
            gap = after - before
            inside = rng.randint(0, min(gap, 24)) if rng.random() < 0.4 else 0
            self.text(gap - inside)
            self._mode, self._named = mode, len(self.context.tokens)
            self.context.tokens.append(FIRST_MODE + mode)
            self.text(inside)
            for key in keys:
                self.context.tokens += [FIRST_KEY + key, FIRST_VALUE + self._value[mode, key]]
        self.text(spare - (cuts[-1] if cuts else 0))

    def questions(self, count: int) -> None:
        """``count`` times ``? key value``, in the mode that holds."""
        for _ in range(count):
            key = self._rng.choice(self._keys)
            tokens = self.context.tokens
            tokens += [QUESTION, FIRST_KEY + key, FIRST_VALUE + self._value[self._mode, key]]
            self.context.answers.append(len(tokens) - 1)
            self.context.since.append(len(tokens) - 2 - self._named)

    def question_blocks(self, length: int) -> None:
        """Modes, text and questions until the context has ``length`` tokens (cut there)."""
        rng, context = self._rng, self.context
        while len(context.tokens) < length:
            left = length - len(context.tokens)
            if rng.random() < 0.8:
                self.name_mode()
            longest = 8 if rng.random() < 0.5 else min(80, max(8, left // 3))
            if not self._calm:
                self.text(rng.randint(0, min(longest, left)))
            self.questions(rng.randint(1, 5))
        kept = [i for i, at in enumerate(context.answers) if at < length]
        context.tokens = context.tokens[:length]
        context.answers = [context.answers[i] for i in kept]
        context.since = [context.since[i] for i in kept]


def training_context(
    source: bytes, records: int, modes: int, length: int, rng: random.Random
) -> Recall:
    """A context to train on: records first, then questions."""
    writer = Writer(source, records, modes, rng)
    writer.records(int(length * rng.uniform(0.4, 0.65)))
    writer.question_blocks(length)
    return writer.context


def resumed_context(
    source: bytes, records: int, prefix: int, distance: int, questions: int, rng: random.Random
) -> Recall:
    """A context to be resumed at token ``prefix``: the mode was named ``distance`` tokens before,
    and ``questions`` follow."""
    writer = Writer(source, records, MODES, rng)
    writer.records(int((prefix - distance) * 0.8))
    writer.question_blocks(prefix - distance)
    writer.name_mode()
    writer.text(distance - 1)
    writer.context.answers, writer.context.since = [], []
    writer.questions(questions)
    return writer.context
