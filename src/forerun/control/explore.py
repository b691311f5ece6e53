"""The exploration schedule: when something that is off, or was not seen for long, is tried again.
Sees counts and ratios; no draft, no clock.

One schedule, `TrialSchedule`: after `interval` steps, or later where a trial is dear; a few rows are tried for all.
What is on is doubted, too: estimates fade (`Survival`), and what little stands behind a figure is added to it
(`optimism`). Nothing here depends on the value of a draft that is not drawn yet.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from forerun.control.settings import SETTINGS
from forerun.core.acceptance import Acceptance

_SHARED_EVIDENCE = 4 * SETTINGS.weight
"""Most steps of other rows behind a row's figures: with one prior's worth the bound added 0.3 tokens anew for every
request, and models drafted in 30 % of the steps at 50 ms where copies gave more tokens at 37.
"""


class TrialSchedule:
    """The schedule of trials of one drafter; `first` is the step of the first one."""

    least = SETTINGS.interval  # Steps from the end of a trial to the next one

    def __init__(self, first: int) -> None:
        self._due = first

    def due(self, step: int) -> bool:
        """Return whether it may be tried in this step."""
        return step >= self._due

    def wait_after(self, step: int, spent: float = 0.0) -> None:
        """Schedule the next trial after one that ended, which took `spent` plain steps."""
        self._due = step + max(self.least, round(spent / SETTINGS.trial_share))


def few(members: Sequence[int]) -> Sequence[int]:
    """Return some of many rows that represent all of them in a trial."""
    return members[:: -(-len(members) // SETTINGS.few)] if members else members


class PassTrials(TrialSchedule):
    """The schedule, by the number of rows, for checking whether passes with nodes are still as
    expensive as when they were last seen: what else ran on the machine then may have ended, and
    what is not drafted is not seen.
    """

    def __init__(self) -> None:
        super().__init__(first=SETTINGS.interval)
        self._ended = math.inf  # When drafting has ended, if no step from now on drafts

    def due(self, step: int) -> bool:
        return super().due(step) or step >= self._ended

    def drafted(self, step: int) -> None:
        """Note that nodes were scored because that pays."""
        self._ended = step + SETTINGS.interval

    def wait_after(self, step: int, spent: float = 0.0) -> None:
        super().wait_after(step, spent)
        self._ended = math.inf


class ModelTrials(TrialSchedule):
    """The schedule for trying a drafter with a forward pass although its figures speak against it,
    for a few rows: all learn from these, for the figures of a row start from what all rows showed
    (`Survival`).
    """

    def __init__(self) -> None:
        super().__init__(first=SETTINGS.interval)
        self._steps, self._tokens, self._cost, self._spent = 0, 0.0, 0.0, 0.0  # Figures of the current trial
        self.off = False  # It raised: it drafts on trial alone until a trial passes

    @property
    def begun(self) -> bool:
        """True while a trial goes on."""
        return self._steps > 0

    def drafted(self, step: int) -> None:
        """Note that it drafted because its figures are good."""
        self._due = max(self._due, step + SETTINGS.interval)

    def tried(self, step: int, *, tokens: float, cost: float, spent: float) -> bool:
        """Record a step of a trial, which added `spent` plain steps; returns whether the trial has
        passed with it. A row that was tried had `tokens`, and would answer for `cost` plain steps
        if all rows were drafted for.
        """
        self._steps, self._spent = self._steps + 1, self._spent + spent
        self._tokens, self._cost = self._tokens + tokens, self._cost + cost
        good = self._tokens >= SETTINGS.pays * self._cost
        if self._steps < (SETTINGS.few if good else 2):
            return False
        self._end(step)
        self.off = self.off and not good
        return good

    def fail(self, step: int) -> None:
        """Note that the drafter raised."""
        self.off = True
        self._end(step)

    def _end(self, step: int) -> None:
        self.wait_after(step, self._spent)
        self._steps, self._tokens, self._cost, self._spent = 0, 0.0, 0.0, 0.0


class LookupTrials(TrialSchedule):
    """The schedule for asking a drafter that copies: in every step while that repays itself, else for a
    few rows, as often as takes `trial_share` of the time, until what it holds repays asking. A long
    copy does so at once.
    """

    least = 1

    def __init__(self) -> None:
        super().__init__(first=0)
        self.off = False
        self._seen = deque[tuple[float, float]](maxlen=SETTINGS.window)
        """Pairs (ms added, ms saved) of the latest steps that it was asked in."""

    def of(self, members: Sequence[int]) -> Sequence[int]:
        """Return the members to ask it for: while it is off a few represent all."""
        return few(members) if self.off else members

    def looked_up(self, *, ms: float, gain_ms: float) -> None:
        """Record that it was asked, which adds `ms` to a step if it is asked for all rows; what it
        drafts is expected to save `gain_ms` of decoding.
        """
        self._seen.append((ms, gain_ms))
        if self.off and sum([gain for _, gain in [*self._seen][-SETTINGS.few :]]) > SETTINGS.few * ms:
            self.off = False
            self.begin_anew()

    def begin_anew(self) -> None:
        """Forget what was seen so far: since then it, or one that may hold the same, is asked anew or no more."""
        self._seen.clear()

    def loss_ms(self) -> float:
        """Return what asking takes beyond what it saves, a step; 0 if it repays itself or is too new to tell."""
        if self.off or len(self._seen) < SETTINGS.few:
            return 0.0
        cost = median([ms for ms, _ in self._seen])
        return max(0.0, cost - sum([gain for _, gain in self._seen]) / len(self._seen))


class Asked(NamedTuple):
    """A drafter that copies was asked in a step: the cost, and what it saves."""

    trials: LookupTrials
    spent_ms: float  # For the rows that it was asked for
    ms: float  # If it is asked for all rows
    gain_ms: float  # Saved by what nobody else drafted, for all rows


def settle(asked: Sequence[Asked], step: int, *, plain_ms: float) -> None:
    """Put off the drafter that loses most by being asked; the others are looked at again, for they may have drafted the
    same. Those that are off stay off unless what they hold repays asking them.
    """
    for one in asked:
        one.trials.looked_up(ms=one.ms, gain_ms=one.gain_ms)
    losses = [one.trials.loss_ms() for one in asked]
    if max(losses, default=0.0) > 0.0:
        asked[losses.index(max(losses))].trials.off = True
        for one in asked:
            one.trials.begin_anew()
    for one in asked:
        if one.trials.off:
            one.trials.wait_after(step, one.spent_ms / plain_ms)


class Survival:
    """Acceptance by depth of one drafter: a row starts from what all rows showed and departs from
    it as it learns. What was not seen for long fades, and so does its `evidence`: it is tried
    again, also while something else pays.
    """

    def __init__(self) -> None:
        self._long, self._shared = Acceptance(weight=SETTINGS.weight), Acceptance(weight=SETTINGS.weight)
        self._rows: dict[int, Acceptance] = {}
        self._all: list[float] = []
        """Estimates of all rows together for no depth, depth 1, ..., as far as computed since they
        last learned.
        """

    def record(self, row: int, *, accepted: int, drafted: int) -> None:
        """Count a step whose path of `drafted` tokens was accepted up to `accepted`; what lies
        behind is unseen.
        """
        own = self._rows.setdefault(row, Acceptance(weight=SETTINGS.weight, memory=SETTINGS.row_memory))
        self._all.clear()
        for depth in range(min(accepted + 1, drafted)):
            self._shared.learn(depth, depth < accepted)
            own.learn(depth, depth < accepted)

    def age(self) -> None:
        """Fade what was seen: a step has passed, whoever drafted in it."""
        lost = 1 - SETTINGS.memory
        self._all.clear()
        right, tried = self._shared.counts(0)
        self._long.fade(SETTINGS.long_memory)
        self._long.learn(0, lost * right, lost * tried)
        self._shared.fade(SETTINGS.memory)
        for own in self._rows.values():
            own.fade(SETTINGS.memory)

    def curve(self, row: int | None, depth: int) -> list[float]:
        """Return the probability that depth 1, 2, ... `depth` survives; of all rows together if
        `row` is None or new.
        """
        own, all_rows = self._rows.get(row) if row is not None else None, self._all
        if not all_rows:
            all_rows.append(self._long.estimate(0, SETTINGS.first_guess))
        while len(all_rows) <= depth:
            all_rows.append(self._shared.estimate(len(all_rows) - 1, all_rows[-1]))
        mine, alive, found = all_rows[0], 1.0, list[float]()
        for level in range(depth):
            expected = min(0.995, max(0.005, all_rows[level + 1] + SETTINGS.carried * (mine - all_rows[level])))
            mine = expected if own is None else own.estimate(level, expected)
            alive *= mine
            found.append(alive)
        return found

    def evidence(self, row: int) -> float:
        """Return the steps that support a row's curve; those of other rows count up to a limit."""
        own = self._rows[row].counts(0)[1] if row in self._rows else 0.0
        return 1.0 + own + min(_SHARED_EVIDENCE, self._shared.counts(0)[1])

    def renew(self) -> None:
        """Fade what was seen before a trial that passed, for it tells little."""
        self._all.clear()
        for known in (self._long, self._shared, *self._rows.values()):
            known.fade(0.25)

    def forget(self, row: int) -> None:
        """Forget a row that is free."""
        self._rows.pop(row, None)


def optimism(curve: Sequence[float], evidence: float, steps: int) -> float:
    """Return the tokens to add to an expectation for its uncertainty: an upper confidence bound
    (arXiv 2505.15141) from the probability that depth 1, 2, ... survives, the steps that support
    it, and the steps so far of all drafters.
    """
    mean = sum(curve)
    square = sum((2 * depth - 1) * alive for depth, alive in enumerate(curve, start=1))
    deviation = math.sqrt(max(0.05, square - mean * mean))
    return SETTINGS.exploration * deviation * math.sqrt(math.log(2.0 + steps) / evidence)
