"""What `suffix` does for every token, compiled: functions over arrays, so that a large batch costs the host little.

Three things live here: a suffix automaton over a growing text, a follower of a text that is copied with changes, and
the drafts made from either. `automaton`, `follower` and `suffix` own the arrays and say what they mean. numba compiles
a function when it is first called and keeps the result on disk. It does not notice when a function of another file
changes, so all that call one another are in this one; and it looks at no array's end, so the tests run all of it once
with ``NUMBA_BOUNDSCHECK=1``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, ParamSpec, TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

from forerun.core.acceptance import BINS, COPIED, WEIGHT, bucket_of

P = ParamSpec("P")
R = TypeVar("R")
Ints = NDArray[np.int32]
Floats = NDArray[np.float64]

SEPARATOR = -1  # Stands between two texts in one automaton; never drafted, never matched
ROOT = 0  # The state of the empty string
NONE = -1


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """numba's compiler; what it made is kept beside the source, or in the user's cache, where either can be written."""
    try:
        made: Callable[P, R] = numba.njit(cache=True)(function)
    except RuntimeError:  # No folder to keep it in
        made = numba.njit(function)
    return made


# --- a suffix automaton -----------------------------------------------------------------------------------------------

# Columns of `states`
LENGTH = 0  # Tokens of the state's longest string
LINK = 1  # State of the longest suffix that occurs at more positions
END = 2  # How many tokens of the text end with the first occurrence
COUNT = 3  # Occurrences; right where the state's shortest string has at most `depth` tokens
FIRST = 4  # Target of the transition that the first occurrence takes
BEST = 5  # Target of the most frequent transition, the most recent of equals; else of the first one
EDGES = 6  # First entry of the list of further transitions
MARK = 7  # The size of a text that ends with one of the state's strings, as `_mark_ends` last found it
STATE_COLUMNS = 8
# Columns of `edges`, the further transitions
SOURCE, TOKEN, TARGET, NEXT = 0, 1, 2, 3  # NEXT: in the list of its source
EDGE_COLUMNS = 4
# Places in `head`
SIZE = 0  # Tokens of the text
STATES, USED = 1, 2  # States and edges in use
LAST = 3  # State of the whole text
DEEP, DEEP_LENGTH = 4, 5  # State of the text's last `depth` tokens, and how many these are
DEPTH = 6  # Longest string that is counted, tokens
HEAD = 7

_SEEN = 32  # Most continuations of one string looked at for a tree: a frequent word has thousands
_WIDTH = 8  # Most of them that become nodes, the most frequent ones
_BACKED_OFF = 4  # Ever shorter strings asked for the share of a continuation
_UNSEEN = 1.0  # Occurrences that the share after the next shorter string counts for


class Arrays(NamedTuple):
    """A suffix automaton over N tokens: at most 2 N states and N further transitions (Blumer et al. 1985)."""

    head: Ints  # (HEAD,)
    tokens: Ints  # (room,)
    states: Ints  # (2 room, STATE_COLUMNS)
    edges: Ints  # (room, EDGE_COLUMNS)
    slots: Ints  # (a power of two,) open addressing: the edge of a state and a token, NONE where there is none


@compiled
def _slot(slots: Ints, state: int, token: int) -> int:
    """Where the search for an edge begins."""
    mixed = ((np.int64(state) << 32) ^ np.int64(token)) * np.int64(0x1E3779B97F4A7C15)
    return int((mixed >> 29) & (len(slots) - 1))


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
    """Put the edges from this one on into the index."""
    for edge in range(first, text.head[USED]):
        slot = _slot(text.slots, text.edges[edge, SOURCE], text.edges[edge, TOKEN])
        while text.slots[slot] != NONE:
            slot = (slot + 1) & (len(text.slots) - 1)
        text.slots[slot] = edge


@compiled
def step(text: Arrays, state: int, token: int) -> int:
    """The state after `token`, NONE where the text does not go on like this."""
    end = text.states[state, END]
    if end < text.head[SIZE] and text.tokens[end] == token:
        return int(text.states[state, FIRST])
    edge = _edge(text, state, token)
    return NONE if edge == NONE else int(text.edges[edge, TARGET])


@compiled
def advance(text: Arrays, state: int, matched: int, token: int) -> tuple[int, int]:
    """From the longest match of one text in this one to that of the text and `token`: its state and length."""
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
    """The last token of the state's strings."""
    return int(text.tokens[text.states[state, END] - 1])


