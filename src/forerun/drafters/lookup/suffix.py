"""SuffixDecoding: drafts what followed earlier occurrences of the text's suffix, in this request or in past outputs.

It is SuffixDecoding (arXiv 2411.04975) with the suffix automata of SAM-Decoding (arXiv 2411.10666): one automaton for
each running request over its prompt and output, and a bounded store of past outputs. forerun adds a follower
(`following`), which tracks a text that is repeated with edits. Each step drafts from the source with the most expected
accepted tokens. All nodes are deterministic.

The automata (`suffixes`) represent every string in a text, with its number of occurrences and its continuations:
Blumer et al. 1985, with the counts of SuffixDecoding. All work per token is in compiled code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from forerun.core.sampling import Sampler
from forerun.decode.drafter import DrafterSetup, PerDomain, check_least, check_share
from forerun.drafters.lookup import batch as batches
from forerun.drafters.lookup import following, suffixes
from forerun.drafters.lookup.base import IndexedText, LookupDrafter
from forerun.drafters.lookup.batch import (
    COUNTS,
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
    address,
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
from forerun.drafters.lookup.drafts import NONE, REQUEST, SEPARATOR, STORE, Ints, compiled, room_for, zero_counts
from forerun.drafters.lookup.following import FOUND, PLACE, follower_of
from forerun.drafters.lookup.suffixes import ROOT, SIZE, Arrays, SuffixLimits, SuffixMatch, automaton_at
from forerun.errors import ArgumentError
from forerun.types import DraftKind

_NUMBERS = count(1)


class SuffixAutomaton(IndexedText):
    """A suffix automaton: it represents all substrings of a text, with one state for those that end at the same
    positions.

    A token is appended in amortised O(1), and counted in O(`depth`) at worst: occurrences are counted for strings of at
    most `depth` >= 2 tokens. States and transitions are in one flat array of 32-bit integers. The token of a state's
    transition along its first occurrence is read from the text, so only branches need an entry: 92 to 190 bytes per
    token, and twice that while the array grows.
    """

    def __init__(self, depth: int, tokens: int = 0) -> None:
        """Make the automaton of the empty text, with a capacity of `tokens` tokens."""
        self.number = next(_NUMBERS)  # A unique number
        self.whole = _empty(tokens)
        self.arrays = suffixes.parts_of(self.whole)
        suffixes.start(self.arrays, depth)

    def __len__(self) -> int:
        return int(self.whole[suffixes.SIZE])

    @property
    def tokens(self) -> Ints:
        return self.arrays.tokens[: len(self)]

    @property
    def room(self) -> int:
        return len(self.arrays.tokens)

    def extend(self, tokens: Sequence[int] | Ints) -> None:
        """Append tokens to the text."""
        self.make_room(len(self) + len(tokens))
        suffixes.extend(self.arrays, np.asarray(tokens, np.int32))

    def make_room(self, tokens: int) -> None:
        if tokens > self.room:
            whole = _empty(tokens)
            larger = suffixes.parts_of(whole)
            larger.head[: suffixes.ROOM] = self.arrays.head[: suffixes.ROOM]
            for old, new in zip(self.arrays[1:-1], larger[1:-1], strict=True):
                new[: len(old)] = old
            suffixes.reindex(larger, 0)
            self.whole, self.arrays = whole, larger


def _empty(tokens: int) -> Ints:
    """Allocate an array with a capacity of at least `tokens` tokens, and an empty index."""
    room = room_for(tokens)
    whole = np.empty(suffixes.size_of(room), np.int32)
    whole[: suffixes.HEAD] = 0
    whole[suffixes.ROOM] = room
    suffixes.parts_of(whole).slots.fill(NONE)
    return whole


class OutputStore:
    """The outputs of finished requests in an index of at most `tokens` tokens and `requests` requests. It is
    SuffixDecoding's global tree (arXiv 2411.04975) as two generations of automata: outputs are added to the younger
    one; when that is full, the older one is dropped, and a new one is started.
    """

    def __init__(self, *, depth: int, tokens: int, requests: int) -> None:
        self._depth, self._tokens, self._requests = depth, tokens // 2, requests // 2
        self.generations = [SuffixAutomaton(depth)]  # The youngest first; at most two
        self._outputs = 0  # Outputs in the younger generation

    @property
    def held(self) -> int:
        """Tokens of all outputs."""
        return sum(map(len, self.generations))

    def add(self, output: Sequence[int] | Ints) -> None:
        """Add an output; of one that is longer than half the store, only the end is added."""
        kept = np.asarray(output[max(0, len(output) + 1 - self._tokens) :], np.int32)
        if not len(kept) or not self._requests or self._tokens <= 1:
            return
        if self._outputs == self._requests or len(self.generations[0]) + len(kept) + 1 > self._tokens:
            self.generations, self._outputs = [SuffixAutomaton(self._depth), self.generations[0]], 0
        self.generations[0].extend(np.append(kept, np.int32(SEPARATOR)))
        self._outputs += 1

    def memory_bytes(self) -> int:
        return sum(generation.whole.nbytes for generation in self.generations)


GENERATIONS = 2  # Most automata of a store
# Columns of a store, which has a row for each automaton
NUMBER, ADDRESS = 0, 1  # The automaton's unique number, 0 if there is none, and its address
STORE_COLUMNS = 2
# Further columns of a batch's rows
STORED = batches.COLUMNS  # Address of the domain's store
FOLLOWED = STORED + 1  # NUMBER of the automaton whose text is followed; 0: the row's own
CURSORS = STORED + 2  # `_CURSOR` columns for each of the GENERATIONS
# A row's position in an automaton of the store
_NUMBER, _KNOWN, _READ, _STATE, _MATCHED = range(5)  # The automaton, its size, tokens read; the longest match
_CURSOR = 5
COLUMNS = CURSORS + GENERATIONS * _CURSOR

_FOLLOWED = 4  # Shortest match, tokens, after which its text is followed


class Options(NamedTuple):
    """Limits of the drafts, from `SuffixConfig`."""

    length: int
    factor: float
    offset: float
    least: float  # Least probability of a path
    shortest: int  # Shortest match, tokens
    nodes: int  # Most nodes of a tree of several continuations; 0: chains
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
    """Advance the row's cursors over the new tokens of its text. A cursor starts again if its automaton has grown or
    was replaced.
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
    """Return the automaton of the followed text. If the store has dropped it, it is the row's own, in which the
    follower has no position.
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
    """Return the longest match of the text's suffix, and its automaton: the row's own for source 0, else one of the
    store.
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
    """Let the follower read the tokens from `known` on. If it loses its position, it continues at the longest match, if
    that is long enough.
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
    """Append new tokens, for which there is capacity, to a row's text."""
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
    """Return the length of a draft after a match of `matched` tokens."""
    if matched < options.shortest:
        return 0
    return min(most, int(min(float(options.length), options.factor * matched + options.offset + 1e-6)))


