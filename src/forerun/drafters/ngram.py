"""Prompt lookup: what followed the same words earlier in this text is drafted again.

The method of apoorvumang's prompt-lookup-decoding, with the option names of vLLM's `ngram`. Every row has an index from
n-grams to the places where they ended, kept up to date token by token, so a proposal costs a few dictionary look-ups
whatever the length of the text. Deterministic: all nodes are given. Knows no model and no law.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from forerun.drafters.base import DraftContext, Drafter, DrafterSetup
from forerun.errors import ArgumentError
from forerun.tree import TreeBuilder, stack
from forerun.types import Budget, Draft

_SCANNED = 32
"""Most earlier places looked at for one n-gram, the most recent ones: a frequent word has thousands."""
_PRIOR = (0.2, 0.35, 0.5, 0.6, 0.68, 0.74, 0.78, 0.8, 0.82)
"""First guess that a copied token is right after 0, 1, 2, ... matching tokens before it."""
_PRIOR_WEIGHT = 16.0
"""How many observations the first guess is worth."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NgramConfig:
    """Options of `ngram`; names are vLLM's."""

    num_speculative_tokens: int = 8
    """Most tokens copied from one place."""
    prompt_lookup_max: int = 4
    """Longest n-gram searched for, in tokens; tried first."""
    prompt_lookup_min: int = 1
    """Shortest n-gram searched for, in tokens."""
    max_branches: int = 1
    """Most different continuations merged into one tree; 1 drafts a chain."""

    def __post_init__(self) -> None:
        for name in ("num_speculative_tokens", "prompt_lookup_min", "max_branches"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"ngram: {name} must be at least 1, got {getattr(self, name)}")
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        if high < low:
            raise ArgumentError(f"ngram: prompt_lookup_max ({high}) is below prompt_lookup_min ({low})")


@dataclass(kw_only=True, slots=True)
class _Row:
    """One row's text, and for each n-gram the places (index of the token after it) where it ended, ascending."""

    tokens: list[int] = field(default_factory=list)
    places: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    drafted: TreeBuilder | None = None
    evidence: list[int] = field(default_factory=list)
    """Of each drafted node: how many tokens before it matched the place it was copied from."""

    def append(self, token: int, sizes: range) -> None:
        self.tokens.append(token)
        for gram in self.grams(sizes):
            self.places.setdefault(gram, []).append(len(self.tokens))

    def pop(self, sizes: range) -> None:
        for gram in self.grams(sizes):
            where = self.places[gram]
            where.pop()
            if not where:
                del self.places[gram]
        self.tokens.pop()

    def grams(self, sizes: range) -> Iterator[tuple[int, ...]]:
        """The n-grams that end the text, the longest first."""
        for size in sizes:
            if size <= len(self.tokens):
                yield tuple(self.tokens[-size:])

    def copy(self, place: int, length: int) -> list[int]:
        """`length` tokens from `place`; a copy that reaches the end of the text goes on with itself."""
        period = len(self.tokens) - place
        found = self.tokens[place : place + length]
        while len(found) < length:
            found.append(found[len(found) - period])
        return found


class NgramDrafter(Drafter):
    """Copies what followed the longest, most recent earlier occurrence of the text's last tokens."""

    name = "ngram"
    Config = NgramConfig

    def __init__(self, config: NgramConfig, setup: DrafterSetup) -> None:
        self.config = config
        self._sizes = range(config.prompt_lookup_max, config.prompt_lookup_min - 1, -1)
        self._rows: dict[int, _Row] = {}
        self._tried = [_PRIOR_WEIGHT] * len(_PRIOR)
        self._right = [_PRIOR_WEIGHT * prior for prior in _PRIOR]

    def extend(self, context: DraftContext) -> None:
        for row_id, tokens, fresh in zip(context.rows, context.tokens, context.fresh, strict=True):
            row = self._rows.setdefault(row_id, _Row())
            self._shrink(row, len(tokens) - fresh)
            self._learn(row, tokens)
            for index in range(len(row.tokens), len(tokens)):
                row.append(tokens[index], self._sizes)

    def propose(self, context: DraftContext, budget: Budget) -> Draft:
        builders = []
        for row_id, nodes, depth in zip(context.rows, budget.nodes, budget.depth, strict=True):
            row = self._rows.get(row_id)
            builders.append(self._grow(row, nodes, depth) if row else TreeBuilder())
        return stack(builders)

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

    def _grow(self, row: _Row, nodes: int, depth: int) -> TreeBuilder:
        """A trie of up to `max_branches` continuations: longest match first, then the most recent."""
        builder, evidence = TreeBuilder(), list[int]()
        length = min(self.config.num_speculative_tokens, depth)
        branches = 0
        for place, size in self._matches(row):
            if branches == self.config.max_branches or len(builder) >= nodes or length <= 0:
                break
            before = len(builder)
            parent = 0
            for offset, token in enumerate(row.copy(place, length)):
                parent = builder.add(token, parent, confidence=self._confidence(size + offset))
                evidence.extend([size + offset] * (len(builder) - len(evidence)))
                if len(builder) >= nodes:
                    break
            branches += len(builder) > before
        row.drafted, row.evidence = builder, evidence
        return builder

    def _matches(self, row: _Row) -> Iterator[tuple[int, int]]:
        """(place, size of the n-gram) of earlier occurrences of the text's end, each place once."""
        seen: set[int] = set()
        end = len(row.tokens)
        for gram in row.grams(self._sizes):
            for place in reversed(row.places.get(gram, [])[-_SCANNED - 1 :]):
                if place != end and place not in seen:
                    seen.add(place)
                    yield place, len(gram)

    def _confidence(self, evidence: int) -> float:
        bucket = min(evidence, len(_PRIOR) - 1)
        return self._right[bucket] / self._tried[bucket]

    def _learn(self, row: _Row, tokens: Sequence[int]) -> None:
        """Compare the last draft with what the text went on with; whether a rule accepted it does not matter."""
        draft, row.drafted = row.drafted, None
        if draft is None:
            return
        on_path = {0: len(row.tokens)}
        for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True), start=1):
            place = on_path.get(parent)
            if place is None or place >= len(tokens):
                continue
            bucket = min(row.evidence[node - 1], len(_PRIOR) - 1)
            self._tried[bucket] += 1.0
            if tokens[place] == token:
                self._right[bucket] += 1.0
                on_path[node] = place + 1
