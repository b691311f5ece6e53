"""SuffixDecoding: drafts what followed the text's end where it occurred before, in this request or in earlier outputs.

arXiv 2411.04975, on the suffix automata of SAM-Decoding (arXiv 2411.10666): one automaton for each running request over
its prompt and output, and a bounded store of past outputs; and, ours, a `Follower`, which stays with a text that is
copied with changes. Each step drafts from where the expected number of accepted tokens is largest. All nodes are
deterministic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from forerun.core.sampling import Sampler
from forerun.core.tree import TokenTree
from forerun.drafters.base import DraftContext, Drafter, DrafterSetup, PerDomain, check_least
from forerun.drafters.lookup.automaton import Cursor, OutputStore, SuffixAutomaton
from forerun.drafters.lookup.compiled import suffixes
from forerun.drafters.lookup.compiled.drafts import REQUEST, STORE, Draft, Floats, Ints, learn, unseen
from forerun.drafters.lookup.compiled.suffixes import Limits, Match
from forerun.drafters.lookup.follower import Follower
from forerun.errors import ArgumentError
from forerun.types import Budget, DraftKind

_FOLLOWED = 4  # Shortest match, tokens, whose text is followed from then on
_FULL_STORES = 4  # What the stores of all isolation domains may hold together, in full ones


@dataclass(frozen=True, kw_only=True, slots=True)
class SuffixConfig:
    """Options of `suffix`; vLLM's names, with ``suffix_decoding_`` before them, are understood too."""

    num_speculative_tokens: int = 24  # Most tokens on one path
    max_tree_depth: int = 24  # Longest string that is counted, tokens; beyond it the first occurrence is followed
    max_spec_factor: float = 2.0  # Tokens drafted for each token of the match
    max_spec_offset: float = 0.0  # Tokens drafted besides
    min_token_prob: float = 0.1
    """Least probability of a path, in 0..1: by the counts, of its tokens' shares, multiplied; followed, as learned."""
    min_match: int = 1  # Shortest match that is drafted from, tokens
    nodes: int | None = None  # Most nodes of a tree of several continuations, by their counts; None drafts a chain
    follow_edits: bool = True  # Stay with a text that is copied, over changes, and make replacements again
    max_cached_requests: int = 10_000  # Past outputs kept of a domain (API key); 0: the request's own text only
    max_cached_tokens: int = 500_000  # Their tokens (150 bytes each); four times as many of all domains together
    cache_prompts: bool = False  # Keep the prompts of past requests too

    def __post_init__(self) -> None:
        check_least("suffix", self, num_speculative_tokens=1, max_tree_depth=2, min_match=1, nodes=1)
        check_least("suffix", self, max_spec_factor=0, max_spec_offset=0)
        if not 0 <= self.min_token_prob <= 1:
            raise ArgumentError(f"suffix: min_token_prob must be in 0..1, got {self.min_token_prob}")
        for name, least in (("max_cached_requests", 2), ("max_cached_tokens", 4)):
            given = getattr(self, name)
            if given < least and given != 0:
                raise ArgumentError(f"suffix: {name} must be 0 (off) or at least {least}, got {given}")
        if self.max_spec_factor == 0 and self.max_spec_offset < 1:
            raise ArgumentError("suffix: max_spec_factor 0 with max_spec_offset below 1 never drafts; raise one")


class SuffixDrafter(Drafter):
    """Longest match in the request's own text and in past outputs, and the text that is followed; of these the draft of
    largest expected gain is taken."""

    name = "suffix"
    Config = SuffixConfig

    def __init__(self, config: SuffixConfig, setup: DrafterSetup) -> None:
        self.config = config
        self._rows: dict[int, _Row] = {}
        self._memories = PerDomain(
            lambda: _memory(config),
            size=lambda memory: memory.store.held,
            most_size=_FULL_STORES * config.max_cached_tokens,
        )
        _compile()

    def kind(self, sampler: Sampler) -> DraftKind:
        return DraftKind(chain=self.config.nodes is None)

    def extend(self, context: DraftContext) -> None:
        entries = zip(context.tokens, context.fresh, context.prompt_lengths, strict=True)
        for index, (tokens, fresh, prompt_length) in enumerate(entries):
            row = self._row(context, index)
            row.prompt_length = prompt_length
            row.shrink(len(tokens) - fresh)
            row.read(tokens)

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        trees = []
        for index, (tokens, nodes, depth) in enumerate(zip(context.tokens, budget.nodes, budget.depth, strict=True)):
            row = self._row(context, index)
            row.read(tokens)
            trees.append(row.draft(nodes, depth))
        return trees

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """As `Drafter.truncate`; the output of a row that is freed enters the store of its domain."""
        for row_id, length in zip(rows, lengths, strict=True):
            row = self._rows.get(row_id)
            if row is not None and length == 0:
                row.memory.store.add(row.automaton.tokens[0 if self.config.cache_prompts else row.prompt_length :])
                self._memories.trim()
                del self._rows[row_id]
            elif row is not None:
                row.shrink(length)

    def memory_bytes(self) -> int:
        stores = sum(memory.store.memory_bytes() for memory in self._memories.all())
        return stores + sum(row.automaton.memory_bytes() for row in self._rows.values())

    def _row(self, context: DraftContext, index: int) -> _Row:
        row_id = context.rows[index]
        if row_id not in self._rows:
            self._rows[row_id] = _Row(self.config, self._memories.of(context.salt(index)))
        return self._rows[row_id]


