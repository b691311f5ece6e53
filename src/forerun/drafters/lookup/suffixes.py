"""A suffix automaton over a growing text, and drafts from a match in it, in compiled code."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from forerun.drafters.lookup.batch import ints_at
from forerun.drafters.lookup.drafts import (
    MIX,
    NONE,
    SEPARATOR,
    Draft,
    Floats,
    Ints,
    compiled,
    likelihood,
    put,
    slot_of,
    slots_for,
)

ROOT = 0  # The state of the empty string

# Columns of `states`
LENGTH = 0  # Tokens of the state's longest string
LINK = 1  # State of the longest suffix that occurs at more positions
END = 2  # End of the first occurrence, in tokens of the text
COUNT = 3  # Occurrences; valid if the state's shortest string has at most `depth` tokens
FIRST = 4  # Target of the transition that the first occurrence takes
BEST = 5  # Target of the most frequent transition, the most recent of equals; else of the first one
EDGES = 6  # First entry of the list of further transitions
MARK = 7  # Size of the text at the last call of `_mark_ends` that found one of the state's strings at its end
STATE_COLUMNS = 8
# Columns of `edges`, the further transitions
SOURCE, TOKEN, TARGET, NEXT = 0, 1, 2, 3  # NEXT: in the list of its source
EDGE_COLUMNS = 4
# Places in `head`
SIZE = 0  # Tokens of the text
STATES, USED = 1, 2  # States and edges in use
LAST = 3  # State of the whole text
DEEP, DEEP_LENGTH = 4, 5  # State of the text's last `depth` tokens, and their number
DEPTH = 6  # Longest string that is counted, tokens
ROOM = 7  # Capacity, in tokens
HEAD = 8

_SEEN = 32  # Most continuations of one string that are considered for a tree: a frequent word has thousands
_WIDTH = 8  # Most of them that become nodes, the most frequent ones
_BACKED_OFF = 4  # Number of shorter suffixes that smooth the share of a continuation
_UNSEEN = 1.0  # Occurrences that the share after the next shorter suffix counts for


class Arrays(NamedTuple):
    """A suffix automaton over N tokens: at most 2 N states and N further transitions (Blumer et al.
    1985). The parts are views into one array, see `parts_of`.
    """

    head: Ints  # (HEAD,)
    tokens: Ints  # (room,)
    states: Ints  # (2 room, STATE_COLUMNS)
    edges: Ints  # (room, EDGE_COLUMNS)
    slots: Ints  # (a power of two,) hash table with open addressing: the edge of a state and a token, or NONE


@compiled
def size_of(room: int) -> int:
    """Return the size of the array of an automaton with a capacity of `room` tokens."""
    return HEAD + room * (1 + 2 * STATE_COLUMNS + EDGE_COLUMNS) + slots_for(room)


@compiled
def parts_of(whole: Ints) -> Arrays:
    """Return the parts of an automaton as views into its array, whose head is initialised."""
    room = whole[ROOM]
    tokens = HEAD + room
    states = tokens + 2 * room * STATE_COLUMNS
    edges = states + room * EDGE_COLUMNS
    return Arrays(
        whole[:HEAD],
        whole[HEAD:tokens],
        whole[tokens:states].reshape(2 * room, STATE_COLUMNS),
        whole[states:edges].reshape(room, EDGE_COLUMNS),
        whole[edges:],
    )


@compiled
def automaton_at(place: int) -> Arrays:
    """Return the automaton at an address."""
    return parts_of(ints_at(place, size_of(ints_at(place, HEAD)[ROOM])))


@compiled
def _slot(slots: Ints, state: int, token: int) -> int:
    """Return the slot at which probing for an edge begins."""
    return slot_of(slots, ((np.int64(state) << 32) ^ np.int64(token)) * np.int64(MIX))


@compiled
def _edge(text: Arrays, state: int, token: int) -> int:
    slot = _slot(text.slots, state, token)
    while True:
        edge = text.slots[slot]
        if edge == NONE or (text.edges[edge, SOURCE] == state and text.edges[edge, TOKEN] == token):
            return int(edge)
        slot = (slot + 1) & (len(text.slots) - 1)


@compiled
def reindex(text: Arrays, first: int) -> None:
    """Add the edges from `first` on to the index."""
    for edge in range(first, text.head[USED]):
        slot = _slot(text.slots, text.edges[edge, SOURCE], text.edges[edge, TOKEN])
        while text.slots[slot] != NONE:
            slot = (slot + 1) & (len(text.slots) - 1)
        text.slots[slot] = edge


@compiled
def step(text: Arrays, state: int, token: int) -> int:
    """Return the state after `token`, or NONE if the text does not contain that continuation."""
    end = text.states[state, END]
    if end < text.head[SIZE] and text.tokens[end] == token:
        return int(text.states[state, FIRST])
    edge = _edge(text, state, token)
    return NONE if edge == NONE else int(text.edges[edge, TARGET])


@compiled
def advance(text: Arrays, state: int, matched: int, token: int) -> tuple[int, int]:
    """Extend the longest match of another text in this one by `token`, and return the new match's state and length."""
    following = step(text, state, token)
    while following == NONE and state != ROOT:
        state = text.states[state, LINK]
        matched = text.states[state, LENGTH]
        following = step(text, state, token)
    if following == NONE:
        return ROOT, 0
    return following, matched + 1


