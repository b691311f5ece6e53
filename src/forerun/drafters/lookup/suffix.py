"""SuffixDecoding: drafts what followed the text's end where it occurred before, in this request or in earlier outputs.

arXiv 2411.04975, on the suffix automata of SAM-Decoding (arXiv 2411.10666): one automaton for each running request over
its prompt and output, and a bounded store of past outputs; and, ours, a `Follower`, which stays with a text that is
copied with changes. Each step drafts from where the expected number of accepted tokens is largest. All nodes are
deterministic.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

from forerun.core.acceptance import Acceptance, Evidence, by_match
from forerun.core.sampling import Sampler
from forerun.core.tree import TokenTree
from forerun.drafters.base import DraftContext, Drafted, Drafter, DrafterSetup, PerDomain, check_least
from forerun.drafters.lookup.automaton import NONE, ROOT, SEPARATOR, Cursor, OutputStore, SuffixAutomaton
from forerun.drafters.lookup.follower import Follower
from forerun.errors import ArgumentError
from forerun.types import Budget, DraftKind

_SEEN = 32  # Most continuations of one string looked at for a tree: a frequent word has thousands
_WIDTH = 8  # Most of them that become nodes, the most frequent ones
_BACKED_OFF = 4  # Ever shorter strings asked for the share of a continuation
_UNSEEN = 1.0  # Occurrences that the share after the next shorter string counts for
_PACE = 64  # Tokens of past outputs indexed in a call at least, and two for each token that running requests gained
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
        depth, tokens, requests = config.max_tree_depth, config.max_cached_tokens, config.max_cached_requests
        self._memories = PerDomain(
            lambda: _Memory(store=OutputStore(depth=depth, tokens=tokens, requests=requests)),
            size=lambda memory: memory.store.held,
            most_size=_FULL_STORES * tokens,
        )

    def kind(self, sampler: Sampler) -> DraftKind:
        return DraftKind(chain=self.config.nodes is None)

    def extend(self, context: DraftContext) -> None:
        gained = Counter[str | None]()
        for index, count in enumerate(context.fresh):
            gained[context.salt(index)] += count
        for salt, count in gained.items():
            self._memories.of(salt).store.digest(_PACE // len(gained) + 2 * count)
        entries = zip(context.tokens, context.fresh, context.prompt_lengths, strict=True)
        for index, (tokens, fresh, prompt_length) in enumerate(entries):
            row = self._row(context, index)
            row.prompt_length = prompt_length
            self._shrink(row, len(tokens) - fresh)
            if row.drafted is not None:
                row.drafted.learn(tokens[len(row.automaton) :])
                row.drafted = None
            self._follow(row, tokens)

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        trees = context.trees()
        for index, (tokens, nodes, depth) in enumerate(zip(context.tokens, budget.nodes, budget.depth, strict=True)):
            row = self._row(context, index)
            self._follow(row, tokens)
            row.drafted = self._best_draft(row, nodes, depth)
            if row.drafted is not None:
                trees[index] = row.drafted.tree
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
                self._shrink(row, length)

    def memory_bytes(self) -> int:
        stores = sum(memory.store.memory_bytes() for memory in self._memories.all())
        return stores + sum(row.automaton.memory_bytes() for row in self._rows.values())

    def _row(self, context: DraftContext, index: int) -> _Row:
        row_id = context.rows[index]
        if row_id not in self._rows:
            memory = self._memories.of(context.salt(index))
            self._rows[row_id] = _Row(automaton=SuffixAutomaton(self.config.max_tree_depth), memory=memory)
        return self._rows[row_id]

    def _shrink(self, row: _Row, length: int) -> None:
        """An automaton cannot forget a token, so the shorter text gets a new one: linear, and rare."""
        if len(row.automaton) <= length:
            return
        kept = row.automaton.tokens[:length]
        row.automaton, row.drafted, row.cursors = SuffixAutomaton(self.config.max_tree_depth), None, []
        row.automaton.extend(kept)
        row.follower = Follower()

    def _follow(self, row: _Row, tokens: Sequence[int]) -> None:
        known = len(row.automaton)
        row.automaton.extend(tokens[known:])
        generations = row.memory.store.generations
        if [cursor.automaton for cursor in row.cursors] != generations:
            row.cursors = [Cursor(generation) for generation in generations]
        for cursor in row.cursors:
            cursor.follow(tokens)
        if self.config.follow_edits and known < len(tokens):
            for at in range(max(known, row.prompt_length), len(tokens)):
                row.follower.read(row.automaton.tokens, at)
            if not row.follower.found:
                _, automaton, state, matched = max(self._positions(row), key=itemgetter(3))
                if matched >= _FOLLOWED:
                    row.follower.start(automaton.tokens, automaton.place(state), matched)

    def _positions(self, row: _Row) -> list[tuple[str, SuffixAutomaton, int, int]]:
        """The longest match in the request's own text and in each generation of past outputs: which text it is, its
        automaton, state and length."""
        found = [("request", row.automaton, *row.automaton.repeated())]
        return found + [("store", cursor.automaton, cursor.state, cursor.matched) for cursor in row.cursors]

    def _best_draft(self, row: _Row, nodes: int, depth: int) -> Drafted | None:
        """The draft with most expected tokens, of the request's own text at equality; None without any match."""
        drafts, most = list[tuple[Drafted, float]](), min(nodes, depth)
        for source, automaton, state, matched in self._positions(row):
            if length := self._length(matched, most):
                drafts.append(self._draft(row, automaton, _Position(state, matched, 1.0), source, nodes, length))
        if length := self._length(row.follower.agreed, most):
            drafts.append(self._followed(row, length))
        return max(drafts, key=itemgetter(1), default=(None, 0.0))[0]

    def _length(self, matched: int, most: int) -> int:
        """Tokens of a path that is drafted from a match of so many."""
        config = self.config
        if matched < config.min_match:
            return 0
        wanted = int(config.max_spec_factor * matched + config.max_spec_offset + 1e-6)
        return min(config.num_speculative_tokens, wanted, most)

    def _followed(self, row: _Row, length: int) -> tuple[Drafted, float]:
        """What comes next in the text that is followed, as far as that is likely enough, and the sum of its estimated
        survival."""
        drafted = Drafted(TokenTree(row.automaton.tokens[-1]), row.memory.acceptance)
        parent, survival, expected = 0, 1.0, 0.0
        for token, evidence in row.follower.draft(length):
            if token == SEPARATOR or survival < self.config.min_token_prob:
                break
            parent = drafted.add(token, parent, evidence)
            survival *= drafted.tree.confidence[parent]
            expected += survival
        return drafted, expected

    def _draft(
        self, row: _Row, automaton: SuffixAutomaton, position: _Position, source: str, nodes: int, depth: int
    ) -> tuple[Drafted, float]:
        """The `nodes` nodes of largest estimated survival below a position, and the sum of their survival."""
        ends, acceptance = automaton.suffixes(), row.memory.acceptance
        most = nodes if self.config.nodes is None else min(nodes, self.config.nodes)
        drafted = Drafted(TokenTree(row.automaton.tokens[-1]), acceptance)
        heap: list[tuple[float, int, int, int, int, Evidence, _Position]] = []
        parent, level, survival, expected, serial = 0, 0, 1.0, 0.0, 0
        while drafted.tree.size < most:
            if level < depth:
                for token, evidence, below in self._branches(automaton, position, source, ends):
                    serial += 1
                    reached = survival * acceptance.estimate(*evidence)
                    heapq.heappush(heap, (-reached, serial, parent, level + 1, token, evidence, below))
            if not heap:
                break
            negative, _, above, level, token, evidence, position = heapq.heappop(heap)
            parent, survival = drafted.add(token, above, evidence), -negative
            expected += survival
        return drafted, expected

    def _branches(
        self, automaton: SuffixAutomaton, position: _Position, source: str, ends: set[int]
    ) -> Iterator[tuple[int, Evidence, _Position]]:
        """(token, evidence, where it leads) of each way on from a position, the most frequent first; one of a chain."""
        state, matched, probability = position
        while (likeliest := automaton.likeliest(state)) == NONE and state != ROOT:
            state, matched = automaton.shorter(state)
        if likeliest == NONE or matched == 0:
            return
        if not automaton.counted(state):
            counts, total = {likeliest: 1}, 1
        else:
            total = automaton.count(state) - (state in ends)
            states = [likeliest] if self.config.nodes is None else automaton.following(state, _SEEN)
            counts = {following: automaton.count(following) for following in (likeliest, *states)}
        for following, count in sorted(counts.items(), key=lambda item: -item[1])[:_WIDTH]:
            chance = probability * count / total
            if chance >= self.config.min_token_prob:
                token = automaton.token(following)
                evidence = by_match(source, matched, _share(automaton, state, token, ends))
                yield token, evidence, _Position(following, matched + 1, chance)


