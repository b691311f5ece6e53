"""When to ask a drafter that copies, at every step where that is cheap, else by turns; and for how much.

Knows figures only.
"""

from __future__ import annotations

from collections import deque
from statistics import median

CHEAP = 0.01
"""Share of a plain step that asking may always take."""
_PATIENCE = 32
"""Steps in a row without a draft worth submitting, after which one that is not cheap is left in peace."""
_INTERVAL = 64
"""Steps that it is then not asked."""
_TRIAL = 8
"""Steps that it is asked after that before it is left in peace again."""
_FEW = 8
"""Nodes that a row is thought to take while nothing says otherwise."""
_REACH_MEMORY = 0.95
"""What a step leaves of the most that rows took lately."""


class Reach:
    """How many nodes to ask of drafters that copy: twice as many as rows took lately. Each costs host time."""

    def __init__(self) -> None:
        self._taken = float(_FEW)

    def nodes(self) -> int:
        """Most nodes of a row worth asking for."""
        return 2 * int(self._taken)

    def took(self, nodes: int) -> None:
        """The row that took most was given this many."""
        self._taken = max(_FEW, nodes, _REACH_MEMORY * self._taken)


class Asking:
    """One copying drafter's turns."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=15)
        self._idle, self._wake = 0, 0

    def due(self, step: int) -> bool:
        """Whether to ask in this step."""
        return step >= self._wake

    def asked(self, step: int, *, ms: float, useful: bool, plain_ms: float) -> None:
        """It was asked, which took `ms`; `useful`: at least one row got a draft worth submitting."""
        self._times.append(ms)
        self._idle = 0 if useful else self._idle + 1
        if self._idle >= _PATIENCE and median(self._times) > CHEAP * plain_ms:
            self._wake, self._idle = step + _INTERVAL, _PATIENCE - _TRIAL

    def failed(self, step: int) -> None:
        """It raised."""
        self._wake = step + _INTERVAL
