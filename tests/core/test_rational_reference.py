"""The real rules against an independent implementation in rational numbers, verdict by verdict."""

import random
from collections import defaultdict
from fractions import Fraction
from itertools import product

import pytest
import torch

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
from forerun.types import Drawn

Distribution = list[Fraction]
Distributions = dict[tuple[int, ...], Distribution]
Result = dict[tuple[tuple[int, ...], int], Fraction]
ONE = Fraction(1)


def positive_part(target: Distribution, draft: Distribution, weight: Fraction = ONE) -> Distribution:
    return [max(weight * a - b, Fraction(0)) for a, b in zip(target, draft, strict=True)]


def norm(distribution: Distribution) -> Distribution:
    return [value / sum(distribution) for value in distribution]


def prefix(tree: TokenTree, node: int) -> tuple[int, ...]:
    return tuple(tree.tokens[step] for step in tree.path(node))


def restricted(distribution: Distribution, tokens: list[int]) -> Distribution:
    return norm([Fraction(0) if token in tokens else value for token, value in enumerate(distribution)])


def sibling_distribution(tree: TokenTree, draft: Distributions, child: int) -> Distribution:
    """The distribution that `child` was drawn from, given its elder siblings."""
    parent, kind = tree.parents[child], tree.drawn[child]
    distribution = draft[prefix(tree, parent)]
    if kind is Drawn.DETERMINISTIC:
        return [Fraction(token == tree.tokens[child]) for token in range(len(distribution))]
    gone = [tree.tokens[node] for node in tree.children[parent] if tree.drawn[node] is Drawn.DETERMINISTIC]
    if kind is Drawn.WITHOUT_REPLACEMENT:
        gone += [tree.tokens[node] for node in tree.children[parent] if node < child]
    return restricted(distribution, gone)


def tree_probability(tree: TokenTree, draft: Distributions) -> Fraction:
    """The chance that the toy drafter drew this tree."""
    chance = ONE
    for node in range(1, tree.size + 1):
        chance *= sibling_distribution(tree, draft, node)[tree.tokens[node]]
    return chance


def sampled_first(tree: TokenTree, node: int) -> list[int]:
    return sorted(tree.children[node], key=lambda child: tree.drawn[child] is Drawn.DETERMINISTIC)


def recursive(tree: TokenTree, target: Distributions, draft: Distributions) -> Result:
    """Sections 2.2 and 2.4: on a chain this is token-by-token rejection."""
    result: Result = defaultdict(Fraction)

    def visit(node: int, reach: Fraction) -> None:
        distribution = target[prefix(tree, node)]
        for child in sampled_first(tree, node):
            drafted, token = sibling_distribution(tree, draft, child), tree.tokens[child]
            accept = min(ONE, distribution[token] / drafted[token])
            visit(child, reach * accept)
            reach *= 1 - accept
            if reach == 0:
                return
            distribution = norm(positive_part(distribution, drafted))
        for token, value in enumerate(distribution):
            result[tree.path(node), token] += reach * value

    visit(0, ONE)
    return result


def block(tree: TokenTree, target: Distributions, draft: Distributions) -> Result:
    """Section 2.3, by the closed form P(kept = i) = h_i * prod_{j > i} (1 - h_j)."""
    size = tree.size
    distributions = [target[prefix(tree, node)] for node in range(size + 1)]
    drafts = [sibling_distribution(tree, draft, node) for node in range(1, size + 1)]
    weights = [ONE]
    for node in range(1, size + 1):
        token = tree.tokens[node]
        weights.append(min(weights[-1] * distributions[node - 1][token] / drafts[node - 1][token], ONE))
    result: Result = defaultdict(Fraction)
    missed = ONE
    for node in range(size, -1, -1):
        left = distributions[node] if node == size else positive_part(distributions[node], drafts[node], weights[node])
        mass = sum(left)
        holds = (
            weights[node] if node == size else ONE if mass + 1 == weights[node] else mass / (mass + 1 - weights[node])
        )
        holds = ONE if node == 0 else holds
        if missed * holds > 0:
            for token, value in enumerate(norm(left)):
                result[tree.path(node), token] += missed * holds * value
        missed *= 1 - holds
    return result


def traversal(tree: TokenTree, target: Distributions, draft: Distributions) -> Result:
    """Section 2.5 as the sheet tells it: a loop that deletes leaves, the state in plain dictionaries."""
    distributions = {node: target[prefix(tree, node)] for node in range(tree.size + 1)}
    alive = {node: sampled_first(tree, node) for node in range(tree.size + 1)}
    weight = {0: ONE}
    result: Result = defaultdict(Fraction)
    reach = ONE
    while reach > 0:
        node = 0
        while alive[node]:
            child = alive[node][0]
            token, drafted = tree.tokens[child], sibling_distribution(tree, draft, child)
            weight.setdefault(child, min(weight[node] * distributions[node][token] / drafted[token], ONE))
            node = child
        for token, value in enumerate(distributions[node]):
            result[tree.path(node), token] += reach * weight[node] * value
        reach *= 1 - weight[node]
        if reach > 0:
            parent = tree.parents[node]
            left = positive_part(distributions[parent], sibling_distribution(tree, draft, node), weight[parent])
            weight[parent] = sum(left) / (sum(left) + 1 - weight[parent])
            distributions[parent] = norm(left) if sum(left) else distributions[parent]
            alive[parent].pop(0)
    return result


def greedy_k(tree: TokenTree, target: Distributions, draft: Distributions) -> Result:
    """Section 1.3: rejection with the restricted distribution; a draw that a deterministic sibling holds descends
    there."""
    result: Result = defaultdict(Fraction)

    def visit(node: int, reach: Fraction) -> None:
        distribution = target[prefix(tree, node)]
        given = {tree.tokens[child]: child for child in tree.children[node] if tree.drawn[child] is Drawn.DETERMINISTIC}
        for child in tree.children[node]:
            if tree.drawn[child] is not Drawn.DETERMINISTIC:
                drafted, token = sibling_distribution(tree, draft, child), tree.tokens[child]
                accept = min(ONE, distribution[token] / drafted[token])
                visit(child, reach * accept)
                reach *= 1 - accept
                distribution = norm(positive_part(distribution, drafted)) if reach else distribution
        for token, value in enumerate(distribution):
            if token in given:
                visit(given[token], reach * value)
            else:
                result[tree.path(node), token] += reach * value

    visit(0, ONE)
    return result


def sample_walk(tree: TokenTree, target: Distributions, _draft: Distributions) -> Result:
    """Section 2.6, by its definition: the target's own text, cut where it leaves the tree."""
    result: Result = defaultdict(Fraction)
    depth = max(tree.depths) + 1
    for text in product(range(len(target[()])), repeat=depth):
        chance = ONE
        for at, token in enumerate(text):
            chance *= target[text[:at]][token]
        kept = max(
            (node for node in range(tree.size + 1) if prefix(tree, node) == text[: tree.depths[node]]),
            key=lambda node: (tree.depths[node], bool(tree.children[node]), -node),
        )
        result[tree.path(kept), text[tree.depths[kept]]] += chance
    return result


REFERENCE = {
    "token_rejection": recursive,
    "recursive_rejection": recursive,
    "block": block,
    "traversal": traversal,
    "greedy_k": greedy_k,
    "sample_walk": sample_walk,
}


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
