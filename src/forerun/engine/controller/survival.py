"""How deep a drafter's paths survive: acceptance by depth, of each row and of all, fading with age.

Knows counts only: no tree, no token, no drafter. What is asked here before a draft is made can therefore depend on no
value of that draft.
"""

from __future__ import annotations

from collections.abc import Sequence

from forerun.acceptance import Acceptance

FIRST_GUESS = 0.7
"""Conditional acceptance assumed of a drafter that nobody has seen: good enough to be tried at once."""
_SHARED_WEIGHT = 12.0
"""Observations that the depth above is worth to the shared figures, the long run to those of the first depth, and the
first guess to that."""
_ROW_WEIGHT = 12.0
"""Observations that the shared figures are worth to a row."""
_SHARED_EVIDENCE = 48.0
"""Most that those of other rows count when a row's figures are doubted: texts of one load are alike, and each new one
would else begin by trying everything again."""
_LONG_MEMORY = 0.5 ** (1 / 4096)
_SHARED_MEMORY = 0.5 ** (1 / 256)
_ROW_MEMORY = 0.5 ** (1 / 96)
"""What an observation still counts a step later, whoever drafted in it: half after 256 steps, of a row after 96. What
is no longer asked, or no longer drafted so deep, fades towards the long run and what the depth above shows, and so does
what stands behind it (`evidence`): so it is tried again, also while something else pays."""
_CARRIED = 0.8
"""Share of a row's surprise at one depth that is expected at the next."""
_LEAST, _MOST = 0.005, 0.995


class Survival:
    """Acceptance by depth of one drafter: a row starts from what all rows showed and departs from it as it learns."""

    def __init__(self) -> None:
        self._long, self._shared = Acceptance(weight=_SHARED_WEIGHT), Acceptance(weight=_SHARED_WEIGHT)
        self._rows: dict[int, Acceptance] = {}

    def record(self, row: int, *, accepted: int, drafted: int) -> None:
        """Count a step whose path of `drafted` tokens was kept for `accepted`; depths behind a rejection are unseen."""
        own = self._of(row)
        for depth in range(min(accepted + 1, drafted)):
            self._shared.learn(depth, depth < accepted)
            own.learn(depth, depth < accepted)

    def age(self) -> None:
        """A step has passed, whoever drafted in it: what was seen counts a little less."""
        right, tried = self._shared.counts(0)
        self._long.fade(_LONG_MEMORY)
        self._long.learn(0, (1 - _SHARED_MEMORY) * right, (1 - _SHARED_MEMORY) * tried)
        self._shared.fade(_SHARED_MEMORY)
        for own in self._rows.values():
            own.fade(_ROW_MEMORY)

    def curve(self, row: int | None, depth: int) -> list[float]:
        """Probability that depth 1, 2, ... `depth` survives; of all rows together where `row` is None or new."""
        own = self._rows.get(row) if row is not None else None
        shared = mine = self._expected()
        alive = 1.0
        found = []
        for level in range(depth):
            before, shared = shared, self._shared.estimate(level, shared)
            expected = min(_MOST, max(_LEAST, shared + _CARRIED * (mine - before)))
            mine = expected if own is None else own.estimate(level, expected)
            alive *= mine
            found.append(alive)
        return found

    def _expected(self) -> float:
        """Of a first token, before anything of late is known."""
        return self._long.estimate(0, FIRST_GUESS)

    def evidence(self, row: int) -> float:
        """Steps that stand behind a row's curve; those of other rows count up to a limit."""
        own = self._rows[row].counts(0)[1] if row in self._rows else 0.0
        return 1.0 + own + min(_SHARED_EVIDENCE, self._shared.counts(0)[1])

    def renew(self, row: int, steps: Sequence[tuple[int, int]]) -> None:
        """What was known of a row no longer holds: start again from these (accepted, drafted) steps."""
        self._rows.pop(row, None)
        self._long.fade(0.25)
        self._shared.fade(0.25)
        for accepted, drafted in steps:
            self.record(row, accepted=accepted, drafted=drafted)

    def forget(self, row: int) -> None:
        """The row is free."""
        self._rows.pop(row, None)

    def _of(self, row: int) -> Acceptance:
        if row not in self._rows:
            self._rows[row] = Acceptance(weight=_ROW_WEIGHT)
        return self._rows[row]


def guessed(depth: int) -> list[float]:
    """The curve of a drafter that nobody has seen."""
    return [FIRST_GUESS**level for level in range(1, depth + 1)]
