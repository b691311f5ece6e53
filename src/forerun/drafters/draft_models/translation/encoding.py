"""Bytes to tokens with the place of each: the step that every exchange between two tokenizers ends in.

A tokenizer takes text, not bytes, may put a space before it, and may change it (case, accents, spaces). What its tokens
spell is therefore compared with what it was given; where that differs, the places are those that it reports itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from forerun.drafters.draft_models.translation.spelling import Spelling

_ANCHORS = ("\n", "a", ".")
"""What may stand before a piece so that it is no beginning of a text."""


class Span(NamedTuple):
    """One token and the bytes of the text that it covers."""

    id: int
    start: int
    end: int


def whole_characters(data: bytes | bytearray) -> int:
    """How many bytes from the first there are without an incomplete UTF-8 character at the end."""
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue
        needed = 1 if byte < 0xC2 or byte > 0xF4 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
        return len(data) - back if needed > back else len(data)
    return len(data)


def starts_character(data: bytes | bytearray, place: int) -> bool:
    """Whether no character of the UTF-8 text reaches over `place`."""
    return place >= len(data) or data[place] & 0xC0 != 0x80


class Encoder:
    """A tokenizer as a function from bytes to spans."""

    def __init__(self, spelling: Spelling) -> None:
        self.spelling = spelling
        self._bytes = {piece[0]: token for piece, token in spelling.ordinary.items() if len(piece) == 1}

    def encode(self, data: bytes, *, opening: bool = True) -> list[Span]:
        """The tokens of a text, without those that a tokenizer adds around it.

        Bytes that are no UTF-8 become the tokens of single bytes; a tokenizer without such tokens leaves them out.

        Args:
            opening: the text begins here, so that a tokenizer may put a space before it; else it is a piece of one.
        """
        found, place = list[Span](), 0
        for part in _parts(data):
            if isinstance(part, str):
                spans = self._text(part) if opening and not place else self._inside(part)
                found += [Span(s.id, place + s.start, place + s.end) for s in spans]
                place += len(part.encode())
                continue
            for byte in part:
                if byte in self._bytes:
                    found.append(Span(self._bytes[byte], place, place + 1))
                place += 1
        return found

    def after(self, before: bytes, data: bytes) -> list[Span] | None:
        """The tokens of `data` where it follows `before`, placed from the border on; None if a token lies across it."""
        return _behind(self.encode(before + data), len(before))

    def _inside(self, text: str) -> list[Span]:
        """The tokens of text in the middle of a text, so without a space that was not there, if that can be had."""
        plain, data = self._text(text), text.encode()
        if self._spells(plain, data):
            return plain
        for anchor in _ANCHORS:
            spans = _behind(self._text(anchor + text), len(anchor.encode()))
            if spans is not None and self._spells(spans, data):
                return spans
        return plain

    def _spells(self, spans: list[Span], data: bytes) -> bool:
        return self.spelling.spell(span.id for span in spans) == data

    def _text(self, text: str) -> list[Span]:
        """The tokens of valid text, placed in its bytes."""
        tokenizer = self.spelling.tokenizer
        fast = bool(getattr(tokenizer, "is_fast", False))
        made = tokenizer(text, add_special_tokens=False, return_offsets_mapping=fast, verbose=False)
        ids: list[int] = list(made["input_ids"])
        data, spelled = text.encode(), self.spelling.spell(ids)
        if spelled in (data, b" " + data):
            shift = len(spelled) - len(data)
            ends = [max(0, end - shift) for end in accumulate(len(self.spelling.piece(token)) for token in ids)]
        elif fast:
            return _reported(text, ids, made["offset_mapping"])
        else:
            # Nobody says where the tokens stand: one that covers all is in the way of every border.
            return [Span(token, 0, len(data)) for token in ids]
        return [Span(*span) for span in zip(ids, [0, *ends], ends, strict=False)]


def _behind(spans: list[Span], border: int) -> list[Span] | None:
    """What comes after `border`, placed from there; None if a token lies across it."""
    rest = [Span(s.id, s.start - border, s.end - border) for s in spans if s.end > border]
    return None if rest and rest[0].start < 0 else rest


def _reported(text: str, ids: list[int], offsets: list[tuple[int, int]]) -> list[Span]:
    """Places in characters, as the tokenizer tells them, as places in bytes."""
    places = [0, *accumulate(len(character.encode()) for character in text)]
    return [Span(token, places[start], places[end]) for token, (start, end) in zip(ids, offsets, strict=True)]


def _parts(data: bytes) -> Iterator[str | bytes]:
    """The text in the bytes, and between its parts what is no text."""
    while data:
        try:
            yield data.decode()
            return
        except UnicodeDecodeError as error:
            if error.start:
                yield data[: error.start].decode()
            yield data[error.start : error.end]
            data = data[error.end :]