@compiled
def _draft(batch: Batch, row: int, most: int, nodes: int, options: Options) -> int:
    """Write a draft for a row: the one with the most expected tokens of those from each match and from the followed
    text; of equal ones that of the row's own text. Return the number of nodes, root included.
    """
    text = automaton_at(batch.rows[row, TEXT])
    counts = counts_of(batch, row)
    follower = follower_of(batch.followers, row)
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
    """Read and draft as `lookup.ngram.step` does; `chosen` are `Options`."""
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


_FULL_STORES = 4  # Most tokens in the stores of all isolation domains together, in full stores


@dataclass(frozen=True, kw_only=True, slots=True)
class SuffixConfig:
    """Options of `suffix`; vLLM's names, with ``suffix_decoding_`` before them, are understood too."""

    num_speculative_tokens: int = 24  # Most tokens on one path
    max_tree_depth: int = 24  # Longest string that is counted, tokens; after longer ones the first occurrence is used
    max_spec_factor: float = 4.0  # Tokens drafted for each token of the match
    max_spec_offset: float = 0.0  # Tokens added to that
    min_token_prob: float = 0.1
    """Least probability of a path, in 0..1: the product of its tokens' shares of the counts; for followed text the
    learned one.
    """
    min_match: int = 1  # Shortest match that is drafted from, tokens
    nodes: int | None = None  # Most nodes of a tree of several continuations, by their counts; None drafts a chain
    follow_edits: bool = True  # Follow a text that is repeated with edits, and repeat replacements
    max_cached_requests: int = 10_000  # Past outputs kept of a domain (API key); 0: the request's own text only
    max_cached_tokens: int = 500_000
    """Most tokens of these (150 bytes each); four times as many for all domains together."""
    cache_prompts: bool = False  # Keep the prompts of past requests too

    def __post_init__(self) -> None:
        check_least("suffix", self, num_speculative_tokens=1, max_tree_depth=2, min_match=1, nodes=1)
        check_least("suffix", self, max_spec_factor=0, max_spec_offset=0)
        check_share("suffix", self, "min_token_prob")
        for name, least in (("max_cached_requests", 2), ("max_cached_tokens", 4)):
            given = getattr(self, name)
            if given < least and given != 0:
                raise ArgumentError(f"suffix: {name} must be 0 (off) or at least {least}, got {given}")
        if self.max_spec_factor == 0 and self.max_spec_offset < 1:
            raise ArgumentError("suffix: max_spec_factor 0 with max_spec_offset below 1 never drafts; raise one")


