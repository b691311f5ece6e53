"""The options of drafters that grow a tree of a fixed shape from a distribution at each node. Knows no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forerun.drafters.growth import Draw, Shape
from forerun.drafters.levels import FixedTree
from forerun.errors import ArgumentError, nearest
from forerun.params import GREEDY_BELOW, MAX_TEMPERATURE


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeOptions:
    """How much is drafted and how it is drawn; a method adds its own options."""

    num_speculative_tokens: int = 8
    """Length of the chain, tokens; a tree's depth is that of `shape`."""
    shape: Sequence[int] | None = None
    """Children of each node at depth 0, 1, ...; None drafts a chain."""
    tree: Sequence[int] | None = None
    """Any tree instead: the parent of node 1, 2, ..., 0 the root, level by level. `forerun plan` finds the best."""
    draw: str = "auto"
    """``auto``, ``given``, ``iid``, ``without_replacement`` or ``greedy_k``."""
    temperature: float | None = None
    """Draft at this temperature instead of the request's; requests at temperature 0 are not touched."""

    def check_tree(self, method: str) -> None:
        """Raise ArgumentError, in the name of `method`, unless the options make sense."""
        kinds = [kind.value for kind in Draw]
        if self.draw not in kinds:
            raise ArgumentError(
                f"{method}: draw is one of {', '.join(kinds)}, got {self.draw!r}.{nearest(self.draw, kinds)}"
            )
        if self.num_speculative_tokens < 1:
            raise ArgumentError(
                f"{method}: num_speculative_tokens must be at least 1, got {self.num_speculative_tokens}"
            )
        if self.shape is not None and (not self.shape or min(self.shape) < 1):
            raise ArgumentError(f"{method}: shape needs at least one depth and one child a node, got {self.shape}")
        if self.tree is not None and (self.shape is not None or not self.tree or self.draw == Draw.GREEDY_K):
            raise ArgumentError(
                f"{method}: tree takes the place of shape and needs at least one node; draw='greedy_k' needs a shape, "
                f"in which all nodes of a level have equally many children; got {self.tree}"
            )
        if self.tree is not None:
            Shape.of(self.tree)
        if self.temperature is not None and not GREEDY_BELOW <= self.temperature <= MAX_TEMPERATURE:
            raise ArgumentError(
                f"{method}: temperature must be in [{GREEDY_BELOW:g}, {MAX_TEMPERATURE:g}], got {self.temperature}; "
                "draw='given' drafts the likeliest tokens"
            )

    def fixed_tree(self) -> FixedTree:
        """What grows such trees."""
        if self.tree is not None:
            shape = Shape.of(self.tree)
        else:
            shape = Shape.regular(self.shape or (1,) * self.num_speculative_tokens)
        return FixedTree(shape=shape, draw=Draw(self.draw), temperature=self.temperature)
