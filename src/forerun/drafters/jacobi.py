"""Jacobi decoding: a chain of guesses for the next tokens, all refined by every pass of the target.

Santilli et al., arXiv 2305.10427. The target's argmax after each token of the chain is the next guess for the token
behind it; what was guessed right is accepted, and the rest moves up. It is one row of lookahead decoding's window,
submitted and not only scouted. Deterministic at every temperature: all nodes are given. Knows no law.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from forerun.drafters.base import DraftContext, Drafter, DrafterSetup
from forerun.drafters.domains import PerDomain
from forerun.drafters.looking_ahead.paths import Paths
from forerun.drafters.looking_ahead.window import Window
from forerun.errors import ArgumentError
from forerun.sampling import Sampler
from forerun.tree import TreeBuilder, stack
from forerun.types import Budget, Draft, DraftKind, Verdict

if TYPE_CHECKING:
    from forerun.step import Scores

_PRIOR = 0.15
"""First guess that a token is right if those before it were."""
_PRIOR_WEIGHT = 8.0
"""How many observations the first guess is worth."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JacobiConfig:
    """Options of `jacobi`."""

    num_speculative_tokens: int = 8
    """Tokens that are guessed at once."""

    def __post_init__(self) -> None:
        if self.num_speculative_tokens < 1:
            raise ArgumentError(f"jacobi: num_speculative_tokens must be at least 1, got {self.num_speculative_tokens}")


class _Rates:
    """How often a token was right if those before it were, by its place."""

    def __init__(self, places: int) -> None:
        self._tried = [_PRIOR_WEIGHT] * places
        self._right = [_PRIOR_WEIGHT * _PRIOR] * places

    def estimate(self, place: int) -> float:
        return self._right[place] / self._tried[place]

    def learn(self, guessed: Sequence[int], committed: Sequence[int]) -> None:
        for place, (guess, token) in enumerate(zip(guessed, committed, strict=False)):
            self._tried[place] += 1.0
            if guess != token:
                return
            self._right[place] += 1.0


@dataclass(kw_only=True, slots=True)
class _Row:
    rates: _Rates
    window: Window = field(default_factory=lambda: Window(level=2))
    guessed: list[int] | None = None
    """The last chain, until the target has spoken."""


class JacobiDrafter(Drafter):
    """Guesses the next tokens, and takes the target's corrections of wrong guesses as its next ones."""

    name = "jacobi"
    Config = JacobiConfig

    def __init__(self, config: JacobiConfig, setup: DrafterSetup) -> None:
        self.config = config
        self._rows: dict[int, _Row] = {}
        self._rates = PerDomain(lambda: _Rates(config.num_speculative_tokens))

    def kind(self, sampler: Sampler) -> DraftKind:
        return DraftKind(chain=True)

    def propose(self, context: DraftContext, budget: Budget) -> Draft:
        builders = []
        for index, (tokens, nodes, depth) in enumerate(zip(context.tokens, budget.nodes, budget.depth, strict=True)):
            row, builder, parent = self._row(context, index), TreeBuilder(), 0
            length = max(0, min(self.config.num_speculative_tokens, nodes, depth))
            row.window.fit(tokens, length + 1)
            row.guessed = [column[0] for column in row.window.columns[1:]]
            for place, token in enumerate(row.guessed):
                parent = builder.add(token, parent, confidence=row.rates.estimate(place))
            builders.append(builder)
        return stack(builders)

    def observe(self, context: DraftContext, verdicts: Sequence[Verdict], scores: Scores) -> None:
        for index, (tokens, verdict) in enumerate(zip(context.tokens, verdicts, strict=True)):
            row, emitted = self._row(context, index), len(verdict.path) + 1
            if row.guessed is None:
                continue
            row.rates.learn(row.guessed, tokens[-emitted:])
            row.guessed = None
            new = row.window.read(Paths(scores.trees[index]), partial(scores.raw_argmax, index))
            row.window.roll(new, emitted)

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        for row_id, length in zip(rows, lengths, strict=True):
            if length == 0:
                self._rows.pop(row_id, None)
            elif row_id in self._rows:
                self._rows[row_id].guessed = None

    def _row(self, context: DraftContext, index: int) -> _Row:
        row_id = context.rows[index]
        if row_id not in self._rows:
            self._rows[row_id] = _Row(rates=self._rates.of(context.salt(index)))
        return self._rows[row_id]
