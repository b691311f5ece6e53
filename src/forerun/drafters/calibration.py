"""What a drafter's own probability is worth: learned, while decoding, from how often nodes of its kind were kept.

The estimate of a sampled node never reads the node's own value: the raw figure is a function of the law that it is
drawn from. Knows no model and no rule.
"""

from __future__ import annotations

from typing import NamedTuple

from forerun.types import Drawn

_BINS = 10
_RANKS = 4
_PRIOR_WEIGHT = 8.0
"""How many observations the first guess is worth."""


class Signs(NamedTuple):
    """What is known of a node before its value is: two nodes with like signs survive equally often."""

    drawn: Drawn
    rank: int
    """0 for the eldest sibling."""
    raw: float
    """In 0..1: of a given node its own draft probability, of a sampled one the largest of the law it is drawn from."""


class Calibration:
    """Estimates the probability that a node survives if its parent does."""

    def __init__(self) -> None:
        self._right: dict[tuple[bool, int, int], float] = {}
        self._tried: dict[tuple[bool, int, int], float] = {}

    def estimate(self, signs: Signs) -> float:
        """In 0..1: the share of nodes with such signs that survived, near a first guess while there are few."""
        key = _key(signs)
        right, tried = self._right.get(key, 0.0), self._tried.get(key, 0.0)
        return (right + _PRIOR_WEIGHT * _prior(signs)) / (tried + _PRIOR_WEIGHT)

    def learn(self, signs: Signs, right: bool) -> None:
        """Count one node whose parent survived."""
        key = _key(signs)
        self._tried[key] = self._tried.get(key, 0.0) + 1.0
        self._right[key] = self._right.get(key, 0.0) + right


def _key(signs: Signs) -> tuple[bool, int, int]:
    return signs.drawn is Drawn.GIVEN, min(signs.rank, _RANKS - 1), min(int(signs.raw * _BINS), _BINS - 1)


def _prior(signs: Signs) -> float:
    """A given token is as likely as the draft says; a sampled one is kept wherever the two laws overlap."""
    if signs.drawn is Drawn.GIVEN:
        return signs.raw
    return (0.4 + 0.6 * signs.raw) * 0.4**signs.rank
