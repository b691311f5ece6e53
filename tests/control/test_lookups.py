"""When copying drafters are asked follows what they save, how much they are asked for what is taken of it."""

import pytest

from forerun.control.explore import LookupOutcome, LookupTrials, update_lookup_trials
from forerun.control.settings import SETTINGS

PLAIN_MS = 20.0


def ask(trials: LookupTrials, step: int, *, ms: float, gain_ms: float) -> None:
    """Ask one alone for all rows."""
    update_lookup_trials([LookupOutcome(trials, spent_ms=ms, ms=ms, gain_ms=gain_ms)], step, plain_ms=PLAIN_MS)


@pytest.mark.parametrize(
    ("ms", "gain_ms", "share"),
    [(2.0, 3.0, 1.0), (0.2, 0.1, 1.0), (2.0, 1.0, 0.1), (8.0, 1.0, 0.025)],
    ids=["repays itself", "takes no more than trials may", "does not repay itself", "is dear"],
)
def test_one_is_asked_all_the_time_only_if_it_repays_itself(ms: float, gain_ms: float, share: float) -> None:
    trials, asked = LookupTrials(), 0
    for step in range(2000):
        if trials.due(step):
            ask(trials, step, ms=ms, gain_ms=gain_ms)
            asked += step >= 1000
    assert asked == pytest.approx(share * 1000, rel=0.05)
    assert asked * ms <= 1.05 * SETTINGS.trial_share * 1000 * PLAIN_MS or share == 1.0


@pytest.mark.parametrize(("gain_ms", "trials_needed"), [(30.0, 1), (5.0, 4), (2.1, 8)])
def test_one_that_was_put_off_is_asked_again_when_it_saves(gain_ms: float, trials_needed: int) -> None:
    """A long copy says so by itself; of small gains there must be some."""
    trials, asked = LookupTrials(), list[int]()
    for step in range(400):
        if trials.due(step):
            asked.append(step)
            ask(trials, step, ms=2.0, gain_ms=gain_ms if step > 200 else 0.0)
    after = [step for step in asked if step > 200]
    spacing = round(2.0 / PLAIN_MS / SETTINGS.trial_share)
    first, last = after[0], after[trials_needed - 1]
    assert after == [*range(first, last, spacing), *range(last, 400)]


def test_of_two_that_draft_the_same_one_is_put_off() -> None:
    """Either saves 3 ms and takes 2; beside it the other saves nothing more."""
    both = [LookupTrials(), LookupTrials()]
    asked = [0, 0]
    for step in range(1000):
        due = [(index, one) for index, one in enumerate(both) if one.due(step)]
        turns = [(one, 2.0 + index / 4, 3.0 if len(due) == 1 else 0.0) for index, one in due]
        update_lookup_trials([LookupOutcome(one, ms, ms, gain) for one, ms, gain in turns], step, plain_ms=PLAIN_MS)
        asked = [count + one.due(step) for count, one in zip(asked, both, strict=True)]
    assert asked[0] > 900 and asked[1] < 200


def test_while_one_is_off_a_few_stand_for_all() -> None:
    trials, asked = LookupTrials(), list[int]()
    for step in range(160):
        if trials.due(step):
            asked.append(len(trials.sample(range(20))))
            ask(trials, step, ms=2.0, gain_ms=9.0 if step > 90 else 0.0)
    assert asked == [20] * 8 + [7] * 10 + [20] * (160 - 108)
    assert list(trials.sample([])) == []
