"""Off where a drafter does not pay, and back on when it does: hysteresis, and short trials of several rows at once.

Rows are tried together because a pass may be as wide as its widest row: if they tried by turns, every pass would be
wide. In a large batch a few are tried for all, for a drafter must first read their texts, and all rows wait for that.
Knows ratios to plain decoding, no drafter and no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

THRESHOLD = 1.02
"""A drafter pays if it yields this many times the tokens per time of plain decoding."""
PATIENCE = 32
"""Steps in a row below the threshold that switch a row off; clearly useless steps (`HOPELESS`) count fourfold."""
HOPELESS = 0.9
INTERVAL = 64
"""Steps from one trial to the next."""
TRIAL_SHARE = 0.015
"""Most share of the time that trials may take; where one costs more, the interval grows."""
_MOST_WAIT = 4
"""Times that the interval grows to, doubling, while one trial after another fails."""
_SHORTEST, _LONGEST = 2, 6
"""Steps of a trial: fewer where it fails."""
_TOGETHER = 8
"""Rows of a trial; where one of them passes, the next ones follow at once."""


@dataclass(slots=True)
class _Trial:
    tokens: float = 0.0
    cost: float = 0.0
    """In plain steps."""
    steps: list[tuple[int, int]] = field(default_factory=list)
    """(accepted, drafted)"""


class Switch:
    """Which rows one drafter works for."""

    def __init__(self) -> None:
        self._points: dict[int, int] = {}
        self._known: set[int] = set()
        """Rows that the drafter has drafted for."""
        self._off: set[int] = set()
        self._trials: dict[int, _Trial] = {}
        self._rounds, self._passed = 0, False
        """Trials so far, and whether a row passed the latest."""
        self._useless = False
        """No row that is known was on when last looked: others start off."""
        self._step, self._due = 0, INTERVAL
        self._spent, self._wait = 0.0, 1

    def begin(self, rows: list[int]) -> None:
        """A step of these rows begins: new ones start as the drafter stands, and trials start when they are due."""
        self._step += 1
        for row in rows:
            if row not in self._points:
                self._points[row] = 0
                if self._useless:
                    self._off.add(row)
        if self._off and self._step >= self._due and not self._trials:
            self._trials = {row: _Trial() for row in self._next([row for row in rows if row in self._off])}
            self._spent, self._passed = 0.0, False

    def on(self, row: int) -> bool:
        """Whether the drafter works for the row, not counting trials."""
        return row not in self._off

    def trying(self, row: int) -> bool:
        """Whether the row is on trial."""
        return row in self._trials

    @property
    def waiting(self) -> int:
        """Rows that a trial speaks for: all that the drafter is off for."""
        return len(self._off)

    def judge(self, row: int, ratio: float) -> None:
        """A row that is on has drafted; `ratio` to plain decoding is what its figures promise."""
        self._known.add(row)
        self._points[row] = _points(self._points.get(row, 0), ratio)
        if self._points[row] >= PATIENCE:
            self._put_off([row])

    def tried(self, row: int, *, accepted: int, drafted: int, cost: float) -> list[tuple[int, int]] | None:
        """A row on trial has drafted, for which it answers with `cost` plain steps.

        Where it passed: its steps, (accepted, drafted).
        """
        trial = self._trials[row]
        trial.tokens += accepted + 1
        trial.cost += cost
        trial.steps.append((accepted, drafted))
        good = trial.tokens >= THRESHOLD * trial.cost
        if len(trial.steps) < (_LONGEST if good else _SHORTEST):
            return None
        if good:
            self._off.discard(row)
            self._known.add(row)
            self._points[row], self._useless, self._passed = 0, False, True
        self._end(row)
        return trial.steps if good else None

    def spend(self, cost: float) -> None:
        """A step with a trial took this much more than a plain one, in plain steps."""
        self._spent += cost

    def fail(self, rows: list[int]) -> None:
        """The drafter raised: these rows go on without it until the next trial."""
        for row in rows:
            self._end(row)
        self._put_off(rows)

    def forget(self, row: int) -> None:
        """The row is free."""
        self._points.pop(row, None)
        self._known.discard(row)
        self._off.discard(row)
        self._end(row)

    def _put_off(self, rows: list[int]) -> None:
        self._off.update(rows)
        self._points.update(dict.fromkeys(rows, 0))
        self._useless = self._off >= self._known
        if self._useless:
            self._off.update(self._points)
        self._due = max(self._due, self._step + INTERVAL)

    def _next(self, rows: list[int]) -> list[int]:
        """Those of the rows that are tried next: each comes to it in time."""
        first = self._rounds * _TOGETHER % max(1, len(rows))
        self._rounds += 1
        return [*rows[first:], *rows[:first]][:_TOGETHER]

    def _end(self, row: int) -> None:
        if self._trials.pop(row, None) is None or self._trials:
            return
        if self._passed:
            self._due, self._wait = self._step + 1, 1
        else:
            self._due = self._step + self._wait * max(INTERVAL, round(self._spent / TRIAL_SHARE))
            self._wait = min(_MOST_WAIT, 2 * self._wait)


def _points(points: int, ratio: float) -> int:
    if ratio >= THRESHOLD:
        return 0
    return min(PATIENCE, points + (4 if ratio < HOPELESS else 1))
