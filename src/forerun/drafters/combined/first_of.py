"""Drafts each row with the first of several drafters whose draft promises enough tokens.

The last one takes the rows that are left. A drafter is asked for these rows only, so one that costs forward passes
costs them where it is needed. The routing of SAM-Decoding (arXiv 2411.10666), by expected tokens, not match lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forerun.core.tree import TokenTree
from forerun.drafters.base import DraftContext
from forerun.drafters.combined.members import Composed, ComposedConfig, check_specs
from forerun.errors import ArgumentError
from forerun.types import Budget


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstOfConfig(ComposedConfig):
    """Options of `first_of`; the preferred member stands first."""

    min_tokens: float | Sequence[float] = 1.0  # Tokens a draft must promise; a number, or one per drafter but the last

    def __post_init__(self) -> None:
        check_specs("first_of", self.drafters)
        wanted = len(self.drafters) - 1
        given = self.min_tokens
        if not isinstance(given, int | float) and len(given) != wanted:
            raise ArgumentError(f"first_of: min_tokens needs {wanted} numbers for {wanted + 1} drafters, got {given}")
        if min(self.thresholds) < 0:
            raise ArgumentError(f"first_of: min_tokens must be 0 or more, got {given}")

    @property
    def thresholds(self) -> tuple[float, ...]:
        """The values of `min_tokens` for each drafter but the last."""
        if isinstance(self.min_tokens, int | float):
            return (float(self.min_tokens),) * (len(self.drafters) - 1)
        return tuple(self.min_tokens)


class FirstOfDrafter(Composed):
    """Takes each row's draft from the first member that promises enough. A draft that holds sampled
    nodes is taken whatever it promises: to submit a sampled node or not for its value would bias
    the answer.
    """

    name = "first_of"
    Config = FirstOfConfig
    config: FirstOfConfig

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        context = self.for_members(context)
        trees, limits = context.trees(), enumerate(zip(budget.nodes, budget.depth, strict=True))
        left = [row for row, limit in limits if min(limit) > 0]
        for member, threshold in zip(self.members, (*self.config.thresholds, 0.0), strict=True):
            if not left:
                break
            share = Budget(nodes=[budget.nodes[row] for row in left], depth=[budget.depth[row] for row in left])
            drafted = dict(zip(left, member.propose(context.of(left), share), strict=True))
            good = {row: tree for row, tree in drafted.items() if _promises(tree, threshold)}
            for row, tree in good.items():
                trees[row] = tree
            left = [row for row in left if row not in good]
        return trees


def _promises(tree: TokenTree, threshold: float) -> bool:
    if not tree.size or threshold == 0 or tree.sampled:
        return tree.size > 0
    return sum(tree.survival()[1:]) >= threshold
