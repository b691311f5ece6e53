"""Token ids to text, token by token, and where the text must stop. Knows a tokenizer; knows no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_INCOMPLETE = "\ufffd"


class Detokenizer:
    """Turns output ids into text as they come; a character that spans tokens appears with its last token.

    Decodes a short window with every token and takes the difference to the text before, so it holds for every
    tokenizer.
    """

    _WINDOW = 5
    """Tokens of the prompt, or before an incomplete character, that are decoded with what follows."""
    _LONGEST = 12
    """Tokens of a window after which it begins anew with the last piece, which takes a decoding of its own."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, prompt: Sequence[int], *, skip_special: bool) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._ids = list(prompt[-self._WINDOW :])
        self._start = 0
        self._read = len(self._ids)
        self._text: str | None = None
        """Of the window up to what was read; None before it is needed."""

    def add(self, token: int) -> str:
        """The text that `token` adds; empty while a character is incomplete."""
        self._ids.append(token)
        return self._advance(final=False)

    def flush(self) -> str:
        """What is left of an incomplete character at the end of the answer."""
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        if self._tokenizer is None or self._read == len(self._ids):
            return ""
        if self._text is None:
            self._text = self._decode(self._ids[self._start : self._read])
        before, after = self._text, self._decode(self._ids[self._start :])
        if not final and after.endswith(_INCOMPLETE):
            return ""
        last, self._read, self._text = self._read, len(self._ids), after
        if final:
            self._start, self._text = max(0, self._read - self._WINDOW), None
        elif self._read - self._start > self._LONGEST:
            self._start, self._text = last, None
        return after[len(before) :]

    def _decode(self, ids: Sequence[int]) -> str:
        assert self._tokenizer is not None
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=self._skip_special, clean_up_tokenization_spaces=False
        )
        return text


@dataclass(slots=True)
class AnswerText:
    """The text of one answer as it grows: finds stop strings and holds back what may become one."""

    stops: tuple[str, ...]
    include_stop: bool
    text: str = ""
    sent: int = 0
    """Characters already handed out by `release`."""

    def add(self, piece: str, *, search: bool = False) -> str | None:
        """Append; with `search`, the stop string that this completed (the text is then cut), or None."""
        start = len(self.text)
        self.text += piece
        hits = []
        for stop in self.stops if search else ():
            at = self.text.find(stop, max(0, start - len(stop) + 1))
            if at >= 0:
                hits.append((at, stop))
        if not hits:
            return None
        at, stop = min(hits)
        self.text = self.text[: at + len(stop) if self.include_stop else at]
        return stop

    def release(self, *, final: bool) -> str:
        """New text that can no longer be taken back; everything if `final`."""
        held = 0 if final else max((_overlap(self.text, stop) for stop in self.stops), default=0)
        end = max(self.sent, len(self.text) - held)
        piece, self.sent = self.text[self.sent : end], end
        return piece


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