@compiled
def token_of(text: Arrays, state: int) -> int:
    """Return the last token of the state's strings."""
    return int(text.tokens[text.states[state, END] - 1])


@compiled
def is_counted(text: Arrays, state: int) -> bool:
    """Return whether the continuations of the state's strings are counted."""
    return state == ROOT or bool(text.states[text.states[state, LINK], LENGTH] + 2 <= text.head[DEPTH])


@compiled
def _new(text: Arrays, length: int, end: int) -> int:
    """Add a state without transitions and with a link to the root, and return it."""
    state = text.head[STATES]
    text.head[STATES] += 1
    text.states[state] = 0
    text.states[state, LENGTH], text.states[state, END] = length, end
    text.states[state, FIRST] = text.states[state, BEST] = text.states[state, EDGES] = NONE
    return int(state)


@compiled
def start(text: Arrays, depth: int) -> None:
    """Initialise the automaton of the empty text."""
    text.head[:ROOM] = 0
    text.head[DEPTH] = depth
    text.slots[:] = NONE
    text.states[_new(text, 0, 0), LINK] = NONE


@compiled
def _add_edge(text: Arrays, state: int, token: int, target: int) -> None:
    edge = text.head[USED]
    text.head[USED] += 1
    text.edges[edge, SOURCE], text.edges[edge, TOKEN] = state, token
    text.edges[edge, TARGET], text.edges[edge, NEXT] = target, text.states[state, EDGES]
    text.states[state, EDGES] = edge
    reindex(text, edge)


@compiled
def extend(text: Arrays, new: Ints) -> None:
    """Append tokens, for which there is capacity: amortised O(1) for each, and O(`depth`) to count it."""
    states = text.states
    for token in new:
        size = text.head[SIZE] + 1
        text.tokens[size - 1], text.head[SIZE] = token, size
        made, last = _new(text, size, size), text.head[LAST]
        states[last, FIRST] = made
        if token != SEPARATOR:
            states[last, BEST] = made
        state = states[last, LINK]
        while state != NONE:
            target = step(text, state, token)
            if target != NONE:
                if states[target, LENGTH] != states[state, LENGTH] + 1:
                    target = _split(text, state, target, token)
                states[made, LINK] = target
                break
            _add_edge(text, state, token, made)
            state = states[state, LINK]
        text.head[LAST] = made
        _tally(text, token)


@compiled
def longest_repeat(text: Arrays) -> tuple[int, int]:
    """Return state and length of the longest suffix of the text that also occurs earlier in it."""
    state = max(ROOT, text.states[text.head[LAST], LINK])
    return state, int(text.states[state, LENGTH])


