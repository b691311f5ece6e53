"""Detokenizing and stop strings, token by token."""

from __future__ import annotations

import pytest

from forerun.engine.completion import AnswerText, Detokenizer
from tests.engine.conftest import tiny_tokenizer


def test_pieces_add_up_and_no_half_character_is_shown() -> None:
    tokenizer = tiny_tokenizer()
    text = "the cat — naïve 漢字 🙂 sat"
    detokenizer = Detokenizer(tokenizer, [], skip_special=True)
    pieces = [detokenizer.add(token) for token in tokenizer(text)["input_ids"]]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_token_is_decoded_about_once() -> None:
    """Twice, with transformers' Python around it, was a tenth of all work outside the model where drafts are long."""
    tokenizer, calls = tiny_tokenizer(), list[int]()

    class Counting:
        def decode(self, ids: list[int], **keywords: bool) -> str:
            calls.append(len(ids))
            text: str = tokenizer.decode(ids, **keywords)
            return text

    tokens = tokenizer("the cat sat on the mat and the dog sat on the log " * 8)["input_ids"]
    detokenizer = Detokenizer(Counting(), [], skip_special=True)  # type: ignore[arg-type]
    assert "".join(detokenizer.add(token) for token in tokens) == tokenizer.decode(tokens)
    assert len(calls) < 1.2 * len(tokens) and max(calls) < 16


def test_an_incomplete_character_at_the_end_is_shown_as_such() -> None:
    tokenizer = tiny_tokenizer()
    tokens = tokenizer("ok 漢")["input_ids"][:-1]
    detokenizer = Detokenizer(tokenizer, [], skip_special=True)
    assert "".join(detokenizer.add(token) for token in tokens) == "ok "
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_without_a_tokenizer_there_is_no_text() -> None:
    detokenizer = Detokenizer(None, [1, 2], skip_special=True)
    assert detokenizer.add(3) == detokenizer.flush() == ""


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_across_pieces(include: bool) -> None:
    text = AnswerText(stops=("END", "stop"), include_stop=include)
    sent = ""
    for piece in ("a sto", "ne, E", "N"):
        assert text.add(piece, search=True) is None
        sent += text.release(final=False)
    assert sent == "a stone, "
    assert text.add("D tail", search=True) == "END"
    sent += text.release(final=True)
    assert sent == text.text == ("a stone, END" if include else "a stone, ")


def test_the_first_of_several_stops_wins() -> None:
    text = AnswerText(stops=("world", "lo w"), include_stop=False)
    assert text.add("hello world", search=True) == "lo w"
    assert text.text == "hel"


def test_before_min_tokens_a_stop_string_is_ordinary_text() -> None:
    text = AnswerText(stops=("x",), include_stop=False)
    assert text.add("axb", search=False) is None
    assert text.text == "axb"
