"""Joins the trees of several drafters under one node budget.

Deterministic nodes with the same path become one, and the likeliest are kept. Sampled nodes come from one member only,
whose tree goes in whole: neither merged nor pruned, since either, decided by a drawn value, would bias the answer.
Deterministic nodes of the others may stand beside and below sampled ones; traversal verifies such trees.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from forerun.core.tree import TokenTree, join
from forerun.drafters.base import DraftContext
from forerun.drafters.combined.members import Composed, ComposedConfig, check_specs
from forerun.errors import ArgumentError
from forerun.types import Budget


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeConfig(ComposedConfig):
    """Options of `merge`. Of members that sample, the first one's sampled nodes are used."""

    nodes: int | None = None  # Most nodes of the joined tree; None takes what a step may draft

    def __post_init__(self) -> None:
        check_specs("merge", self.drafters)
        if self.nodes is not None and self.nodes < 1:
            raise ArgumentError(f"merge: nodes must be at least 1, got {self.nodes}; leave it out for no limit")


class MergeDrafter(Composed):
    """Joins the members' trees, row by row."""

    name = "merge"
    Config = MergeConfig
    config: MergeConfig

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        context, most = self.for_members(context), self.config.nodes
        nodes = [own if most is None else min(own, most) for own in budget.nodes]
        drafts = [member.propose(context, replace(budget, nodes=nodes)) for member in self.members]
        # The member whose trees go in whole is the first that sampled, else the first whose nodes were begun.
        sampled = (member for member, trees in enumerate(drafts) if any(tree.sampled for tree in trees))
        begun = (member for member, trees in enumerate(drafts) if any(tree.resume is not None for tree in trees))
        lead, joined = next(sampled, next(begun, 0)), []
        for root, row, count in zip(context.trees(), zip(*drafts, strict=True), nodes, strict=True):
            whole = row[lead].sampled or row[lead].resume is not None
            others = [tree for member, tree in enumerate(row) if member != lead or not whole]
            joined.append(join(row[lead] if whole else root, others, count))
        return joined