@compiled
def _split(text: Arrays, state: int, target: int, token: int) -> int:
    """Split off a state for those strings of `target` that are suffixes of the text, which occur
    once more, and return it.
    """
    states = text.states
    twin = _new(text, states[state, LENGTH] + 1, states[target, END])
    for column in (LINK, COUNT, FIRST, BEST):
        states[twin, column] = states[target, column]
    edge = states[target, EDGES]
    while edge != NONE:
        _add_edge(text, twin, text.edges[edge, TOKEN], text.edges[edge, TARGET])
        edge = text.edges[edge, NEXT]
    states[target, LINK] = twin
    if text.head[DEEP] == target and text.head[DEEP_LENGTH] <= states[twin, LENGTH]:
        text.head[DEEP] = twin
    while state != NONE and step(text, state, token) == target:
        if text.tokens[states[state, END]] == token:
            states[state, FIRST] = twin
        else:
            text.edges[_edge(text, state, token), TARGET] = twin
        if states[state, BEST] == target:
            states[state, BEST] = twin
        state = states[state, LINK]
    return twin


@compiled
def _tally(text: Arrays, token: int) -> None:
    """Count the strings that end with the new token, and update BEST of the states before it."""
    head, states = text.head, text.states
    before = head[DEEP]
    after = step(text, before, token)
    if head[DEEP_LENGTH] < head[DEPTH]:
        head[DEEP_LENGTH] += 1
    elif states[states[after, LINK], LENGTH] >= head[DEPTH]:
        after = states[after, LINK]
    head[DEEP] = state = after
    while state != ROOT:
        states[state, COUNT] += 1
        state = states[state, LINK]
    states[ROOT, COUNT] += 1
    if token != SEPARATOR:
        _elect(text, before if is_counted(text, before) else states[before, LINK], after)


@compiled
def _elect(text: Arrays, before: int, after: int) -> None:
    """Update BEST of each suffix before the new token, if that is now its most frequent continuation. `before` and
    `after` are the states of the longest such suffix with counted continuations, and of the longest suffix that ends
    with the token.
    """
    states = text.states
    while before != NONE:
        size = states[states[before, LINK], LENGTH] + 2 if before != ROOT else 1
        while states[states[after, LINK], LENGTH] >= size:
            after = states[after, LINK]
        known = states[before, BEST]
        if known == NONE or states[after, COUNT] >= states[known, COUNT]:
            states[before, BEST] = after
        before = states[before, LINK]


@compiled
def follow(text: Arrays, other: Ints, state: int, matched: int) -> tuple[int, int]:
    """Run `advance` over several tokens of another text, and return state and length of the longest match."""
    for token in other:
        state, matched = advance(text, state, matched, token)
    return state, matched


# --- drafts from a match ----------------------------------------------------------------------------------------------


@compiled
def _mark_ends(text: Arrays) -> None:
    """Mark the states of the text's suffixes: each has one occurrence without a continuation."""
    state = text.head[DEEP]
    text.states[ROOT, MARK] = text.head[SIZE]
    while state != ROOT:
        text.states[state, MARK] = text.head[SIZE]
        state = text.states[state, LINK]


@compiled
def occurrences(text: Arrays, state: int) -> int:
    """Return how often the strings of a state that `is_counted` occur and something follows; the ends must
    be marked.
    """
    return int(text.states[state, COUNT] - int(text.states[state, MARK] == text.head[SIZE]))


@compiled
def _share(text: Arrays, state: int, token: int) -> float:
    """Return the share of `token` among the continuations of the state's strings, smoothed with its share after shorter
    suffixes. A long string that occurred once says little alone; shorter suffixes show whether other continuations are
    possible.
    """
    asked = np.empty(_BACKED_OFF, np.int64)
    size = 0
    while state != ROOT and size < _BACKED_OFF:
        asked[size] = state
        state, size = text.states[state, LINK], size + 1
    share = 0.0
    for place in range(size - 1, -1, -1):
        shorter = asked[place]
        following = step(text, shorter, token)
        if is_counted(text, shorter):
            total, count = occurrences(text, shorter), text.states[following, COUNT]
        else:
            total, count = 1, int(following == text.states[shorter, BEST])
        share = (count + _UNSEEN * share) / (total + _UNSEEN)
    return share


