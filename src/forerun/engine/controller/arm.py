"""One drafter under control, with everything that is known of how it does. Knows no step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from forerun.engine.controller.asking import Asking
from forerun.engine.controller.confidence import Confidence
from forerun.engine.controller.deferred import Deferred
from forerun.engine.controller.survival import Survival
from forerun.engine.controller.switch import Switch

_USED_WEIGHT = 1 / 16
"""Of one step's offers in `Arm.used`."""


class Sizes:
    """Nodes that a drafter submits when it may go to some depth: a chain until seen otherwise."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._seen: dict[int, float] = {}

    def saw(self, depth: int, nodes: float) -> None:
        """Of a proposal that might go to `depth`, `nodes` of each row were scored."""
        before = self._seen.get(depth)
        self._seen[depth] = nodes if before is None else before + 0.2 * (nodes - before)

    def expected(self, depth: int) -> int:
        """Nodes per row, at least 1; depths that were never tried are in proportion to the nearest that was."""
        if not self._seen:
            return min(depth, self._most)
        nearest = min(self._seen, key=lambda seen: (abs(seen - depth), seen))
        per_level = max(1.0, self._seen[nearest] / nearest) if nearest != depth else self._seen[nearest] / depth
        return max(1, min(self._most, math.ceil(per_level * depth - 1e-9)))


@dataclass(kw_only=True, slots=True)
class Arm:
    """One drafter under control."""

    name: str
    key: str
    """Of its configuration: costs are kept under it."""
    drafter: Deferred
    copies: bool
    """Asked at every step, because a proposal costs no forward pass."""
    limit: int
    """Most tokens on one path."""
    sizes: Sizes
    survival: Survival = field(default_factory=Survival)
    confidence: Confidence = field(default_factory=Confidence)
    switch: Switch = field(default_factory=Switch)
    asking: Asking = field(default_factory=Asking)
    used: float = 1.0
    """Share of its offers that were taken, of late; 1 before the first."""
    read: int = 0
    """The step in which it was last offered for a text that it had to read."""

    def offered(self, *, taken: float) -> None:
        """It was offered to rows, of which this share took the offer."""
        self.used += _USED_WEIGHT * (taken - self.used)

    def forget(self, row: int) -> None:
        """The row is free."""
        self.survival.forget(row)
        self.confidence.forget(row)
        self.switch.forget(row)
