"""Drafting with a part of the target itself, in the slots of the coming step: what every such method shares.

The prefix's keys and values are the target's own. The root and the drafted nodes are run level by level, behind the
committed tokens, by whatever part of the target the method chooses; scoring overwrites these slots afterwards. So there
is no second cache, nothing to catch up with and nothing to forget. Knows no rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forerun.drafters.base import DraftContext, Drafter
from forerun.drafters.growth import Children, Shape
from forerun.drafters.levels import FixedTree, Grown, Submitted
from forerun.sampling import Sampler
from forerun.tree import TreeBuilder, stack
from forerun.types import Budget, Draft, DraftKind, empty_draft

if TYPE_CHECKING:
    from forerun.target import Target


class Limits:
    """How many nodes each active row may submit; a row whose last nodes are all unlikely ends there.

    A node that was grown is never taken back, so whether it is submitted does not depend on its value. The figure of a
    sampled node is that of the law it is drawn from (`Children.confidence`).
    """

    def __init__(self, shape: Shape, nodes: Sequence[int], below: Sequence[float | None]) -> None:
        self.nodes = list(nodes)
        """(B,) from the first node on."""
        self._shape, self._below = shape, below
        self._stops = any(threshold is not None for threshold in below)

    def enough(self, depth: int, children: Children) -> bool:
        """Whether no row wants a level below these children of the nodes at `depth`."""
        stop = self._shape.levels[depth + 1].stop - 1
        if self._stops:
            surest = children.confidence.flatten(1).amax(1).tolist()
            for place, threshold in enumerate(self._below):
                if threshold is not None and surest[place] < threshold:
                    self.nodes[place] = min(self.nodes[place], stop)
        return max(self.nodes) <= stop


class SelfDrafter(Drafter):
    """The base of drafters that run a part of the target; a method gives `logits`."""

    def __init__(self, tree: FixedTree, target: Target) -> None:
        self.target = target
        self._tree = tree
        self._drafted: dict[int, Submitted] = {}

    def kind(self, sampler: Sampler) -> DraftKind:
        return self._tree.kind(sampler)

    def logits(self, rows: Sequence[int], roots: Sequence[int], draft: Draft, start: int) -> Tensor:
        """The method's own raw logits (B, N - start, V) after the nodes ``start .. K``; earlier ones have been run."""
        raise NotImplementedError

    def stop_below(self, row: int, *, greedy: bool) -> float | None:
        """A row whose last nodes are all less likely than this drafts no deeper; None never stops."""
        return None

    def extend(self, context: DraftContext) -> None:
        for row, tokens, fresh in zip(context.rows, context.tokens, context.fresh, strict=True):
            drafted = self._drafted.pop(row, None)
            if drafted is not None and fresh:
                drafted.learn(tokens[-fresh:])

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        for row in rows:
            self._drafted.pop(row, None)

    def propose(self, context: DraftContext, budget: Budget) -> Draft:
        within = self._tree.within(context, budget, self.target.max_length)
        active = [index for index, count in enumerate(within) if count > 0]
        if not active:
            return empty_draft(len(within))
        below = [self.stop_below(context.rows[index], greedy=context.samplers[index].greedy) for index in active]
        limits = Limits(self._tree.shape, [within[index] for index in active], below)
        grown = self._grow(context, active, limits)
        builders, cuts = [TreeBuilder() for _ in within], self._tree.cut(context, active, grown, limits.nodes)
        for index, (builder, drafted) in zip(active, cuts, strict=True):
            builders[index], self._drafted[context.rows[index]] = builder, drafted
        return stack(builders)

    def _grow(self, context: DraftContext, active: Sequence[int], limits: Limits) -> Grown:
        rows, roots = [context.rows[index] for index in active], [context.tokens[index][-1] for index in active]

        def descend(ids: Tensor, level: range) -> Tensor:
            return self.logits(rows, roots, partial_draft(self._tree.shape, ids, limits.nodes), level.start)

        first = self.logits(rows, roots, empty_draft(len(rows)), 0)
        draws = self._tree.draws(context, active, first.device, first.shape[-1])
        return self._tree.grow(context, active, max(limits.nodes), first, descend, draws=draws, enough=limits.enough)


def partial_draft(shape: Shape, ids: Tensor, nodes: Sequence[int]) -> Draft:
    """The nodes ``ids`` (B, K) so far as a draft; those beyond a row's share of `nodes` are padding."""
    batch, size = ids.shape
    counts = torch.tensor([min(size, count) for count in nodes])
    parents = torch.tensor(shape.parents[:size]).expand(batch, -1)
    return Draft(tokens=ids, parents=parents, counts=counts, drawn=torch.zeros(batch, size, dtype=torch.uint8))
