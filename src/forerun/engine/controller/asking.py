"""When to ask a drafter that copies: at every step where that is cheap or repays itself, else by turns; for how much.

Knows figures only.
"""

from __future__ import annotations

from collections import deque
from statistics import median

CHEAP = 0.01
"""Share of a plain step that asking may always take."""
_ASKING = 0.5
"""Share of what copies cost the host that is asking for them; the rest is ranking, joining and learning from them."""
_PATIENCE = 32
"""Steps after which one that is not cheap and does not repay itself is left in peace."""
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
        self._gains: deque[float] = deque(maxlen=_PATIENCE)
        self._asked, self._wake = 0, 0

    def due(self, step: int) -> bool:
        """Whether to ask in this step."""
        return step >= self._wake

    def asked(self, step: int, *, ms: float, gain_ms: float, plain_ms: float) -> None:
        """It was asked, which took `ms`; what it drafts is expected to save `gain_ms` of decoding."""
        self._times.append(ms)
        self._gains.append(gain_ms)
        self._asked += 1
        cost = median(self._times)
        repays = sum(self._gains) / len(self._gains) > cost / _ASKING
        if self._asked >= _PATIENCE and cost > CHEAP * plain_ms and not repays:
            self._wake, self._asked = step + _INTERVAL, _PATIENCE - _TRIAL
            self._gains.clear()

    def failed(self, step: int) -> None:
        """It raised."""
        self._wake = step + _INTERVAL