@compiled
def counted(text: Arrays, state: int) -> bool:
    """Whether it is known how often the state's strings go on with each token."""
    return state == ROOT or bool(text.states[text.states[state, LINK], LENGTH] + 2 <= text.head[DEPTH])


@compiled
def _new(text: Arrays, length: int, end: int) -> int:
    """A state without transitions; its link is the root."""
    state = text.head[STATES]
    text.head[STATES] += 1
    text.states[state] = 0
    text.states[state, LENGTH], text.states[state, END] = length, end
    text.states[state, FIRST] = text.states[state, BEST] = text.states[state, EDGES] = NONE
    return int(state)


@compiled
def start(text: Arrays, depth: int) -> None:
    """The automaton of the empty text."""
    text.head[:] = 0
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
def extend(text: Arrays, new: Ints) -> tuple[int, int]:
    """Append tokens, for which there is room: amortised O(1) for each, and O(`depth`) to count it. Returns state and
    length of the longest suffix of the text that occurs in it before its end too."""
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
    repeated = max(ROOT, states[text.head[LAST], LINK])
    return repeated, states[repeated, LENGTH]


@compiled
def _split(text: Arrays, state: int, target: int, token: int) -> int:
    """A state of its own for those strings of `target` that are suffixes of the text: these occur once more."""
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
    """Count the strings that end with the new token, and keep BEST right for what stood before it."""
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
        _elect(text, before if counted(text, before) else states[before, LINK], after)


@compiled
def _elect(text: Arrays, before: int, after: int) -> None:
    """For each suffix that stood before the new token: does it now follow most often? `before` and `after` are the
    states of the longest such suffix whose continuations are counted, and that ends with the token."""
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
    """`advance` over several tokens of another text."""
    for token in other:
        state, matched = advance(text, state, matched, token)
    return state, matched


# --- what is known of a drafted token ---------------------------------------------------------------------------------

SOURCES = ("request", "store", "followed", "guessed")  # Where a token was copied from: the text itself, an earlier
# answer, the place that a follower has found or guessed
REQUEST, STORE, FOLLOWED, GUESSED = range(len(SOURCES))
KEYS = len(SOURCES) * len(COPIED) * BINS
NODE_TOKEN, NODE_PARENT, NODE_KEY = 0, 1, 2  # Columns of a draft's nodes, the root first
NODE_COLUMNS = 3

_bucket = compiled(bucket_of)


@compiled
def evidence(source: int, matched: int, share: float) -> tuple[int, float]:
    """`forerun.core.acceptance.by_match` with a number below KEYS for a key: (key, prior)."""
    bucket = _bucket(matched)
    key = (source * len(COPIED) + bucket) * BINS + min(int(share * BINS), BINS - 1)
    return key, COPIED[bucket] * share


@compiled
def estimate(counts: Floats, key: int, prior: float) -> float:
    """`forerun.core.acceptance.Acceptance.estimate` on (KEYS, 2) counts: accepted, tried."""
    return float((counts[key, 0] + WEIGHT * prior) / (counts[key, 1] + WEIGHT))


@compiled
def learn(nodes: Ints, text: Ints, counts: Floats) -> None:
    """Count for every node of a draft whose parent the text holds whether it holds the node, too: the draft against
    what followed its root."""
    depths = np.full(len(nodes), NONE, np.int64)
    depths[0] = 0
    for node in range(1, len(nodes)):
        depth = depths[nodes[node, NODE_PARENT]]
        if depth == NONE or depth >= len(text):
            continue
        key = nodes[node, NODE_KEY]
        counts[key, 1] += 1.0
        if text[depth] == nodes[node, NODE_TOKEN]:
            depths[node] = depth + 1
            counts[key, 0] += 1.0


# --- drafts from a match ----------------------------------------------------------------------------------------------


@compiled
def _mark_ends(text: Arrays) -> None:
    """Mark the states that hold the text's end: each has one occurrence that is not followed by anything."""
    state = text.head[DEEP]
    text.states[ROOT, MARK] = text.head[SIZE]
    while state != ROOT:
        text.states[state, MARK] = text.head[SIZE]
        state = text.states[state, LINK]


