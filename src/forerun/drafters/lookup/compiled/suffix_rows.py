"""The work of the drafter `suffix` for a batch of rows: reads what their texts gained, and drafts."""

from __future__ import annotations

from typing import Any, NamedTuple

from forerun.drafters.lookup.compiled import batch as batches
from forerun.drafters.lookup.compiled import following, suffixes
from forerun.drafters.lookup.compiled.batch import (
    DEPTH,
    END,
    NODES,
    PROMPT,
    READ,
    ROW,
    START,
    TEXT,
    Batch,
    Longs,
    batch_at,
    counts_of,
    keep,
    learn_draft,
    longs_at,
    put_chain,
    room_of,
    spare_of,
    without_room,
)
from forerun.drafters.lookup.compiled.drafts import NONE, REQUEST, STORE, Ints, compiled
from forerun.drafters.lookup.compiled.following import FOUND, PLACE, follower_of
from forerun.drafters.lookup.compiled.suffixes import ROOT, SIZE, Arrays, SuffixLimits, SuffixMatch, automaton_at

GENERATIONS = 2  # Most automata of a store
# Columns of a store, which has a row for each
NUMBER, ADDRESS = 0, 1  # The automaton's unique number, 0 if there is none, and its address
STORE_COLUMNS = 2
# Further columns of a batch's rows
STORED = batches.COLUMNS  # Address of the domain's store
FOLLOWED = STORED + 1  # NUMBER of the automaton whose text is followed; 0: the row's own
CURSORS = STORED + 2  # GENERATIONS times what `_CURSOR` counts
# Where the text stands in an automaton of the store
_NUMBER, _KNOWN, _READ, _STATE, _MATCHED = range(5)  # Which, its tokens then, those of the text; the longest match
_CURSOR = 5
COLUMNS = CURSORS + GENERATIONS * _CURSOR

_FOLLOWED = 4  # Shortest match, tokens, whose text is followed from then on


class Options(NamedTuple):
    """Limits of the drafts, from `SuffixConfig`."""

    length: int
    factor: float
    offset: float
    least: float  # Probability of a path
    shortest: int  # Match, tokens
    nodes: int  # Nodes of a tree of several continuations; 0: chains
    follows: bool


@compiled
def _store_of(batch: Batch, row: int) -> Longs:
    """Return the store of the row's domain, (GENERATIONS, STORE_COLUMNS)."""
    return longs_at(batch.rows[row, STORED], (GENERATIONS, STORE_COLUMNS))


@compiled
def _cursor(batch: Batch, row: int, generation: int) -> Longs:
    first = CURSORS + generation * _CURSOR
    return batch.rows[row, first : first + _CURSOR]


@compiled
def _follow_store(batch: Batch, row: int, text: Arrays) -> None:
    """Advance the row's cursors over what its text and the store have gained. A cursor begins anew
    if its automaton has grown or is another.
    """
    store, size = _store_of(batch, row), text.head[SIZE]
    for generation in range(GENERATIONS):
        number, cursor = store[generation, NUMBER], _cursor(batch, row, generation)
        if number == 0:
            cursor[:] = 0
            continue
        known = automaton_at(store[generation, ADDRESS])
        depth, first = known.head[suffixes.DEPTH], cursor[_READ]
        if cursor[_NUMBER] != number or cursor[_KNOWN] != known.head[SIZE] or not 0 <= size - first <= depth:
            first, cursor[_STATE], cursor[_MATCHED] = max(0, size - depth), ROOT, 0
        if first < size:
            new = text.tokens[first:size]
            cursor[_STATE], cursor[_MATCHED] = suffixes.follow(known, new, cursor[_STATE], cursor[_MATCHED])
        cursor[_NUMBER], cursor[_KNOWN], cursor[_READ] = number, known.head[SIZE], size


@compiled
def _source(batch: Batch, row: int, place: Ints) -> Arrays:
    """Return the automaton of the text that is followed. If the store has dropped it, it is the
    row's own, in which the follower has no place.
    """
    followed = batch.rows[row, FOLLOWED]
    if followed != 0:
        store = _store_of(batch, row)
        for generation in range(GENERATIONS):
            if store[generation, NUMBER] == followed:
                return automaton_at(store[generation, ADDRESS])
        place[PLACE], place[FOUND], batch.rows[row, FOLLOWED] = NONE, 0, 0
    return automaton_at(batch.rows[row, TEXT])