@dataclass(kw_only=True, slots=True)
class _Memory:
    """What is known of an isolation domain."""

    store: OutputStore
    counts: Floats = field(default_factory=unseen)


def _memory(config: SuffixConfig) -> _Memory:
    depth, tokens, requests = config.max_tree_depth, config.max_cached_tokens, config.max_cached_requests
    return _Memory(store=OutputStore(depth=depth, tokens=tokens, requests=requests))


class _Row:
    """A running request's text."""

    def __init__(self, config: SuffixConfig, memory: _Memory) -> None:
        self.config, self.memory = config, memory
        self.prompt_length = 0
        self._begin([])

    def _begin(self, tokens: Sequence[int] | Ints) -> None:
        self.automaton = SuffixAutomaton(self.config.max_tree_depth)
        self.automaton.extend(tokens)
        self.drafted: Ints | None = None  # The nodes of the last draft
        self.cursors: list[Cursor] = []  # Where the text stands in each generation of the store
        self.follower, self.source = Follower(), self.automaton  # Where it stands in a text that it copies with changes
        self._known = (0, 0)  # Tokens of the text and of the store when both were last looked at

    def shrink(self, length: int) -> None:
        """An automaton cannot forget a token, so the shorter text gets a new one: linear, and rare."""
        if len(self.automaton) > length:
            self._begin(self.automaton.tokens[:length])

    def read(self, tokens: Sequence[int]) -> None:
        """Take in what the text and the store have gained, and what became of the last draft."""
        known, store = len(self.automaton), self.memory.store
        if self._known == (now := (len(tokens), store.read)):
            return
        self._known = now
        if known < len(tokens):
            new = np.asarray(tokens[known:], np.int32)
            if self.drafted is not None:
                learn(self.drafted, new, self.memory.counts)
                self.drafted = None
            self.automaton.extend(new)
        text = self.automaton.tokens
        if [cursor.automaton for cursor in self.cursors] != store.generations:
            self.cursors = [Cursor(generation) for generation in store.generations]
        for cursor in self.cursors:
            cursor.follow(text)
        if self.config.follow_edits and known < len(text):
            first, same = max(known, self.prompt_length), self.source is self.automaton
            self.follower.read(self.source.tokens, text, first, len(text), same=same)
            if not self.follower.found:
                automaton, match = max(self._matches(), key=lambda found: found[1].matched)
                if match.matched >= _FOLLOWED:
                    self.source = automaton
                    self.follower.start(automaton.place(match.state), match.matched)

    def _matches(self) -> list[tuple[SuffixAutomaton, Match]]:
        """The longest match in the request's own text and in each generation of past outputs."""
        found = [(self.automaton, Match(REQUEST, *self.automaton.repeated))]
        return found + [(cursor.automaton, Match(STORE, cursor.state, cursor.matched)) for cursor in self.cursors]

    def draft(self, nodes: int, depth: int) -> TokenTree:
        """The draft with most expected tokens, of the request's own text at equality; the root alone without any."""
        best, expected = _NOTHING, 0.0
        for made, (size, gain) in self._drafts(nodes, min(nodes, depth)):
            if gain > expected:
                best, expected = made.first(size), gain
        self.drafted = best.nodes
        return best.tree(int(self.automaton.tokens[-1]))

    def _drafts(self, nodes: int, most: int) -> Iterator[tuple[Draft, tuple[int, float]]]:
        """Of each match and of the text that is followed: a draft, how many nodes it has, and what these are worth."""
        config, counts = self.config, self.memory.counts
        for automaton, match in self._matches():
            if length := self._length(match.matched, most):
                limits = Limits(length, config.nodes is not None, config.min_token_prob)
                made = Draft.of(length if config.nodes is None else min(nodes, config.nodes))
                yield made, suffixes.draft(automaton.arrays, match, limits, counts, made)
        if length := self._length(self.follower.agreed, most):
            made = Draft.of(length)
            yield made, self.follower.draft(self.source.tokens, counts, config.min_token_prob, made)

    def _length(self, matched: int, most: int) -> int:
        """Tokens of a path that is drafted from a match of so many."""
        config = self.config
        if matched < config.min_match:
            return 0
        wanted = int(config.max_spec_factor * matched + config.max_spec_offset + 1e-6)
        return min(config.num_speculative_tokens, wanted, most)


_NOTHING = Draft.of(0)


@cache
def _compile() -> None:
    """Have everything compiled, or read from disk, before a request waits for it."""
    row = _Row(SuffixConfig(), _memory(SuffixConfig()))
    row.memory.store.add([1, 2, 3, 1, 2])
    row.read([1, 2, 3, 1, 2])
    row.draft(2, 2)
    row.read([1, 2, 3, 1, 2, 3])
