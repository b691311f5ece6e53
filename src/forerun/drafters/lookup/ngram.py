"""Prompt lookup: drafts what followed the text's last n-gram where it occurred before.

The method of apoorvumang's prompt-lookup-decoding, with the option names of vLLM's `ngram`. Every row has an index from
n-grams to positions, so a proposal costs a few dictionary look-ups. All nodes are deterministic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

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
        self._sizes = range(config.prompt_lookup_max, config.prompt_lookup_min - 1, -1)
        self._rows: dict[int, _Row] = {}
        self._estimates = PerDomain(Acceptance)

    def kind(self, sampler: Sampler) -> DraftKind:
        return DraftKind(chain=self.config.max_branches == 1)

    def extend(self, context: DraftContext) -> None:
        for index, (row_id, tokens, fresh) in enumerate(zip(context.rows, context.tokens, context.fresh, strict=True)):
            if row_id not in self._rows:
                self._rows[row_id] = _Row(acceptance=self._estimates.of(context.salt(index)))
            row = self._rows[row_id]
            self._shrink(row, len(tokens) - fresh)
            if row.drafted is not None:
                row.drafted.learn(tokens[len(row.tokens) :])
                row.drafted = None
            for token in tokens[len(row.tokens) :]:
                row.append(token, self._sizes)

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

    def _shrink(self, row: _Row, length: int) -> None:
        if len(row.tokens) > length:
            row.drafted = None
        while len(row.tokens) > length:
            row.pop(self._sizes)

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
        for gram in row.grams(self._sizes):
            where = row.positions.get(gram, [])
            earlier = len(where) - 1
            if earlier < self.config.min_hits:
                continue
            for position in self._ordered(row, where, earlier, length):
                if position not in seen:
                    seen.add(position)
                    yield position, len(gram)

    def _ordered(self, row: _Row, where: Sequence[int], earlier: int, length: int) -> Iterator[int]:
        """Some of the first `earlier` positions, in the order in which to copy from them."""
        if self.config.match == "first":
            yield from where[: min(earlier, _SCANNED)]
            return
        recent = list(reversed(where[max(0, earlier - _SCANNED) : earlier]))
        if self.config.match == "last":
            yield from recent
            return
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


@dataclass(kw_only=True, slots=True)
class _Row:
    """One row's text, and for each n-gram the positions (index of the token after it) where it ended, ascending."""

    acceptance: Acceptance
    tokens: list[int] = field(default_factory=list)
    positions: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    drafted: Drafted | None = None

    def append(self, token: int, sizes: range) -> None:
        self.tokens.append(token)
        for gram in self.grams(sizes):
            self.positions.setdefault(gram, []).append(len(self.tokens))

    def pop(self, sizes: range) -> None:
        for gram in self.grams(sizes):
            where = self.positions[gram]
            where.pop()
            if not where:
                del self.positions[gram]
        self.tokens.pop()

    def grams(self, sizes: range) -> Iterator[tuple[int, ...]]:
        """The n-grams that end the text, the longest first."""
        for size in sizes:
            if size <= len(self.tokens):
                yield tuple(self.tokens[-size:])

    def copied(self, position: int, offset: int) -> int:
        """The token at `offset` from `position`; a copy that reaches the end of the text goes on with itself."""
        return self.tokens[position + offset % (len(self.tokens) - position)]
