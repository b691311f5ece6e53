"""Sample-and-walk: draw the target's token at each node and follow it while it was drafted. Never reads a draft
distribution."""

from __future__ import annotations

from typing import ClassVar

from forerun.core.probs import NodeProbs
from forerun.core.rules.base import Reads, walk
from forerun.core.sampling import Rng
from forerun.core.tree import TokenTree
from forerun.types import DraftKind, Verdict


class SampleWalk:
    """Draws y ~ target(. | node) and descends if a child holds y, else emits y.

    Exact for every tree, whatever drew it, since no draw looks at the draft. Draws are keyed by absolute position, so
    the text for a seed is that of plain decoding. Optimal where all children are deterministic: the acceptance, the
    target's mass on the children, is the bound of arXiv 2502.18779. Sampled children are verified correctly but waste
    their correlation.
    """

    name: ClassVar[str] = "sample_walk"
    lossless: ClassVar[bool] = True
    reads: ClassVar[Reads] = Reads(rungs=0)
    summary: ClassVar[str] = (
        "draw the target's token, walk while it is a child; any tree, plain decoding's text for a seed"
    )

    def verifies(self, kind: DraftKind) -> bool:
        """Any draft."""
        return True

    def verify(self, tree: TokenTree, target: NodeProbs, rng: Rng) -> Verdict:
        """Walk while the drawn token is a child."""
        return walk(tree, lambda node: target.probs(node).draw(rng))
