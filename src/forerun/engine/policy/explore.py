"""When something that is off, or was not seen for long, is tried again. Sees counts and ratios; no draft, no clock.

One schedule, `Backoff`, says when: after `interval` steps, twice as many after each failure up to a limit, and more
where a trial is dear. `RowTrials` (drafters with a forward pass) and `LookupTrials` (drafters that copy) follow it; a
few rows are tried for all. What is on is doubted, too: estimates fade (`Survival`), and what little stands behind a
figure is added to it (`optimism`). What is decided here can depend on no value of a draft that is yet to be drawn.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import fmean, median

from forerun.core.acceptance import Acceptance
from forerun.engine.policy.settings import SETTINGS


class Backoff:
    """The schedule of trials of one thing that is off."""

    def __init__(self, first: int = SETTINGS.interval) -> None:
        """`first`: the step of the first trial."""
        self._due, self._wait = first, 1

    def due(self, step: int) -> bool:
        """Whether it may be tried in this step."""
        return step >= self._due

    def failed(self, step: int, spent: float = 0.0) -> None:
        """A trial failed, which took `spent` plain steps."""
        self._due = step + self._wait * max(SETTINGS.interval, round(spent / SETTINGS.trial_share))
        self._wait = min(SETTINGS.longest, 2 * self._wait)

    def put_off(self, step: int) -> None:
        """More of it is off from now on."""
        self._due = max(self._due, step + SETTINGS.interval)

    def passed(self, step: int) -> None:
        """A trial passed: the next one, of what else is off, may follow at once."""
        self._due, self._wait = step, 1


@dataclass(slots=True)
class _Trial:
    tokens: float = 0.0
    cost: float = 0.0  # In plain steps
    steps: list[tuple[int, int]] = field(default_factory=list)  # (accepted, drafted)


class RowTrials:
    """Which rows a drafter with a forward pass works for: off where it does not pay, on again where a trial passed.

    Rows are tried together because a pass may be as wide as its widest row; of many only a few, for a drafter must read
    their texts first, and all rows wait for that. New rows start as the drafter stands: off once it is off for every
    row that it drafted for.
    """

    def __init__(self) -> None:
        self._misses: dict[int, int] = {}  # Row -> steps in a row that did not pay
        self._known: set[int] = set()  # Rows that it has drafted for
        self._off: dict[int, None] = {}  # Rows that it is off for, those that were tried last at the end
        self._trials: dict[int, _Trial] = {}
        self._useless = False  # No known row was on when last looked
        self._backoff = Backoff()
        self._step = 0
        self._spent, self._passed = 0.0, False  # Of the latest trials: their cost, and whether one passed

    def begin(self, rows: Sequence[int]) -> None:
        """A step of these rows begins: new ones start, and trials where they are due."""
        self._step += 1
        for row in rows:
            if row not in self._misses:
                self._misses[row] = 0
                if self._useless:
                    self._off[row] = None
        if self._off and not self._trials and self._backoff.due(self._step):
            here = set(rows)
            self._trials = {row: _Trial() for row in islice((r for r in self._off if r in here), SETTINGS.trial_rows)}
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

    def drafted(self, row: int, ratio: float) -> None:
        """A row that is on was drafted for; `ratio` to plain decoding is what its figures promise."""
        self._known.add(row)
        weight = SETTINGS.hopeless_steps if ratio < SETTINGS.hopeless else 1
        self._misses[row] = 0 if ratio >= SETTINGS.pays else self._misses.get(row, 0) + weight
        if self._misses[row] >= SETTINGS.off_after:
            self._put_off([row])

    def tried(self, row: int, *, accepted: int, drafted: int, cost: float) -> list[tuple[int, int]] | None:
        """A row on trial was drafted for, for which it answers with `cost` plain steps.

        Where it passed: its steps, (accepted, drafted).
        """
        trial = self._trials[row]
        trial.tokens += accepted + 1
        trial.cost += cost
        trial.steps.append((accepted, drafted))
        good = trial.tokens >= SETTINGS.pays * trial.cost
        if len(trial.steps) < SETTINGS.trial_steps[good]:
            return None
        self._off.pop(row, None)
        if not good:
            self._off[row] = None
        else:
            self._known.add(row)
            self._misses[row], self._useless, self._passed = 0, False, True
        self._end([row])
        return trial.steps if good else None

    def spend(self, cost: float) -> None:
        """A step with a trial took this much more than a plain one, in plain steps."""
        self._spent += cost

    def fail(self, rows: Sequence[int]) -> None:
        """The drafter raised: these rows go on without it until the next trial."""
        self._end(rows)
        self._put_off(rows)

    def forget(self, row: int) -> None:
        """The row is free."""
        self._misses.pop(row, None)
        self._known.discard(row)
        self._off.pop(row, None)
        self._end([row])

    def _put_off(self, rows: Sequence[int]) -> None:
        self._off.update(dict.fromkeys(rows))
        self._misses.update(dict.fromkeys(rows, 0))
        self._useless = self._off.keys() >= self._known
        if self._useless:
            self._off.update(dict.fromkeys(self._misses))
        self._backoff.put_off(self._step)

    def _end(self, rows: Iterable[int]) -> None:
        ended = [row for row in rows if self._trials.pop(row, None) is not None]
        if ended and not self._trials:
            if self._passed:
                self._backoff.passed(self._step)
            else:
                self._backoff.failed(self._step, self._spent)


class LookupTrials:
    """When a drafter that copies is asked: always if that is cheap or repays itself, else on trial, for a few rows."""

    def __init__(self) -> None:
        self._seen = deque[tuple[float, float]](maxlen=SETTINGS.off_after)
        """(ms added, ms saved) of the steps that it was asked in of late."""
        self._backoff, self._needed = Backoff(first=0), SETTINGS.off_after

    def due(self, step: int) -> bool:
        """Whether to ask in this step."""
        return self._backoff.due(step)

    def of(self, members: Sequence[int]) -> Sequence[int]:
        """Those of the members to ask it for: in a trial a few stand for all."""
        trying = self._needed == SETTINGS.lookup_steps and len(self._seen) <= self._needed
        return members[:: -(-len(members) // SETTINGS.trial_rows)] if trying and members else members

    def looked_up(self, step: int, *, ms: float, gain_ms: float) -> None:
        """It was asked, which added `ms` to the step; what it drafts is expected to save `gain_ms` of decoding."""
        self._seen.append((ms, gain_ms))
        if len(self._seen) == SETTINGS.off_after:
            self._backoff.passed(step)

    def loss_ms(self, plain_ms: float) -> float:
        """What asking takes beyond what it saves, a step; 0 where it is cheap, repays itself or is too new to tell."""
        if len(self._seen) < self._needed:
            return 0.0
        cost = median(ms for ms, _ in self._seen)
        return max(0.0, cost - fmean(gain for _, gain in self._seen)) if cost > SETTINGS.cheap * plain_ms else 0.0

    def put_off(self, step: int) -> None:
        """It is not asked until the next trial."""
        self._backoff.failed(step)
        self._needed = SETTINGS.lookup_steps
        self._seen.clear()

    def look_again(self) -> None:
        """What it saves is another matter from now on."""
        self._seen.clear()


def settle(asked: Sequence[tuple[LookupTrials, float, float]], step: int, *, gain_ms: float, plain_ms: float) -> None:
    """Put off the drafter that loses most by being asked; the others are looked at again: they may have drafted the
    same.

    Args:
        asked: the trials of each drafter, what asking it added to the step (ms, for all rows), and the tokens that its
            nodes alone would bring: what all save together, `gain_ms`, is shared by these.
    """
    tokens = sum(own for *_, own in asked)
    for trials, ms, own in asked:
        trials.looked_up(step, ms=ms, gain_ms=gain_ms * own / tokens if tokens > 0 else 0.0)
    losses = [trials.loss_ms(plain_ms) for trials, *_ in asked]
    if max(losses, default=0.0) > 0.0:
        worst = losses.index(max(losses))
        for index, (trials, *_) in enumerate(asked):
            if index == worst:
                trials.put_off(step)
            else:
                trials.look_again()


class Survival:
    """Acceptance by depth of one drafter: a row starts from what all rows showed and departs from it as it learns.

    What a drafter that is not asked, or not so deep, once showed fades, and so does what stands behind it (`evidence`):
    it is tried again, also while something else pays.
    """

    def __init__(self) -> None:
        self._long, self._shared = Acceptance(weight=SETTINGS.weight), Acceptance(weight=SETTINGS.weight)
        self._rows: dict[int, Acceptance] = {}
        self._all: list[float] = []
        """What all rows together say of no depth, depth 1, ..., as far as it was worked out since they last learned."""

    def record(self, row: int, *, accepted: int, drafted: int) -> None:
        """Count a step whose path of `drafted` tokens was accepted up to `accepted`; what lies behind is unseen."""
        own = self._rows.setdefault(row, Acceptance(weight=SETTINGS.weight))
        self._all.clear()
        for depth in range(min(accepted + 1, drafted)):
            self._shared.learn(depth, depth < accepted)
            own.learn(depth, depth < accepted)

    def age(self) -> None:
        """A step has passed, whoever drafted in it: what was seen counts a little less."""
        lost = 1 - SETTINGS.shared_memory
        self._all.clear()
        right, tried = self._shared.counts(0)
        self._long.fade(SETTINGS.long_memory)
        self._long.learn(0, lost * right, lost * tried)
        self._shared.fade(SETTINGS.shared_memory)
        for own in self._rows.values():
            own.fade(SETTINGS.row_memory)

    def curve(self, row: int | None, depth: int) -> list[float]:
        """Probability that depth 1, 2, ... `depth` survives; of all rows together where `row` is None or new."""
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
        """Steps that stand behind a row's curve; those of other rows count up to a limit."""
        own = self._rows[row].counts(0)[1] if row in self._rows else 0.0
        return 1.0 + own + min(SETTINGS.shared_evidence, self._shared.counts(0)[1])

    def renew(self, row: int, steps: Sequence[tuple[int, int]]) -> None:
        """What was known of a row no longer holds: start again from these (accepted, drafted) steps."""
        self.forget(row)
        self._long.fade(0.25)
        self._shared.fade(0.25)
        for accepted, drafted in steps:
            self.record(row, accepted=accepted, drafted=drafted)

    def forget(self, row: int) -> None:
        """The row is free."""
        self._rows.pop(row, None)


def guessed(depth: int) -> list[float]:
    """The curve of a drafter that nobody has seen."""
    return [SETTINGS.first_guess**level for level in range(1, depth + 1)]


def optimism(curve: Sequence[float], evidence: float, steps: int) -> float:
    """Tokens to add to an expectation for what is not known of it: an upper confidence bound (arXiv 2505.15141).

    Args:
        curve: probability that depth 1, 2, ... survives.
        evidence: steps behind the curve.
        steps: steps so far, of all drafters.
    """
    mean = sum(curve)
    square = sum((2 * depth - 1) * alive for depth, alive in enumerate(curve, start=1))
    deviation = math.sqrt(max(0.05, square - mean * mean))
    return SETTINGS.exploration * deviation * math.sqrt(math.log(2.0 + steps) / evidence)
