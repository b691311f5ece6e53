"""Intervals of what few samples say: Student's t, which knows that a spread over few is itself uncertain."""

from __future__ import annotations

import math

CONFIDENCE = 0.95


def t_factor(freedom: int, confidence: float = CONFIDENCE) -> float:
    """Return how many standard errors a two-sided interval reaches to each side, with so many degrees of freedom, at
    least 1: 1.96 at 95 % for very many, 2.26 for 9.
    """
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _inside(middle, freedom) < confidence else (low, middle)
    return math.tan(low) * math.sqrt(freedom)


def _inside(angle: float, freedom: int) -> float:
    """Return how likely t is within tan(angle) * sqrt(freedom) of 0: Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for power in range(1 + odd, freedom, 2):
        total += term
        term *= cosine**2 * power / (power + 1)
    return (angle + sine * total) * 2 / math.pi if odd else sine * total
