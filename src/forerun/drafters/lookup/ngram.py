"""Prompt lookup: drafts what followed the text's last n-gram where it occurred before.

The method of apoorvumang's prompt-lookup-decoding, with the option names of vLLM's `ngram`. All nodes are
deterministic. What runs for every token is in `compiled.grams`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forerun.core.sampling import Sampler
from forerun.drafters.base import DrafterSetup, PerDomain, check_choice, check_least, check_share
from forerun.drafters.lookup.base import IndexedText, LookupDrafter
from forerun.drafters.lookup.compiled import grams
from forerun.drafters.lookup.compiled.batch import COLUMNS, COUNTS, DRAFTED, PROMPT, READ, Longs, address
from forerun.drafters.lookup.compiled.drafts import Floats, Ints, unseen
from forerun.drafters.lookup.compiled.grams import Choice
from forerun.errors import ArgumentError
from forerun.types import DraftKind

_MATCHES = ("last", "first", "most_frequent")


@dataclass(frozen=True, kw_only=True, slots=True)
class NgramConfig:
    """Options of `ngram`; names are vLLM's, `min_hits` is llama.cpp's."""

    num_speculative_tokens: int = 8  # Most tokens copied from one position
    prompt_lookup_max: int = 4  # Longest n-gram searched for, in tokens; tried first
    prompt_lookup_min: int = 1  # Shortest n-gram searched for, in tokens
    max_branches: int = 1  # Most different continuations merged into one tree; 1 drafts a chain
    match: str = "last"
    """Which position to copy from if an n-gram has several: ``last``, ``first`` (transformers), or
    ``most_frequent``: the continuation that its last 32 positions have most often, token after
    token.
    """
    min_hits: int = 1  # Earlier positions that an n-gram must have to be copied from
    min_token_prob: float = 0.1  # Least probability of a path, in 0..1, as learned; 0 drafts whatever was found
    follow_edits: bool = True
    """Stay with the text that is copied once the longest n-gram matches, over changes, and make
    replacements again.
    """

    def __post_init__(self) -> None:
        check_least("ngram", self, num_speculative_tokens=1, prompt_lookup_min=1, max_branches=1, min_hits=1)
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        if high < low:
            raise ArgumentError(f"ngram: prompt_lookup_max ({high}) is below prompt_lookup_min ({low})")
        check_choice("ngram", self, "match", _MATCHES)
        check_share("ngram", self, "min_token_prob")


class NgramDrafter(LookupDrafter[Floats]):
    """Copies what followed an earlier occurrence of the text's last tokens, of the longest n-gram that has one."""

    name = "ngram"
    Config = NgramConfig

    def __init__(self, config: NgramConfig, setup: DrafterSetup) -> None:
        branches, length = config.max_branches, config.num_speculative_tokens
        super().__init__(PerDomain(unseen), setup, columns=COLUMNS, nodes=branches * length)
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
        if row in self._texts:  # whose room it takes
            self._shrink(row, 0)
            self.batch.rows[row, PROMPT] = prompt
            self._point(row, self._domain[row])
        else:
            super()._restart(row, prompt)

    def _shrink(self, row: int, length: int) -> None:
        self.batch.rows[row, READ], self.batch.rows[row, DRAFTED] = length, 0
        self._follow_nothing(row)

    def _step(self, where: Longs, tokens: Ints, work: Longs, chains: Ints) -> int:
        return grams.step(where, self._choice, tokens, work, chains)


class _Tokens(IndexedText):
    """A text without an index."""

    def __init__(self, tokens: int) -> None:
        self.whole = np.empty(max(64, 2 * tokens), np.int32)  # An answer may be as long as its prompt

    @property
    def tokens(self) -> Ints:
        return self.whole

    @property
    def room(self) -> int:
        return len(self.whole)

    def make_room(self, tokens: int) -> None:
        if tokens > self.room:
            self.whole = np.append(self.whole, np.empty(2 * tokens - self.room, np.int32))
