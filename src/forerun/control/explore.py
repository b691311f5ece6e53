"""The exploration schedule says when a drafter that is off, or was not seen for long, is tried again.

The next trial is due after `interval` steps, or later where trials are slow (`TrialSchedule`), and drafts for a sample
of the rows. A drafter that is on is explored, too: its estimates fade (`Survival`), and a figure with little evidence
gets a bonus (`optimism`). All this reads counts and ratios only, never the value of a draft that is not drawn yet.
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
"""Most steps of other rows that count as evidence for a row. With a quarter of it the bonus was 0.3 tokens at the start
of every request, and models drafted in 30 % of the steps, at 50 ms, where lookup drafters gave more tokens at 37 ms.
"""


class TrialSchedule:
    """The schedule of one drafter's trials; `first` is the step of the first one."""

    least = SETTINGS.interval  # Least steps from the end of a trial to the next one

    def __init__(self, first: int) -> None:
        self._due = first

    def due(self, step: int) -> bool:
        """Return whether a trial may run in this step."""
        return step >= self._due

    def wait_after(self, step: int, spent: float = 0.0) -> None:
        """Schedule the next trial after one that ended and took `spent` plain steps."""
        self._due = step + max(self.least, round(spent / SETTINGS.trial_share))


def sample_rows(members: Sequence[int]) -> Sequence[int]:
    """Return an evenly spaced sample of the rows, which represents all of them in a trial."""
    return members[:: -(-len(members) // SETTINGS.trial_rows)] if members else members


class PassTrials(TrialSchedule):
    """The schedule for measuring passes with nodes again, for one number of rows. Another process may have slowed the
    last ones down and ended since; without drafts such passes are not run, so their times would never be corrected.
    """

    def __init__(self) -> None:
        super().__init__(first=SETTINGS.interval)
        self._idle_from = math.inf  # Step from which drafting counts as ended, unless a step before it drafts

    def due(self, step: int) -> bool:
        return super().due(step) or step >= self._idle_from

    def note_drafted(self, step: int) -> None:
        """Note that nodes were scored outside of a trial."""
        self._idle_from = step + SETTINGS.interval

    def wait_after(self, step: int, spent: float = 0.0) -> None:
        super().wait_after(step, spent)
        self._idle_from = math.inf


class ModelTrials(TrialSchedule):
    """The schedule for trying a drafter with a forward pass although its figures say that it does not pay. A trial
    drafts for a sample of the rows; all rows learn from it, because a row starts from the figures of all (`Survival`).
    """

    def __init__(self) -> None:
        super().__init__(first=SETTINGS.interval)
        self._steps, self._tokens, self._cost, self._spent = 0, 0.0, 0.0, 0.0  # Figures of the current trial
        self.off = False  # The drafter raised: it drafts only in trials until one passes

    @property
    def under_way(self) -> bool:
        """True from the first step of a trial to its last one."""
        return self._steps > 0

    def note_drafted(self, step: int) -> None:
        """Note that the drafter drafted outside of a trial, because it pays."""
        self._due = max(self._due, step + SETTINGS.interval)

    def record_step(self, step: int, *, tokens: float, cost: float, spent: float) -> bool:
        """Record one step of a trial, and return whether the trial ends with it and has passed.

        Args:
            tokens: mean tokens of the trial's rows.
            cost: plain steps that each row would cost if all rows were drafted for.
            spent: plain steps that the trial added to this step.
        """
        self._steps, self._spent = self._steps + 1, self._spent + spent
        self._tokens, self._cost = self._tokens + tokens, self._cost + cost
        good = self._tokens >= SETTINGS.min_speedup * self._cost
        if self._steps < (SETTINGS.trial_steps if good else 2):
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
    """The schedule for querying a lookup drafter: at every step while that repays itself. Else it is off: it is queried
    for a sample of the rows, as often as takes `trial_share` of the time, until its drafts repay the queries. A single
    long match does.
    """

    least = 1

    def __init__(self) -> None:
        super().__init__(first=0)
        self.off = False
        self._seen = deque[tuple[float, float]](maxlen=SETTINGS.window)
        """Pairs (ms added, ms saved) of the latest steps in which it was queried."""

    def sample(self, members: Sequence[int]) -> Sequence[int]:
        """Return the members to query it for: all, or a sample while it is off."""
        return sample_rows(members) if self.off else members

    def record(self, *, ms: float, gain_ms: float) -> None:
        """Record a query, and switch the drafter on if its drafts repay it.

        Args:
            ms: time that querying it for all rows adds to a step.
            gain_ms: time of decoding that its drafts are expected to save.
        """
        self._seen.append((ms, gain_ms))
        latest = [gain for _, gain in [*self._seen][-SETTINGS.trial_steps :]]
        if self.off and sum(latest) > SETTINGS.trial_steps * ms:
            self.off = False
            self.reset()

    def reset(self) -> None:
        """Forget the recorded queries: which drafters are queried has changed, and with it what each one saves."""
        self._seen.clear()

    def loss_ms(self) -> float:
        """Return what a query costs beyond what it saves, or 0 if it repays itself or too few were recorded."""
        if self.off or len(self._seen) < SETTINGS.trial_steps:
            return 0.0
        cost = median([ms for ms, _ in self._seen])
        return max(0.0, cost - sum([gain for _, gain in self._seen]) / len(self._seen))


class LookupOutcome(NamedTuple):
    """The cost and the gain of one query of a lookup drafter."""

    trials: LookupTrials
    spent_ms: float  # Cost, for the rows that it was queried for
    ms: float  # Cost, if it were queried for all rows
    gain_ms: float  # Time saved by what no other drafter proposed, for all rows


def update_lookup_trials(outcomes: Sequence[LookupOutcome], step: int, *, plain_ms: float) -> None:
    """Record the queries of one step, and switch off the drafter whose queries lose most. The others start afresh then:
    they may have proposed the same. A drafter that is off stays off unless its drafts repay its queries.
    """
    for outcome in outcomes:
        outcome.trials.record(ms=outcome.ms, gain_ms=outcome.gain_ms)
    losses = [outcome.trials.loss_ms() for outcome in outcomes]
    if max(losses, default=0.0) > 0.0:
        outcomes[losses.index(max(losses))].trials.off = True
        for outcome in outcomes:
            outcome.trials.reset()
    for outcome in outcomes:
        if outcome.trials.off:
            outcome.trials.wait_after(step, outcome.spent_ms / plain_ms)


class Survival:
    """The acceptance of one drafter by depth. A row starts from the figures of all rows and departs from them as it
    learns. Figures fade, and with them their `evidence`, so that a drafter is tried again while another one pays.
    """

    def __init__(self) -> None:
        self._long, self._shared = Acceptance(weight=SETTINGS.weight), Acceptance(weight=SETTINGS.weight)
        self._rows: dict[int, Acceptance] = {}
        self._all: list[float] = []
        """Estimates of all rows together: entry 0 is the long-run one, entry d that of depth d. Computed on demand, and
        cleared when counts change.
        """

    def record(self, row: int, *, accepted: int, drafted: int) -> None:
        """Count a path of `drafted` tokens, of which the first `accepted` were accepted. Tokens behind the first
        rejected one tell nothing.
        """
        row_counts = self._rows.setdefault(row, Acceptance(weight=SETTINGS.weight, memory=SETTINGS.row_memory))
        self._all.clear()
        for depth in range(min(accepted + 1, drafted)):
            self._shared.learn(depth, depth < accepted)
            row_counts.learn(depth, depth < accepted)

    def age(self) -> None:
        """Fade the counts by one step, whether or not this drafter drafted in it."""
        lost = 1 - SETTINGS.memory
        self._all.clear()
        right, tried = self._shared.counts(0)
        self._long.fade(SETTINGS.long_memory)
        self._long.learn(0, lost * right, lost * tried)
        self._shared.fade(SETTINGS.memory)
        for row_counts in self._rows.values():
            row_counts.fade(SETTINGS.memory)

    def curve(self, row: int | None, depth: int) -> list[float]:
        """Return the probability that depth 1, 2, ... `depth` survives. A row that is None or new has the figures of
        all rows.
        """
        row_counts = self._rows.get(row) if row is not None else None
        all_rows = self._all
        if not all_rows:
            all_rows.append(self._long.estimate(0, SETTINGS.first_guess))
        while len(all_rows) <= depth:
            all_rows.append(self._shared.estimate(len(all_rows) - 1, all_rows[-1]))
        mine, alive, survival = all_rows[0], 1.0, list[float]()
        for index in range(depth):
            expected = min(0.995, max(0.005, all_rows[index + 1] + SETTINGS.carried * (mine - all_rows[index])))
            mine = expected if row_counts is None else row_counts.estimate(index, expected)
            alive *= mine
            survival.append(alive)
        return survival

    def evidence(self, row: int) -> float:
        """Return the number of steps behind a row's curve; those of other rows count up to a limit."""
        own = self._rows[row].counts(0)[1] if row in self._rows else 0.0
        return 1.0 + own + min(_SHARED_EVIDENCE, self._shared.counts(0)[1])

    def renew(self) -> None:
        """Reduce all counts to a quarter, because a trial has passed: the drafter differs from what they say."""
        self._all.clear()
        for counts in (self._long, self._shared, *self._rows.values()):
            counts.fade(0.25)

    def forget(self, row: int) -> None:
        """Forget the counts of a row that is free."""
        self._rows.pop(row, None)


def optimism(curve: Sequence[float], evidence: float, steps: int) -> float:
    """Return the bonus in tokens that makes an upper confidence bound of expected accepted tokens (arXiv 2505.15141).

    Args:
        curve: probability that depth 1, 2, ... survives.
        evidence: number of steps behind the curve.
        steps: steps of the policy so far.
    """
    mean = sum(curve)
    square = sum((2 * depth - 1) * alive for depth, alive in enumerate(curve, start=1))
    deviation = math.sqrt(max(0.05, square - mean * mean))
    return SETTINGS.exploration * deviation * math.sqrt(math.log(2.0 + steps) / evidence)