class _Position(NamedTuple):
    state: int
    matched: int  # Tokens before it that are the same here and there
    probability: float  # Of the path so far, by the counts


@dataclass(kw_only=True, slots=True)
class _Memory:
    """What is known of an isolation domain."""

    store: OutputStore
    acceptance: Acceptance = field(default_factory=Acceptance)


@dataclass(kw_only=True, slots=True)
class _Row:
    automaton: SuffixAutomaton
    memory: _Memory
    prompt_length: int = 0
    drafted: Drafted | None = None
    cursors: list[Cursor] = field(default_factory=list)  # Where the text stands in each generation of the store
    follower: Follower = field(default_factory=Follower)  # Where it stands in a text that it copies with changes


def _share(automaton: SuffixAutomaton, state: int, token: int, ends: set[int]) -> float:
    """How often `token` follows the state's strings, blended with how often it follows ever shorter ones. A long string
    that was met once says little by itself; the shorter ones tell whether it could have gone on otherwise."""
    states = list[int]()
    while state != ROOT and len(states) < _BACKED_OFF:
        states.append(state)
        state, _ = automaton.shorter(state)
    share = 0.0
    for state in reversed(states):
        following = automaton.step(state, token)
        if automaton.counted(state):
            total = automaton.count(state) - (state in ends)
            count = automaton.count(following)
        else:
            total, count = 1, int(following == automaton.likeliest(state))
        share = (count + _UNSEEN * share) / (total + _UNSEEN)
    return share
