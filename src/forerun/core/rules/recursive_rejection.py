"""Recursive rejection: each sibling is tried against the residual that its elder siblings left."""

from __future__ import annotations

from forerun.core.probs import NodeProbs
from forerun.core.rules.base import Reads, Rule, ending
from forerun.core.sampling import Rng
from forerun.core.tree import TokenTree
from forerun.types import Verdict


class RecursiveRejection(Rule):
    """Tries siblings x in drawing order: accepts with probability min(1, p(x) / q(x)), else p <-
    norm[p - q]_+.

    p is the target's distribution as the elder siblings left it, q the distribution that x was drawn from given them:
    the recorded distribution for iid siblings (SpecInfer, arXiv 2305.09781), without the elder siblings' tokens and
    renormalised for draws without replacement (Sequoia, arXiv 2402.12374), a point mass for a deterministic sibling. If
    none is accepted the token is drawn from p.
    """

    name = "recursive_rejection"
    reads = Reads(rejections=None)

    def verify(self, tree: TokenTree, target: NodeProbs, rng: Rng) -> Verdict:
        """Verify the tree from the root down."""
        node = 0
        while True:
            probs = target.probs(node)
            while (child := probs.child) is not None and not rng.flip(probs.ratio, child):
                probs, _ = probs.reject()
            if child is None:
                return Verdict(path=tree.path(node), next_token=probs.draw(rng), kind=ending(tree, node))
            node = child
