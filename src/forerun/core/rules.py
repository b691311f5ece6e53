"""This module has the verification rules, and says which one verifies a draft by default.

A rule sees one row's tree, the target's distributions at its nodes, and random numbers. It never
sees a drafter. Each class says what its rule accepts, why that is exact, and in which paper it
stands. `TypicalAcceptance` alone is lossy.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, ClassVar

from forerun.errors import ArgumentError, refuse_unknown
from forerun.types import DraftKind, Drawn, Source, Verdict

if TYPE_CHECKING:  # rules are named before torch is imported
    from forerun.core.probs import NodeProbs, Probs
    from forerun.core.rng import Rng
    from forerun.core.tree import TokenTree

__path__: list[str] = []  # It was a package: what lay in it is found by `forerun.moved`


@dataclass(frozen=True, kw_only=True, slots=True)
class Reads:
    """The numbers that a rule reads at a node. On an accelerator these are computed before the rule
    runs, and no others.
    """

    argmax: bool = False  # Only the token of largest processed logit
    rejections: int | None = 0  # Most rejected children of a node; None: all of them; 0: the rule only draws
    weighted: bool = False  # Whether children are rejected with the weights of block and traversal verification
    entropy: bool = False  # Also the entropy, and the probability of each child's token


class Rule(ABC):
    """A verification rule: it accepts a path of the tree and chooses the token after it."""

    name: ClassVar[str]
    reads: ClassVar[Reads]
    lossless: ClassVar[bool] = True  # Whether the emitted distribution is exactly the target's

    def verifies(self, kind: DraftKind) -> bool:
        """Return whether the rule uses all nodes of drafts of this kind. Of other drafts it ignores some nodes, which
        is lossless, too.
        """
        return True

    @abstractmethod
    def verify(self, tree: TokenTree, target: NodeProbs, rng: Rng) -> Verdict:
        """Verify the tree. The rule reads from `target` only what `reads` declares, and draws only from `rng`."""


def check_named(name: str) -> None:
    """Raise ArgumentError unless there is a rule of that name. Imports nothing."""
    refuse_unknown("unknown verification rule", name, RULES)


@cache
def rule_named(name: str) -> Rule:
    """Return the rule of that name; rules are stateless, so one instance serves all. Raises
    ArgumentError if there is none, naming the nearest.
    """
    check_named(name)
    return RULES[name]()


def ending(tree: TokenTree, node: int) -> Source:
    """Return the kind of the token after `node`, the last accepted node: TARGET, BONUS or
    RECOVERED.
    """
    if tree.size == len(tree.probes):
        return Source.TARGET
    return Source.RECOVERED if tree.children[node] else Source.BONUS


def walk(tree: TokenTree, choose: Callable[[int], int]) -> Verdict:
    """Follow the target's own choices, ``choose(node)``, for as long as they were drafted.

    Nodes with the same tokens from the root on (a token that was sampled twice) are followed together.
    """
    nodes = [0]
    while True:
        token = choose(nodes[0])
        below = [child for node in nodes for child in tree.children[node] if tree.tokens[child] == token]
        if not below:
            last = next((node for node in nodes if tree.children[node]), nodes[0])
            return Verdict(path=tree.path(last), next_token=token, kind=ending(tree, last))
        nodes = below


def default_rule(kind: DraftKind, *, greedy: bool) -> str:
    """Return the name of the best lossless rule for drafts of a kind (docs/losslessness.md)."""
    if greedy:
        return "argmax_walk"
    if not kind.sampled:
        return "sample_walk"
    if kind.chain:
        return "block"
    return "greedy_k" if kind.multipath else "traversal"


def check_fits(name: str, kind: DraftKind, drafter: str) -> None:
    """Raise ArgumentError if the requested rule does not exist, or cannot verify everything that a drafter may
    draft.
    """
    if rule_named(name).verifies(kind):
        return
    multipath = rule_named(name).verifies(DraftKind(sampled=True, multipath=True))
    shapes = "trees with at most one sampled child per node" if multipath else "chains"
    raise ArgumentError(
        f"rule {name!r} verifies {shapes}, drafter {drafter!r} as configured drafts other trees; leave the rule out, "
        f"which takes {default_rule(kind, greedy=False)!r}, or configure the drafter for {shapes}"
    )


class ArgmaxWalk(Rule):
    """Accepts a child while it holds the target's argmax, then emits the argmax. It is exact at
    temperature 0, and only there.

    At T = 0 every lossless rule comes down to this one (Stern et al. 2018, arXiv 1811.03115).
    """

    name = "argmax_walk"
    reads = Reads(argmax=True)

    def verify(self, tree: TokenTree, target: NodeProbs, rng: Rng) -> Verdict:
        """Walk while the largest processed logit is a child; `rng` is not used."""
        return walk(tree, target.argmax)


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
        below: list[Probs] = []
        nodes, weights = [0], [1.0]
        while weights[-1] > 0 and tree.children[nodes[-1]]:
            probs = target.probs(nodes[-1])
            if probs.child is None:
                break
            below.append(probs)
            weights.append(min(weights[-1] * probs.ratio, 1.0))
            nodes.append(probs.child)
        return nodes, weights, below


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
            deterministic = (child for child in tree.children[node] if tree.drawn[child] is Drawn.DETERMINISTIC)
            held = next((child for child in deterministic if tree.tokens[child] == token), None)
            if held is None:
                return Verdict(path=tree.path(node), next_token=token, kind=ending(tree, node))
            node = held


class TypicalAcceptance(Rule):
    """Accepts x where target(x) > min(epsilon, delta * exp(-H(target))) and takes the longest
    accepted path.

    Medusa (Cai et al., arXiv 2401.10774), H in nats. Among paths of equal length the one that the target finds
    likeliest is kept. At T = 0 the entropy is 0 and only the argmax passes; at T > 0 the rule is LOSSY, biased towards
    the draft.

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


def share(mass: float, weight: float) -> float:
    """Return mass / (mass + 1 - weight), the probability that a node is still accepted after the
    draw below it was rejected; 0/0 is 1.

    0/0 means that the draft below was the target itself, where a rejection has probability zero.
    """
    total = mass + max(1.0 - weight, 0.0)
    return mass / total if total > 0 else 1.0


RULES: dict[str, type[Rule]] = {
    rule.name: rule
    for rule in (
        ArgmaxWalk,
        SampleWalk,
        TokenRejection,
        BlockVerification,
        RecursiveRejection,
        TraversalVerification,
        GreedyK,
        TypicalAcceptance,
    )
}
"""A new rule is one class above and its name here."""
