"""Bugs that shipped elsewhere and that no line of ours can be changed into (`mutations.py` plants those): each shows in
the exact distribution or in the exact acceptance."""

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
from forerun.core.probs import HostResidual, NodeProbs, Probs
from forerun.core.rng import Rng
from forerun.core.rules import Rule, TokenRejection, rule_named
from forerun.core.tree import TokenTree
from forerun.types import Drawn, Source, Verdict

CLEARLY_WRONG = 1e-3
"""Largest error of a joint probability; rounding is 1e-15."""


def worst_error(rule: Rule) -> float:
    """Over some worlds, for chains of two."""
    errors = []
    for seed in range(4):
        target, draft = toy_distributions(World.RANDOM, vocabulary=3, depth=2, seed=seed)
        draw = toy_drafter(draft, branching(1, 1), Drawing.IID)
        errors.append(exact_distribution(rule, target, draw, 3).error(target))
    return max(errors)


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


def test_a_bonus_from_the_position_before_is_seen() -> None:
    assert worst_error(StaleBonus()) > CLEARLY_WRONG


class MissingBonus(TokenRejection):
    """A chain kept whole emits its last token as the step's own, and nothing after it."""

    def verify(self, tree: TokenTree, target: NodeProbs, rng: Rng) -> Verdict:
        verdict = super().verify(tree, target, rng)
        if verdict.kind is not Source.BONUS:
            return verdict
        return Verdict(path=verdict.path[:-1], next_token=tree.tokens[verdict.path[-1]], kind=Source.RECOVERED)


def test_missing_bonus_token_shows_in_the_acceptance_only() -> None:
    """Fewer tokens, the right distribution: no distribution test can see it."""
    assert worst_error(MissingBonus()) <= TOLERANCE
    prefixes = [(), *[(a,) for a in range(2)], *[(a, b) for a in range(2) for b in range(2)]]
    target: Distributions = {prefix: torch.tensor([1 / 3, 2 / 3], dtype=torch.float64) for prefix in prefixes}
    draft: Distributions = {prefix: torch.tensor([2 / 3, 1 / 3], dtype=torch.float64) for prefix in prefixes}
    draw = toy_drafter(draft, branching(1, 1), Drawing.IID)
    right = exact_distribution(rule_named("token_rejection"), target, draw, 3).accepted
    assert right == pytest.approx(10 / 9)
    assert exact_distribution(MissingBonus(), target, draw, 3).accepted == pytest.approx(10 / 9 - 4 / 9)


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
