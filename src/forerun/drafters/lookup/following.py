"""A follower tracks a text's position in a source that the text repeats with edits, and drafts from that position."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from forerun.drafters.lookup.drafts import (
    FOLLOWED,
    GUESSED,
    NONE,
    SEPARATOR,
    Draft,
    Floats,
    Ints,
    compiled,
    likelihood,
    put,
)

# Entries of a follower's `place`
PLACE = 0  # Index in the source of the expected next token; NONE: unknown
FOUND = 1  # 1: the position is confirmed by the text's last token; else it is a guess
CHANGED = 2  # 1: the text has differed from the source before
PARTED = 3  # Index in the source where they last began to differ
MATCHED = 4  # Recent tokens before the position that agree
TRUST = 5  # Tokens that agreed, at most _TRUST; a token that does not agree halves it
BEGAN = 6  # Index in the text where the current edit began
MISSED = 7  # Tokens of the current edit that did not agree; 0: no edit is open
UNDONE = 8  # The position to return to if the repeated replacement turns out wrong
KNOWN = 9  # Number of replacements recorded so far
DUE = 10  # Tokens of a repeated replacement that are still expected; these are the last of _DUE
_DUE = 11

_REACH = 16  # After an edit, this many tokens of the text are searched for in this many tokens of the source
_AGREED = 4  # Consecutive tokens that agree and so end an edit
_LONGEST = 8  # Most tokens, before and after, of a replacement that is recorded
_TRUST = 16
FOLLOWER = _DUE + _LONGEST
# Columns of a follower's `replacements`
_OLD_SIZE, _NEW_SIZE, _OLD = 0, 1, 2
_NEW = _OLD + _LONGEST
REPLACEMENT_COLUMNS = _NEW + _LONGEST
REPLACEMENTS = 64  # Most replacements recorded, by the first replaced token; the oldest is dropped


NOWHERE = np.zeros(FOLLOWER, np.int32)  # A follower's `place` at the start
NOWHERE[PLACE] = NONE


class Following(NamedTuple):
    """A follower's state."""

    place: Ints  # (FOLLOWER,)
    replacements: Ints  # (REPLACEMENTS, REPLACEMENT_COLUMNS)


def new_follower() -> Following:
    """Return a follower without a position. Source and text, which the caller passes, may grow, and may be the same
    array.
    """
    return Following(NOWHERE.copy(), np.empty((REPLACEMENTS, REPLACEMENT_COLUMNS), np.int32))


class Followers(NamedTuple):
    """The followers of the rows of a batch."""

    places: Ints  # (R, FOLLOWER)
    replacements: Ints  # (R, REPLACEMENTS, REPLACEMENT_COLUMNS)


@compiled
def follower_of(followers: Followers, row: int) -> Following:
    """Return a row's follower, as views."""
    return Following(followers.places[row], followers.replacements[row])


@compiled
def start(place: Ints, at: int, matched: int) -> None:
    """Set the position: the text continues at index `at` of the source, before which `matched` tokens agree."""
    place[PLACE], place[FOUND], place[MATCHED] = at, 1, matched
    place[TRUST] = place[MISSED] = place[DUE] = 0


@compiled
def count_agreed(place: Ints) -> int:
    """Return the evidence for the position: recent tokens that agreed, and those since the last edit."""
    return 0 if place[PLACE] == NONE else int(place[TRUST] + place[MATCHED])


@compiled
def is_settled(place: Ints) -> bool:
    """Return whether enough consecutive tokens before the position agree."""
    return bool(place[FOUND] and place[MATCHED] >= _AGREED)


@compiled
def _replacement(follower: Following, source: Ints, at: int, end: int) -> int:
    """Return the recorded replacement to repeat at an index of the source, or NONE."""
    place, replacements = follower.place, follower.replacements
    if place[FOUND] == 0 or at >= end:
        return NONE
    for known in range(min(place[KNOWN], len(replacements))):
        size = replacements[known, _OLD_SIZE]
        if replacements[known, _OLD] == source[at]:
            if at + size > len(source):
                return NONE
            for offset in range(size):
                if replacements[known, _OLD + offset] != source[at + offset]:
                    return NONE
            return known
    return NONE


@compiled
def _settle(follower: Following, source: Ints, text: Ints, at: int) -> None:
    """Detect the end of an edit, and record the replacement."""
    place, replacements = follower.place, follower.replacements
    if place[MATCHED] < _AGREED:
        return
    first, began = place[PARTED], place[BEGAN]
    old, new = place[PLACE] - place[MATCHED] - first, at + 1 - place[MATCHED] - began
    if 0 < old <= _LONGEST and 0 < new <= _LONGEST:
        known = place[KNOWN] % len(replacements)
        for other in range(min(place[KNOWN], len(replacements))):
            if replacements[other, _OLD] == source[first]:
                known = other
                break
        else:
            place[KNOWN] += 1
        replacements[known, _OLD_SIZE], replacements[known, _NEW_SIZE] = old, new
        replacements[known, _OLD : _OLD + old] = source[first : first + old]
        replacements[known, _NEW : _NEW + new] = text[began : began + new]
    place[MISSED] = 0


