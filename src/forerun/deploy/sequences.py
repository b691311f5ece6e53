"""This module recognises which sequence a row of tokens belongs to, for engines that move rows and
tell no request ids.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from forerun.drafters.lookup.compiled.batch import END, ROW, START, WORK, Longs
from forerun.drafters.lookup.compiled.drafts import NONE, Ints, compiled

_BLOCK = 64  # Tokens that are compared before a difference is looked for: without branches, so several at a time


class RecognisedRows(NamedTuple):
    """`RecognisedRows` says which known text each of the B rows of a step goes on with."""

    work: Longs  # (WORK, B): the place of each as its ROW, and where its new tokens are in `KnownRows.tokens`
    gone: list[int]  # Places of texts that no row goes on with; a new text may have one of them now
    new: list[int]  # Which of the B rows are texts that begin now


class KnownRows:
    """`KnownRows` holds the texts of all rows.

    A row that goes on with a known text is that sequence, wherever it stands now: two rows that
    hold the same are the same to a drafter, too.
    """

    def __init__(self, rows: int) -> None:
        self._known = _Known(
            np.zeros((rows, 1), np.int32), np.zeros(rows, np.int32), np.arange(rows), np.zeros((2, rows), np.int64)
        )
        self._running = 0  # Rows of the last step
        self.recognise(np.zeros((0, 1), np.int32), np.zeros(0, np.int32))  # Has it compiled

    @property
    def tokens(self) -> Ints:
        """Return all texts in one array, (R * W,), with space for W tokens each."""
        return self._known.held.reshape(-1)

    def recognise(self, table: Ints, lengths: Ints) -> RecognisedRows:
        """Take in the rows of a step, ``table[i, : lengths[i]]``; AssertionError for more rows than
        were announced.
        """
        rows, known = len(lengths), self._known
        assert rows <= len(known.sizes), "more rows than the engine said"
        work = np.zeros((WORK, rows), np.int64)
        gone, new = _recognise(tuple(known), self._running, table, lengths, work)
        if gone < 0:
            self._known = known = self._widened(2 * -gone)
            gone, new = _recognise(tuple(known), self._running, table, lengths, work)
        self._running = rows
        lost, begun = known.changes
        return RecognisedRows(work, lost[:gone].tolist() if gone else [], begun[:new].tolist() if new else [])

    def clear(self) -> None:
        """Forget all rows."""
        self._known.sizes[:] = 0
        self._running = 0

    def _widened(self, width: int) -> _Known:
        known = self._known
        held = np.zeros((len(known.sizes), width), np.int32)
        for place, size in enumerate(known.sizes.tolist()):
            held[place, :size] = known.held[place, :size]
        return known._replace(held=held)


class _Known(NamedTuple):
    held: Ints  # (R, W) the text of each place, with room to grow
    sizes: Ints  # (R,) tokens of each; 0 of a free one
    order: Longs  # (R,) the places, those of the last step's rows first
    changes: Longs  # (2, R) room for what is gone, places, and for what is new, rows


@compiled
def _begins(held: Ints, size: int, text: Ints, length: int) -> bool:
    """Return whether the text begins with the `size` tokens that are held."""
    if size > length:
        return False
    for done in range(0, size, _BLOCK):  # From the end: many texts begin alike
        first, last = max(0, size - done - _BLOCK), size - done
        one, other, differs = held[first:last], text[first:last], 0
        for at in range(len(one)):
            differs |= one[at] ^ other[at]
        if differs != 0:
            return False
    return True


@compiled
def _place_rows(known: _Known, running: int, table: Ints, lengths: Ints, places: Longs) -> NDArray[np.bool_]:
    """Find the slot of each row, NONE for a new one; return which slots are left, (R,).

    A row that stayed where it was is found at once; another one is the longest text that it goes on
    with.
    """
    held, sizes, order = known.held, known.sizes, known.order
    free = np.ones(len(order), np.bool_)
    for row in range(len(lengths)):
        places[row] = NONE
        if row < running and _begins(held[order[row]], sizes[order[row]], table[row], lengths[row]):
            places[row] = order[row]
            free[order[row]] = False
    for row in range(len(lengths)):
        if places[row] != NONE:
            continue
        for place in order[:running]:
            longest = free[place] and (places[row] == NONE or sizes[place] > sizes[places[row]])
            if longest and _begins(held[place], sizes[place], table[row], lengths[row]):
                places[row] = place
        if places[row] != NONE:
            free[places[row]] = False
    return free


@compiled
def _recognise(all_known: Any, running: int, table: Ints, lengths: Ints, work: Longs) -> tuple[int, int]:
    """Fill ROW, START and END of `work` and `known.changes`; return how many texts are gone and how
    many rows are new.

    Where there is no space for the longest row, change nothing and return its length, negative.
    """
    known, places = _Known(*all_known), work[ROW]
    held, sizes, order = known.held, known.sizes, known.order
    longest = 0
    for length in lengths:
        longest = max(longest, length)
    if longest > held.shape[1]:
        return -longest, 0
    free, lost, new = _place_rows(known, running, table, lengths, places), 0, 0
    for place in order[:running]:
        if free[place]:
            known.changes[0, lost], lost = place, lost + 1
            sizes[place] = 0
    for row in range(len(lengths)):
        if places[row] == NONE:
            places[row], known.changes[1, new], new = np.argmax(free), row, new + 1
            free[places[row]] = False
        place, length = places[row], lengths[row]
        size, first = sizes[place], place * held.shape[1]
        work[START, row], work[END, row] = first + size, first + length
        held[place, size:length] = table[row, size:length]
        sizes[place], order[row] = length, place
    at = len(lengths)
    for place in range(len(order)):
        if free[place]:
            order[at], at = place, at + 1
    return lost, new
