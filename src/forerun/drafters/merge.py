"""Several drafters at once: their trees joined under one node budget.

Deterministic nodes with the same path become one, and the likeliest are kept. Sampled nodes come from one member only,
whose tree goes in whole: neither merged nor pruned, since either, decided by a drawn value, would bias the answer.
Deterministic nodes of the others may stand beside and below sampled ones; traversal verifies such trees. Knows no
method and no rule.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from forerun.drafters.base import DraftContext, DrafterSetup
from forerun.drafters.composing.joining import draws, join
from forerun.drafters.composing.members import Composed, Spec, check_specs
from forerun.errors import ArgumentError
from forerun.target import Resume
from forerun.tree import TreeBuilder, rebuild, stack
from forerun.types import Budget, Draft


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeConfig:
    """Options of `merge`."""

    drafters: Sequence[Spec] = ("suffix", "recycling")
    """The members, each a name or ``{"method": name, ...}`` with its own options. Of those that sample, the first one's
    sampled nodes are used."""
    nodes: int | None = None
    """Most nodes of the joined tree; None takes what a step may draft."""
    reproducible: bool = True
    """For sampled requests with a seed the members draft deterministically, so that the text is plain decoding's. False
    lets them sample there too: more is accepted, and the text depends on what was learned from other requests."""

    def __post_init__(self) -> None:
        check_specs("merge", self.drafters)
        if self.nodes is not None and self.nodes < 1:
            raise ArgumentError(f"merge: nodes must be at least 1, got {self.nodes}; leave it out for no limit")


class MergeDrafter(Composed):
    """Joins the members' trees, row by row."""

    name = "merge"
    Config = MergeConfig

    def __init__(self, config: MergeConfig, setup: DrafterSetup) -> None:
        super().__init__(config.drafters, setup, reproducible=config.reproducible)
        self.config = config

    def propose(self, context: DraftContext, budget: Budget) -> Draft:
        context, most = self.for_members(context), self.config.nodes
        nodes = [own if most is None else min(own, most) for own in budget.nodes]
        drafts = [member.propose(context, replace(budget, nodes=nodes)) for member in self.members]
        grown = [[rebuild(draft, row) for row in range(len(nodes))] for draft in drafts]
        lead = self._lead(drafts, grown)
        leading = {row for row, tree in enumerate(grown[lead]) if draws(tree) or _begun(drafts[lead], row)}
        builders = []
        for row, most_nodes in enumerate(nodes):
            trees = [own[row] for own in grown]
            base = trees.pop(lead) if row in leading else TreeBuilder()
            builders.append(join(base, trees, most_nodes))
        joined = stack(builders)
        begun = drafts[lead].resume
        return joined if begun is None else replace(joined, resume=_kept(begun, leading))

    def _lead(self, drafts: Sequence[Draft], grown: Sequence[Sequence[TreeBuilder]]) -> int:
        """The member whose trees go in whole: the first that sampled, else the first whose nodes were begun."""
        sampled = (index for index, trees in enumerate(grown) if any(draws(tree) for tree in trees))
        begun = (index for index, draft in enumerate(drafts) if draft.resume is not None)
        return next(sampled, next(begun, 0))


def _begun(draft: Draft, row: int) -> bool:
    return draft.resume is not None and draft.resume.counts[row] > 0


def _kept(begun: Resume, leading: Set[int]) -> Resume:
    """What was begun, of the rows whose nodes kept their numbers."""
    return replace(begun, counts=[count if row in leading else 0 for row, count in enumerate(begun.counts)])
