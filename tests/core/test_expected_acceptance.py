"""How much each rule keeps: exact expectations against published figures, formulas and upper bounds."""

from __future__ import annotations

from itertools import chain, combinations, permutations, product

import pytest
import torch
from torch import Tensor

from forerun.certify.enumeration import (
    SHAPES,
    Distributions,
    Drawing,
    World,
    branching,
    check_rule,
    exact_distribution,
    toy_distributions,
    toy_drafter,
)
from forerun.core.rules import rule_named
from selection import slow

ONE_STEP = [
    (Drawing.IID, 1),
    (Drawing.IID, 2),
    (Drawing.IID, 3),
    (Drawing.WITHOUT_REPLACEMENT, 2),
    (Drawing.GREEDY_K, 2),
]


def same_distribution(distribution: list[float], depth: int) -> Distributions:
    """A memoryless world."""
    prefixes = chain.from_iterable(product(range(len(distribution)), repeat=length) for length in range(depth + 1))
    return {prefix: torch.tensor(distribution, dtype=torch.float64) for prefix in prefixes}


def accepted(
    name: str, target: Distributions, draft: Distributions, counts: tuple[int, ...], drawing: Drawing = Drawing.IID
) -> float:
    return exact_distribution(
        rule_named(name), target, toy_drafter(draft, branching(*counts), drawing), len(counts) + 1
    ).accepted


def sibling_sets(draft: Tensor, drawing: Drawing, count: int) -> list[tuple[tuple[int, ...], float]]:
    """Every outcome of drawing `count` siblings with its probability, from the definition."""
    tokens = range(len(draft))
    if drawing is Drawing.IID:
        return [
            (drawn, float(torch.tensor([draft[token] for token in drawn]).prod()))
            for drawn in product(tokens, repeat=count)
        ]
    if drawing is Drawing.GREEDY_K:
        top = tuple(draft.argsort(descending=True).tolist()[: count - 1])
        rest = [token for token in tokens if token not in top]
        return [((*top, token), float(draft[token] / draft[rest].sum())) for token in rest]
    result = []
    for drawn in permutations(tokens, count):
        chance, left = 1.0, 1.0
        for token in drawn:
            chance, left = chance * float(draft[token]) / left, left - float(draft[token])
        result.append((drawn, chance))
    return result


def transport_bound(target: Tensor, draft: Tensor, drawing: Drawing, count: int) -> float:
    """1 + min_H [target(H) - P(all siblings in H)] over every set H: the most that any one-step rule accepts."""
    drawn = sibling_sets(draft, drawing, count)
    tokens = range(len(target))
    sets = chain.from_iterable(combinations(tokens, size) for size in range(len(target) + 1))
    return 1 + min(
        sum(float(target[token]) for token in inside)
        - sum(chance for siblings, chance in drawn if set(siblings) <= set(inside))
        for inside in sets
    )


def test_the_papers_toy() -> None:
    """arXiv 2403.10444, section 2: target (1/3, 2/3), draft (2/3, 1/3), two drafted tokens."""
    target, draft = same_distribution([1 / 3, 2 / 3], 2), same_distribution([2 / 3, 1 / 3], 2)
    for name, expected in {
        "token_rejection": 10 / 9,
        "recursive_rejection": 10 / 9,
        "block": 11 / 9,
        "traversal": 11 / 9,
    }.items():
        assert accepted(name, target, draft, (1, 1)) == pytest.approx(expected, abs=1e-14)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_leviathans_expectation(depth: int) -> None:
    """(1 - a^(g+1)) / (1 - a) tokens per pass, bonus included, where every position accepts with probability a."""
    target, draft = same_distribution([0.5, 0.3, 0.2], depth), same_distribution([0.2, 0.6, 0.2], depth)
    alpha = 0.2 + 0.3 + 0.2
    emitted = 1 + accepted("token_rejection", target, draft, (1,) * depth)
    assert emitted == pytest.approx((1 - alpha ** (depth + 1)) / (1 - alpha), abs=1e-14)


