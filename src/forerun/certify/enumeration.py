"""Exact distributions of the real rules, by an rng that enumerates all outcomes and by toy targets that are small
enough.

With `EnumeratingRng` instead of `Rng` a rule is run once per outcome, with that outcome's probability, so its output
distribution is computed, not estimated. The tests and ``forerun certify`` use this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, partial
from math import isnan
from typing import TypeVar

import torch
from torch import Tensor

from forerun.core.probs import HostResidual
from forerun.core.rng import Rng
from forerun.core.rules import RULES, Rule, rule_named
from forerun.core.tree import TokenTree
from forerun.types import Drawn

T = TypeVar("T")

TOLERANCE = 1e-12  # Largest difference between an emitted and the target's joint probability that counts as rounding

Distributions = Mapping[tuple[int, ...], Tensor]  # The distribution (V,) float64 of the token after each prefix
Shape = tuple["Shape", ...]  # A tree's shape: the shapes of a node's children; () is a leaf
Draw = Callable[[Rng], TokenTree]  # A toy drafter: one tree, all its randomness from the rng


class EnumeratingRng(Rng):
    """An rng that follows a script of outcomes and multiplies their probabilities.

    Using a key twice is an error: a real rng would give the same number twice, which is a bias.
    """

    def __init__(self, script: Sequence[int] = ()) -> None:
        super().__init__(seed=0, position=0)
        self.probability = 1.0  # Of all outcomes taken so far
        self.choices: list[tuple[int, int]] = []
        """(index of the outcome taken, number of outcomes) of every real choice."""
        self._script = script
        self._keys: set[tuple[str, int, int]] = set()

    def flip(self, probability: float, node: int) -> bool:
        """Take both outcomes, unless one is certain."""
        assert not isnan(probability), "a probability is NaN"
        chance = min(max(probability, 0.0), 1.0)
        return self._choose(("flip", node, 0), [chance, 1.0 - chance]) == 0

    def draw(self, distribution: Tensor, depth: int = 0) -> int:
        """Take every token of positive probability."""
        return self._choose(("draw", depth, 0), _probabilities(distribution))

    def drafted(self, distribution: Tensor, node: int, index: int = 0) -> int:
        """Take every token of positive probability."""
        return self._choose(("drafted", node, index), _probabilities(distribution))

    def _choose(self, key: tuple[str, int, int], probabilities: list[float]) -> int:
        assert key not in self._keys, f"the random number {key} was used twice"
        self._keys.add(key)
        possible = [outcome for outcome, chance in enumerate(probabilities) if chance > 0]
        if len(possible) > 1:
            at = len(self.choices)
            taken = self._script[at] if at < len(self._script) else 0
            self.choices.append((taken, len(possible)))
        else:
            taken = 0
        self.probability *= probabilities[possible[taken]]
        return possible[taken]


def _probabilities(distribution: Tensor) -> list[float]:
    values: list[float] = distribution.tolist()
    total = sum(values)
    assert 0 < total < float("inf") and min(values) >= 0, f"this is no distribution: {values}"
    return [value / total for value in values]


def outcomes(run: Callable[[EnumeratingRng], T]) -> Iterator[tuple[T, float]]:
    """Every result of `run` with its probability; `run` must be a function of its rng alone."""
    script: list[int] | None = []
    while script is not None:
        rng = EnumeratingRng(script)
        result = run(rng)
        yield result, rng.probability
        script = _successor(rng.choices)


def _successor(choices: list[tuple[int, int]]) -> list[int] | None:
    """The next script in lexicographic order; None after the last."""
    while choices and choices[-1][0] + 1 == choices[-1][1]:
        choices = choices[:-1]
    if not choices:
        return None
    return [taken for taken, _ in choices[:-1]] + [choices[-1][0] + 1]


class PrefixProbs:
    """A toy target at the nodes of one tree: the distribution of a node is that of its path's tokens."""

    def __init__(self, distributions: Distributions, tree: TokenTree) -> None:
        self.distributions, self.tree = distributions, tree
        self._residuals: dict[int, HostResidual] = {}  # A rule rejects from them and leaves them as they are

    def probs(self, node: int) -> HostResidual:
        """Return the float64 residual of a node."""
        if node not in self._residuals:
            values = self.distributions[tuple(self.tree.tokens[step] for step in self.tree.path(node))]
            self._residuals[node] = HostResidual(self.tree, node, values)
        return self._residuals[node]

    def argmax(self, node: int) -> int:
        """The likeliest token."""
        return int(self.probs(node).values.argmax())


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactDistribution:
    """A rule's outcomes over all its randomness and the drafter's."""

    joint: Tensor
    """(V,) * horizon float64: the distribution of the next tokens, completed by the target where a step emitted
    fewer."""
    accepted: float  # Expected number of accepted nodes; one more token is emitted

    def error(self, target: Distributions) -> float:
        """Largest absolute difference from the target's own joint distribution."""
        return float((self.joint - joint_distribution(target, (), self.joint.dim())).abs().max())


