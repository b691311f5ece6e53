"""Finds where a text that is copied with changes goes on in its source: behind a replaced, an added
or a left-out run of tokens, and through a replacement that was made before. The work per token is
done in `compiled.following`.

Prompt lookup and suffix automata find the place to copy from by what stands before the end of the text, and just that
is what an edit has changed. A follower keeps the place instead, like a finger on the original. What "speculative edits"
(Cursor, 2024) are for, whose method was not published; this one is ours.
"""

from __future__ import annotations

import numpy as np

from forerun.drafters.lookup.compiled import following
from forerun.drafters.lookup.compiled.drafts import NONE, Draft, Floats, Ints


class Follower:
    """A text's place in its source. Both may grow, and they may be the same sequence; the caller
    passes both, as int32 arrays.
    """

    def __init__(self) -> None:
        self._place = following.NOWHERE.copy()
        replacements = np.empty((following.REPLACEMENTS, following.REPLACEMENT_COLUMNS), np.int32)
        self._all = following.Following(self._place, replacements)

    @property
    def place(self) -> int | None:
        """Index in the source of the token that comes next; None: nowhere."""
        place = int(self._place[following.PLACE])
        return None if place == NONE else place

    @property
    def found(self) -> bool:
        """True if the place is where the text's last token stands; else it is a guess, or there is
        none.
        """
        return bool(self._place[following.FOUND])

    @property
    def changed(self) -> bool:
        """True if the text has left the source before."""
        return bool(self._place[following.CHANGED])

    @property
    def parted(self) -> int:
        """Index in the source where the text last left it."""
        return int(self._place[following.PARTED])

    @property
    def agreed(self) -> int:
        """How much speaks for the place: recent tokens that agreed, and those since the last
        change.
        """
        return following.count_agreed(self._place)

    def start(self, place: int, matched: int) -> None:
        """Set the place: the text goes on at this index of its source, before which so many tokens
        agree.
        """
        following.start(self._place, place, matched)

    def read(self, source: Ints, text: Ints, first: int, last: int, *, same: bool = False) -> None:
        """Read the tokens ``first:last`` that the text gained, in their order. `same` means that
        the text is its own source.
        """
        following.read(self._all, source, text, first, last, same)

    def draft(self, source: Ints, counts: Floats, made: Draft, *, same: bool = False) -> tuple[int, float]:
        """Draft everything that comes next, however improbable, with `following.draft`."""
        return following.draft(self._all, source, counts, made, 0.0, same)
