"""Prompt lookup: drafts what followed the text's last n-gram where it occurred before.

The method of apoorvumang's prompt-lookup-decoding, with the option names of vLLM's `ngram`. Every row knows where each
n-gram ended last, and of each place the one before it, so a proposal costs a few look-ups. All nodes are deterministic.
What runs for every token is in `compiled.grams`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from forerun.core.sampling import Sampler
from forerun.core.tree import TokenTree
from forerun.drafters.base import DraftContext, Drafter, DrafterSetup, PerDomain, check_choice, check_least
from forerun.drafters.lookup.compiled import grams
from forerun.drafters.lookup.compiled.drafts import Draft, Floats, Ints, empty_slots, learn, room_for, unseen
from forerun.drafters.lookup.compiled.grams import Choice, Grams
from forerun.errors import ArgumentError
from forerun.types import Budget, DraftKind

_MATCHES = ("last", "first", "most_frequent")


@dataclass(frozen=True, kw_only=True, slots=True)
class NgramConfig:
    """Options of `ngram`; names are vLLM's, `min_hits` is llama.cpp's."""

    num_speculative_tokens: int = 8  # Most tokens copied from one position
    prompt_lookup_max: int = 4  # Longest n-gram searched for, in tokens; tried first
    prompt_lookup_min: int = 1  # Shortest n-gram searched for, in tokens
    max_branches: int = 1  # Most different continuations merged into one tree; 1 drafts a chain
    match: str = "last"
    """Where to copy from if an n-gram has several positions: ``last``, ``first`` (transformers), or ``most_frequent``:
    the continuation that its last 32 positions have most often, token after token."""
    min_hits: int = 1  # Earlier positions that an n-gram must have to be copied from

    def __post_init__(self) -> None:
        check_least("ngram", self, num_speculative_tokens=1, prompt_lookup_min=1, max_branches=1, min_hits=1)
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        if high < low:
            raise ArgumentError(f"ngram: prompt_lookup_max ({high}) is below prompt_lookup_min ({low})")
        check_choice("ngram", self, "match", _MATCHES)


class NgramDrafter(Drafter):
    """Copies what followed an earlier occurrence of the text's last tokens, of the longest n-gram that has one."""

    name = "ngram"
    Config = NgramConfig

    def __init__(self, config: NgramConfig, setup: DrafterSetup) -> None:
        self.config = config
        self._rows: dict[int, _Row] = {}
        self._counts = PerDomain(unseen)
        _compile()

    def kind(self, sampler: Sampler) -> DraftKind:
        return DraftKind(chain=self.config.max_branches == 1)

    def extend(self, context: DraftContext) -> None:
        for index, (row_id, tokens, fresh) in enumerate(zip(context.rows, context.tokens, context.fresh, strict=True)):
            if row_id not in self._rows:
                self._rows[row_id] = _Row(self.config, self._counts.of(context.salt(index)))
            row = self._rows[row_id]
            row.shrink(len(tokens) - fresh)
            row.read(tokens[row.size :])

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        trees, limits = context.trees(), zip(context.rows, budget.nodes, budget.depth, strict=True)
        for index, (row_id, nodes, depth) in enumerate(limits):
            if (row := self._rows.get(row_id)) is not None:
                trees[index] = row.draft(context.tokens[index][-1], nodes, depth)
        return trees

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        for row_id, length in zip(rows, lengths, strict=True):
            if length == 0:
                self._rows.pop(row_id, None)
            elif row_id in self._rows:
                self._rows[row_id].shrink(length)

    def memory_bytes(self) -> int:
        return sum(row.memory_bytes() for row in self._rows.values())


class _Row:
    """A running request's text, and where its n-grams ended."""

    def __init__(self, config: NgramConfig, counts: Floats) -> None:
        self.config, self.counts = config, counts  # Accepted and tried, of nodes by what was known of them
        self.size = 0  # Tokens of the text
        self.drafted: Ints | None = None  # The nodes of the last draft
        self.text = self._made(0)

    def _made(self, tokens: int) -> Grams:
        """Arrays for so many tokens and more, and none of them there."""
        low, high = self.config.prompt_lookup_min, self.config.prompt_lookup_max
        sizes, room = high + 1 - low, room_for(tokens)
        return Grams(
            head=np.array((0, low), np.int32),
            tokens=np.empty(room, np.int32),
            before=np.empty((room, sizes), np.int32),
            slots=empty_slots(room * sizes),
        )

    def shrink(self, length: int) -> None:
        """Of a text that becomes shorter everything is read again: linear, and rare."""
        if self.size > length:
            kept = self.text.tokens[:length]
            self.text, self.size, self.drafted = self._made(length), 0, None
            self.read(kept)

    def read(self, tokens: Sequence[int] | Ints) -> None:
        """The text goes on with these tokens."""
        new = np.asarray(tokens, np.int32)
        if self.drafted is not None:
            learn(self.drafted, new, self.counts)
            self.drafted = None
        known, self.size = self.size, self.size + len(new)
        if self.size > len(self.text.tokens):
            new = np.append(self.text.tokens[:known], new)
            self.text = self._made(self.size)
        grams.extend(self.text, new)

    def draft(self, root: int, nodes: int, depth: int) -> TokenTree:
        """A trie of up to `max_branches` continuations: longest match first, then as `match` prefers."""
        config = self.config
        length, branches = min(config.num_speculative_tokens, depth), config.max_branches
        made = Draft.of(max(0, min(nodes, branches * length)))
        choice = Choice(_MATCHES.index(config.match), config.min_hits, branches, length)
        drafted = made.first(grams.draft(self.text, choice, self.counts, made))
        self.drafted = drafted.nodes
        return drafted.tree(root)

    def memory_bytes(self) -> int:
        return sum(values.nbytes for values in self.text)


@cache
def _compile() -> None:
    """Have everything compiled, or read from disk, before a request waits for it."""
    row = _Row(NgramConfig(), unseen())
    row.read([1, 2, 1])
    row.draft(1, 2, 2)
    row.read([2])
