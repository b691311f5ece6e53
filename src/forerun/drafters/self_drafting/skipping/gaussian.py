"""A small Gaussian process over subsets, and two rules for what to try next. Knows numbers only.

Subsets are 0/1 vectors. Their likeness is a mixture of the share of entries in which they agree (effects that add up)
and an exponential of their Hamming distance (effects that do not); the mixture is the likeliest of a few.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]

NOISE = 1e-2
"""Variance of an observation relative to that of all values: Draft & Verify's alpha (arXiv 2309.08168)."""
_LENGTHS = (0.1, 0.25, 0.5, 1.0)
"""Of the exponential, as a share of the number of entries."""
_ADDITIVE = (0.0, 0.5, 0.9)


class GaussianProcess:
    """What is known of all subsets after some were valued.

    Args:
        points: (n, d) of 0 and 1.
        values: (n,) larger is better.
        noise: variance of an observation, relative to the variance of `values`.
    """

    def __init__(self, points: Floats, values: Floats, *, noise: float = NOISE) -> None:
        self._points = points
        self._mean, self._scale = float(values.mean()), float(values.std()) or 1.0
        scaled = (values - self._mean) / self._scale
        fits = [self._fit(scaled, length, additive, noise) for length in _LENGTHS for additive in _ADDITIVE]
        _, self._kernel, self._factor, self._weights = max(fits, key=lambda fit: fit[0])

    def predict(self, points: Floats) -> tuple[Floats, Floats]:
        """Mean (m,) and standard deviation (m,) at `points` (m, d), in the units of the values."""
        cross = _likeness(points, self._points, *self._kernel)
        solved = np.linalg.solve(self._factor, cross.T)
        spread = np.sqrt(np.clip(1.0 - (solved**2).sum(0), 1e-12, None))
        return cross @ self._weights * self._scale + self._mean, spread * self._scale

    def _fit(
        self, values: Floats, length: float, additive: float, noise: float
    ) -> tuple[float, tuple[float, float], Floats, Floats]:
        """(log evidence, kernel, Cholesky factor, weights)"""
        likeness = _likeness(self._points, self._points, length, additive)
        factor = np.linalg.cholesky(likeness + noise * np.eye(len(values)))
        weights = np.linalg.solve(factor.T, np.linalg.solve(factor, values))
        evidence = -0.5 * float(values @ weights) - float(np.log(np.diag(factor)).sum())
        return evidence, (length, additive), factor, weights


def expected_improvement(mean: Floats, spread: Floats, best: float) -> Floats:
    """(m,) how much better than `best` a value is expected to be, worse ones counted as 0."""
    ahead = mean - best
    scaled = ahead / spread
    above = np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in scaled])
    density = np.exp(-0.5 * scaled**2) / math.sqrt(2 * math.pi)
    improvement: Floats = ahead * above + spread * density
    return improvement


def upper_bound(mean: Floats, spread: Floats, kappa: float) -> Floats:
    """(m,) the mean and `kappa` standard deviations: what a subset might be worth."""
    bound: Floats = mean + kappa * spread
    return bound


def _likeness(left: Floats, right: Floats, length: float, additive: float) -> Floats:
    """(n, m) in 0..1, 1 for equal subsets."""
    share = (left @ (1.0 - right).T + (1.0 - left) @ right.T) / left.shape[1]
    likeness: Floats = additive * (1.0 - share) + (1.0 - additive) * np.exp(-share / length)
    return likeness
