"""Bugs that shipped elsewhere, planted here: each shows in the exact distribution or in the exact acceptance."""

from collections.abc import Callable

import pytest
import torch

from forerun.certify.enumeration import (
    TOLERANCE,
    Distributions,
    Drawing,
    World,
    branching,
    exact_distribution,
    toy_distributions,
    toy_drafter,
)
from forerun.core import rules
from forerun.core.probs import HostResidual, NodeProbs, Probs
from forerun.core.rng import Rng
from forerun.core.rules import TokenRejection, rule_named
from forerun.core.tree import TokenTree
from forerun.types import Drawn, Source, Verdict

CLEARLY_WRONG = 1e-3
"""Largest error of a joint probability; rounding is 1e-15."""
Draw = Callable[[Rng], TokenTree]
Change = Callable[[Draw], Draw]


def worst_error(
    rule: rules.Rule, counts: tuple[int, ...], drawing: Drawing, change: Change = lambda draw: draw
) -> float:
    """Over some worlds; `change` is what the drafter does to its trees."""
    worst = 0.0
    for seed in range(4):
        target, draft = toy_distributions(World.RANDOM, vocabulary=3, depth=len(counts), seed=seed)
        draw = toy_drafter(draft, branching(*counts), drawing)
        found = exact_distribution(rule, target, change(draw), len(counts) + 1)
        worst = max(worst, found.error(target))
    return worst


class UnnormalisedResidual(rules.RecursiveRejection):
    """The second sibling is judged against [p - q]_+ as it stands."""

    def verify(self, tree: TokenTree, target: NodeProbs, rng: Rng) -> Verdict:
        probs = target.probs(0)
        while (child := probs.child) is not None:
            if rng.flip(probs.ratio, child):
                return Verdict(path=(child,), next_token=target.probs(child).draw(rng), kind=Source.BONUS)
            probs, _ = probs.reject()
            probs.__dict__["mass"] = 1.0
        return Verdict(path=(), next_token=probs.draw(rng), kind=Source.RECOVERED)


class NoResidual(TokenRejection):
    """After a rejection the target's own distribution is drawn from."""

    def verify(self, tree: TokenTree, target: NodeProbs, rng: Rng) -> Verdict:
        probs, child = target.probs(0), 1
        if rng.flip(probs.ratio, child):
            return Verdict(path=(child,), next_token=target.probs(child).draw(rng), kind=Source.BONUS)
        return Verdict(path=(), next_token=probs.draw(rng), kind=Source.RECOVERED)


class StaleBonus(TokenRejection):
    """The bonus token is drawn one position too early."""

    def verify(self, tree: TokenTree, target: NodeProbs, rng: Rng) -> Verdict:
        return super().verify(tree, _Earlier(target, tree), rng)


class _Earlier:
    def __init__(self, target: NodeProbs, tree: TokenTree) -> None:
        self.target, self.tree = target, tree

    def probs(self, node: int) -> Probs:
        if self.tree.children[node]:
            return self.target.probs(node)
        return HostResidual(self.tree, node, self.target.probs(self.tree.parents[node]).values)

    def argmax(self, node: int) -> int:
        return int(self.probs(node).values.argmax())


class UncappedRatios(rules.BlockVerification):
    """Joint ratios capped only where they are used, not on the way (HSD's last ratio)."""

    last_only = False

    def _weigh(self, tree: TokenTree, target: NodeProbs) -> tuple[list[int], list[float], list[Probs]]:
        nodes, weights, distributions = super()._weigh(tree, target)
        joint = [1.0]
        for probs in distributions:
            joint.append(joint[-1] * probs.ratio)
        uncapped = [min(weight, 1.0) for weight in joint]
        return nodes, [*weights[:-1], uncapped[-1]] if self.last_only else uncapped, distributions


class UncappedLastRatio(UncappedRatios):
    """Only the last one is."""

    last_only = True


class StopsAtFirstMiss(rules.BlockVerification):
    """Block verification that stops at the first prefix that does not hold instead of keeping the longest that does."""

    def verify(self, tree: TokenTree, target: NodeProbs, rng: Rng) -> Verdict:
        nodes, weights, distributions = self._weigh(tree, target)
        at = 0
        while at + 1 < len(nodes):
            weight = weights[at + 1]
            if at + 2 < len(nodes):
                mass = distributions[at + 1].reject(weight)[1]
                weight = mass / (mass + 1 - weight) if mass else weight
            if not rng.flip(weight, nodes[at + 1]):
                break
            at += 1
        node = nodes[at]
        if at + 1 == len(nodes):
            return Verdict(path=tree.path(node), next_token=target.probs(node).draw(rng), kind=Source.BONUS)
        token = distributions[at].reject(weights[at])[0].draw(rng)
        return Verdict(path=tree.path(node), next_token=token, kind=Source.RECOVERED)


