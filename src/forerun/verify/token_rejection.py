"""Token-by-token rejection on a chain: the rule that speculative sampling began with, kept as the baseline."""

from __future__ import annotations

from typing import ClassVar

from forerun.sampling import Rng
from forerun.tree import TokenTree
from forerun.types import DraftKind, NodeLaws, Source, Verdict
from forerun.verify.base import ending
from forerun.verify.laws import Law, drafted_children, ratio, residual


class TokenRejection:
    """Accepts x with probability min(1, target(x) / draft(x)); the first rejection emits norm[target - draft]_+.

    Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318. Exact since draft * min(1, target / draft) +
    P(rejected) * norm[target - draft]_+ = min(target, draft) + [target - draft]_+ = target. A deterministic node counts
    as a draw from a point mass.
    """

    name: ClassVar[str] = "token_rejection"
    lossless: ClassVar[bool] = True
    summary: ClassVar[str] = "token-by-token rejection on a chain (Leviathan, arXiv 2211.17192; Chen, arXiv 2302.01318)"

    def verifies(self, kind: DraftKind) -> bool:
        """Chains."""
        return kind.chain

    def verify(self, tree: TokenTree, target: NodeLaws, rng: Rng) -> Verdict:
        """Judge the chain from the root down."""
        node = 0
        while True:
            law = Law.of(target.law(node))
            drafted = next(drafted_children(tree, node, law), None)
            if drafted is None:
                return self._end(tree, node, ending(tree, node), rng.draw(law.values, tree.depths[node]))
            child, draft = drafted
            if not rng.flip(ratio(law, draft, tree.tokens[child]), child):
                left, _ = residual(law, draft)
                token = rng.draw(left.values, tree.depths[node])
                return self._end(tree, node, Source.RECOVERED, token)
            node = child

    def _end(self, tree: TokenTree, node: int, kind: Source, token: int) -> Verdict:
        return Verdict(path=tree.path(node), next_token=token, kind=kind)