@pytest.mark.parametrize("seed", range(5))
def test_one_draft_reaches_one_minus_total_variation(seed: int) -> None:
    target, draft = toy_distributions(World.RANDOM, vocabulary=4, depth=1, seed=seed)
    expected = float(torch.minimum(target[()], draft[()]).sum())
    for name in ("token_rejection", "block", "recursive_rejection", "traversal", "greedy_k"):
        assert accepted(name, target, draft, (1,)) == pytest.approx(expected, abs=1e-14)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("drawing", "count"), ONE_STEP)
def test_no_rule_beats_the_transport_bound(drawing: Drawing, count: int, seed: int) -> None:
    target, draft = toy_distributions(World.RANDOM, vocabulary=3, depth=1, seed=seed)
    bound = transport_bound(target[()], draft[()], drawing, count)
    for name in ("sample_walk", "recursive_rejection", "traversal"):
        assert accepted(name, target, draft, (count,), drawing) <= bound + 1e-12
    if drawing is Drawing.GREEDY_K:
        assert accepted("greedy_k", target, draft, (count,), drawing) == pytest.approx(bound, abs=1e-12)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("count", [2, 3])
def test_greedy_k_formula(count: int, seed: int) -> None:
    """sum over given of p + sum over the rest of min(p, q'), arXiv 2502.18779."""
    target, draft = toy_distributions(World.RANDOM, vocabulary=5, depth=1, seed=seed)
    top = draft[()].argsort(descending=True)[: count - 1]
    rest = draft[()].clone()
    rest[top] = 0
    formula = float(target[()][top].sum()) + float(torch.minimum(target[()], rest / rest.sum()).sum())
    assert accepted("greedy_k", target, draft, (count,), Drawing.GREEDY_K) == pytest.approx(formula, abs=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_walk_accepts_the_targets_mass_on_given_children(seed: int) -> None:
    target, draft = toy_distributions(World.RANDOM, vocabulary=4, depth=1, seed=seed)
    expected = float(target[()][draft[()].argsort(descending=True)[:2]].sum())
    for name in ("sample_walk", "greedy_k", "traversal"):
        assert accepted(name, target, draft, (2,), Drawing.DETERMINISTIC) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("seed", [0, 1, *slow(2, 3)])
@pytest.mark.parametrize("drawing", list(Drawing))
@pytest.mark.parametrize("shape", ["chain of 3", "tree 2 x 1", "deep left, leaf right"])
def test_rules_keep_their_order(shape: str, drawing: Drawing, seed: int) -> None:
    """Traversal never keeps less than recursive rejection, nor that less than walking; block never less than tokens."""
    kept = {}
    for name in ("sample_walk", "recursive_rejection", "traversal", "token_rejection", "block", "greedy_k"):
        kept[name] = check_rule(rule_named(name), shape, drawing, World.RANDOM, seed=seed).accepted
    assert kept["traversal"] >= kept["recursive_rejection"] - 1e-12 >= kept["sample_walk"] - 2e-12
    assert kept["block"] >= kept["token_rejection"] - 1e-12
    if len(SHAPES[shape]) == 1:
        assert kept["block"] == pytest.approx(kept["traversal"], abs=1e-12)
    assert kept["traversal"] >= max(kept["greedy_k"], kept["block"]) - 1e-12


def test_a_draft_that_is_the_target_is_kept_whole() -> None:
    for name in ("token_rejection", "block", "recursive_rejection", "traversal"):
        check = check_rule(rule_named(name), "chain of 3", Drawing.IID, World.SAME)
        assert check.accepted == pytest.approx(3.0, abs=1e-12)


def test_a_draft_off_the_support_is_never_kept() -> None:
    for name in ("token_rejection", "block", "recursive_rejection", "traversal", "sample_walk"):
        check = check_rule(rule_named(name), "chain of 3", Drawing.IID, World.OFF_SUPPORT)
        assert check.accepted == 0.0
