"""The real rules against an independent implementation in rational numbers, verdict by verdict."""

from __future__ import annotations

import random
from collections import defaultdict
from fractions import Fraction
from itertools import product

import pytest
import torch

from core.rational import REFERENCE, Distributions, tree_probability
from forerun.certify.enumeration import (
    SHAPES,
    Drawing,
    PrefixProbs,
    Shape,
    branching,
    outcomes,
    shape_depth,
    toy_drafter,
)
from forerun.core.rules import rule_named
from forerun.core.tree import TokenTree


def random_distributions(depth: int, seed: int) -> Distributions:
    """Distributions with small numerators; zeros happen."""
    chance = random.Random(seed)
    distributions: Distributions = {}
    for length in range(depth + 1):
        for prefix in product(range(3), repeat=length):
            weights = [0, 0, 0]
            while sum(weights) == 0:
                weights = [chance.randrange(7) for _ in range(3)]
            distributions[prefix] = [Fraction(weight, sum(weights)) for weight in weights]
    return distributions


def in_float(distributions: Distributions) -> dict[tuple[int, ...], torch.Tensor]:
    return {
        prefix: torch.tensor([float(value) for value in distribution], dtype=torch.float64)
        for prefix, distribution in distributions.items()
    }


def real_distribution(name: str, tree: TokenTree, target: Distributions) -> dict:
    rule, distributions, result = rule_named(name), PrefixProbs(in_float(target), tree), defaultdict(float)
    for verdict, chance in outcomes(lambda rng: rule.verify(tree, distributions, rng)):
        result[verdict.path, verdict.next_token] += chance
    return result


CASES = [
    ("token_rejection", branching(1, 1, 1), Drawing.IID),
    ("block", branching(1, 1, 1), Drawing.IID),
    ("block", branching(1, 1), Drawing.DETERMINISTIC),
    ("recursive_rejection", branching(2, 1), Drawing.WITHOUT_REPLACEMENT),
    ("recursive_rejection", branching(2, 1), Drawing.IID),
    ("recursive_rejection", branching(3, 1), Drawing.MIXED),
    ("traversal", branching(1, 1, 1), Drawing.IID),
    ("traversal", branching(2, 1), Drawing.IID),
    ("traversal", SHAPES["deep left, leaf right"], Drawing.WITHOUT_REPLACEMENT),
    ("traversal", SHAPES["leaf left, deep right"], Drawing.WITHOUT_REPLACEMENT),
    ("traversal", branching(3, 1), Drawing.MIXED),
    ("greedy_k", branching(2, 1), Drawing.GREEDY_K),
    ("greedy_k", branching(2, 2), Drawing.DETERMINISTIC),
    ("sample_walk", branching(2, 1), Drawing.DETERMINISTIC),
    ("sample_walk", branching(2, 1), Drawing.IID),
]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("name", "shape", "drawing"), CASES)
def test_real_rule_and_reference(name: str, shape: Shape, drawing: Drawing, seed: int) -> None:
    depth = shape_depth(shape)
    target, draft = random_distributions(depth, seed), random_distributions(depth, seed + 100)
    joint: dict[tuple[int, ...], Fraction] = defaultdict(Fraction)
    trees = 0
    for tree, chance in outcomes(toy_drafter(in_float(draft), shape, drawing)):
        exact = REFERENCE[name](tree, target, draft)
        real = real_distribution(name, tree, target)
        assert all(abs(real[key] - float(exact[key])) <= 1e-12 for key in {*real, *exact})
        drawn = tree_probability(tree, draft)
        assert chance == pytest.approx(float(drawn), abs=1e-14)
        add_completed(joint, tree, drawn, exact, target, depth + 1)
        trees += 1
    assert trees > (drawing is not Drawing.DETERMINISTIC)
    assert all(value == text_probability(target, text) for text, value in joint.items()), (
        "exact, not within a tolerance"
    )
    assert sum(joint.values()) == 1


def add_completed(joint, tree: TokenTree, drawn: Fraction, exact, target: Distributions, horizon: int) -> None:
    """Add a tree's verdicts to the distribution of the next `horizon` tokens, the target writing what a verdict leaves
    open."""
    for (path, token), chance in exact.items():
        emitted = (*(tree.tokens[node] for node in path), token)
        for rest in product(range(3), repeat=horizon - len(emitted)):
            text = (*emitted, *rest)
            weight = drawn * chance
            for at in range(len(emitted), horizon):
                weight *= target[text[:at]][text[at]]
            joint[text] += weight


def text_probability(target: Distributions, text: tuple[int, ...]) -> Fraction:
    chance = Fraction(1)
    for at, token in enumerate(text):
        chance *= target[text[:at]][token]
    return chance
