"""Every lossless rule emits exactly the target's distribution: all outcomes enumerated, over shapes, drawings and
worlds.
"""

from collections import defaultdict

import pytest
import torch

from forerun.certify.enumeration import (
    SHAPES,
    TOLERANCE,
    Distributions,
    Drawing,
    EnumeratingRng,
    PrefixProbs,
    World,
    branching,
    check_rule,
    check_rules,
    exact_distribution,
    joint_distribution,
    outcomes,
    toy_distributions,
    toy_drafter,
)
from forerun.core.probs import HostResidual, NodeProbs, Probs
from forerun.core.rng import Rng
from forerun.core.rules import RULES, Rule, TokenRejection, rule_named
from forerun.core.tree import TokenTree
from forerun.types import Drawn, Source, Verdict

LOSSLESS = [name for name in RULES if rule_named(name).lossless]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", LOSSLESS)
def test_emitted_distribution_is_the_targets(name: str, shape: str) -> None:
    rule = rule_named(name)
    checks = [check_rule(rule, shape, drawing, world, seed=1) for drawing in Drawing for world in World]
    judged = [check for check in checks if check is not None]
    assert len(judged) == len(Drawing) * (1 if name == "argmax_walk" else len(World))
    for check in judged:
        assert check.passed, check


@pytest.mark.parametrize("name", ["traversal", "recursive_rejection", "greedy_k"])
def test_wide_trees(name: str) -> None:
    target, draft = toy_distributions(World.RANDOM, vocabulary=3, depth=2, seed=3)
    drawing = Drawing.GREEDY_K if name == "greedy_k" else Drawing.WITHOUT_REPLACEMENT
    distribution = exact_distribution(rule_named(name), target, toy_drafter(draft, branching(3, 1), drawing), 3)
    assert distribution.error(target) <= TOLERANCE


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("drawing", [Drawing.IID, Drawing.WITHOUT_REPLACEMENT])
def test_traversal_is_block_verification_on_a_chain(seed: int, drawing: Drawing) -> None:
    target, draft = toy_distributions(World.RANDOM, vocabulary=3, depth=3, seed=seed)
    for tree, _ in outcomes(toy_drafter(draft, branching(1, 1, 1), drawing)):
        assert verdict_distribution("block", tree, target) == pytest.approx(
            verdict_distribution("traversal", tree, target), abs=1e-14
        )


def verdict_distribution(name: str, tree: TokenTree, target: Distributions) -> dict[tuple, float]:
    distribution = defaultdict(float)
    distributions = PrefixProbs(target, tree)
    for verdict, chance in outcomes(lambda rng: rule_named(name).verify(tree, distributions, rng)):
        distribution[verdict.path, verdict.next_token, verdict.kind] += chance
    return {key: chance for key, chance in distribution.items() if chance > 0}


@pytest.mark.parametrize("name", ["sample_walk", "recursive_rejection", "traversal"])
@pytest.mark.parametrize("seed", range(4))
def test_shapes_may_depend_on_what_was_drawn_before(name: str, seed: int) -> None:
    """Every node is drawn in another way, and what hangs below it depends on the tokens above and before it."""
    target, draft = toy_distributions(World.RANDOM, vocabulary=3, depth=2, seed=seed)

    def draw(rng: Rng) -> TokenTree:
        tree = TokenTree(0)
        tree.set_probs(0, draft[()])
        first = rng.drafted(draft[()], 0, 0)
        tree.add(first, 0, drawn=Drawn.IID)
        second = first
        if first != 1:
            second = rng.drafted(draft[()], 0, 1)
            tree.add(second, 0, drawn=Drawn.IID)
            distribution = draft[second,]
            tree.set_probs(2, distribution)
            tree.add(rng.drafted(distribution, 2, 0), 2, drawn=Drawn.WITHOUT_REPLACEMENT)
        if second == 0:
            rest = draft[first,].clone()
            tree.add(int(rest.argmax()), 1)
            rest[int(rest.argmax())] = 0
            tree.set_probs(1, rest)
            tree.add(rng.drafted(rest, 1, 0), 1, drawn=Drawn.IID)
        tree.add(2, 0)
        return tree

    distribution = exact_distribution(rule_named(name), target, draw, 3)
    assert distribution.error(target) <= TOLERANCE


