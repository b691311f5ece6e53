"""Greedy verification: follow the target's own argmax down the tree."""

from __future__ import annotations

from forerun.core.probs import NodeProbs
from forerun.core.rules.base import Reads, Rule, walk
from forerun.core.sampling import Rng
from forerun.core.tree import TokenTree
from forerun.types import Verdict


class ArgmaxWalk(Rule):
    """Accepts a child while it holds the target's argmax, then emits the argmax. It is exact at
    temperature 0, and only there.

    At T = 0 every lossless rule comes down to this one (Stern et al. 2018, arXiv 1811.03115).
    """

    name = "argmax_walk"
    reads = Reads(argmax=True)

    def verify(self, tree: TokenTree, target: NodeProbs, rng: Rng) -> Verdict:
        """Walk while the largest processed logit is a child; `rng` is not used."""
        return walk(tree, target.argmax)
