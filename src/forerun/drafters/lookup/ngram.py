"""Prompt lookup: drafts the tokens that followed an earlier occurrence of the text's last n-gram.

This is apoorvumang's prompt-lookup-decoding, with the option names of vLLM's `ngram`. All nodes are deterministic.

Earlier occurrences are found by scanning the whole text in compiled code, which takes 0.1 to 1 ns per token. An index
would cost more than the scans that it saves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from forerun.core.sampling import Sampler
from forerun.decode.drafter import DrafterSetup, PerDomain, check_choice, check_least, check_share
from forerun.drafters.lookup import following
from forerun.drafters.lookup.base import IndexedText, LookupDrafter
from forerun.drafters.lookup.batch import (
    COLUMNS,
    COUNTS,
    DEPTH,
    DRAFTED,
    END,
    NODES,
    PROMPT,
    READ,
    ROW,
    START,
    Batch,
    Longs,
    address,
    batch_at,
    counts_of,
    keep,
    learn_draft,
    put_chain,
    room_of,
    spare_of,
    text_of,
    without_room,
)
from forerun.drafters.lookup.drafts import (
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
    zero_counts,
)
from forerun.drafters.lookup.following import FOUND, follower_of
from forerun.errors import ArgumentError
from forerun.types import DraftKind

LAST, FIRST, MOST_FREQUENT = range(3)  # Which of several earlier occurrences is used
_SCANNED = 32  # Most earlier occurrences considered for one n-gram, from the preferred end
_BLOCK = 64  # Positions that are compared without branches, several at a time (SIMD)


class Choice(NamedTuple):
    """The options of a lookup: which occurrences are used, and how many tokens are drafted."""

    match: int  # LAST, FIRST or MOST_FREQUENT
    hits: int  # Least number of earlier occurrences of an n-gram
    branches: int  # Most different continuations
    length: int  # Most tokens of each
    shortest: int  # Shortest n-gram, tokens
    longest: int
    least: float  # Least probability of a path
    follows: bool  # Whether a text is followed over edits once the longest n-gram matches


@compiled
def _any_between(text: Ints, low: int, high: int, size: int) -> bool:
    """Return whether the n-gram's first and last token precede one of these positions."""
    last, first, found = text[len(text) - 1], text[len(text) - size], False
    # Without negative indices the compiler uses SIMD
    lasts, firsts = text[low - 1 : high - 1], text[low - size : high - size]
    for place in range(high - low):
        found |= (lasts[place] == last) & (firsts[place] == first)
    return found


@compiled
def _find(text: Ints, choice: Choice, found: Ints, met: Ints) -> None:
    """Fill ``found[i]`` with the positions after earlier occurrences of the text's last ``shortest + i`` tokens, the
    preferred ones first, up to its size, and ``met[i]`` with their number, up to the number that matters. It is a
    single scan: once there are enough occurrences of the shorter n-grams, only longer ones are searched for.
    """
    end, size, (_, room) = len(text), choice.shortest, found.shape
    enough, forwards, places = max(choice.hits, room), choice.match == FIRST, max(0, end - size)
    for done in range(0, places, _BLOCK):
        block = min(_BLOCK, places - done)
        low = choice.shortest + (done if forwards else places - done - block)
        if not _any_between(text, max(low, size), low + block, size):
            continue
        for step in range(block):
            place, matched = low + (step if forwards else block - 1 - step), 0
            while matched < min(choice.longest, place) and text[place - 1 - matched] == text[end - 1 - matched]:
                matched += 1
            for other in range(size - choice.shortest, matched + 1 - choice.shortest):
                if met[other] < room:
                    found[other, met[other]] = place
                met[other] += 1
            while met[size - choice.shortest] >= enough:
                size += 1
                if size > choice.longest:
                    return


@compiled
def _copy_token(text: Ints, place: int, offset: int) -> int:
    """Return the token at `offset` from a position; beyond the end of the text the continuation repeats itself."""
    return int(text[place + offset % (len(text) - place)])


@compiled
def _vote(text: Ints, places: Ints, length: int, kept: Ints) -> int:
    """Fill `kept` with the positions whose next token is the most frequent one, of equally frequent tokens the first,
    and repeat this for `length` tokens. Return the number of remaining positions.
    """
    size = len(places)
    kept[:size] = places
    for offset in range(length):
        if size == 1:
            break
        best, most = 0, 0
        for one in range(size):
            votes, token = 0, _copy_token(text, kept[one], offset)
            for other in range(size):
                votes += _copy_token(text, kept[other], offset) == token
            if votes > most:
                best, most = token, votes
        left = 0
        for one in range(size):
            if _copy_token(text, kept[one], offset) == best:
                kept[left], left = kept[one], left + 1
        size = left
    return size


