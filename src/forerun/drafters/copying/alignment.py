"""Where an answer stands in a text that was predicted for it, found again after every edit.

Knows two lists of tokens; nothing of drafts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

_LONGEST = 4
"""Longest string searched for, tokens."""
_REACH = 16
"""A string of n tokens is believed at most ``_REACH ** n`` tokens ahead: common words are everywhere."""


class Alignment:
    """The place in `predicted` at which the answer goes on, if it goes on as predicted.

    In step, a token that agrees moves the place by one. After an edit the last tokens of the answer are searched for:
    the longest string first, the nearest place ahead of where the two texts parted, and only strings of `_LONGEST`
    tokens also behind it. A token costs a few look-ups whatever the length of the texts.
    """

    def __init__(self, predicted: Sequence[int]) -> None:
        self.predicted = predicted
        self.place: int | None = 0
        """Index of the token that comes next; None where the answer stands nowhere in the prediction."""
        self.matched = 0
        """How many tokens before the place are the same in both texts."""
        self.edited = False
        """Whether the texts have parted before."""
        self._parted = 0
        """Index of the first predicted token that has not come."""
        self._recent: list[int] = []
        self._places: dict[tuple[int, ...], list[int]] = {}
        for size in range(1, _LONGEST + 1):
            for end in range(size, len(predicted) + 1):
                self._places.setdefault(tuple(predicted[end - size : end]), []).append(end)

    def advance(self, token: int) -> None:
        """The answer gained a token."""
        self._recent = [*self._recent[1 - _LONGEST :], token]
        place = self.place
        if place is not None and place < len(self.predicted) and self.predicted[place] == token:
            self.place, self.matched = place + 1, self.matched + 1
        else:
            self.edited = True
            self.place, self.matched = self._search()
        if self.place is not None and (self.matched >= _LONGEST or not self.edited):
            self._parted = self.place

    def _search(self) -> tuple[int | None, int]:
        for size in range(len(self._recent), 0, -1):
            ends = self._places.get(tuple(self._recent[-size:]), [])
            ahead = bisect_left(ends, self._parted)
            if ahead < len(ends) and ends[ahead] - self._parted <= _REACH**size:
                return ends[ahead], size
            if ends and size == _LONGEST:
                return ends[ahead - 1] if ahead else ends[0], size
        return None, 0
