"""Detokenizing and stop strings, token by token."""

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from forerun.engine.completion import CompletionText, Detokenizer
from tests.engine.conftest import tiny_tokenizer


def test_pieces_add_up_and_no_half_character_is_shown() -> None:
    tokenizer = tiny_tokenizer()
    text = "the cat — naïve 漢字 🙂 sat"
    detokenizer = Detokenizer(tokenizer, [], skip_special=True)
    pieces = [detokenizer.add(token) for token in tokenizer(text)["input_ids"]]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


class Counting:
    """A tokenizer that notes how many tokens it decodes at a time."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer, self.calls = tokenizer, list[int]()

    def decode(self, ids: list[int], **keywords: bool) -> str:
        self.calls.append(len(ids))
        return str(self._tokenizer.decode(ids, **keywords))


@pytest.mark.parametrize(
    ("text", "part", "times", "most"),
    [
        ("the cat sat on the mat and the dog sat on the log " * 8, slice(None), 1, 15),
        *(("漢", part, 1000, 16) for part in (slice(0, 1), slice(0, 2), slice(2, 3))),
    ],
)
def test_a_token_is_decoded_about_once(text: str, part: slice, times: int, most: int) -> None:
    """Twice was a tenth of all work outside the model where drafts are long; and bytes that never form a character were
    decoded all together with each further one, which took seconds for 8,000 of them."""
    tokenizer = tiny_tokenizer()
    counting, tokens = Counting(tokenizer), tokenizer(text)["input_ids"][part] * times
    detokenizer = Detokenizer(counting, [], skip_special=True)
    shown = "".join(detokenizer.add(token) for token in tokens)
    assert shown + detokenizer.flush() == tokenizer.decode(tokens) and shown
    assert len(counting.calls) < 1.2 * len(tokens) and max(counting.calls) <= most


@pytest.mark.parametrize("first", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_tokens_that_each_end_within_a_character(first: int, size: int) -> None:
    """As merges of bytes may, where a character comes often: no character is complete at the end of a token."""
    text = "漢字" * 20 + "🙂" * 20 + "naïve"
    data = text.encode()
    pieces = [data[:first], *(data[at : at + size] for at in range(first, len(data), size))]
    tokenizer: Any = SimpleNamespace(
        decode=lambda ids, **_: b"".join(pieces[one] for one in ids).decode("utf-8", "replace")
    )
    detokenizer = Detokenizer(tokenizer, [], skip_special=True)
    assert "".join(map(detokenizer.add, range(len(pieces)))) + detokenizer.flush() == text


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
    text = CompletionText(stops=("END", "stop"), include_stop=include)
    sent = ""
    for piece in ("a sto", "ne, E", "N"):
        assert text.add(piece, search=True) is None
        sent += text.release(final=False)
    assert sent == "a stone, "
    assert text.add("D tail", search=True) == "END"
    sent += text.release(final=True)
    assert sent == text.text == ("a stone, END" if include else "a stone, ")


def test_a_stop_string_across_pieces_is_found_and_the_first_of_several_wins() -> None:
    text = CompletionText(stops=("world", "lo w"), include_stop=False)
    assert text.add("hello world", search=True) == "lo w"
    assert text.text == "hel"
