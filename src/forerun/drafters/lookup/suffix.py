"""SuffixDecoding: drafts what followed the text's end where it occurred before, in this request or in earlier outputs.

arXiv 2411.04975, on the suffix automata of SAM-Decoding (arXiv 2411.10666): one automaton for each running request over
its prompt and output, and a bounded store of past outputs; and, ours, a `Follower`, which stays with a text that is
copied with changes. Each step drafts from where the expected number of accepted tokens is largest. All nodes are
deterministic.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forerun.core.sampling import Sampler
from forerun.drafters.base import DrafterSetup, PerDomain, check_least, check_share
from forerun.drafters.lookup.automaton import OutputStore, SuffixAutomaton
from forerun.drafters.lookup.base import LookupDrafter
from forerun.drafters.lookup.compiled import suffix_rows
from forerun.drafters.lookup.compiled.batch import COUNTS, PROMPT, READ, Longs, address
from forerun.drafters.lookup.compiled.drafts import Ints, unseen
from forerun.drafters.lookup.compiled.suffix_rows import Options
from forerun.errors import ArgumentError
from forerun.types import DraftKind

_FULL_STORES = 4  # Size of all isolation domains' stores together, in full stores


@dataclass(frozen=True, kw_only=True, slots=True)
class SuffixConfig:
    """Options of `suffix`; vLLM's names, with ``suffix_decoding_`` before them, are understood too."""

    num_speculative_tokens: int = 24  # Most tokens on one path
    max_tree_depth: int = 24  # Longest string that is counted, tokens; beyond it the first occurrence is followed
    max_spec_factor: float = 4.0  # Tokens drafted for each token of the match
    max_spec_offset: float = 0.0  # Tokens drafted besides
    min_token_prob: float = 0.1
    """Least probability of a path, in 0..1: the product of its tokens' shares by the counts; for
    followed text, as learned.
    """
    min_match: int = 1  # Shortest match that is drafted from, tokens
    nodes: int | None = None  # Most nodes of a tree of several continuations, by their counts; None drafts a chain
    follow_edits: bool = True  # Stay with a text that is copied, over changes, and make replacements again
    max_cached_requests: int = 10_000  # Past outputs kept of a domain (API key); 0: the request's own text only
    max_cached_tokens: int = 500_000  # Their tokens (150 bytes each); four times as many of all domains together
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
    """Drafts from the longest match in the request's own text and in past outputs, and from the
    text that is followed, whichever draft has the largest expected gain.
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
        super().__init__(domains, setup, columns=suffix_rows.COLUMNS, nodes=most)
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
        columns[COUNTS], columns[suffix_rows.STORED] = address(domain.counts), address(domain.stored)

    def _step(self, where: Longs, tokens: Ints, work: Longs, chains: Ints) -> int:
        return suffix_rows.step(where, self._options, tokens, work, chains)

    def _free(self, row: int) -> None:
        """Free a row; its output enters the store of its domain."""
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
        self.counts = unseen()
        shape = suffix_rows.GENERATIONS, suffix_rows.STORE_COLUMNS
        self.stored = np.zeros(shape, np.int64)  # The store, for compiled code
        self._point()

    def add(self, output: Ints) -> None:
        """Add the output of a request that has ended."""
        try:
            self.store.add(output)
        finally:
            self._point()

    def _point(self) -> None:
        self.stored[:] = 0
        for place, automaton in enumerate(self.store.generations):
            self.stored[place] = automaton.number, address(automaton.whole)
