"""The arithmetic that the law-reading rules share: ratios, residuals, and the law each sibling was really drawn from.

Vectors keep their law's precision (float32 or better: a residual is a difference of nearly equal numbers); masses,
ratios and weights are float64 (sums on a device without it are float32). Knows no rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.devices import widest
from forerun.tree import TokenTree
from forerun.types import Drawn


@dataclass(frozen=True, slots=True)
class Law:
    """A law as it came: not copied, its sum kept beside it, since laws of real vocabularies are large."""

    values: Tensor
    """(V,) nonnegative, float32 or float64."""
    mass: float
    """Their sum, accumulated in the device's widest type."""

    @classmethod
    def of(cls, values: Tensor) -> Law:
        """The law (V,) with its sum."""
        return cls(values, float(values.sum(dtype=widest(values.device))))

    def prob(self, token: int) -> float:
        """Probability of `token`, as a draw by inverse of the cumulated values gives it."""
        return float(self.values[token]) / self.mass

    def without(self, token: int) -> Law:
        """The law restricted to the other tokens; of mass zero if there is none."""
        values = self.values.clone()
        values[token] = 0
        return Law.of(values)


_TINY = 1e-30


def residual(target: Law, draft: Law, weight: float = 1.0) -> tuple[Law, float]:
    """norm[weight * target - draft]_+ and its mass before it was normalised; at mass zero it is `target`.

    Positive only where the target is. A weight so small that float32 cannot divide by it counts as zero.
    """
    if weight < _TINY:
        return target, 0.0
    left = torch.sub(target.values, draft.values, alpha=target.mass / (draft.mass * weight)).clamp_(min=0)
    law = Law.of(left)
    if law.mass <= 0:
        return target, 0.0
    return law, law.mass * weight / target.mass


def share(mass: float, weight: float) -> float:
    """mass / (mass + 1 - weight): the chance that a node still holds after the draw below it was rejected; 0/0 is 1.

    0/0 means that the draft below was the target itself, where a rejection has probability zero.
    """
    total = mass + max(1.0 - weight, 0.0)
    return mass / total if total > 0 else 1.0


def ratio(target: Law, draft: Law, token: int) -> float:
    """target(token) / draft(token); the draft's is positive, as `drafted_children` sees to."""
    return target.prob(token) / draft.prob(token)


def drafted_children(tree: TokenTree, node: int, target: Law) -> Iterator[tuple[int, Law]]:
    """(child, law it was drawn from given its elder siblings) for every acceptable child of `node`.

    Sampled children come first, in the order they were drawn, then the deterministic ones, as draws from point masses:
    deterministic siblings do not depend on the draws, and asking them last accepts more (arXiv 2502.18779). A sampled
    child to
    which its law gives no mass is left out: its draw has probability zero, and leaving a child out never biases a rule.
    `target` lends its width, dtype and device.
    """
    children = tree.children[node]
    sampled = [child for child in children if tree.drawn[child] is not Drawn.DETERMINISTIC]
    if sampled:
        values = tree.laws[node].to(target.values.device)
        law = Law(values, tree.masses[node]) if node in tree.masses else Law.of(values)
        yield from _sampled(tree, sampled, law)
    for child in children:
        if tree.drawn[child] is Drawn.DETERMINISTIC:
            point = torch.zeros_like(target.values)
            point[tree.tokens[child]] = 1.0
            yield child, Law(point, 1.0)


def _sampled(tree: TokenTree, children: list[int], law: Law) -> Iterator[tuple[int, Law]]:
    for child in children:
        token = tree.tokens[child]
        if float(law.values[token]) <= 0:
            continue
        yield child, law
        if tree.drawn[child] is Drawn.WITHOUT_REPLACEMENT and child != children[-1]:
            law = law.without(token)
            if law.mass <= 0:
                return
