"""Whether drafts are really kept as often since the last swap as before it. Counts only; knows no weights."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from enum import Enum

from forerun.types import Source, Verdict

WINDOW = 2000
"""Judged drafted tokens that speak for the weights before a swap."""
LOOKS = (250, 500, 1000)
"""Judged drafted tokens after a swap at which it is looked whether acceptance fell; after the last it stays."""
LEAST_BEFORE = 100
"""Fewer judged tokens before a swap can tell nothing about it."""
SIGNIFICANT = 3.0
"""Standard errors by which acceptance must have fallen. Tokens of an answer are not independent, hence so many."""


class Sentence(Enum):
    """On the weights that serve."""

    KEPT = "kept"
    """They were watched long enough, or nothing is being watched."""
    PENDING = "pending"
    WORSE = "worse"


class Watch:
    """Accepted and judged drafted tokens. A draft's tokens behind its first rejected one are not judged."""

    def __init__(self) -> None:
        self._recent: deque[tuple[int, int]] = deque()
        self._accepted = self._judged = 0
        self._before: tuple[int, int] | None = None
        self._after = (0, 0)
        self._looks = 0

    @property
    def acceptance(self) -> float:
        """Share of judged tokens that were kept, over the last `WINDOW` of them under the same weights; 0 of none."""
        return self._accepted / self._judged if self._judged else 0.0

    @property
    def pending(self) -> bool:
        """A swap is being watched."""
        return self._before is not None

    def saw(self, verdicts: Sequence[Verdict]) -> Sentence:
        """Count a step; after WORSE the former weights must come back, and `rolled_back` be called."""
        accepted = sum(len(verdict.path) + (verdict.kind is Source.DRAFT) for verdict in verdicts)
        judged = accepted + sum(verdict.kind is Source.RECOVERED for verdict in verdicts)
        self._recent.append((accepted, judged))
        self._accepted, self._judged = self._accepted + accepted, self._judged + judged
        while self._judged - self._recent[0][1] >= WINDOW:
            oldest = self._recent.popleft()
            self._accepted, self._judged = self._accepted - oldest[0], self._judged - oldest[1]
        if self._before is None:
            return Sentence.KEPT
        self._after = (self._after[0] + accepted, self._after[1] + judged)
        return self._look()

    def swapped(self) -> None:
        """Other weights serve from now on, and are watched if there is something to compare them with."""
        self._before = (self._accepted, self._judged) if self._judged >= LEAST_BEFORE else None
        self._forget()

    def rolled_back(self) -> None:
        """The former weights serve again; they need not prove themselves."""
        self._before = None
        self._forget()

    def _forget(self) -> None:
        self._recent.clear()
        self._accepted = self._judged = self._looks = 0
        self._after = (0, 0)

    def _look(self) -> Sentence:
        if self._looks == len(LOOKS) or self._after[1] < LOOKS[self._looks]:
            return Sentence.PENDING
        self._looks += 1
        assert self._before is not None
        if fell(self._before, self._after):
            return Sentence.WORSE
        if self._looks < len(LOOKS):
            return Sentence.PENDING
        self._before = None
        return Sentence.KEPT


def fell(before: tuple[int, int], after: tuple[int, int]) -> bool:
    """Whether the second share (count, of) is significantly below the first: two proportions, pooled variance."""
    pooled = (before[0] + after[0]) / (before[1] + after[1])
    error = math.sqrt(pooled * (1 - pooled) * (1 / before[1] + 1 / after[1]))
    return after[0] / after[1] < before[0] / before[1] - SIGNIFICANT * error