@compiled
def occurrences(text: Arrays, state: int) -> int:
    """How often the strings of a `counted` state occur and something follows; the ends are marked."""
    return int(text.states[state, COUNT] - int(text.states[state, MARK] == text.head[SIZE]))


@compiled
def _share(text: Arrays, state: int, token: int) -> float:
    """How often `token` follows the state's strings, blended with how often it follows ever shorter ones. A long string
    that was met once says little by itself; the shorter ones tell whether it could have gone on otherwise."""
    asked = np.empty(_BACKED_OFF, np.int64)
    size = 0
    while state != ROOT and size < _BACKED_OFF:
        asked[size] = state
        state, size = text.states[state, LINK], size + 1
    share = 0.0
    for place in range(size - 1, -1, -1):
        shorter = asked[place]
        following = step(text, shorter, token)
        if counted(text, shorter):
            total, count = occurrences(text, shorter), text.states[following, COUNT]
        else:
            total, count = 1, int(following == text.states[shorter, BEST])
        share = (count + _UNSEEN * share) / (total + _UNSEEN)
    return share


@compiled
def _ways(text: Arrays, state: int, wide: bool, found: Ints) -> int:
    """The states after the next tokens of a `counted` state, the most frequent first, and of equals the one that BEST
    prefers, then the first that occurred, then the last that came up; how many."""
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


class Match(NamedTuple):
    """Where a draft is copied from."""

    source: int  # One of SOURCES, by its place
    state: int
    matched: int  # Tokens before it that are the same here and there


class Limits(NamedTuple):
    """What bounds a draft besides the room for its nodes."""

    depth: int  # Tokens of a path
    wide: bool  # Up to _WIDTH ways on from a node instead of one
    least: float  # What the shares along a path multiply to


@compiled
def draft(
    text: Arrays, match: Match, limits: Limits, counts: Floats, nodes: Ints, confidence: Floats
) -> tuple[int, float]:
    """Fill `nodes` and `confidence` with the nodes of largest estimated survival below a match, as many as there is
    room for: how many, the root included, and the sum of their survival."""
    source, state, matched = match.source, match.state, match.matched
    room = len(nodes) * (_WIDTH if limits.wide else 1)
    offers = np.empty((room, 6), np.int64)  # Parent, depth, token, key, state, matched
    chances = np.empty((room, 3), np.float64)  # Survival, of the node if its parent survives, share along the path
    found = np.empty(_SEEN + 1, np.int32)
    _mark_ends(text)
    offered, size, node, level, survival, chance, expected = 0, 1, 0, 0, 1.0, 1.0, 0.0
    while size < len(nodes):
        if level < limits.depth:
            while text.states[state, BEST] == NONE and state != ROOT:
                state = text.states[state, LINK]
                matched = text.states[state, LENGTH]
            if text.states[state, BEST] != NONE and matched > 0:
                sure = counted(text, state)
                total = occurrences(text, state) if sure else 1
                for place in range(min(_WIDTH, _ways(text, state, limits.wide and sure, found))):
                    following = found[place]
                    share = chance * (text.states[following, COUNT] if sure else 1) / total
                    if share < limits.least:
                        break
                    token = token_of(text, following)
                    key, prior = evidence(source, matched, _share(text, state, token))
                    likely = estimate(counts, key, prior)
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
        nodes[size, NODE_TOKEN], nodes[size, NODE_PARENT] = offers[taken, 2], offers[taken, 0]
        nodes[size, NODE_KEY], confidence[size] = offers[taken, 3], chances[taken, 1]
        node, level, state, matched = size, offers[taken, 1], offers[taken, 4], offers[taken, 5]
        survival, chance = chances[taken, 0], chances[taken, 2]
        chances[taken, 0] = -1.0  # Taken
        expected += survival
        size += 1
    return size, expected


# --- a follower -------------------------------------------------------------------------------------------------------

# Places in a follower's `place`
PLACE = 0  # Index in the source of the token that comes next; NONE: nowhere
FOUND = 1  # 1: it is where the text's last token stands; else it is a guess
CHANGED = 2  # 1: the text has left the source before
PARTED = 3  # Index in the source where it last did
MATCHED = 4  # Tokens before the place that agree, of late
TRUST = 5  # Tokens that agreed, at most _TRUST; one that does not agree halves it
BEGAN = 6  # Index in the text where the change began
MISSED = 7  # Tokens of the text in it that did not agree; 0: it has ended
UNDONE = 8  # The place if the replacement that is being made again is not
KNOWN = 9  # Replacements ever remembered
DUE = 10  # How many tokens of a replacement that is being made again are to come; these are the last of _DUE
_DUE = 11

