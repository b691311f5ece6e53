"""Token-by-token rejection on a chain: the original rule of speculative sampling, here as the
baseline.
"""

from __future__ import annotations

from forerun.core.probs import NodeProbs
from forerun.core.rules.base import Reads, Rule, ending
from forerun.core.sampling import Rng
from forerun.core.tree import TokenTree
from forerun.types import DraftKind, Source, Verdict


class TokenRejection(Rule):
    """Accepts x with probability min(1, target(x) / draft(x)); the first rejection emits norm[target - draft]_+.

    Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318. Exact since draft * min(1, target / draft) +
    P(rejected) * norm[target - draft]_+ = min(target, draft) + [target - draft]_+ = target. A deterministic node counts
    as a draw from a point mass.
    """

    name = "token_rejection"
    reads = Reads(rejections=1)

    def verifies(self, kind: DraftKind) -> bool:
        return kind.chain

    def verify(self, tree: TokenTree, target: NodeProbs, rng: Rng) -> Verdict:
        """Verify the chain from the root down."""
        node = 0
        while True:
            probs = target.probs(node)
            child = probs.child
            if child is None:
                return Verdict(path=tree.path(node), next_token=probs.draw(rng), kind=ending(tree, node))
            if not rng.flip(probs.ratio, child):
                left, _ = probs.reject()
                return Verdict(path=tree.path(node), next_token=left.draw(rng), kind=Source.RECOVERED)
            node = child
