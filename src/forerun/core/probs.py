"""The distributions that a rule reads at a node: the target's, and the residual after each rejected
child.

The vectors do not depend on a rule's random draws: draws only decide where it stops. So `HostResidual` computes a
residual on demand, and `decode.residuals` computes all of them, for all nodes, on the device before any rule runs.
Vectors keep their dtype (float32 or better: a residual is a difference of nearly equal numbers); masses, ratios and
weights are float64 (sums on a device without it are float32).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Protocol, Self

import torch
from torch import Tensor

from forerun.core.rng import Rng
from forerun.core.tree import TokenTree
from forerun.devices import widest
from forerun.types import Drawn

TINY = 1e-30  # A weight so small that float32 cannot divide by it counts as zero


class Probs(Protocol):
    """The target's distribution of the token after a node, or the residual after some of its
    children were rejected.
    """

    @property
    def child(self) -> int | None:
        """The next child to try, or None if there is none.

        Sampled children come first, in the order in which they were drawn, then the deterministic ones, as draws from
        point masses: deterministic siblings do not depend on the draws, and trying them last accepts more (arXiv
        2502.18779). A sampled child to which its distribution gives no mass is skipped: its draw has probability zero,
        and skipping a child never biases a rule.
        """

    @property
    def ratio(self) -> float:
        """The ratio target(x) / draft(x) for the token x of `child`; draft is the distribution that x was drawn from,
        given its earlier siblings.
        """

    def reject(self, weight: float = 1.0) -> tuple[Self, float]:
        """Return norm[weight * target - draft]_+ without `child`, and its mass before
        normalisation.

        It is positive only where the target is; if its mass is zero, the target is returned. A rule calls this once per
        child, with the weight that its paper defines for the node.
        """

    def draw(self, rng: Rng) -> int:
        """Draw a token from this distribution, for the position after the node."""

    def of_child(self, child: int) -> float:
        """Return the target's probability of the token of any child."""

    @property
    def entropy(self) -> float:
        """Entropy of the target's distribution, in nats."""


class NodeProbs(Protocol):
    """The target's distributions at the nodes of one row's tree: a verification rule reads the target only through
    this.
    """

    def probs(self, node: int) -> Probs:
        """Return the distribution of the token after `node`, before any rejection; a point mass at temperature 0."""

    def argmax(self, node: int) -> int:
        """Return the token of the largest processed logit after `node`."""


class HostResidual:
    """A distribution or residual whose vector is on the host (`Probs`).

    Args:
        tree: the node's tree.
        node: the distribution is that of the token after it.
        values: (V,) nonnegative, float32 or float64; their sum need not be 1.
    """

    __slots__ = ("__dict__", "_draft", "_draft_mass", "_tree", "_waiting", "node", "values")

    def __init__(self, tree: TokenTree, node: int, values: Tensor) -> None:
        self._tree, self.node, self.values = tree, node, values
        self._waiting: Sequence[int] = tree.tried[node]
        self._draft: Tensor | None = None  # (V,) distribution of the next sampled child; None: the recorded one
        self._draft_mass = math.nan

    @cached_property
    def mass(self) -> float:
        return _sum(self.values)

    @cached_property
    def child(self) -> int | None:
        """The next child to try, see `Probs.child`."""
        for position, child in enumerate(self._waiting):
            if self._given(child) or float(self._drawn_from()[0][self._tree.tokens[child]]) > 0:
                self._waiting = self._waiting[position:]
                return child
        return None

    @property
    def ratio(self) -> float:
        """The ratio target / draft at the child's token."""
        token = self._tree.tokens[self._asked()]
        target = float(self.values[token]) / self.mass
        if self._given(self._asked()):
            return target
        draft, mass = self._drawn_from()
        return target / (float(draft[token]) / mass)

    def reject(self, weight: float = 1.0) -> tuple[HostResidual, float]:
        """Return the residual without the child, and its mass."""
        child, rest = self._asked(), HostResidual(self._tree, self.node, self.values)
        token = self._tree.tokens[child]
        rest._waiting = self._waiting[1:]
        rest._draft, rest._draft_mass = self._draft, self._draft_mass
        if self._tree.drawn[child] is Drawn.WITHOUT_REPLACEMENT and rest._waiting and not self._given(rest._waiting[0]):
            rest._draft = _without(self._drawn_from()[0], token)
            rest._draft_mass = _sum(rest._draft)
        if weight < TINY:
            return rest, 0.0
        if self._given(child):
            left = _without(self.values, token)
        else:
            draft, mass = self._drawn_from()
            left = torch.sub(self.values, draft, alpha=self.mass / (mass * weight)).clamp_(min=0)
        mass = _sum(left)
        if mass <= 0:
            return rest, 0.0
        rest.values = left
        rest.__dict__["mass"] = mass
        return rest, mass * weight / self.mass

    def draw(self, rng: Rng) -> int:
        return rng.draw(self.values, self._tree.depths[self.node])

    def of_child(self, child: int) -> float:
        return float(self.values[self._tree.tokens[child]])

    @property
    def entropy(self) -> float:
        return float(torch.special.entr(self.values).sum(dtype=widest(self.values.device)))

    def _asked(self) -> int:
        assert self.child is not None, "there is no child to ask"
        return self.child

    def _given(self, child: int) -> bool:
        return self._tree.drawn[child] is Drawn.DETERMINISTIC

    def _drawn_from(self) -> tuple[Tensor, float]:
        """Return the distribution that the next sampled child was drawn from, and its mass."""
        if self._draft is None:
            self._draft = self._tree.draft_probs[self.node].to(self.values.device)
            known = self._tree.masses.get(self.node)
            self._draft_mass = _sum(self._draft) if known is None else known
        return self._draft, self._draft_mass


def _sum(values: Tensor) -> float:
    return float(values.sum(dtype=widest(values.device)))


def _without(values: Tensor, token: int) -> Tensor:
    rest = values.clone()
    rest[token] = 0
    return rest
