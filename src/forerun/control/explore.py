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

from forerun.control.settings import SETTINGS
from forerun.core.acceptance import Acceptance

_SHARED_EVIDENCE = 4 * SETTINGS.weight
"""Most steps of other rows behind a row's figures: with one prior's worth the bound added 0.3 tokens anew for every
request, and models drafted in 30 % of the steps at 50 ms where copies gave more tokens at 37.
"""


class TrialSchedule:
    """The schedule of trials of one drafter; `first` is the step of the first one."""

    def __init__(self, first: int) -> None:
        self._due = first

    def due(self, step: int) -> bool:
        """Return whether it may be tried in this step."""
        return step >= self._due

    def wait_after(self, step: int, spent: float = 0.0) -> None:
        """Schedule the next trial after one that ended, which took `spent` plain steps."""
        self._due = step + max(SETTINGS.interval, round(spent / SETTINGS.trial_share))


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
    """The schedule for asking a drafter that copies: always if that is cheap or repays itself, else
    on trial, for a few rows.
    """

    def __init__(self) -> None:
        super().__init__(first=0)
        self._seen = deque[tuple[float, float]](maxlen=SETTINGS.window)
        """Pairs (ms added, ms saved) of the latest steps that it was asked in."""
        self._needed = SETTINGS.window

    def of(self, members: Sequence[int]) -> Sequence[int]:
        """Return the members to ask it for: in a trial a few represent all."""
        trying = self._needed == SETTINGS.few and len(self._seen) <= self._needed
        return few(members) if trying else members

    def looked_up(self, *, ms: float, gain_ms: float) -> None:
        """Record that it was asked, which added `ms` to the step; what it drafts is expected to
        save `gain_ms` of decoding.
        """
        self._seen.append((ms, gain_ms))

    def loss_ms(self, plain_ms: float) -> float:
        """Return what asking takes beyond what it saves, a step; 0 if it is cheap, repays itself or
        is too new to tell.
        """
        if len(self._seen) < self._needed:
            return 0.0
        cost = median([ms for ms, _ in self._seen])
        gain = sum([gain for _, gain in self._seen]) / len(self._seen)
        return max(0.0, cost - gain) if cost > SETTINGS.cheap * plain_ms else 0.0


def settle(asked: Sequence[tuple[LookupTrials, float, float]], step: int, *, plain_ms: float) -> None:
    """Put off the drafter that loses most by being asked; the others are looked at again: they may
    have drafted the same. `asked` holds the trials of each drafter, what asking it added to the
    step (ms, for all rows), and what is saved by what nobody else drafted (ms).
    """
    for trials, ms, gain_ms in asked:
        trials.looked_up(ms=ms, gain_ms=gain_ms)
    losses = [trials.loss_ms(plain_ms) for trials, *_ in asked]
    if max(losses, default=0.0) > 0.0:
        worst = asked[losses.index(max(losses))][0]
        worst.wait_after(step, SETTINGS.few * max(losses) / plain_ms)
        worst._needed = SETTINGS.few
        for trials, *_ in asked:
            trials._seen.clear()


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