@compiled
def _match(batch: Batch, row: int, text: Arrays, source: int) -> tuple[Arrays, SuffixMatch]:
    """Return the longest match of the row's end, and the automaton that it is in: the row's own for
    source 0, else the store's.
    """
    known, kind, (state, matched) = text, REQUEST, suffixes.longest_repeat(text)
    if source > 0:
        cursor = _cursor(batch, row, source - 1)
        kind, state, matched = STORE, cursor[_STATE], cursor[_MATCHED]
        if matched > 0:
            known = automaton_at(_store_of(batch, row)[source - 1, ADDRESS])
    return known, SuffixMatch(kind, state, matched)


@compiled
def _follow(batch: Batch, row: int, text: Arrays, known: int) -> None:
    """Read the tokens from `known` on in the text that is followed. If that no longer tells the
    place, the longest match does, if it is long enough.
    """
    follower = follower_of(batch.followers, row)
    place, source = follower.place, _source(batch, row, follower.place)
    first, size, same = max(known, batch.rows[row, PROMPT]), text.head[SIZE], batch.rows[row, FOLLOWED] == 0
    following.read(follower, source.tokens[: source.head[SIZE]], text.tokens[:size], first, size, same)
    if place[FOUND]:
        return
    followed, matched, end = 0, _FOLLOWED - 1, 0
    for one in range(1 + GENERATIONS):
        known_text, match = _match(batch, row, text, one)
        if match.matched > matched:
            followed = 0 if one == 0 else _store_of(batch, row)[one - 1, NUMBER]
            matched, end = match.matched, known_text.states[match.state, suffixes.END]
    if matched >= _FOLLOWED:
        batch.rows[row, FOLLOWED] = followed
        following.start(place, end, matched)


@compiled
def _read(batch: Batch, row: int, new: Ints, follows: bool) -> None:
    """Append new tokens, which have room, to a row's text."""
    known, text = batch.rows[row, READ], automaton_at(batch.rows[row, TEXT])
    if len(new) > 0:
        learn_draft(batch, row, new)
        suffixes.extend(text, new)
        batch.rows[row, READ] = known + len(new)
    _follow_store(batch, row, text)
    if follows and len(new) > 0:
        _follow(batch, row, text, known)


@compiled
def _length(options: Options, matched: int, most: int) -> int:
    """Return the length of a path that is drafted from a match of so many tokens."""
    if matched < options.shortest:
        return 0
    return min(most, int(min(float(options.length), options.factor * matched + options.offset + 1e-6)))


@compiled
def _draft(batch: Batch, row: int, most: int, nodes: int, options: Options) -> int:
    """Write a draft for a row, the one with most expected tokens of those from each match and from
    the text that is followed; at equality that of the row's own text. Returns the number of nodes,
    the root included.
    """
    text, counts, follower = (
        automaton_at(batch.rows[row, TEXT]),
        counts_of(batch, row),
        follower_of(batch.followers, row),
    )
    made, best, expected = room_of(batch, row, nodes), 1, 0.0
    for source in range(1 + GENERATIONS):
        known, match = _match(batch, row, text, source)
        length = _length(options, match.matched, most)
        if length > 0:
            limits = SuffixLimits(length, options.nodes > 0, options.least)
            spare = spare_of(batch, min(nodes, options.nodes) if options.nodes > 0 else length)
            size, gain = suffixes.draft(known, match, limits, counts, spare)
            if gain > expected:
                best, expected = size, gain
                keep(made, spare, size)
    length = _length(options, following.count_agreed(follower.place), most)
    if length > 0:
        followed, spare = _source(batch, row, follower.place), spare_of(batch, length)
        tokens = followed.tokens[: followed.head[SIZE]]
        size, gain = following.draft(follower, tokens, counts, spare, options.least, batch.rows[row, FOLLOWED] == 0)
        if gain > expected:
            best = size
            keep(made, spare, size)
    return best


@compiled
def step(where: Longs, chosen: Any, tokens: Ints, work: Longs, chains: Ints) -> int:
    """Read and draft as `grams.step` does; `chosen` are `Options`."""
    batch, options = batch_at(where), Options(*chosen)
    ready = without_room(batch, work)
    if ready < work.shape[1]:
        return ready
    for index in range(work.shape[1]):
        _read(batch, work[ROW, index], tokens[work[START, index] : work[END, index]], options.follows)
    for index in range(work.shape[1]):
        most, chains[index, 0] = min(work[NODES, index], work[DEPTH, index]), 1
        if most > 0:
            row = work[ROW, index]
            put_chain(batch, row, _draft(batch, row, most, work[NODES, index], options), chains[index])
    return ready
