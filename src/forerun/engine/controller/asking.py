"""When to ask a drafter that copies: at every step where that is cheap or repays itself, else by turns; for how much.

Knows figures only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

CHEAP = 0.01
"""Share of a plain step that asking may always take."""
_PATIENCE = 32
"""Steps after which one that is not cheap and does not repay itself is left in peace."""
_INTERVAL, _LONGEST = 64, 512
"""Steps that it is then not asked: twice as many each time that it still does not, up to the second."""
_TRIAL = 8
"""Steps that it is asked after that before it is left in peace again."""
_SAMPLE = 8
"""Members that it is asked for in these steps: with 64 rows, to ask for all would take a third of a step each time."""
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
        self._costs: deque[float] = deque(maxlen=15)
        self._gains: deque[float] = deque(maxlen=_PATIENCE)
        self._asked, self._wake, self._interval = 0, 0, _INTERVAL
        self._probing = False

    def due(self, step: int) -> bool:
        """Whether to ask in this step."""
        return step >= self._wake

    def of(self, members: Sequence[int]) -> Sequence[int]:
        """Those of the members to ask it for: after a rest a few stand for all, until it has shown that it pays."""
        return members[:: -(-len(members) // _SAMPLE)] if self._probing and members else members

    def asked(self, *, ms: float, gain_ms: float) -> None:
        """It was asked, which added `ms` to the step; what it drafts is expected to save `gain_ms` of decoding."""
        self._costs.append(ms)
        self._gains.append(gain_ms)
        self._asked += 1
        self._probing = self._probing and len(self._gains) <= _TRIAL
        if len(self._gains) == _PATIENCE:
            self._interval = _INTERVAL

    def loss_ms(self, plain_ms: float) -> float:
        """What asking takes beyond what it saves, a step; 0 where it is cheap, repays itself or is too new to tell."""
        if self._asked < _PATIENCE or len(self._gains) < _TRIAL:
            return 0.0
        cost = median(self._costs)
        return max(0.0, cost - fmean(self._gains)) if cost > CHEAP * plain_ms else 0.0

    def rest(self, step: int) -> None:
        """Leave it in peace for a while, for longer each time."""
        self._wake, self._asked = step + self._interval, _PATIENCE - _TRIAL
        self._interval = min(_LONGEST, 2 * self._interval)
        self._gains.clear()
        self._probing = True

    def begin_again(self) -> None:
        """What it saves is another matter from now on."""
        self._gains.clear()


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One who was asked in a step."""

    asking: Asking
    ms: float
    """Added to the step, for all members."""
    tokens: float
    """Expected of its nodes, were they alone."""


def settle(turns: Sequence[Turn], step: int, *, gain_ms: float, plain_ms: float) -> None:
    """Share out what all who were asked save together, `gain_ms`, by what each would bring alone; the one that loses
    most by it is left in peace, and the others are looked at again: they may have drafted the same."""
    tokens = sum(turn.tokens for turn in turns)
    for turn in turns:
        turn.asking.asked(ms=turn.ms, gain_ms=gain_ms * turn.tokens / tokens if tokens > 0 else 0.0)
    losses = [turn.asking.loss_ms(plain_ms) for turn in turns]
    if not losses or max(losses) == 0.0:
        return
    worst = losses.index(max(losses))
    for index, turn in enumerate(turns):
        if index == worst:
            turn.asking.rest(step)
        else:
            turn.asking.begin_again()
