"""Where the n-grams of a growing text ended, and drafts of what followed them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from forerun.drafters.lookup.compiled.batch import (
    COUNTS,
    DRAFTED,
    READ,
    TEXT,
    Batch,
    Longs,
    counts_at,
    ints_at,
    learn_draft,
    room_of,
)
from forerun.drafters.lookup.compiled.drafts import (
    MIX,
    NGRAM,
    NODE_PARENT,
    NODE_TOKEN,
    NONE,
    Draft,
    Floats,
    Ints,
    compiled,
    likelihood,
    put,
    slot_of,
    slots_for,
)

# Places in `head`
SIZE = 0  # Tokens of the text
ROOM = 1  # Those that there is room for
LOWEST, SIZES = 2, 3  # Tokens of the shortest n-gram, and how many sizes there are
HEAD = 4

LAST, FIRST, MOST_FREQUENT = range(3)  # Which of several places is copied from
_SCANNED = 32  # Most earlier places looked at for one n-gram, at the end that is preferred


class Grams(NamedTuple):
    """A text and its n-grams of several sizes in a row, views into one array. A place is the index of the token behind
    an n-gram."""

    head: Ints  # (HEAD,)
    tokens: Ints  # (room,)
    before: Ints  # (room, sizes) by place - 1 and size: where the same n-gram ended before; 0 where it did not
    slots: Ints  # (a power of two,) open addressing: place * sizes + size's index of where an n-gram ended last, or NONE


class Choice(NamedTuple):
    """Where a draft is copied from."""

    match: int  # LAST, FIRST or MOST_FREQUENT
    hits: int  # Earlier places that an n-gram must have
    branches: int  # Most different continuations
    length: int  # Tokens of each


@compiled
def size_of(room: int, sizes: int) -> int:
    """Numbers of a text with room for so many tokens."""
    return HEAD + room * (1 + sizes) + slots_for(room * sizes)


@compiled
def parts_of(whole: Ints) -> Grams:
    """The parts of a text that is one array; its head is written."""
    room, sizes = whole[ROOM], whole[SIZES]
    tokens = HEAD + room
    before = tokens + room * sizes
    return Grams(whole[:HEAD], whole[HEAD:tokens], whole[tokens:before].reshape(room, sizes), whole[before:])


@compiled
def grams_at(place: int) -> Grams:
    """The text at an address."""
    head = ints_at(place, HEAD)
    return parts_of(ints_at(place, size_of(head[ROOM], head[SIZES])))


@compiled
def _same(tokens: Ints, one: int, other: int, size: int) -> bool:
    """Whether the same n-gram of this size ends at two places."""
    back = 1
    while back <= size and tokens[one - back] == tokens[other - back]:
        back += 1
    return back > size


@compiled
def extend(text: Grams, new: Ints) -> None:
    """Append tokens, for which there is room."""
    sizes, lowest, last = text.before.shape[1], text.head[LOWEST], len(text.slots) - 1
    for token in new:
        place = text.head[SIZE] + 1
        text.tokens[place - 1], text.head[SIZE], text.before[place - 1] = token, place, 0
        mixed = np.int64(0)
        for size in range(1, min(place, lowest + sizes - 1) + 1):
            mixed = (mixed + np.int64(text.tokens[place - size]) + 1) * np.int64(MIX)
            if size < lowest:
                continue
            slot, column = slot_of(text.slots, mixed), size - lowest
            known = text.slots[slot]
            while known != NONE and not (known % sizes == column and _same(text.tokens, known // sizes, place, size)):
                slot = (slot + 1) & last
                known = text.slots[slot]
            if known != NONE:
                text.before[place - 1, column] = known // sizes
            text.slots[slot] = place * sizes + column


@compiled
def _earlier(text: Grams, column: int, choice: Choice, found: Ints) -> int:
    """Fill `found` with earlier places of the n-gram that ends the text, those that are preferred first; how many there
    are, 0 where the n-gram has too few."""
    place, met, room, everyone = text.head[SIZE], 0, len(found), choice.match == FIRST
    recent = np.empty(room, np.int32)  # The last that were met, in turns
    while everyone or met < max(choice.hits, room):
        place = text.before[place - 1, column]
        if place == 0:
            break
        if everyone or met < room:
            recent[met % room] = place
        met += 1
    if met < choice.hits:
        return 0
    kept = min(met, room)
    for index in range(kept):
        found[index] = recent[(met - 1 - index) % room] if everyone else recent[index]
    return kept


@compiled
def _copied(text: Grams, place: int, offset: int) -> int:
    """The token at `offset` from a place; a copy that reaches the end of the text goes on with itself."""
    return int(text.tokens[place + offset % (text.head[SIZE] - place)])


@compiled
def _voted(text: Grams, places: Ints, length: int, kept: Ints) -> int:
    """Fill `kept` with those of the places whose next token is the most frequent, of equals the first; of these again,
    for `length` tokens. How many are left."""
    size = len(places)
    kept[:size] = places
    for offset in range(length):
        if size == 1:
            break
        best, most = 0, 0
        for one in range(size):
            votes, token = 0, _copied(text, kept[one], offset)
            for other in range(size):
                votes += _copied(text, kept[other], offset) == token
            if votes > most:
                best, most = token, votes
        left = 0
        for one in range(size):
            if _copied(text, kept[one], offset) == best:
                kept[left], left = kept[one], left + 1
        size = left
    return size


@compiled
def _order_by_votes(text: Grams, places: Ints, length: int) -> int:
    """Leave of the places one for each continuation, the most frequent first; how many."""
    waiting, voters, size, chosen = places.copy(), np.empty(len(places), np.int32), len(places), 0
    while size > 0:
        voted = _voted(text, waiting[:size], length, voters)
        places[chosen], chosen = voters[0], chosen + 1
        left = 0
        for one in range(size):
            if not (voters[:voted] == waiting[one]).any():
                waiting[left], left = waiting[one], left + 1
        size = left
    return chosen


@compiled
def draft(text: Grams, choice: Choice, counts: Floats, made: Draft) -> int:
    """Fill `made` with a trie of continuations, as many nodes as there is room for: those of the longest n-gram that
    ended earlier first. How many nodes, the root included."""
    nodes = made.nodes
    sizes, size, branches = text.before.shape[1], 1, 0
    found, seen, met = np.empty(_SCANNED, np.int32), np.empty(_SCANNED * sizes, np.int32), 0
    for column in range(sizes - 1, -1, -1):
        places = found[: _earlier(text, column, choice, found)]
        if choice.match == MOST_FREQUENT:
            places = places[: _order_by_votes(text, places, choice.length)]
        for place in places:
            if branches == choice.branches or size == len(nodes):
                return size
            if (seen[:met] == place).any():
                continue
            seen[met], met = place, met + 1
            before, parent = size, 0
            for offset in range(choice.length):
                token, child = _copied(text, place, offset), NONE
                for node in range(1, size):
                    if nodes[node, NODE_PARENT] == parent and nodes[node, NODE_TOKEN] == token:
                        child = node
                if child == NONE and size == len(nodes):
                    break
                if child == NONE:
                    key, likely = likelihood(counts, NGRAM, column + text.head[LOWEST] + offset, 1.0)
                    put(made, size, token, parent, key, likely)
                    child, size = size, size + 1
                parent = child
            branches += size > before
    return size


# --- a batch of rows --------------------------------------------------------------------------------------------------


@compiled
def read_rows(batch: Batch, which: Longs, new: Ints, starts: Longs, ends: Longs) -> int:
    """The texts of the rows `which` go on with ``new[starts[i] : ends[i]]``. The index of the first whose text
    has no room for that; how many rows there are where all had."""
    for index in range(len(which)):
        row = which[index]
        gained = new[starts[index] : ends[index]]
        text = grams_at(batch.rows[row, TEXT])
        if text.head[SIZE] + len(gained) > len(text.tokens):
            return index
        if len(gained) > 0:
            learn_draft(batch, row, gained)
            extend(text, gained)
            batch.rows[row, READ] = text.head[SIZE]
    return len(which)


@compiled
def draft_rows(batch: Batch, which: Longs, nodes: Longs, depths: Longs, choice: Choice) -> None:
    """Leave a draft for each of the rows `which` in the batch: at most ``nodes[i]`` nodes and ``depths[i]`` tokens on
    a path."""
    for index in range(len(which)):
        row = which[index]
        length = min(choice.length, depths[index])
        made = room_of(batch, row, min(nodes[index], choice.branches * length))
        own = Choice(choice.match, choice.hits, choice.branches, length)
        text, counts = grams_at(batch.rows[row, TEXT]), counts_at(batch.rows[row, COUNTS])
        batch.rows[row, DRAFTED] = draft(text, own, counts, made)
