"""Whose a row of tokens is, where an engine moves rows about and tells no request ids: seen from what the row holds."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from forerun.drafters.lookup.compiled.batch import Longs
from forerun.drafters.lookup.compiled.drafts import NONE, Ints, compiled

_BLOCK = 64  # Tokens that are compared before a difference is looked for: without branches, so several at a time


class Recognised(NamedTuple):
    """Of the B rows of a step: what is known of each stands in one of the places, and stays there."""

    places: Longs  # (B,)
    starts: Longs  # (B,) of its new tokens in `KnownRows.tokens`
    ends: Longs  # (B,)
    gone: list[int]  # Places of texts that no row goes on with; a new text may have one of them now
    new: int  # Rows whose text begins now


class KnownRows:
    """The texts of all rows. A row that goes on with a known text is that sequence, wherever it stands now: two that
    hold the same are the same to a drafter, too."""

    def __init__(self, rows: int) -> None:
        self._held = np.zeros((rows, 1), np.int32)  # By place, with room to grow
        self._sizes = np.zeros(rows, np.int32)
        self._order = np.arange(rows)  # The places, those of the last step's rows first
        self._running = 0  # Of these
        self._gone = np.zeros(rows, np.int64)
        self.recognise(np.zeros((0, 1), np.int32), np.zeros(0, np.int32))  # Has it compiled

    @property
    def width(self) -> int:
        """Tokens that a place has room for."""
        return int(self._held.shape[1])

    @property
    def tokens(self) -> Ints:
        """(R * `width`,) all texts."""
        return self._held.reshape(-1)

    def recognise(self, table: Ints, lengths: Ints) -> Recognised:
        """Take in the rows of a step: ``table[i, : lengths[i]]``. AssertionError: more rows than were said."""
        rows = len(lengths)
        assert rows <= len(self._sizes), "more rows than the engine said"
        if table.shape[1] > self.width:
            held = np.zeros((len(self._sizes), max(2 * self.width, table.shape[1])), np.int32)
            held[:, : self.width] = self._held
            self._held = held
        found = np.empty((3, rows), np.int64)
        gone, new = _recognise(
            self._held, self._sizes, self._order, self._running, table, lengths, found, self._gone
        )  # fmt: skip
        self._running = rows
        return Recognised(found[0], found[1], found[2], self._gone[:gone].tolist() if gone else [], new)


@compiled
def _begins(held: Ints, size: int, text: Ints, length: int) -> bool:
    """Whether the text begins with the `size` tokens that are held."""
    if size > length:
        return False
    for first in range(0, size, _BLOCK):
        differs = 0
        for at in range(first, min(size, first + _BLOCK)):
            differs |= held[at] ^ text[at]
        if differs != 0:
            return False
    return True


@compiled
def _recognise(
    held: Ints, sizes: Ints, order: Longs, running: int, table: Ints, lengths: Ints, found: Longs, gone: Longs
) -> tuple[int, int]:
    """Fill `found` (places, starts, ends) and `gone`; how many are gone, and how many rows are new. A row that stayed
    where it was is found at once; another one is the longest text that it goes on with."""
    rows, lost, new = len(lengths), 0, 0
    taken = np.zeros(len(order), np.bool_)
    places = found[0]
    for row in range(rows):
        places[row] = NONE
        if row < running and _begins(held[order[row]], sizes[order[row]], table[row], lengths[row]):
            places[row] = order[row]
            taken[order[row]] = True
    for row in range(rows):
        if places[row] != NONE:
            continue
        best = NONE
        for at in range(running):
            place = order[at]
            longer = not taken[place] and (best == NONE or sizes[place] > sizes[best])
            if longer and _begins(held[place], sizes[place], table[row], lengths[row]):
                best = place
        if best != NONE:
            places[row] = best
            taken[best] = True
    for at in range(running):
        if not taken[order[at]]:
            gone[lost], lost = order[at], lost + 1
            sizes[order[at]] = 0
    free = 0
    for row in range(rows):
        if places[row] == NONE:
            while taken[order[free]]:
                free += 1
            places[row], new = order[free], new + 1
            taken[order[free]] = True
    others = [place for place in order if not taken[place]]
    for row in range(rows):
        place, length = places[row], lengths[row]
        known, first = sizes[place], place * held.shape[1]
        found[1, row], found[2, row] = first + known, first + length
        held[place, known:length] = table[row, known:length]
        sizes[place], order[row] = length, place
    for at in range(len(others)):
        order[rows + at] = others[at]
    return lost, new
