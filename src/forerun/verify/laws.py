"""The arithmetic that the law-reading rules share: ratios, residuals, and the law each sibling was really drawn from.

Works in float64: a residual is a difference of nearly equal numbers. Knows no rule.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from forerun.tree import TokenTree
from forerun.types import Drawn


def normalised(law: Tensor) -> Tensor:
    """The law (V,) in float64 with sum one: exactly what a draw by inverse of the cumulated law follows."""
    law = law.double()
    return law / law.sum()


def residual(target_probs: Tensor, draft_probs: Tensor, weight: float = 1.0) -> tuple[Tensor, float]:
    """[weight * target - draft]_+ (V,), not normalised, and its mass. Positive only where the target is."""
    left = target_probs.mul(weight).sub_(draft_probs).clamp_(min=0)
    return left, float(left.sum())


def share(mass: float, weight: float) -> float:
    """mass / (mass + 1 - weight): the chance that a node still holds after the draw below it was rejected; 0/0 is 1.

    0/0 means that the draft below was the target itself, where a rejection has probability zero.
    """
    total = mass + max(1.0 - weight, 0.0)
    return mass / total if total > 0 else 1.0


def ratio(target_probs: Tensor, draft_probs: Tensor, token: int) -> float:
    """target(token) / draft(token); the draft's is positive, as `drafted_children` sees to."""
    return float(target_probs[token]) / float(draft_probs[token])


def drafted_children(tree: TokenTree, node: int, target_probs: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(child, law (V,) it was drawn from given its elder siblings) for every acceptable child of `node`.

    Sampled children come first, in the order they were drawn, then the given ones, as draws from point masses: given
    siblings do not depend on the draws, and asking them last accepts more (arXiv 2502.18779). A sampled child to which
    its law gives no mass is left out: its draw has probability zero, and leaving a child out never biases a rule.
    `target_probs` lends its width, dtype and device.
    """
    children = tree.children[node]
    sampled = [child for child in children if tree.drawn[child] is not Drawn.GIVEN]
    if sampled:
        yield from _sampled(tree, sampled, normalised(tree.laws[node]))
    for child in children:
        if tree.drawn[child] is Drawn.GIVEN:
            point = torch.zeros_like(target_probs)
            point[tree.tokens[child]] = 1.0
            yield child, point


def _sampled(tree: TokenTree, children: list[int], law: Tensor) -> Iterator[tuple[int, Tensor]]:
    for child in children:
        token = tree.tokens[child]
        if float(law[token]) <= 0:
            continue
        yield child, law
        if tree.drawn[child] is Drawn.WITHOUT_REPLACEMENT:
            law = law.clone()
            law[token] = 0
            mass = float(law.sum())
            if mass <= 0:
                return
            law /= mass


def is_chain(tree: TokenTree) -> bool:
    """Whether no node has two acceptable children."""
    return all(len(children) <= 1 for children in tree.children)


def laws_recorded(tree: TokenTree) -> bool:
    """Whether every sampled node may be judged by its law: the law is there, and no sampled node is a scout.

    A sampled scout is a draw that was looked at and not submitted: whether that biases, only its drafter knows.
    """
    sampled = [node for node, kind in enumerate(tree.drawn) if kind is not Drawn.GIVEN]
    return all(tree.parents[node] in tree.laws and node not in tree.scouts for node in sampled)
