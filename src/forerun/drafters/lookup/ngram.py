"""Prompt lookup: drafts what followed the text's last n-gram where it occurred before.

The method of apoorvumang's prompt-lookup-decoding, with the option names of vLLM's `ngram`. Every row knows where each
n-gram ended last, and of each place the one before it, so a proposal costs a few dictionary look-ups. All nodes are
deterministic.
"""

from __future__ import annotations

import sys
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from forerun.core.acceptance import Acceptance, by_match
from forerun.core.sampling import Sampler
from forerun.core.tree import TokenTree
from forerun.drafters.base import DraftContext, Drafted, Drafter, DrafterSetup, PerDomain, check_choice, check_least
from forerun.errors import ArgumentError
from forerun.types import Budget, DraftKind

_SCANNED = 32  # Most earlier positions looked at for one n-gram, at the end that `match` prefers
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
        self._estimates = PerDomain(Acceptance)

    def kind(self, sampler: Sampler) -> DraftKind:
        return DraftKind(chain=self.config.max_branches == 1)

    def extend(self, context: DraftContext) -> None:
        for index, (row_id, tokens, fresh) in enumerate(zip(context.rows, context.tokens, context.fresh, strict=True)):
            if row_id not in self._rows:
                sizes = range(self.config.prompt_lookup_min, self.config.prompt_lookup_max + 1)
                self._rows[row_id] = _Row(acceptance=self._estimates.of(context.salt(index)), sizes=sizes)
            row = self._rows[row_id]
            self._shrink(row, len(tokens) - fresh)
            new = tokens[len(row.tokens) :]
            if row.drafted is not None:
                row.drafted.learn(new)
                row.drafted = None
            row.extend(new)

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        trees, limits = context.trees(), zip(context.rows, budget.nodes, budget.depth, strict=True)
        for index, (row_id, nodes, depth) in enumerate(limits):
            if (row := self._rows.get(row_id)) is not None:
                self._grow(trees[index], row, nodes, depth)
        return trees

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        for row_id, length in zip(rows, lengths, strict=True):
            if length == 0:
                self._rows.pop(row_id, None)
            elif row_id in self._rows:
                self._shrink(self._rows[row_id], length)

    def memory_bytes(self) -> int:
        return sum(row.memory_bytes() for row in self._rows.values())

    def _shrink(self, row: _Row, length: int) -> None:
        if len(row.tokens) > length:
            row.drafted = None
        while len(row.tokens) > length:
            row.pop()

    def _grow(self, tree: TokenTree, row: _Row, nodes: int, depth: int) -> None:
        """A trie of up to `max_branches` continuations: longest match first, then as `match` prefers."""
        row.drafted = drafted = Drafted(tree, row.acceptance)
        length = min(self.config.num_speculative_tokens, depth)
        branches = 0
        for position, size in self._matches(row, length):
            if branches == self.config.max_branches or tree.size >= nodes or length <= 0:
                break
            before, parent = tree.size, 0
            for offset in range(length):
                parent = drafted.add(row.copied(position, offset), parent, by_match("ngram", size + offset))
                if tree.size >= nodes:
                    break
            branches += tree.size > before

    def _matches(self, row: _Row, length: int) -> Iterator[tuple[int, int]]:
        """(position, size of the n-gram) of earlier occurrences of the text's end, each position once."""
        seen: set[int] = set()
        for size in reversed(row.sizes):
            for position in self._ordered(row, row.earlier(size), length):
                if position not in seen:
                    seen.add(position)
                    yield position, size

    def _ordered(self, row: _Row, earlier: Iterator[int], length: int) -> Iterator[int]:
        """Which of these positions, given the most recent first, to copy from, and in which order."""
        least = list(islice(earlier, self.config.min_hits))
        if len(least) < self.config.min_hits:
            return
        every = chain(least, earlier)
        if self.config.match == "last":
            yield from islice(every, _SCANNED)
        elif self.config.match == "first":
            yield from reversed(deque(every, _SCANNED))
        else:
            recent = list(islice(every, _SCANNED))
            while recent:
                chosen = _most_frequent(row, recent, length)
                yield chosen[0]
                recent = [position for position in recent if position not in chosen]


def _most_frequent(row: _Row, positions: list[int], length: int) -> list[int]:
    """Those, most recent first, whose next token is the most frequent; of these again, for `length` tokens."""
    for offset in range(length):
        if len(positions) == 1:
            break
        votes: dict[int, list[int]] = {}
        for position in positions:
            votes.setdefault(row.copied(position, offset), []).append(position)
        positions = max(votes.values(), key=len)
    return positions


_BITS = 32  # More than a token id has
_NUMBERS_BYTES = 72  # Of an entry: an n-gram of four tokens, and a position


@dataclass(kw_only=True, slots=True)
class _Row:
    """One row's text, and where its n-grams ended. A position is the index of the token behind an n-gram, at least 1.

    Numbers in one dictionary and a flat array, no object for each n-gram: the garbage collector has nothing to walk
    through.
    """

    acceptance: Acceptance
    sizes: range  # Of n-grams, the shortest first
    tokens: list[int] = field(default_factory=list)
    drafted: Drafted | None = None
    _newest: dict[int, int] = field(default_factory=dict)  # N-gram as a number -> its last position
    _before: array[int] = field(default_factory=lambda: array("i"))
    """By position and size: where the same n-gram ended before; 0 where it did not."""

    def extend(self, tokens: Sequence[int]) -> None:
        newest, before = self._newest, self._before
        for token in tokens:
            self.tokens.append(token)
            position = len(self.tokens)
            for gram in self._grams():
                before.append(newest.get(gram, 0))
                newest[gram] = position
            before.extend([0] * (position * len(self.sizes) - len(before)))

    def pop(self) -> None:
        last = self._before[(len(self.tokens) - 1) * len(self.sizes) :]
        for gram, before in zip(self._grams(), last, strict=False):
            if before:
                self._newest[gram] = before
            else:
                del self._newest[gram]
        del self._before[-len(last) :]
        self.tokens.pop()

    def earlier(self, size: int) -> Iterator[int]:
        """Earlier positions of the n-gram of this size that ends the text, the most recent first."""
        column, width, before = size - self.sizes.start, len(self.sizes), self._before
        position = len(self.tokens)
        while position and (position := before[(position - 1) * width + column]):
            yield position

    def copied(self, position: int, offset: int) -> int:
        """The token at `offset` from `position`; a copy that reaches the end of the text goes on with itself."""
        return self.tokens[position + offset % (len(self.tokens) - position)]

    def memory_bytes(self) -> int:
        held = map(sys.getsizeof, (self.tokens, self._newest, self._before))
        return sum(held) + _NUMBERS_BYTES * len(self._newest)

    def _grams(self) -> Iterator[int]:
        """The n-grams that end the text, the shortest first, as numbers; as far as it is long enough."""
        gram = shift = 0
        for token in reversed(self.tokens[-self.sizes[-1] :]):
            gram |= (token + 1) << shift
            shift += _BITS
            if shift >= self.sizes.start * _BITS:
                yield gram
