"""What was seen over what was predicted: the machine's pace of late, times what each size has of its own.

The pace is common to all sizes and quick, so a figure that was not seen for long follows when the machine becomes
slower; what a size has of its own is slow. A size that is new tells what it has of its own and nothing of the pace:
else one that is dearer than was predicted would seem to say that all have become so. Medians, so a garbage collection
moves nothing. Knows no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from statistics import median
from typing import Any

_PACE_WINDOW = 8
"""Latest ratios that make the pace."""
_OWN_WINDOW = 24
"""Ratios kept of each size; more than a change of pace takes to be noticed."""
_STALE = 1024
"""Additions after which a ratio no longer counts."""
_NEW = 3
"""Ratios of a size before it has a say in the pace."""
_COMMON_WEIGHT = 1.0
"""Observations that what its family has in common is worth to a size."""
_LEAST_MS = 1e-3


class Correction:
    """Factors for predictions, by size, leaning on what its family has in common while a size has been seen seldom.

    Args:
        family: of a size; by default they are all of one.
    """

    def __init__(self, family: Callable[[Any], Hashable] = lambda size: None) -> None:
        self._family = family
        self._latest: deque[tuple[Hashable, float]] = deque(maxlen=_PACE_WINDOW)
        self._seen: dict[Hashable, deque[tuple[int, float]]] = {}
        self._own: dict[Hashable, float] = {}
        """Median of the ratios kept of a size, the pace taken out."""
        self._common: dict[Hashable, float] = {}
        """Median of these by family."""
        self._count = 0
        self._pace = 1.0

    def add(self, size: Hashable, seen: float, predicted: float) -> None:
        """Take in one figure."""
        self._count += 1
        ratio = max(seen, _LEAST_MS) / max(predicted, _LEAST_MS)
        own = self._seen.setdefault(size, deque(maxlen=_OWN_WINDOW))
        if len(own) >= _NEW or all(len(others) < _NEW for others in self._seen.values()):
            self._latest.append((size, ratio))
            self._pace = median(ratio / self._own.get(size, 1.0) for size, ratio in self._latest)
        own.append((self._count, ratio / self._pace))
        while own[0][0] < self._count - _STALE:
            own.popleft()
        self._own[size] = median(ratio for _, ratio in own)
        family = self._family(size)
        self._common[family] = median(factor for other, factor in self._own.items() if self._family(other) == family)

    def known(self, size: Hashable) -> int:
        """Figures of this size that still count."""
        return sum(count > self._count - _STALE for count, _ in self._seen.get(size, ()))

    def factor(self, size: Hashable) -> float:
        """To multiply a prediction with; a size that was never seen is as its family is."""
        many, common = len(self._seen.get(size, ())), self._common.get(self._family(size), 1.0)
        return self._pace * (many * self._own.get(size, 1.0) + _COMMON_WEIGHT * common) / (many + _COMMON_WEIGHT)
