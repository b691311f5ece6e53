"""Greedy verification: follow the target's own argmax down the tree."""

from __future__ import annotations

from typing import ClassVar

from forerun.core.probs import NodeProbs
from forerun.core.rules.base import Reads, walk
from forerun.core.sampling import Rng
from forerun.core.tree import TokenTree
from forerun.types import DraftKind, Verdict


class ArgmaxWalk:
    """Keeps a child while it holds the target's argmax, then emits the argmax: exact at temperature 0, and only there.

    At T = 0 every lossless rule comes down to this one (Stern et al. 2018, arXiv 1811.03115).
    """

    name: ClassVar[str] = "argmax_walk"
    lossless: ClassVar[bool] = True
    reads: ClassVar[Reads] = Reads(argmax=True)
    summary: ClassVar[str] = "follow the target's argmax; T = 0 only (blockwise decoding, arXiv 1811.03115)"

    def verifies(self, kind: DraftKind) -> bool:
        """Any draft: the target's choice does not depend on how the draft came about."""
        return True

    def verify(self, tree: TokenTree, target: NodeProbs, rng: Rng) -> Verdict:
        """Walk while the largest processed logit is a child; `rng` is not touched."""
        return walk(tree, target.argmax)
