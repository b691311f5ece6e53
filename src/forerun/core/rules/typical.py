"""Typical acceptance: accepts what the target finds plausible. LOSSY: the emitted distribution is
not the target's.
"""

from __future__ import annotations

import math

from forerun.core.probs import NodeProbs
from forerun.core.rules.base import Reads, Rule, ending
from forerun.core.sampling import Rng
from forerun.core.tree import TokenTree
from forerun.types import Verdict


class TypicalAcceptance(Rule):
    """Accepts x where target(x) > min(epsilon, delta * exp(-H(target))) and takes the longest
    accepted path.

    Medusa (Cai et al., arXiv 2401.10774), H in nats. Among paths of equal length the one that the target finds
    likeliest is kept. At T = 0 the entropy is 0 and only the argmax passes; at T > 0 the rule is biased towards the
    draft.

    Args:
        epsilon: hard probability threshold.
        delta: scale of the entropy-dependent threshold.
    """

    name = "typical"
    lossless = False
    reads = Reads(rejections=0, entropy=True)

    def __init__(self, epsilon: float = 0.09, delta: float = 0.3) -> None:
        self.epsilon, self.delta = epsilon, delta

    def verify(self, tree: TokenTree, target: NodeProbs, rng: Rng) -> Verdict:
        """Search the tree for the longest plausible path, then draw the token after it from the target."""
        best, score = 0, 0.0
        reached = [(0, 0.0)]
        for node, logprob in reached:
            if (tree.depths[node], logprob) > (tree.depths[best], score):
                best, score = node, logprob
            if tree.children[node]:
                reached += [(child, logprob + math.log(prob)) for child, prob in self._plausible(tree, target, node)]
        token = target.probs(best).draw(rng)
        return Verdict(path=tree.path(best), next_token=token, kind=ending(tree, best))

    def _plausible(self, tree: TokenTree, target: NodeProbs, node: int) -> list[tuple[int, float]]:
        """Return the children of `node` that pass, each with its target probability."""
        at = target.probs(node)
        threshold = min(self.epsilon, self.delta * math.exp(-at.entropy))
        probs = [(child, at.of_child(child)) for child in tree.children[node]]
        return [(child, prob) for child, prob in probs if prob > threshold]
