"""The greedy-k rule: deterministic siblings, and at most one sibling drawn from the law restricted to the other
tokens."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from forerun.sampling import Rng
from forerun.tree import TokenTree
from forerun.types import DraftKind, Drawn, NodeLaws, Verdict
from forerun.verify.base import ending
from forerun.verify.laws import Law, drafted_children, ratio, residual


class GreedyK:
    """At each node: reject or accept the one sampled child against its law q', then walk on the deterministic ones.

    Hu et al., arXiv 2502.18779. q' is the recorded law: the draft's, restricted to the tokens that no deterministic
    sibling holds. The sampled child is accepted with probability min(1, p(x) / q'(x)); else a token is drawn from
    norm[p - q']_+, and if a deterministic sibling holds it the walk goes on there. Accepts sum_given p + sum_rest
    min(p, q'), the most that any rule can. Nodes with deterministic children only are walked. Exact whatever q' is,
    restricted or not.
    """

    name: ClassVar[str] = "greedy_k"
    lossless: ClassVar[bool] = True
    summary: ClassVar[str] = (
        "deterministic siblings plus one drawn from the rest (greedy-k, Hu et al., arXiv 2502.18779)"
    )

    def verifies(self, kind: DraftKind) -> bool:
        """Drafts with at most one sampled node among the children of any node."""
        return kind.chain or kind.multipath or not kind.sampled

    def verify(self, tree: TokenTree, target: NodeLaws, rng: Rng) -> Verdict:
        """Judge the tree from the root down."""
        node = 0
        while True:
            law = target.law(node)
            kept, law = self._try_sampled(tree, node, law, rng)
            token = -1
            if kept is None:
                token = rng.draw(law, tree.depths[node])
                given = (child for child in tree.children[node] if tree.drawn[child] is Drawn.DETERMINISTIC)
                kept = next((child for child in given if tree.tokens[child] == token), None)
            if kept is None:
                return Verdict(path=tree.path(node), next_token=token, kind=ending(tree, node))
            node = kept

    def _try_sampled(self, tree: TokenTree, node: int, law: Tensor, rng: Rng) -> tuple[int | None, Tensor]:
        """The sampled child if it is accepted, else None and what is left of the target's law."""
        if all(tree.drawn[child] is Drawn.DETERMINISTIC for child in tree.children[node]):
            return None, law
        exact = Law.of(law)
        # A sampled child comes first, unless its law rules it out: then a given one does, or none (the root stands in).
        child, draft = next(drafted_children(tree, node, exact), (0, exact))
        if tree.drawn[child] is Drawn.DETERMINISTIC:
            return None, law
        if rng.flip(ratio(exact, draft, tree.tokens[child]), child):
            return child, law
        left, _ = residual(exact, draft)
        return None, left.values