class SuffixDrafter(LookupDrafter["_Domain"]):
    """Drafts from the longest match in the request's own text, the one in past outputs, or the followed text, whichever
    has the most expected tokens.
    """

    name = "suffix"
    Config = SuffixConfig

    def __init__(self, config: SuffixConfig, setup: DrafterSetup) -> None:
        domains = PerDomain(
            lambda: _Domain(config),
            size=lambda domain: domain.store.held,
            most_size=_FULL_STORES * config.max_cached_tokens,
        )
        most = max(config.num_speculative_tokens, config.nodes or 0)
        super().__init__(domains, setup, columns=COLUMNS, nodes=most)
        self.config = config
        self._options = tuple(
            Options(
                length=config.num_speculative_tokens,
                factor=float(config.max_spec_factor),
                offset=float(config.max_spec_offset),
                least=float(config.min_token_prob),
                shortest=config.min_match,
                nodes=config.nodes or 0,
                follows=config.follow_edits,
            )
        )
        self._compile()

    def kind(self, sampler: Sampler) -> DraftKind:
        return DraftKind(chain=self.config.nodes is None)

    def memory_bytes(self) -> int:
        return super().memory_bytes() + sum(domain.store.memory_bytes() for domain in self._domains.all())

    def _new_text(self, tokens: int) -> SuffixAutomaton:
        return SuffixAutomaton(self.config.max_tree_depth, tokens)

    def _point(self, row: int, domain: _Domain) -> None:
        columns = self.batch.rows[row]
        columns[COUNTS], columns[STORED] = address(domain.counts), address(domain.stored)

    def _step(self, where: Longs, tokens: Ints, work: Longs, chains: Ints) -> int:
        return step(where, self._options, tokens, work, chains)

    def _free(self, row: int) -> None:
        """Free a row, and add its output to the store of its domain."""
        first = 0 if self.config.cache_prompts else int(self.batch.rows[row, PROMPT])
        domain, output = self._domain[row], self._texts[row].tokens[first : self.batch.rows[row, READ]]
        super()._free(row)
        domain.add(output)
        self._domains.trim()


class _Domain:
    """The state of an isolation domain."""

    def __init__(self, config: SuffixConfig) -> None:
        depth, tokens, requests = config.max_tree_depth, config.max_cached_tokens, config.max_cached_requests
        self.store = OutputStore(depth=depth, tokens=tokens, requests=requests)
        self.counts = zero_counts()
        shape = GENERATIONS, STORE_COLUMNS
        self.stored = np.zeros(shape, np.int64)  # The store, for compiled code
        self._point()

    def add(self, output: Ints) -> None:
        """Add the output of a finished request."""
        try:
            self.store.add(output)
        finally:
            self._point()

    def _point(self) -> None:
        self.stored[:] = 0
        for place, automaton in enumerate(self.store.generations):
            self.stored[place] = automaton.number, address(automaton.whole)