@compiled
def _order_by_votes(text: Ints, places: Ints, length: int) -> int:
    """Keep one position for each distinct continuation, the most frequent first, and return their number."""
    waiting, voters, size, chosen = places.copy(), np.empty(len(places), np.int32), len(places), 0
    while size > 0:
        voted = _vote(text, waiting[:size], length, voters)
        places[chosen], chosen = voters[0], chosen + 1
        left = 0
        for one in range(size):
            if not (voters[:voted] == waiting[one]).any():
                waiting[left], left = waiting[one], left + 1
        size = left
    return chosen


@compiled
def _prefer(text: Ints, choice: Choice, length: int, found: Ints, met: int) -> Ints:
    """Return the positions of one n-gram, from `_find`, whose next `length` tokens are drafted, in the preferred
    order.
    """
    places = found[: min(met, len(found)) if met >= choice.hits else 0]
    return places[: _order_by_votes(text, places, length)] if choice.match == MOST_FREQUENT else places


@compiled
def draft(text: Ints, choice: Choice, length: int, counts: Floats, made: Draft) -> tuple[int, float, int]:
    """Fill `made` with a trie of continuations of `length` tokens, those after the longest n-gram first, up to its
    size. Return the number of nodes, root included, the sum of their survival, and the position of the first
    continuation if the longest n-gram matched, else NONE.
    """
    nodes, size, branches, expected, first = made.nodes, 1, 0, 0.0, NONE
    survival = np.ones(len(nodes))
    sizes = choice.longest + 1 - choice.shortest
    wanted = 1 if choice.branches == 1 and choice.match != MOST_FREQUENT else _SCANNED
    found, met = np.empty((sizes, wanted), np.int32), np.zeros(sizes, np.int32)
    _find(text, choice, found, met)
    seen, known = np.empty(sizes * wanted, np.int32), 0
    for matched in range(choice.longest, choice.shortest - 1, -1):
        which = matched - choice.shortest
        for place in _prefer(text, choice, length, found[which], met[which]):
            if branches == choice.branches or size == len(nodes):
                return size, expected, first
            if (seen[:known] == place).any():
                continue
            seen[known], known = place, known + 1
            if known == 1 and matched == choice.longest:
                first = place
            before, parent, at = size, 0, place
            for offset in range(length):
                token, child = text[at], NONE
                at = at + 1 if at + 1 < len(text) else place  # Beyond the end the continuation repeats itself
                for node in range(1, before):
                    if nodes[node, NODE_PARENT] == parent and nodes[node, NODE_TOKEN] == token:
                        child = node
                if child == NONE and (size == len(nodes) or survival[parent] < choice.least):
                    break
                if child == NONE:
                    key, likely = likelihood(counts, NGRAM, matched + offset, 1.0)
                    put(made, size, token, parent, key, likely)
                    survival[size] = survival[parent] * likely
                    expected += survival[size]
                    child, size = size, size + 1
                parent = child
            branches += size > before
    return size, expected, first


@compiled
def _place(text: Ints, choice: Choice) -> int:
    """Return the position after an earlier occurrence of the longest n-gram, or NONE if there is none."""
    only = Choice(choice.match, choice.hits, 1, choice.length, choice.longest, choice.longest, choice.least, True)
    found, met = np.empty((1, 1 if choice.match != MOST_FREQUENT else _SCANNED), np.int32), np.zeros(1, np.int32)
    _find(text, only, found, met)
    places = _prefer(text, choice, choice.length, found[0], met[0])
    return places[0] if len(places) else NONE


@compiled
def _read(batch: Batch, row: int, new: Ints, choice: Choice) -> None:
    """Append new tokens, for which there is capacity, to a row's text. The position to follow is updated after every
    output token, and by `_draft` after the last one, so the result does not depend on the number of tokens per step.
    """
    size = batch.rows[row, READ]
    learn_draft(batch, row, new)
    batch.rows[row, READ] = size + len(new)
    text, follower = text_of(batch, row), follower_of(batch.followers, row)
    text[size:] = new
    at = max(size, batch.rows[row, PROMPT])
    while choice.follows and at < len(text):
        at = following.advance(follower, text, text, at, len(text), True)
        if follower.place[FOUND] == 0 and at < len(text):
            place = _place(text[:at], choice)
            if place != NONE:
                following.start(follower.place, place, choice.longest)


@compiled
def _draft(batch: Batch, row: int, length: int, nodes: int, choice: Choice) -> int:
    """Write a draft for a row: from the followed position if that is settled, else from the source with more expected
    tokens. Return the number of nodes, root included.
    """
    text, counts, follower = text_of(batch, row), counts_of(batch, row), follower_of(batch.followers, row)
    made = room_of(batch, row, min(nodes, choice.branches * length))
    if choice.follows and choice.branches == 1 and following.is_settled(follower.place):
        size, _ = following.draft(follower, text, counts, made, choice.least, True)
        return size
    size, expected, place = draft(text, choice, length, counts, made)
    if choice.follows:
        if follower.place[FOUND] == 0 and place != NONE:
            following.start(follower.place, place, choice.longest)
        spare = spare_of(batch, length)
        followed, gain = following.draft(follower, text, counts, spare, choice.least, True)
        if gain > expected:
            size = followed
            keep(made, spare, size)
    return size