@pytest.mark.parametrize(
    ("wrong", "right", "counts", "drawing"),
    [
        (UnnormalisedResidual(), "recursive_rejection", (2,), Drawing.IID),
        (NoResidual(), "token_rejection", (1,), Drawing.IID),
        (StaleBonus(), "token_rejection", (1, 1), Drawing.IID),
        (UncappedRatios(), "block", (1, 1), Drawing.IID),
        (UncappedLastRatio(), "block", (1, 1), Drawing.IID),
        (StopsAtFirstMiss(), "block", (1, 1, 1), Drawing.IID),
        (rule_named("argmax_walk"), "token_rejection", (1, 1), Drawing.IID),
        (rule_named("argmax_walk"), "sample_walk", (2,), Drawing.DETERMINISTIC),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_wrong_rule_is_seen(wrong: rules.Rule, right: str, counts: tuple[int, ...], drawing: Drawing) -> None:
    assert worst_error(wrong, counts, drawing) > CLEARLY_WRONG
    assert worst_error(rule_named(right), counts, drawing) <= TOLERANCE


class MissingBonus(TokenRejection):
    """A chain kept whole emits its last token as the step's own, and nothing after it."""

    def verify(self, tree: TokenTree, target: NodeProbs, rng: Rng) -> Verdict:
        verdict = super().verify(tree, target, rng)
        if verdict.kind is not Source.BONUS:
            return verdict
        return Verdict(path=verdict.path[:-1], next_token=tree.tokens[verdict.path[-1]], kind=Source.RECOVERED)


def test_missing_bonus_token_shows_in_the_acceptance_only() -> None:
    """Fewer tokens, the right distribution: no distribution test can see it."""
    assert worst_error(MissingBonus(), (1, 1), Drawing.IID) <= TOLERANCE
    prefixes = [(), *[(a,) for a in range(2)], *[(a, b) for a in range(2) for b in range(2)]]
    target: Distributions = {prefix: torch.tensor([1 / 3, 2 / 3], dtype=torch.float64) for prefix in prefixes}
    draft: Distributions = {prefix: torch.tensor([2 / 3, 1 / 3], dtype=torch.float64) for prefix in prefixes}
    draw = toy_drafter(draft, branching(1, 1), Drawing.IID)
    right = exact_distribution(rule_named("token_rejection"), target, draw, 3).accepted
    assert right == pytest.approx(10 / 9)
    assert exact_distribution(MissingBonus(), target, draw, 3).accepted == pytest.approx(10 / 9 - 4 / 9)


def merged(draw: Draw) -> Draw:
    """Two draws of one token become one node: the second draw is forgotten."""

    def changed(rng: Rng) -> TokenTree:
        tree, made = draw(rng), TokenTree(0)
        for token in dict.fromkeys(tree.tokens[1:]):
            made.add(token, 0, drawn=Drawn.IID)
        made.set_probs(0, tree.draft_probs[0])
        return made

    return changed


def relabelled(draw: Draw) -> Draw:
    """Siblings without replacement are called independent."""

    def changed(rng: Rng) -> TokenTree:
        tree = draw(rng)
        tree.drawn = [Drawn.DETERMINISTIC, *[Drawn.IID] * tree.size]
        return tree

    return changed


@pytest.mark.parametrize("name", ["recursive_rejection", "traversal"])
@pytest.mark.parametrize(
    ("change", "counts", "drawing"),
    [(merged, (3,), Drawing.IID), (relabelled, (2,), Drawing.WITHOUT_REPLACEMENT)],
    ids=["merged", "relabelled"],
)
def test_a_wrong_draft_is_seen(name: str, change: Change, counts: tuple[int, ...], drawing: Drawing) -> None:
    assert worst_error(rule_named(name), counts, drawing, change) > CLEARLY_WRONG
    assert worst_error(rule_named(name), counts, drawing) <= TOLERANCE


@pytest.mark.parametrize("name", ["token_rejection", "block", "recursive_rejection", "traversal", "greedy_k"])
def test_distribution_recorded_before_processing(name: str) -> None:
    """transformers #47932: the draft samples after top-k, the rule is told the distribution before it."""

    def draw_top_2(draft: Distributions) -> Draw:
        def draw(rng: Rng) -> TokenTree:
            distribution = draft[()]
            cut = torch.where(distribution < distribution.topk(2).values[-1], 0.0, distribution)
            tree = TokenTree(0)
            tree.add(rng.drafted(cut, 0), 0, drawn=Drawn.IID)
            tree.set_probs(0, distribution)
            return tree

        return draw

    worlds = [toy_distributions(World.RANDOM, vocabulary=3, depth=1, seed=seed) for seed in range(4)]
    errors = [
        exact_distribution(rule_named(name), target, draw_top_2(draft), 2).error(target) for target, draft in worlds
    ]
    assert max(errors) > CLEARLY_WRONG


def test_argmax_told_as_sampled() -> None:
    """Apple ReDrafter #6, dilab-zju: the likeliest token is drafted and judged as if drawn from the distribution."""

    def draw(_rng: Rng) -> TokenTree:
        tree = TokenTree(0)
        tree.add(2, 0, drawn=Drawn.IID)
        tree.set_probs(0, torch.tensor([0.2, 0.3, 0.5]))
        return tree

    target, _ = toy_distributions(World.RANDOM, vocabulary=3, depth=1, seed=0)
    for name in ("token_rejection", "block", "traversal", "recursive_rejection"):
        assert exact_distribution(rule_named(name), target, draw, 2).error(target) > CLEARLY_WRONG
    walked = exact_distribution(rule_named("sample_walk"), target, draw, 2)
    assert walked.error(target) <= TOLERANCE, "exact for anything"


def test_retrospective_pruning_is_biased() -> None:
    """DSpark's counterexample: p = (.7, .3), q = (.5, .5); dropping a token after it was drawn gives (.85, .15)."""

    def draw(rng: Rng) -> TokenTree:
        tree = TokenTree(0)
        token = rng.drafted(torch.tensor([0.5, 0.5]), 0)
        if token == 0:
            tree.add(token, 0, drawn=Drawn.IID)
            tree.set_probs(0, torch.tensor([0.5, 0.5], dtype=torch.float64))
        return tree

    prefixes: list[tuple[int, ...]] = [(), (0,), (1,)]
    target: Distributions = {prefix: torch.tensor([0.7, 0.3], dtype=torch.float64) for prefix in prefixes}
    distribution = exact_distribution(rule_named("token_rejection"), target, draw, 2)
    assert distribution.joint.sum(1).tolist() == pytest.approx([0.85, 0.15])