_REACH = 16  # So many tokens of the text are searched for in so many of the source, from where the texts parted
_AGREED = 4  # Tokens in a row that agree end a change
_LONGEST = 8  # Tokens, before and after, of a replacement that is remembered
_TRUST = 16
FOLLOWER = _DUE + _LONGEST
# Columns of a follower's `replacements`
_OLD_SIZE, _NEW_SIZE, _OLD = 0, 1, 2
_NEW = _OLD + _LONGEST
REPLACEMENT_COLUMNS = _NEW + _LONGEST
REPLACEMENTS = 64  # Most that are remembered, by the first token of what is replaced; then the oldest goes


class Following(NamedTuple):
    """A follower's state; all zeros, PLACE apart, at the start."""

    place: Ints  # (FOLLOWER,)
    replacements: Ints  # (REPLACEMENTS, REPLACEMENT_COLUMNS)


@compiled
def _replacement(follower: Following, source: Ints, at: int, end: int) -> int:
    """The replacement that is to be made again at an index of the source; NONE if there is none."""
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
    """Behind a change that has ended: remember what replaced what."""
    place, replacements = follower.place, follower.replacements
    if place[MISSED] == 0 or place[MATCHED] < _AGREED:
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
    """A token does not agree. Its nearest place ahead is taken before which most agrees; if there is none, it replaced
    one token, or, after another one like it, was added."""
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
def read(follower: Following, source: Ints, text: Ints, first: int, last: int, same: bool) -> None:
    """The text gained the tokens ``first:last``; `same`: the text is its own source."""
    place, replacements = follower.place, follower.replacements
    for at in range(first, last):
        if place[PLACE] == NONE:
            return
        token, end = text[at], at if same else len(source)
        if place[DUE] > 0 and place[FOLLOWER - place[DUE]] != token:
            place[PLACE], place[DUE] = place[UNDONE], 0
        again = NONE if place[DUE] > 0 else _replacement(follower, source, place[PLACE], end)
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
            continue
        place[MATCHED] = place[MATCHED] + 1 if place[FOUND] else 1
        place[FOUND], place[TRUST] = 1, min(_TRUST, place[TRUST] + 1)
        _settle(follower, source, text, at)


@compiled
def ahead(follower: Following, source: Ints, found: Ints) -> int:
    """Fill `found` with the tokens that come next; how many there are."""
    place, replacements = follower.place, follower.replacements
    at, size = place[PLACE], 0
    if at == NONE:
        return 0
    for due in range(place[DUE]):
        if size < len(found):
            found[size], size = place[FOLLOWER - place[DUE] + due], size + 1
    while size < len(found) and at < len(source):
        again = _replacement(follower, source, at, len(source))
        if again == NONE:
            found[size], size, at = source[at], size + 1, at + 1
        else:
            at += replacements[again, _OLD_SIZE]
            for offset in range(replacements[again, _NEW_SIZE]):
                if size < len(found):
                    found[size], size = replacements[again, _NEW + offset], size + 1
    return size


@compiled
def draft_ahead(
    follower: Following, source: Ints, counts: Floats, least: float, nodes: Ints, confidence: Floats
) -> tuple[int, float]:
    """As `draft`, of a followed text: a chain, as far as it survives with a probability of at least `least`."""
    place, found = follower.place, np.empty(len(nodes) - 1, np.int32)
    kind = FOLLOWED if place[FOUND] else GUESSED
    survival, expected, size = 1.0, 0.0, 1
    for offset in range(ahead(follower, source, found)):
        if found[offset] == SEPARATOR or survival < least:
            break
        key, prior = evidence(kind, place[TRUST] + place[MATCHED] + offset, 1.0)
        confidence[size] = estimate(counts, key, prior)
        nodes[size, NODE_TOKEN], nodes[size, NODE_PARENT], nodes[size, NODE_KEY] = found[offset], size - 1, key
        survival *= confidence[size]
        expected += survival
        size += 1
    return size, expected
