"""Jacobi decoding: a chain of guesses for the next tokens, all refined by every pass of the target.

Santilli et al., arXiv 2305.10427. The target's argmax after each token of the chain is the next guess for the token
behind it; what was guessed right is accepted, and the rest moves up. It is one row of lookahead decoding's window,
submitted and not only probed. Deterministic at every temperature. Knows no distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from forerun.acceptance import Acceptance, Evidence, Proposal
from forerun.drafters.base import DraftContext, Drafter, DrafterSetup
from forerun.drafters.domains import PerDomain
from forerun.drafters.self_drafting.looking_ahead.window import Window
from forerun.errors import ArgumentError
from forerun.sampling import Sampler
from forerun.tree import TokenTree
from forerun.types import Budget, DraftKind, Verdict

if TYPE_CHECKING:
    from forerun.step import Scores

_PRIOR = 0.15
"""First guess that a token is right if those before it were."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JacobiConfig:
    """Options of `jacobi`."""

    num_speculative_tokens: int = 8
    """Tokens that are guessed at once."""

    def __post_init__(self) -> None:
        if self.num_speculative_tokens < 1:
            raise ArgumentError(f"jacobi: num_speculative_tokens must be at least 1, got {self.num_speculative_tokens}")


@dataclass(kw_only=True, slots=True)
class _Row:
    acceptance: Acceptance
    """By place in the chain."""
    window: Window = field(default_factory=lambda: Window(level=2))
    guessed: Proposal | None = None
    """The last chain, until the target has spoken."""


class JacobiDrafter(Drafter):
    """Guesses the next tokens, and takes the target's corrections of wrong guesses as its next ones."""

    name = "jacobi"
    Config = JacobiConfig

    def __init__(self, config: JacobiConfig, setup: DrafterSetup) -> None:
        self.config = config
        self._rows: dict[int, _Row] = {}
        self._estimates = PerDomain(Acceptance)

    def kind(self, sampler: Sampler) -> DraftKind:
        return DraftKind(chain=True)

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        trees = context.trees()
        for index, (tokens, nodes, depth) in enumerate(zip(context.tokens, budget.nodes, budget.depth, strict=True)):
            row, tree, parent = self._row(context, index), trees[index], 0
            length = max(0, min(self.config.num_speculative_tokens, nodes, depth))
            row.window.fit(tokens, length + 1)
            row.guessed = Proposal(acceptance=row.acceptance, tokens=tree.tokens, parents=tree.parents)
            for place, column in enumerate(row.window.columns[1:]):
                parent = tree.add(column[0], parent, confidence=row.acceptance.estimate(place, _PRIOR))
                row.guessed.evidence[parent] = Evidence(place, _PRIOR)
        return trees

    def observe(self, context: DraftContext, verdicts: Sequence[Verdict], scores: Scores) -> None:
        for index, (tokens, verdict) in enumerate(zip(context.tokens, verdicts, strict=True)):
            row, emitted = self._row(context, index), len(verdict.path) + 1
            if row.guessed is None:
                continue
            row.guessed.learn(tokens[-emitted:])
            row.guessed = None
            new = row.window.read(scores.trees[index], partial(scores.raw_argmax, index))
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
            self._rows[row_id] = _Row(acceptance=self._estimates.of(context.salt(index)))
        return self._rows[row_id]