def test_typical_acceptance_is_labelled_lossy_because_it_is() -> None:
    rule = rule_named("typical")
    assert not rule.lossless
    errors = [check_rule(rule, "chain of 3", Drawing.IID, World.RANDOM, seed=seed).error for seed in range(3)]
    assert max(errors) > 0.05
    exact = check_rule(rule, "chain of 3", Drawing.IID, World.GREEDY_TARGET)
    assert exact.error <= TOLERANCE, "at temperature 0 it accepts the argmax and nothing else"


def test_check_rules_covers_every_lossless_rule_and_no_other() -> None:
    assert {check.rule for check in check_rules(["argmax_walk", "typical"])} == {"argmax_walk"}
    assert {next(iter(check_rules([name]))).rule for name in LOSSLESS} == set(LOSSLESS)


def test_the_enumeration_sees_every_outcome_once() -> None:
    distribution = torch.tensor([0.5, 0.0, 0.5])

    def run(rng: EnumeratingRng) -> tuple:
        if rng.flip(0.25, 1):
            return ("kept", rng.draw(distribution, 0))
        return ("lost", rng.drafted(distribution, 0, 1), rng.flip(1.0, 2), rng.flip(0.0, 3))

    seen = list(outcomes(run))
    lost = {("lost", token, True, False): 0.375 for token in (0, 2)}
    assert dict(seen) == {("kept", 0): 0.125, ("kept", 2): 0.125, **lost} and len(seen) == 4


def test_a_coin_used_twice_is_refused() -> None:
    with pytest.raises(AssertionError, match="used twice"):
        list(outcomes(lambda rng: (rng.flip(0.5, 1), rng.flip(0.5, 1))))


def test_joint_distribution_is_the_product_of_the_conditionals() -> None:
    target, _ = toy_distributions(World.RANDOM, vocabulary=3, depth=2, seed=0)
    joint = joint_distribution(target, (), 3)
    assert joint.sum().item() == pytest.approx(1.0, abs=1e-15)
    assert joint[2, 0, 1].item() == pytest.approx(float(target[()][2] * target[(2,)][0] * target[(2, 0)][1]), abs=1e-17)


@pytest.mark.parametrize("world", World)
def test_toy_worlds_are_what_they_say(world: World) -> None:
    target, draft = toy_distributions(world, vocabulary=3, depth=2, seed=5)
    assert len(target) == len(draft) == 1 + 3 + 9
    for prefix, distribution in target.items():
        assert distribution.sum().item() == pytest.approx(1.0) and draft[prefix].sum().item() == pytest.approx(1.0)
    overlap = [float(torch.minimum(target[prefix], draft[prefix]).sum()) for prefix in target]
    assert world is not World.OFF_SUPPORT or max(overlap) == 0.0
    assert world is not World.SAME or min(overlap) == pytest.approx(1.0)
    zeros = {World.TARGET_ZEROS: target, World.DRAFT_ZEROS: draft}.get(world)
    assert zeros is None or all((distribution == 0).sum() == 1 for distribution in zeros.values())


@pytest.mark.parametrize("name", ["token_rejection", "block", "traversal", "recursive_rejection", "greedy_k"])
def test_float32_distributions_over_a_draft_vocabulary_stay_exact(name: str) -> None:
    """Recorded in float32 over the few tokens that the drafter knows, judged over the target's vocabulary."""
    ids = torch.tensor([3, 0])

    def draw(rng: Rng) -> TokenTree:
        tree = TokenTree(0)
        for node in range(2):
            probs = torch.zeros(4).index_copy(0, ids, torch.tensor([0.3, 0.7 + 0.1 * node]))
            tree.set_probs(node, probs)
            tree.add(rng.drafted(probs, node), node, drawn=Drawn.WITHOUT_REPLACEMENT)
        return tree

    for seed in range(3):
        target, _ = toy_distributions(World.RANDOM, vocabulary=4, depth=2, seed=seed)
        distribution = exact_distribution(rule_named(name), target, draw, 3)
        assert distribution.error(target) <= TOLERANCE
        assert distribution.accepted > 0.2


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