@compiled
def step(where: Longs, chosen: Any, tokens: Ints, work: Longs, chains: Ints) -> int:
    """Read new tokens of all rows, then draft. Each row of `chains`, (B, N), gets the draft's number of nodes, root
    included, and their tokens. Return B or, without doing anything, the index of the first row whose text lacks the
    capacity. `chosen` is a `Choice` as a plain tuple, which is faster to pass.
    """
    batch, choice = batch_at(where), Choice(*chosen)
    ready = without_room(batch, work)
    if ready < work.shape[1]:
        return ready
    for index in range(work.shape[1]):
        if work[START, index] < work[END, index]:
            _read(batch, work[ROW, index], tokens[work[START, index] : work[END, index]], choice)
    for index in range(work.shape[1]):
        length, chains[index, 0] = min(choice.length, work[NODES, index], work[DEPTH, index]), 1
        if length > 0:
            row = work[ROW, index]
            put_chain(batch, row, _draft(batch, row, length, work[NODES, index], choice), chains[index])
    return ready


_MATCHES = ("last", "first", "most_frequent")


@dataclass(frozen=True, kw_only=True, slots=True)
class NgramConfig:
    """Options of `ngram`. The first three have vLLM's names, `min_hits` has llama.cpp's."""

    num_speculative_tokens: int = 8  # Most tokens drafted from one position
    prompt_lookup_max: int = 4  # Longest n-gram searched for, in tokens; tried first
    prompt_lookup_min: int = 1  # Shortest n-gram searched for, in tokens
    max_branches: int = 1  # Most different continuations merged into one tree; 1 drafts a chain
    match: str = "last"
    """Which earlier occurrence of an n-gram to use: ``last``, ``first`` (transformers), or ``most_frequent``: token by
    token, the most frequent continuation of its last 32 occurrences.
    """
    min_hits: int = 1  # Least number of earlier occurrences of an n-gram
    min_token_prob: float = 0.1  # Least learned probability of a path, in 0..1; 0 drafts every match
    follow_edits: bool = True
    """Once the longest n-gram matches, follow that text over edits, and repeat replacements."""

    def __post_init__(self) -> None:
        check_least("ngram", self, num_speculative_tokens=1, prompt_lookup_min=1, max_branches=1, min_hits=1)
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        if high < low:
            raise ArgumentError(f"ngram: prompt_lookup_max ({high}) is below prompt_lookup_min ({low})")
        check_choice("ngram", self, "match", _MATCHES)
        check_share("ngram", self, "min_token_prob")


class NgramDrafter(LookupDrafter[Floats]):
    """Drafts what followed an earlier occurrence of the text's last tokens, of the longest n-gram that has one."""

    name = "ngram"
    Config = NgramConfig

    def __init__(self, config: NgramConfig, setup: DrafterSetup) -> None:
        branches, length = config.max_branches, config.num_speculative_tokens
        super().__init__(PerDomain(zero_counts), setup, columns=COLUMNS, nodes=branches * length)
        self.config = config
        self._choice = tuple(
            Choice(
                match=_MATCHES.index(config.match),
                hits=config.min_hits,
                branches=branches,
                length=length,
                shortest=config.prompt_lookup_min,
                longest=config.prompt_lookup_max,
                least=float(config.min_token_prob),
                follows=config.follow_edits,
            )
        )
        self._compile()

    def kind(self, sampler: Sampler) -> DraftKind:
        return DraftKind(chain=self.config.max_branches == 1)

    def _new_text(self, tokens: int) -> IndexedText:
        return _Tokens(tokens)

    def _point(self, row: int, domain: Floats) -> None:
        self.batch.rows[row, COUNTS] = address(domain)

    def _restart(self, row: int, prompt: int) -> None:
        if row in self._texts:  # Its array is reused
            self._shrink(row, 0)
            self.batch.rows[row, PROMPT] = prompt
            self._point(row, self._domain[row])
        else:
            super()._restart(row, prompt)

    def _shrink(self, row: int, length: int) -> None:
        self.batch.rows[row, READ], self.batch.rows[row, DRAFTED] = length, 0
        self._follow_nothing(row)

    def _step(self, where: Longs, tokens: Ints, work: Longs, chains: Ints) -> int:
        return step(where, self._choice, tokens, work, chains)


class _Tokens(IndexedText):
    """A text without an index."""

    def __init__(self, tokens: int) -> None:
        self.whole = np.empty(max(64, 2 * tokens), np.int32)  # The output may be as long as the prompt

    @property
    def tokens(self) -> Ints:
        return self.whole

    @property
    def room(self) -> int:
        return len(self.whole)

    def make_room(self, tokens: int) -> None:
        if tokens > self.room:
            self.whole = np.append(self.whole, np.empty(2 * tokens - self.room, np.int32))
