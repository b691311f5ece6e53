"""A streaming reader goes through text that arrives in pieces with a cursor, and reads the JSON in
it.

A reader is a generator that yields `Piece`s, and None where it needs more text. What it decides depends on the text and
never on where the text was cut, so a streamed completion and a whole one are read by the same lines to the same pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

from forerun.params import begun

T = TypeVar("T")
_NAME = re.compile(r"[\w.-]*")
_SCALAR = re.compile(r"[^\s,:\[\]{}\"]*")


class Kind(Enum):
    """The kind of a piece of a completion."""

    CONTENT = "content"
    REASONING = "reasoning"
    CALL = "call"  # A call begins; the text is the function's name
    ARGUMENTS = "arguments"  # More of the JSON text of the last call's arguments


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer."""

    kind: Kind
    text: str
    start: int = field(default=0, compare=False)  # Where a text that is CONTENT lies in the completion, in characters
    end: int = field(default=0, compare=False)


Steps = Generator[Piece | None, None, T]  # A reader in progress: pieces, None for "more text", a result at the end


class Incoming:
    """The text so far and how far it has been read."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0  # Characters read
        self.ended = False  # Nothing will be added
        self.reasoned = 0  # Characters of the reasoning, with its marks; 0 while it has not been read

    def until(self, mark: str, kind: Kind, *more: str, drop_end: bool = False) -> Steps[int | None]:
        """Pass the text on up to `mark` or one of `more`, which is read too.

        Blanks before it are held back, with `drop_end` also where the text ends without it. Returns
        where what was held back begins; None where no mark came.
        """
        marks = (mark, *more)
        while True:
            starts = [(start, each) for each in marks if (start := self.text.find(each, self.at)) >= 0]
            if starts:
                start, mark_found = min(starts)
                end = self._before_blanks(start)
                yield from self._pass(end, kind)
                self.at = start + len(mark_found)
                return end
            if self.ended:
                yield from self._pass(self._before_blanks(len(self.text)) if drop_end else len(self.text), kind)
                self.at = len(self.text)
                return None
            sure = len(self.text) - begun(self.text, marks)
            yield from self._pass(self._before_blanks(sure), kind)
            yield None

    def holds(self, mark: str) -> Steps[bool]:
        """Return whether `mark` is anywhere in what is left; nothing is read."""
        while self.text.find(mark, self.at) < 0:
            if self.ended:
                return False
            yield None
        return True

    def rest(self, kind: Kind) -> Steps[None]:
        """Pass on all that comes."""
        while True:
            yield from self._pass(len(self.text), kind)
            if self.ended:
                return
            yield None

    def starts(self, mark: str) -> Steps[bool]:
        """Read `mark` if it comes next."""
        while True:
            here = self.text[self.at : self.at + len(mark)]
            if here == mark:
                self.at += len(mark)
                return True
            if self.ended or not mark.startswith(here):
                return False
            yield None

    def opens(self, mark: str) -> Steps[bool]:
        """Skip blanks and read `mark` if it comes next."""
        yield from self.skip_blanks()
        return (yield from self.starts(mark))

    def skip_blanks(self) -> Steps[None]:
        """Read white space."""
        while (yield from self.next()).isspace():
            self.at += 1

    def next(self) -> Steps[str]:
        """Return the next character, unread; empty at the end."""
        while self.at >= len(self.text) and not self.ended:
            yield None
        return self.text[self.at : self.at + 1]

    def matching(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Read the longest text that matches, character by character's decision: `pattern` is ``[...]*``."""
        while True:
            match = pattern.match(self.text, self.at)
            assert match is not None, "the pattern matches the empty text"
            if match.end() < len(self.text) or self.ended:
                self.at = match.end()
                return match.group()
            yield None

    def name(self) -> Steps[str]:
        """Read what could be a function's name; empty where nothing could."""
        return (yield from self.matching(_NAME))

    def up_to(self, mark: str, before: Sequence[str] = ()) -> Steps[str | None]:
        """Read the text up to `mark`, and the mark; None, with nothing read, where it never comes.

        With `before` the mark counts only where, behind blanks, one of these or nothing follows.
        """
        start = searched = self.at
        while True:
            end = self.text.find(mark, searched)
            if end >= 0:
                self.at = end + len(mark)
                if not before or (yield from self.comes(before, ended=True)):
                    return self.text[start:end]
                self.at, searched = start, end + 1
            elif self.ended:
                return None
            else:
                searched = max(searched, len(self.text) - len(mark) + 1)
                yield None

    def comes(self, marks: Sequence[str], *, ended: bool = False) -> Steps[bool]:
        """Return whether one of the marks comes next behind blanks, all unread.

        `ended` is the result where the text ends before that is known.
        """
        start = self.at
        yield from self.skip_blanks()
        behind, self.at = self.at, start
        while True:
            here = self.text[behind:]
            if any(here.startswith(mark) for mark in marks):
                return True
            if not any(mark.startswith(here) for mark in marks):
                return False
            if self.ended:
                return ended
            yield None

    def json_value(self) -> Steps[None]:
        """Pass the JSON value that comes next on as `Kind.ARGUMENTS`, as it arrives, or up to the
        text's end.

        What models forget to escape within strings, such as line breaks, is escaped, all else is
        unchecked.
        """
        first = yield from self.next()
        if first not in ('"', "{", "["):
            if scalar := (yield from self.matching(_SCALAR)):
                yield Piece(Kind.ARGUMENTS, scalar)
            return
        depth, quoted, escaped, ended = 0, False, False, False
        while not ended:
            written = ""
            while self.at < len(self.text) and not ended:
                character = self.text[self.at]
                self.at += 1
                if quoted:
                    written += _escape(character, escaped=escaped)
                    quoted, escaped = escaped or character != '"', character == "\\" and not escaped
                else:
                    written += character
                    quoted = character == '"'
                    depth += (character in "{[") - (character in "}]")
                ended = depth == 0 and not quoted
            if written:
                yield Piece(Kind.ARGUMENTS, written)
            if self.ended:
                return
            if not ended:
                yield None

    def json_string(self) -> Steps[str | None]:
        """Read a JSON string; None where there is none, or where it never ends."""
        if (yield from self.next()) != '"':
            return None
        raw = yield from collect(self.json_value())
        try:
            return str(json.loads(raw, strict=False))
        except ValueError:
            return None

    def _pass(self, end: int, kind: Kind) -> Steps[None]:
        if end > self.at:
            piece = Piece(kind, self.text[self.at : end], self.at, end)
            self.at = end
            yield piece

    def _before_blanks(self, end: int) -> int:
        while end > self.at and self.text[end - 1].isspace():
            end -= 1
        return end