def joint_distribution(target: Distributions, prefix: tuple[int, ...], length: int) -> Tensor:
    """(V,) * length, the target's distribution of the next `length` tokens after `prefix`; a scalar 1 for none."""
    if length == 0:
        return torch.ones((), dtype=torch.float64)
    distribution = target[prefix]
    rest = [joint_distribution(target, (*prefix, token), length - 1) for token in range(len(distribution))]
    return torch.stack([chance * after for chance, after in zip(distribution, rest, strict=True)])


def exact_distribution(rule: Rule, target: Distributions, draw: Draw, horizon: int) -> ExactDistribution:
    """The exact distribution of the next `horizon` tokens when `rule` verifies what `draw` drafts.

    `horizon` is the tree's depth + 1, so that every emitted block fits; `target` holds every prefix shorter than that.
    """
    return _emitted(rule, target, outcomes(draw), horizon)


def _emitted(
    rule: Rule, target: Distributions, drawn: Iterable[tuple[TokenTree, float]], horizon: int
) -> ExactDistribution:
    """Return the exact distribution of every tree that may be drawn, with its probability."""
    joint = torch.zeros([len(target[()])] * horizon, dtype=torch.float64)
    accepted = 0.0
    rests: dict[tuple[int, ...], Tensor] = {}
    for tree, chance in drawn:
        distributions = PrefixProbs(target, tree)
        for verdict, probability in outcomes(partial(rule.verify, tree, distributions)):
            emitted = (*(tree.tokens[node] for node in verdict.path), verdict.next_token)
            if emitted not in rests:
                rests[emitted] = joint_distribution(target, emitted, horizon - len(emitted))
            joint[emitted] += chance * probability * rests[emitted]
            accepted += chance * probability * len(verdict.path)
    return ExactDistribution(joint=joint, accepted=accepted)


class Drawing(StrEnum):
    """How a toy drafter fills a shape."""

    IID = "iid"
    WITHOUT_REPLACEMENT = "without replacement"
    DETERMINISTIC = "deterministic"  # The likeliest tokens
    GREEDY_K = "greedy-k"  # The likeliest tokens, and as the last sibling one drawn from the rest
    MIXED = "mixed"  # The likeliest token, and the other siblings drawn from the rest without replacement


def branching(*counts: int) -> Shape:
    """Return the shape in which all nodes of a depth have the same number of children; ``branching(1, 1, 1)`` is a
    chain of three.
    """
    return (branching(*counts[1:]),) * counts[0] if counts else ()


def shape_depth(shape: Shape) -> int:
    """Levels below the root."""
    return max((1 + shape_depth(child) for child in shape), default=0)


def toy_drafter(distributions: Distributions, shape: Shape, drawing: Drawing) -> Draw:
    """Return a drafter with these `distributions` that fills `shape`; a node has fewer children if its distribution has
    fewer tokens."""

    def draw(rng: Rng) -> TokenTree:
        tree = TokenTree(root=0)
        waiting: list[tuple[int, tuple[int, ...], Shape]] = [(0, (), shape)]
        for node, prefix, below in waiting:
            if not below:
                continue
            children = _draw_children(tree, node, (distributions[prefix], drawing, len(below)), rng)
            for child, next_shape in zip(children, below, strict=False):
                waiting.append((child, (*prefix, tree.tokens[child]), next_shape))
        return tree

    return draw


def _draw_children(tree: TokenTree, node: int, how: tuple[Tensor, Drawing, int], rng: Rng) -> list[int]:
    distribution, drawing, count = how
    deterministic = {Drawing.DETERMINISTIC: count, Drawing.GREEDY_K: count - 1, Drawing.MIXED: 1}.get(drawing, 0)
    best = [int(token) for token in distribution.argsort(descending=True, stable=True)[:deterministic]]
    children = [tree.add(token, node) for token in best]
    rest = distribution.clone()
    rest[best] = 0
    if deterministic == count or float(rest.sum()) <= 0:
        return children
    tree.set_probs(node, rest / rest.sum())
    kind = Drawn.IID if drawing is Drawing.IID else Drawn.WITHOUT_REPLACEMENT
    for index in range(count - deterministic):
        token = rng.drafted(rest, node, index)
        children.append(tree.add(token, node, drawn=kind))
        if kind is Drawn.WITHOUT_REPLACEMENT:
            rest[token] = 0
            if float(rest.sum()) <= 0:
                break
    return children


