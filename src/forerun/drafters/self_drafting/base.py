"""The base of drafters that run a part of the target itself, in the cache slots of the coming step.

The prefix's keys and values are the target's own. Root and drafted nodes are run depth by depth in the slots after the
committed tokens, which scoring overwrites. So there is no second cache to fill or to truncate.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from forerun.core.sampling import Sampler
from forerun.core.tree import TokenTree
from forerun.decode.drafter import DraftContext, LearningDrafter
from forerun.drafters.drawing import Children
from forerun.drafters.trees import FixedTree, NodeLimits, Submitted
from forerun.model import Target
from forerun.model.inputs import Nodes
from forerun.model.transformers_target import require_layers
from forerun.types import Budget, DraftKind


class SelfDrafter(LearningDrafter[Submitted]):
    """The base of drafters that run a part of the target; a method provides `logits`."""

    reads_layers = True

    def __init__(self, tree: FixedTree, target: Target) -> None:
        super().__init__()
        self.target = require_layers(target, self.name)
        self._tree = tree

    def kind(self, sampler: Sampler) -> DraftKind:
        return self._tree.kind(sampler)

    def logits(self, rows: Sequence[int], nodes: Nodes) -> Tensor:
        """Return the method's raw logits (B, N - start, V) after `nodes`; those before `start` have already been
        run.
        """
        raise NotImplementedError

    def stop_below(self, row: int, *, greedy: bool) -> float | None:
        """Return the threshold of a row: it drafts no deeper if all its last nodes are less likely. None: no threshold.
        A sampled node counts with the confidence of its distribution (`Children.confidence`).
        """
        return None

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        within = self._tree.within(context, budget, self.target.max_length)
        active = [index for index, count in enumerate(within) if count > 0]
        trees = context.trees()
        if not active:
            return trees
        thresholds = [self.stop_below(context.rows[index], greedy=context.samplers[index].greedy) for index in active]

        def stopped(children: Children) -> list[bool]:
            if all(threshold is None for threshold in thresholds):
                return []
            surest = children.confidence.flatten(1).amax(1).tolist()
            return [below is not None and sure < below for sure, below in zip(surest, thresholds, strict=True)]

        shape = self._tree.shape
        limits = NodeLimits(shape.levels, [within[index] for index in active], stopped)
        rows, roots = [context.rows[index] for index in active], [context.tokens[index][-1] for index in active]

        def descend(ids: Tensor, level: range) -> Tensor:
            return self.logits(rows, Nodes.of_levels(roots, ids, shape.parents, counts=limits.nodes, start=level.start))

        first = self.logits(rows, Nodes.of_trees([TokenTree(root) for root in roots]))
        draws = self._tree.draws(context, active, first.device, first.shape[-1])
        grown = self._tree.grow(draws, max(limits.nodes), first, descend, enough=limits.enough)
        for index, cut in zip(active, self._tree.cut(context, active, grown, limits.nodes), strict=True):
            trees[index], self._drafted[context.rows[index]] = cut
        return trees