class PieceReader:
    """Runs a reader, which must read to the end, over a text that arrives in pieces; `forced` says that it has to be a
    call.
    """

    def __init__(self, read: Callable[[Incoming], Steps[None]], *, forced: bool = False) -> None:
        self.incoming = Incoming()
        self._steps = read(self.incoming)
        self._calls = forced  # What is not certain of a text that was cut off belongs to a call

    def whole(self, text: str, *, cut: bool = False) -> list[Piece]:
        """Return the pieces of a complete text, or of one that was cut off."""
        return [*self.feed(text), *self.close(cut=cut)]

    def feed(self, text: str) -> list[Piece]:
        """Return the pieces that are certain now that `text` has come."""
        self.incoming.text += text
        return self._run()

    def close(self, *, cut: bool = False) -> list[Piece]:
        """Return the pieces that are left now that nothing will come. Of a text that was `cut` off behind a call, or
        where it has to be one, what was held back is no content: it began another call, or a mark.
        """
        self.incoming.ended = True
        pieces = self._run()
        return [one for one in pieces if one.kind is not Kind.CONTENT] if cut and self._calls else pieces

    def _run(self) -> list[Piece]:
        pieces: list[Piece] = []
        for piece in self._steps:
            if piece is None:
                break
            if pieces and pieces[-1].kind is piece.kind is not Kind.CALL:
                pieces[-1] = Piece(piece.kind, pieces[-1].text + piece.text, pieces[-1].start, piece.end)
            else:
                pieces.append(piece)
                self._calls = self._calls or piece.kind is Kind.CALL
        return pieces


def collect(steps: Steps[None]) -> Steps[str]:
    """Collect the text of all pieces, none of which is passed on."""
    text = ""
    for piece in steps:
        if piece is None:
            yield None
        else:
            text += piece.text
    return text


def _escape(character: str, *, escaped: bool) -> str:
    """Escape a character of a JSON string as JSON wants it; `escaped` says that it stands behind a
    backslash.
    """
    if character < " ":
        return ("\\" if escaped else "") + json.dumps(character)[1:-1]
    return f"\\{character}" if escaped and character not in '"\\/bfnrtu' else character
