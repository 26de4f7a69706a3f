"""Stop texts: where the answer ends, what a reader of the stream gets to see, what is cached."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvspan.engine.detokenizer import Detokenizer
from kvspan.layout import layout_from_tokens
from span_oracle import span_logprobs
from test_engine_requests import TOLERANCE, blocks_in_use, rag
from test_local_engine import GREEDY, difference, open_tiny
from tiny_models import tiny_model, word_tokenizer


class Letters:
    """One token per letter: a, b, c, ..."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(chr(ord("a") + i) for i in ids)


def write(answer: str, stop: list[str]) -> tuple[str, list[str], bool]:
    """What becomes of an answer: its text, the pieces of its stream, whether it was stopped."""
    pieces: list[str] = []
    tokenizer: Any = Letters()
    detokenizer = Detokenizer(tokenizer, pieces.append, stop)
    for letter in answer:
        if detokenizer.push(ord(letter) - ord("a")):
            return detokenizer.finish(), pieces, True
    return detokenizer.finish(), pieces, False


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_the_answer_ends_before_the_first_stop_text(answer: str, stop: list[str]) -> None:
    ends = [at for text in stop if (at := answer.find(text)) >= 0]
    text, pieces, stopped = write(answer, stop)
    assert stopped == bool(ends)
    assert "".join(pieces) == text
    if not ends:
        assert text == answer
    else:
        # A longer stop text may start earlier and be complete later: the first complete one counts.
        assert answer.startswith(text) and not any(word in text for word in stop)
        assert any(answer.startswith(text + word) for word in stop)


def test_the_start_of_a_stop_text_is_held_back() -> None:
    assert write("xyzab", ["zabc"]) == ("xyzab", ["x", "y", "zab"], False)
    assert write("xyzabc", ["zabc"]) == ("xy", ["x", "y"], True)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_stopped_answer_leaves_a_cache_that_is_right(name: str) -> None:
    with open_tiny(name, 16) as engine:
        request = rag([1, 2], max_tokens=60, temperature=3.0, seed=1)
        whole = engine.run(request)
        at = len(whole.text) * 2 // 3
        stop = whole.text[at : at + 15]
        assert whole.text.find(stop) == at
        engine.clear_cache()
        cut = engine.run(replace(request, stop=("nothing", stop)))
        assert cut.text == whole.text[:at] and cut.finish_reason == "stop"
        count = len(cut.token_ids)
        assert 32 < count < 60 and cut.token_ids == whole.token_ids[:count]
        decode = engine.tokenizer.decode
        assert stop in decode(cut.token_ids) and stop not in decode(cut.token_ids[:-1])
        assert cut.usage.completion_tokens == count
        assert blocks_in_use(engine) == 0
        # The conversation goes on over blocks of the answer, whose KV was written or is not found.
        before = engine.layout(request)
        ids = [*before.token_ids, *cut.token_ids, 5, 6]
        longer = layout_from_tokens(ids, before.spans, 16, before.scope)
        again = engine.run_layout(longer, GREEDY)
        assert again.usage.cached_tokens > before.num_tokens + 16
        expected = span_logprobs(tiny_model(name), longer, "sequential")
        assert difference(again, expected) <= TOLERANCE


def test_a_prompt_without_the_chat_template() -> None:
    template = "{% for m in messages %}<turn>{{ m['content'] }}{% endfor %}<turn>"
    with open_tiny("llama", 16) as engine:
        engine.encoder.tokenizer = word_tokenizer(template)
        request = rag([], "w1 w2", scope="full")
        ids = engine.encoder.tokenizer.convert_tokens_to_ids
        turn, bos, w1, w2 = (ids(word) for word in ("<turn>", "<bos>", "w1", "w2"))
        plain = engine.layout(replace(request, prompt=request.prompt[1:], chat=False))
        assert plain.token_ids.tolist() == [bos, w1, w2]
        chat = engine.layout(replace(request, prompt=request.prompt[1:]))
        assert chat.token_ids.tolist() == [turn, w1, w2, turn]
