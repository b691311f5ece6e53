"""Block verification: verifies a whole drafted chain at once and accepts at least as much as
token-by-token rejection.
"""

from __future__ import annotations

from forerun.core.probs import NodeProbs, Probs, share
from forerun.core.rules.base import Reads, Rule, ending
from forerun.core.sampling import Rng
from forerun.core.tree import TokenTree
from forerun.types import DraftKind, Source, Verdict


class BlockVerification(Rule):
    """Accepts the longest prefix whose own acceptance draw succeeds; optimal among rules for one
    chain.

    Sun et al., arXiv 2403.10444. With weights w_0 = 1, w_i = min(w_{i-1} * target(x_i) / draft(x_i), 1) and, below node
    i, Z_i = sum_x [w_i * target(x) - draft(x)]_+, prefix i holds with probability Z_i / (Z_i + 1 - w_i), the whole
    chain with w_n. The longest that holds is kept, and the token after it comes from norm[w_i * target - draft]_+, or
    the target after the whole chain. A deterministic node counts as a draw from a point mass.
    """

    name = "block"
    reads = Reads(rejections=1, weighted=True)

    def verifies(self, kind: DraftKind) -> bool:
        return kind.chain

    def verify(self, tree: TokenTree, target: NodeProbs, rng: Rng) -> Verdict:
        """Weigh the chain downwards, then try the prefixes, the longest first."""
        nodes, weights, below = self._weigh(tree, target)
        last = nodes[-1]
        if len(nodes) == 1 or rng.flip(weights[-1], last):
            token = target.probs(last).draw(rng)
            return Verdict(path=tree.path(last), next_token=token, kind=ending(tree, last))
        for node, weight, probs in reversed(list(zip(nodes, weights, below, strict=False))):
            left, mass = probs.reject(weight)
            if node == 0 or rng.flip(share(mass, weight), node):
                return Verdict(path=tree.path(node), next_token=left.draw(rng), kind=Source.RECOVERED)
        raise AssertionError("the root always holds")

    def _weigh(self, tree: TokenTree, target: NodeProbs) -> tuple[list[int], list[float], list[Probs]]:
        """Return the nodes from the root down, their weights, and the target's distribution below
        each node but the last.
        """
        nodes, weights, below = [0], [1.0], list[Probs]()
        while weights[-1] > 0 and tree.children[nodes[-1]]:
            probs = target.probs(nodes[-1])
            if probs.child is None:
                break
            below.append(probs)
            weights.append(min(weights[-1] * probs.ratio, 1.0))
            nodes.append(probs.child)
        return nodes, weights, below
