"""Where a text that is copied with changes goes on in its source: behind a replaced, an added or a left-out run of
tokens, and through a replacement that was made before.

Prompt lookup and suffix automata find the place to copy from by what stands before the end of the text, and just that
is what an edit has changed. A follower keeps the place instead, like a finger on the original. What "speculative edits"
(Cursor, 2024) are for, whose method was not published; this one is ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from forerun.core.acceptance import Evidence, by_match

_REACH = 16  # So many tokens of the text are searched for in so many of the source, from where the texts parted
_AGREED = 4  # Tokens in a row that agree end a change
_LONGEST = 8  # Tokens, before and after, of a replacement that is remembered
_TRUST = 16  # Most agreeing tokens that are counted; a token that does not agree halves the count


class _Replacement(NamedTuple):
    old: tuple[int, ...]
    new: tuple[int, ...]


class Follower:
    """A text's place in its source. Both may grow, and they may be the same sequence."""

    def __init__(self) -> None:
        self.place: int | None = None  # Index in the source of the token that comes next; None: nowhere
        self._source: Sequence[int] = ()
        self.found = False  # It is where the text's last token stands; else it is a guess
        self.changed = False  # The text has left the source before
        self.parted = 0  # Index in the source where it last did
        self._matched = 0  # Tokens before the place that agree, of late
        self._trust = 0
        self._began = 0  # Index in the text where the change began
        self._missed = 0  # Tokens of the text in it that did not agree; 0: it has ended
        self._replacements: dict[int, _Replacement] = {}  # By the first token of what is replaced
        self._due: tuple[int, ...] = ()  # The rest of a replacement that is being made again
        self._undone = 0  # The place if it is not

    def start(self, source: Sequence[int], place: int, matched: int) -> None:
        """The text goes on at this place of a source, before which so many tokens agree."""
        self._source, self.place, self.found = source, place, True
        self._matched, self._trust, self._missed, self._due = matched, 0, 0, ()

    def read(self, text: Sequence[int], at: int) -> None:
        """The text gained the token at this index; tokens are read in their order."""
        if self.place is None:
            return
        token, end = text[at], at if text is self._source else len(self._source)
        if self._due and self._due[0] != token:
            self.place, self._due = self._undone, ()
        if self._due:
            self._due = self._due[1:]
        elif (again := self._replacement(self.place, end)) is not None and again.new[0] == token:
            self._undone, self._due = self.place, again.new[1:]
            self.place += len(again.old)
        elif self.place < end and self._source[self.place] == token:
            self.place += 1
        else:
            self._part(text, at, end)
            return
        self._matched = self._matched + 1 if self.found else 1
        self.found, self._trust = True, min(_TRUST, self._trust + 1)
        self._settle(text, at)

    @property
    def agreed(self) -> int:
        """How much speaks for the place: tokens that agreed, of late and since the last change."""
        return 0 if self.place is None else self._trust + self._matched

    def draft(self, most: int) -> Iterator[tuple[int, Evidence]]:
        """At most so many tokens that come next, and what is known of each."""
        if self.place is None:
            return
        kind, agreed, end = "followed" if self.found else "guessed", self.agreed, len(self._source)
        due, place = list(self._due), self.place
        for offset in range(most):
            if not due:
                if place >= end:
                    return
                again = self._replacement(place, end)
                due = [self._source[place]] if again is None else list(again.new)
                place += 1 if again is None else len(again.old)
            yield due.pop(0), by_match(kind, agreed + offset)

    def _part(self, text: Sequence[int], at: int, end: int) -> None:
        """A token does not agree. Its nearest place ahead is taken before which most agrees; if there is none, it
        replaced one token, or, after another one like it, was added."""
        assert self.place is not None
        if self._missed == 0:
            self.parted, self._began, self.changed = self.place, at, True
        first = self.parted
        self._missed, self._trust, self._matched, self.found = self._missed + 1, self._trust // 2, 0, False
        if self._missed > _REACH:
            self.place = None
            return
        self.place = first + (self._missed == 1)
        for place in range(first, min(end, first + _REACH)):
            size = 0
            while size <= min(place - first, at - self._began) and self._source[place - size] == text[at - size]:
                size += 1
            if size > self._matched:
                self.found, self._matched, self.place = True, size, place + 1
        self._settle(text, at)

    def _settle(self, text: Sequence[int], at: int) -> None:
        """Behind a change that has ended: remember what replaced what."""
        if self._missed and self._matched >= _AGREED:
            assert self.place is not None
            old = tuple(self._source[self.parted : self.place - self._matched])
            new = tuple(text[self._began : at + 1 - self._matched])
            if 0 < len(old) <= _LONGEST and 0 < len(new) <= _LONGEST:
                self._replacements[old[0]] = _Replacement(old, new)
            self._missed = 0

    def _replacement(self, place: int, end: int) -> _Replacement | None:
        """What is to be made again at a place."""
        known = self._replacements.get(self._source[place]) if self.found and place < end else None
        return known if known and tuple(self._source[place : place + len(known.old)]) == known.old else None
