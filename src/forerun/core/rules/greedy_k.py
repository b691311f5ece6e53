"""The greedy-k rule: deterministic siblings, and at most one drawn from the distribution restricted
to other tokens.
"""

from __future__ import annotations

from forerun.core.probs import NodeProbs
from forerun.core.rules.base import Reads, Rule, ending
from forerun.core.sampling import Rng
from forerun.core.tree import TokenTree
from forerun.types import DraftKind, Drawn, Verdict


class GreedyK(Rule):
    """At each node, tries the one sampled child against q', then walks on among the deterministic
    ones.

    Hu et al., arXiv 2502.18779. q' is the recorded distribution: the draft's, restricted to the tokens that no
    deterministic sibling holds. The sampled child is accepted with probability min(1, p(x) / q'(x)); else a token is
    drawn from norm[p - q']_+, and if a deterministic sibling holds it the walk goes on there. Accepts sum_given p +
    sum_rest min(p, q'), the most that any rule can. Nodes with deterministic children only are walked. Exact whatever
    q' is, restricted or not.
    """

    name = "greedy_k"
    reads = Reads(rejections=1)

    def verifies(self, kind: DraftKind) -> bool:
        return kind.chain or kind.multipath or not kind.sampled

    def verify(self, tree: TokenTree, target: NodeProbs, rng: Rng) -> Verdict:
        """Verify the tree from the root down."""
        node = 0
        while True:
            probs = target.probs(node)
            child = probs.child
            if child is not None and tree.drawn[child] is not Drawn.DETERMINISTIC:
                if rng.flip(probs.ratio, child):
                    node = child
                    continue
                probs, _ = probs.reject()
            token = probs.draw(rng)
            given = (child for child in tree.children[node] if tree.drawn[child] is Drawn.DETERMINISTIC)
            held = next((child for child in given if tree.tokens[child] == token), None)
            if held is None:
                return Verdict(path=tree.path(node), next_token=token, kind=ending(tree, node))
            node = held
