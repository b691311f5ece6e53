"""Sample-and-walk: draw the target's token at each node and follow it while it was drafted."""

from __future__ import annotations

from forerun.core.probs import NodeProbs
from forerun.core.rules.base import Reads, Rule, walk
from forerun.core.sampling import Rng
from forerun.core.tree import TokenTree
from forerun.types import Verdict


class SampleWalk(Rule):
    """Draws y ~ target(. | node) and descends if a child holds y, else emits y.

    Exact for every tree, whatever drew it, since no draw looks at the draft. Draws are keyed by absolute position, so
    the text for a seed is that of plain decoding. Optimal where all children are deterministic: the acceptance, the
    target's mass on the children, is the bound of arXiv 2502.18779. Sampled children are verified correctly but waste
    their correlation.
    """

    name = "sample_walk"
    reads = Reads(rejections=0)

    def verify(self, tree: TokenTree, target: NodeProbs, rng: Rng) -> Verdict:
        """Walk while the drawn token is a child."""
        return walk(tree, lambda node: target.probs(node).draw(rng))
