"""Lookahead decoding: the target guesses several positions at once and collects the n-grams that it comes across.

Fu et al., arXiv 2402.02057. One pass scores the last token, a window of W Jacobi trajectories of N - 1 tokens, and up
to G guesses of N - 1 tokens. The window's elements are probes, which are never accepted. What the target says after the
newest row completes W n-grams, which go to a pool; the guesses are the pool's n-grams that begin with the last token.

Unlike the published code the window begins as copies of the prompt, not at random, with all its rows; it moves by as
many tokens as were emitted, so that every trajectory keeps its position; beginnings that guesses share are scored once.
It is rolled by the argmax of the raw logits at every temperature: it decides what is guessed, not what is accepted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from forerun.core.acceptance import by_draft_prob
from forerun.core.tree import TokenTree
from forerun.drafters.base import DraftContext, Drafted, DrafterSetup, PerDomain, check_least
from forerun.drafters.self_drafting.jacobi import Window, WindowDrafter, WindowRow
from forerun.types import Budget, Drawn

Gram = tuple[int, ...]
_PRIOR = (0.25, 0.45, 0.6, 0.7)  # First guess that a guess's token 1, 2, ... is right if those before it were
_PRIOR_DECAY = 0.6  # Factor by which that falls from one sibling to the next older one
_POOLS = 16  # Isolation domains whose shared pools are kept: a full one takes some 6 MB


@dataclass(frozen=True, kw_only=True, slots=True)
class LookaheadConfig:
    """Options of `lookahead`; defaults are the published code's. A pass scores up to W - 1 + (N - 2) W + G (N - 1)
    nodes: 55 with the defaults. Where that is more than a step may draft, the window shrinks first, then the guesses.
    """

    window: int = 7  # W: trajectories, and n-grams collected in one step
    level: int = 5  # N: tokens of an n-gram; a guess has one less
    num_speculative_tokens: int | None = None  # Most tokens of a guess that are drafted; None: all, N - 1
    guesses: int = 7  # G: most guesses in one step, and most n-grams that are kept of those that begin with one token
    copy_text: bool = True  # Whether the n-grams of prompt and output go to the pool too
    shared_pool: bool = False  # One pool for all requests of an isolation domain, kept between them; else one each
    pool_keys: int = 8192  # Most first tokens that a pool knows; the least recently seen are forgotten

    def __post_init__(self) -> None:
        check_least("lookahead", self, num_speculative_tokens=1, window=1, level=2, guesses=1, pool_keys=1)


@dataclass(kw_only=True, slots=True)
class _LookaheadRow(WindowRow):
    pool: Pool
    copied: int = 0  # Tokens of the text whose n-grams are in the pool


class LookaheadDrafter(WindowDrafter[_LookaheadRow]):
    """Drafts Jacobi trajectories as probes, and guesses from the n-grams that they grew into."""

    name = "lookahead"
    Config = LookaheadConfig
    config: LookaheadConfig

    def __init__(self, config: LookaheadConfig, setup: DrafterSetup) -> None:
        super().__init__(config, setup)
        self._shared = PerDomain(self._new_pool, most=_POOLS)

    @property
    def depth(self) -> int:
        """Most tokens on one path: how far the window reaches, or the guesses."""
        return max(self.config.level - 1, self.config.window + self.config.level - 3)

    def extend(self, context: DraftContext) -> None:
        level, keys = self.config.level, self.config.pool_keys
        for index, (tokens, fresh) in enumerate(zip(context.tokens, context.fresh, strict=True)):
            row = self._row(context, index)
            row.copied = min(row.copied, len(tokens) - fresh)
            if self.config.copy_text:  # of a long prompt what the pool would not forget at once
                for end in range(max(row.copied + 1, level, len(tokens) - keys), len(tokens) + 1):
                    row.pool.add(tokens[end - level], tuple(tokens[end - level + 1 : end]))
                row.copied = len(tokens)

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        """Draft the guesses, then the window; room is kept for a window of one column."""
        trees, column = context.trees(), self.config.level - 2
        for index, (tokens, nodes, depth) in enumerate(zip(context.tokens, budget.nodes, budget.depth, strict=True)):
            row, tree = self._row(context, index), trees[index]
            row.guessed = None
            if nodes <= 0 or depth <= 0:
                continue
            spare = column if column <= min(depth, nodes) else 0
            row.guessed = Drafted(tree, row.acceptance)
            longest = min(depth, self.config.num_speculative_tokens or depth)
            self._guess(row.guessed, row.pool, nodes - spare, longest)
            row.window.fit(tokens, min(self.config.window, row.window.widest(nodes - tree.size, depth)))
            row.window.plant(tree)
        return trees

    def _collect(self, row: _LookaheadRow, new: Sequence[int]) -> None:
        for column, token in zip(row.window.columns, new, strict=False):
            row.pool.add(column[0], (*column[1:], token))

    def _new_pool(self) -> Pool:
        return Pool(per_key=self.config.guesses, keys=self.config.pool_keys)

    def _new(self, salt: str | None) -> _LookaheadRow:
        pool = self._shared.of(salt) if self.config.shared_pool else self._new_pool()
        return _LookaheadRow(window=Window(self.config.level), pool=pool, acceptance=self._estimates.of(salt))

    def _guess(self, guessed: Drafted, pool: Pool, nodes: int, depth: int) -> None:
        """Add the n-grams behind the root as branches, shared beginnings once, as far as `nodes`
        reach.
        """
        children = Counter[int]()
        for gram in pool.after(guessed.tokens[0]):
            parent = 0
            for position, token in enumerate(gram[:depth]):
                if guessed.tree.size >= nodes:
                    return
                before, rank = guessed.tree.size, children[parent]
                prior = _PRIOR[min(position, len(_PRIOR) - 1)] * _PRIOR_DECAY**rank
                node = guessed.add(token, parent, by_draft_prob(Drawn.DETERMINISTIC, rank, prior))
                children[parent] += guessed.tree.size > before
                parent = node


class Pool:
    """The n-grams that a request has come across: at most `per_key` continuations of each of at
    most `keys` tokens. Both bounds forget what was added longest ago; adding a continuation again
    makes it new again.
    """

    def __init__(self, per_key: int, keys: int) -> None:
        self._per_key, self._keys = per_key, keys
        self._grams: dict[int, dict[Gram, None]] = {}

    def add(self, first: int, rest: Gram) -> None:
        """Remember that `rest` may follow `first`."""
        grams = self._grams.pop(first, {})
        grams.pop(rest, None)
        grams[rest] = None
        self._grams[first] = grams
        if len(grams) > self._per_key:
            del grams[next(iter(grams))]
        if len(self._grams) > self._keys:
            del self._grams[next(iter(self._grams))]

    def after(self, first: int) -> list[Gram]:
        """Return the continuations of `first`, the most recent first."""
        return list(reversed(self._grams.get(first, {})))