@compiled
def _ways(text: Arrays, state: int, wide: bool, found: Ints) -> int:
    """Fill `found` with the states after the continuations of a state that `is_counted`, the most frequent first, and
    return their number. Of equally frequent ones BEST comes first, then the first occurrence, then the latest new one.
    """
    states = text.states
    found[0], size = states[state, BEST], 1
    if not wide:
        return size
    seen, edge, target = 0, states[state, EDGES], states[state, FIRST]
    while seen < _SEEN:
        if seen > 0 or target == NONE:
            if edge == NONE:
                break
            target, edge = text.edges[edge, TARGET], text.edges[edge, NEXT]
        seen += 1
        if target == found[0] or token_of(text, target) == SEPARATOR:
            continue
        place = size
        while place > 0 and states[found[place - 1], COUNT] < states[target, COUNT]:
            found[place] = found[place - 1]
            place -= 1
        found[place] = target
        size += 1
    return size


class SuffixMatch(NamedTuple):
    """A match whose continuations are drafted."""

    source: int  # Index into SOURCES
    state: int
    matched: int  # Number of matching tokens before it


class SuffixLimits(NamedTuple):
    """Limits of a draft, besides the number of nodes."""

    depth: int  # Most tokens on a path
    wide: bool  # Up to _WIDTH children per node instead of one
    least: float  # Least product of the shares along a path


@compiled
def draft(text: Arrays, match: SuffixMatch, limits: SuffixLimits, counts: Floats, made: Draft) -> tuple[int, float]:
    """Fill `made` with the nodes of the largest estimated survival below a match, up to its size. Return the number of
    nodes, root included, and the sum of their survival.
    """
    source, state, matched = match.source, match.state, match.matched
    most = len(made.nodes)
    room = most * (_WIDTH if limits.wide else 1)
    offers = np.empty((room, 6), np.int64)  # Parent, depth, token, key, state, matched
    chances = np.empty((room, 3), np.float64)  # Survival, of the node if its parent survives, share along the path
    found = np.empty(_SEEN + 1, np.int32)
    _mark_ends(text)
    offered, size, node, level, survival, chance, expected = 0, 1, 0, 0, 1.0, 1.0, 0.0
    while size < most:
        if level < limits.depth:
            while text.states[state, BEST] == NONE and state != ROOT:
                state = text.states[state, LINK]
                matched = text.states[state, LENGTH]
            if text.states[state, BEST] != NONE and matched > 0:
                sure = is_counted(text, state)
                total = occurrences(text, state) if sure else 1
                for place in range(min(_WIDTH, _ways(text, state, limits.wide and sure, found))):
                    following = found[place]
                    share = chance * (text.states[following, COUNT] if sure else 1) / total
                    if share < limits.least:
                        break
                    token = token_of(text, following)
                    key, likely = likelihood(counts, source, matched, _share(text, state, token))
                    offers[offered, 0], offers[offered, 1], offers[offered, 2] = node, level + 1, token
                    offers[offered, 3], offers[offered, 4], offers[offered, 5] = key, following, matched + 1
                    chances[offered, 0], chances[offered, 1] = survival * likely, likely
                    chances[offered, 2] = share
                    offered += 1
        taken = NONE
        for offer in range(offered):
            if chances[offer, 0] >= 0.0 and (taken == NONE or chances[offer, 0] > chances[taken, 0]):
                taken = offer
        if taken == NONE:
            break
        put(made, size, offers[taken, 2], offers[taken, 0], offers[taken, 3], chances[taken, 1])
        node, level, state, matched = size, offers[taken, 1], offers[taken, 4], offers[taken, 5]
        survival, chance = chances[taken, 0], chances[taken, 2]
        chances[taken, 0] = -1.0  # Taken
        expected += survival
        size += 1
    return size, expected
