"""What was seen over what was predicted: the machine's pace of late, times what each size has of its own.

The pace is common to all sizes and quick, so a figure that was not seen for long follows when the machine becomes
slower; what a size has of its own is slow. Medians, so a garbage collection moves nothing. Knows no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from statistics import median

_PACE_WINDOW = 8
"""Latest ratios that make the pace."""
_OWN_WINDOW = 24
"""Ratios kept of each size; more than a change of pace takes to be noticed."""
_STALE = 1024
"""Additions after which a ratio no longer counts."""
_COMMON_WEIGHT = 1.0
"""Observations that having nothing of its own is worth to a size."""
_LEAST_MS = 1e-3


class Correction:
    """Factors for predictions, by size, leaning on the common pace while a size has been seen seldom."""

    def __init__(self) -> None:
        self._latest: deque[tuple[Hashable, float]] = deque(maxlen=_PACE_WINDOW)
        self._seen: dict[Hashable, deque[tuple[int, float]]] = {}
        self._own: dict[Hashable, float] = {}
        self._count = 0
        self._pace = 1.0

    def add(self, size: Hashable, seen: float, predicted: float) -> None:
        """Take in one figure."""
        self._count += 1
        ratio = max(seen, _LEAST_MS) / max(predicted, _LEAST_MS)
        self._latest.append((size, ratio))
        self._pace = median(ratio / self._own.get(size, 1.0) for size, ratio in self._latest)
        own = self._seen.setdefault(size, deque(maxlen=_OWN_WINDOW))
        own.append((self._count, ratio / self._pace))
        while own[0][0] < self._count - _STALE:
            own.popleft()
        middle = median(ratio for _, ratio in own)
        self._own[size] = (len(own) * middle + _COMMON_WEIGHT) / (len(own) + _COMMON_WEIGHT)

    def factor(self, size: Hashable) -> float:
        """To multiply a prediction with; of a size that was never seen, the pace."""
        return self._pace * self._own.get(size, 1.0)
