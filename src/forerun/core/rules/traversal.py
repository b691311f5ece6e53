"""Traversal verification: verifies a sampled tree from the leaves up. On a chain it is block verification."""

from __future__ import annotations

from forerun.core.probs import NodeProbs, share
from forerun.core.rules.base import Reads, Rule, ending
from forerun.core.sampling import Rng
from forerun.core.tree import TokenTree
from forerun.types import Verdict


class TraversalVerification(Rule):
    """Tries leaves from left to right; rejecting one removes it and corrects its parent's
    distribution and weight.

    Weng et al., arXiv 2505.12398. A node has a weight r (root 1, child min(r * target(x) / draft(x), 1)) and a target
    distribution p. A leaf is accepted, with all above it, with probability r. If it is deleted, its parent b takes S =
    sum_x [r_b p_b - q_b]_+, r_b <- S / (S + 1 - r_b), p_b <- norm[r_b p_b - q_b]_+, and where siblings are drawn
    without replacement q_b loses the token; the next child is weighed with these. A parent that lost all its children
    is a leaf. The root is always accepted. Sampled duplicates stay separate nodes. A deterministic node counts as a
    draw from a point mass, which is exact too.
    """

    name = "traversal"
    reads = Reads(rejections=None, weighted=True)

    def verify(self, tree: TokenTree, target: NodeProbs, rng: Rng) -> Verdict:
        """Verify the tree from its first leaf to the root."""
        verdict = self._visit(tree, target, rng, (0, 1.0))
        assert verdict is not None, "the root always holds"
        return verdict

    def _visit(self, tree: TokenTree, target: NodeProbs, rng: Rng, start: tuple[int, float]) -> Verdict | None:
        """Verify everything below `start` = (node, weight), then the node itself. Returns None if
        none of it was accepted.
        """
        node, weight = start
        if weight <= 0:
            return None
        probs = None
        if tree.children[node]:
            probs = target.probs(node)
            while (child := probs.child) is not None:
                verdict = self._visit(tree, target, rng, (child, min(weight * probs.ratio, 1.0)))
                if verdict is not None:
                    return verdict
                probs, mass = probs.reject(weight)
                weight = share(mass, weight)
        if node != 0 and not rng.flip(weight, node):
            return None
        token = (probs or target.probs(node)).draw(rng)
        return Verdict(path=tree.path(node), next_token=token, kind=ending(tree, node))
