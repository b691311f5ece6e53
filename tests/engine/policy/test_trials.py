"""Where a drafter is off, and whom that concerns."""

from __future__ import annotations

from forerun.engine.policy.explore import RowTrials
from forerun.engine.policy.settings import SETTINGS


def useless_for(trials: RowTrials, row: int, steps: int = 8) -> None:
    for _ in range(steps):
        trials.drafted(row, 0.5)


def test_rows_that_it_never_drafted_for_do_not_keep_it_on() -> None:
    """Of 64 rows it drafts for some; the next ones would else each begin by trying it."""
    trials = RowTrials()
    trials.begin([0, 1, 2])
    useless_for(trials, 0)
    trials.begin([0, 1, 2, 3])
    assert not any(trials.on(row) for row in range(4))


def test_a_row_that_it_is_good_for_keeps_it_on() -> None:
    trials = RowTrials()
    trials.begin([0, 1, 2])
    trials.drafted(1, 1.5)
    useless_for(trials, 0)
    trials.begin([0, 1, 2, 3])
    assert [trials.on(row) for row in range(4)] == [False, True, True, True]
    trials.forget(1)
    trials.begin([0, 2, 3])
    useless_for(trials, 2)
    trials.begin([0, 2, 3, 4])
    assert not any(trials.on(row) for row in (0, 2, 3, 4))


def test_a_trial_that_passes_turns_it_on_for_new_rows() -> None:
    trials = RowTrials()
    trials.begin([0])
    useless_for(trials, 0)
    for _ in range(SETTINGS.interval + 1):
        trials.begin([0])
    assert trials.trying(0)
    while trials.trying(0):
        trials.tried(0, accepted=3, drafted=3, cost=1.5)
    trials.begin([0, 1])
    assert trials.on(0) and trials.on(1)


def test_of_many_rows_a_few_are_tried_and_the_others_follow_once_one_passes() -> None:
    trials = RowTrials()
    rows = list(range(20))
    trials.begin(rows)
    for row in rows:
        useless_for(trials, row)
    tried: list[list[int]] = []
    for step in range(2000):
        trials.begin(rows)
        trying = [row for row in rows if trials.trying(row)]
        if trying:
            tried.append(trying)
        for row in trying:
            trials.tried(row, accepted=3 if step > 500 else 0, drafted=3, cost=1.5)
        if all(trials.on(row) for row in rows):
            break
    rounds = [trial for trial, before in zip(tried, [[], *tried], strict=False) if trial != before]
    assert all(len(trial) <= 8 for trial in rounds)
    assert rounds[0] == rows[:8] and rounds[1] == rows[8:16] and rounds[2] == [*rows[:4], *rows[16:]]
    assert all(trials.on(row) for row in rows)
    assert len(tried) < 2 * len(rounds) + 6 * 4