class World(StrEnum):
    """The target's and the drafter's distributions of a toy world."""

    RANDOM = "random distributions"
    UNIFORM_DRAFT = "a drafter that knows nothing"
    OFF_SUPPORT = "a drafter certain of a token that the target never takes"
    TARGET_ZEROS = "a target cut by top-p"
    DRAFT_ZEROS = "a drafter with a smaller vocabulary"
    SAME = "a drafter that is the target"
    GREEDY_TARGET = "a target at temperature 0"


def toy_distributions(world: World, *, vocabulary: int, depth: int, seed: int) -> tuple[Distributions, Distributions]:
    """The target's and the drafter's distributions for every prefix of up to `depth` tokens."""
    generator = torch.Generator().manual_seed(seed)
    prefixes: list[tuple[int, ...]] = [()]
    for prefix in prefixes:
        if len(prefix) < depth:
            prefixes += [(*prefix, token) for token in range(vocabulary)]
    pairs = {prefix: _toy_pair(world, vocabulary, generator) for prefix in prefixes}
    return {prefix: pair[0] for prefix, pair in pairs.items()}, {prefix: pair[1] for prefix, pair in pairs.items()}


def _toy_pair(world: World, vocabulary: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    noise = torch.randn(2, vocabulary, generator=generator, dtype=torch.float64)
    target, draft = (1.5 * noise).softmax(-1).unbind()
    cut = int(torch.randint(vocabulary, (), generator=generator))
    without_cut = torch.ones(vocabulary, dtype=torch.float64)
    without_cut[cut] = 0
    if world in (World.TARGET_ZEROS, World.OFF_SUPPORT):
        target = target * without_cut / (target * without_cut).sum()
    if world is World.DRAFT_ZEROS:
        draft = draft * without_cut / (draft * without_cut).sum()
    if world is World.GREEDY_TARGET:
        target = 1 - without_cut if vocabulary == 2 else torch.eye(vocabulary, dtype=torch.float64)[cut]
    special = {
        World.UNIFORM_DRAFT: torch.full_like(draft, 1 / vocabulary),
        World.OFF_SUPPORT: 1 - without_cut,
        World.SAME: target,
    }
    return target, special.get(world, draft)


SHAPES: dict[str, Shape] = {
    "nothing": (),
    "chain of 1": branching(1),
    "chain of 3": branching(1, 1, 1),
    "two siblings": branching(2),
    "three siblings": branching(3),
    "tree 2 x 1": branching(2, 1),
    "tree 2 x 2": branching(2, 2),
    "deep left, leaf right": (branching(1, 1), ()),
    "leaf left, deep right": ((), branching(2)),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleCheck:
    """One exact enumeration of one rule."""

    rule: str
    shape: str
    drawing: Drawing
    world: World
    error: float  # Largest absolute error of a joint probability
    accepted: float  # Expected accepted nodes per step

    @property
    def passed(self) -> bool:
        """True if the emitted distribution is the target's but for rounding."""
        return self.error <= TOLERANCE


def check_rule(rule: Rule, shape: str, drawing: Drawing, world: World, *, seed: int = 0) -> RuleCheck | None:
    """Enumerate one case over a vocabulary of three, also if the rule ignores some nodes. None for ``argmax_walk``, a
    rule for temperature 0, with any other target.
    """
    if rule.name == "argmax_walk" and world is not World.GREEDY_TARGET:
        return None
    target, drawn = _toy_case(shape, drawing, world, seed)
    emitted = _emitted(rule, target, drawn, shape_depth(SHAPES[shape]) + 1)
    error, accepted = emitted.error(target), emitted.accepted
    return RuleCheck(rule=rule.name, shape=shape, drawing=drawing, world=world, error=error, accepted=accepted)


@cache
def _toy_case(
    shape: str, drawing: Drawing, world: World, seed: int
) -> tuple[Distributions, list[tuple[TokenTree, float]]]:
    """Return the target and every tree that may be drawn, with its probability; all rules get the same ones."""
    target, draft = toy_distributions(world, vocabulary=3, depth=shape_depth(SHAPES[shape]), seed=seed)
    return target, list(outcomes(toy_drafter(draft, SHAPES[shape], drawing)))


def check_rules(names: Sequence[str] = tuple(RULES), *, seed: int = 0) -> Iterator[RuleCheck]:
    """Every case of every named lossless rule: shapes x drawings x worlds, as ``forerun certify`` reports them."""
    for name in names:
        rule = rule_named(name)
        if not rule.lossless:
            continue
        for shape in SHAPES:
            for drawing in Drawing:
                checks = (check_rule(rule, shape, drawing, world, seed=seed) for world in World)
                yield from (check for check in checks if check is not None)