@compiled
def _part(follower: Following, source: Ints, text: Ints, at: int, end: int) -> None:
    """Handle a token that does not agree: move to the nearest position ahead before which most tokens agree. If there
    is none, assume that the token replaced one token or, after another such token, was inserted.
    """
    place = follower.place
    if place[MISSED] == 0:
        place[PARTED], place[BEGAN], place[CHANGED] = place[PLACE], at, 1
    first = place[PARTED]
    place[MISSED], place[TRUST], place[MATCHED], place[FOUND] = place[MISSED] + 1, place[TRUST] // 2, 0, 0
    if place[MISSED] > _REACH:
        place[PLACE] = NONE
        return
    place[PLACE] = first + int(place[MISSED] == 1)
    for other in range(first, min(end, first + _REACH)):
        size = 0
        while size <= min(other - first, at - place[BEGAN]) and source[other - size] == text[at - size]:
            size += 1
        if size > place[MATCHED]:
            place[FOUND], place[MATCHED], place[PLACE] = 1, size, other + 1


@compiled
def advance(follower: Following, source: Ints, text: Ints, first: int, last: int, same: bool) -> int:
    """Read as `read` does, at least one token, until the position is unknown or a guess. Return the index of the next
    token.
    """
    place, replacements = follower.place, follower.replacements
    for at in range(first, last if place[PLACE] != NONE else first):
        token, end = text[at], at if same else len(source)
        if place[DUE] > 0 and place[FOLLOWER - place[DUE]] != token:
            place[PLACE], place[DUE] = place[UNDONE], 0
        again = _replacement(follower, source, place[PLACE], end) if place[DUE] == 0 < place[KNOWN] else NONE
        if place[DUE] > 0:
            place[DUE] -= 1
        elif again != NONE and replacements[again, _NEW] == token:
            place[UNDONE], place[DUE] = place[PLACE], replacements[again, _NEW_SIZE] - 1
            for offset in range(1, replacements[again, _NEW_SIZE]):
                place[FOLLOWER - replacements[again, _NEW_SIZE] + offset] = replacements[again, _NEW + offset]
            place[PLACE] += replacements[again, _OLD_SIZE]
        elif place[PLACE] < end and source[place[PLACE]] == token:
            place[PLACE] += 1
        else:
            _part(follower, source, text, at, end)
            _settle(follower, source, text, at)
            if place[FOUND] == 0:
                return at + 1
            continue
        place[MATCHED] = place[MATCHED] + 1 if place[FOUND] else 1
        place[FOUND], place[TRUST] = 1, min(_TRUST, place[TRUST] + 1)
        if place[MISSED] > 0:
            _settle(follower, source, text, at)
    return last if place[PLACE] != NONE else first + 1


@compiled
def read(follower: Following, source: Ints, text: Ints, first: int, last: int, same: bool) -> None:
    """Read the new tokens ``first:last`` of the text; `same` means that the text is its own source."""
    while first < last:
        first = advance(follower, source, text, first, last, same)


@compiled
def _ahead(follower: Following, source: Ints, found: Ints, same: bool) -> int:
    """Fill `found` with the expected next tokens, and return their number. If the text is its own source, the expected
    tokens extend the source.
    """
    place, replacements = follower.place, follower.replacements
    at, size = place[PLACE], 0
    if at == NONE:
        return 0
    for due in range(place[DUE]):
        if size < len(found):
            found[size], size = place[FOLLOWER - place[DUE] + due], size + 1
    while size < len(found) and at < len(source) + (size if same else 0):
        again = _replacement(follower, source, at, len(source)) if place[KNOWN] > 0 else NONE
        if again == NONE:
            token = source[at] if at < len(source) else found[at - len(source)]
            found[size], size, at = token, size + 1, at + 1
        else:
            at += replacements[again, _OLD_SIZE]
            for offset in range(replacements[again, _NEW_SIZE]):
                if size < len(found):
                    found[size], size = replacements[again, _NEW + offset], size + 1
    return size


@compiled
def draft(
    follower: Following, source: Ints, counts: Floats, made: Draft, least: float, same: bool
) -> tuple[int, float]:
    """Fill `made` with a chain of the expected next tokens, as long as its probability of survival is at least `least`.
    Return the number of nodes, root included, and the sum of their survival. `same` means that the text is its own
    source.
    """
    place, found = follower.place, np.empty(len(made.nodes) - 1, np.int32)
    kind = FOLLOWED if place[FOUND] else GUESSED
    survival, expected, size = 1.0, 0.0, 1
    for offset in range(_ahead(follower, source, found, same)):
        if found[offset] == SEPARATOR or survival < least:
            break
        key, likely = likelihood(counts, kind, place[TRUST] + place[MATCHED] + offset, 1.0)
        put(made, size, found[offset], size - 1, key, likely)
        survival *= likely
        expected += survival
        size += 1
    return size, expected
