"""The rules once more in rational numbers, written from the papers' formulas and not from the code under test.

Each function gives the exact distribution of (accepted node ids, next token) for one tree, so it needs no rng at all.
"""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction
from itertools import product

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
