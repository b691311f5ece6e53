"""When a drafter with a forward pass is tried although its figures speak against it, and which rows it is good for."""

import dataclasses
from itertools import pairwise

import pytest

from control.simulation import LEVEL, Passes, Spec, World
from forerun.control.choice import best_depth
from forerun.control.explore import ModelTrials, sample_rows
from forerun.control.settings import SETTINGS


def steps_of(trials: ModelTrials, steps: int, *, tokens: float, cost: float = 1.5, spent: float = 0.5) -> list[int]:
    """The steps in which it is tried."""
    found = list[int]()
    for step in range(steps):
        if trials.due(step):
            found.append(step)
            trials.record_step(step, tokens=tokens, cost=cost, spent=spent)
    return found


def test_trials_that_fail_end_soon_and_become_rare() -> None:
    found = steps_of(ModelTrials(), 2000, tokens=1.0)
    assert found[:2] == [SETTINGS.interval, SETTINGS.interval + 1]
    waits = [later - before for before, later in pairwise(found[::2])]
    assert min(waits) >= 2 * 0.5 / SETTINGS.trial_share


def test_dear_trials_are_rarer() -> None:
    cheap, dear = (steps_of(ModelTrials(), 5000, tokens=1.0, spent=spent) for spent in (0.1, 5.0))
    assert len(cheap) > 2 * len(dear)
    assert 10.0 * len(dear) / 2 < 2 * SETTINGS.trial_share * 5000


def test_a_trial_that_passes_takes_longer_and_says_so() -> None:
    trials = ModelTrials()
    passed = [trials.record_step(100 + step, tokens=3.0, cost=1.5, spent=0.5) for step in range(SETTINGS.trial_steps)]
    assert passed == [False] * (SETTINGS.trial_steps - 1) + [True]


def test_who_drafts_is_not_on_trial() -> None:
    trials = ModelTrials()
    for step in range(1000):
        assert not trials.due(step)
        trials.note_drafted(step)


def test_one_that_raised_drafts_on_trial_alone_until_one_passes() -> None:
    trials = ModelTrials()
    trials.fail(0)
    assert trials.off
    steps_of(trials, 500, tokens=1.0)
    assert trials.off
    steps_of(trials, 2000, tokens=3.0)
    assert not trials.off


@pytest.mark.parametrize("rows", [0, 1, 8, 9, 20, 64])
def test_of_many_rows_a_few_are_tried(rows: int) -> None:
    chosen = sample_rows(range(rows))
    assert len(chosen) <= SETTINGS.trial_rows and bool(chosen) == bool(rows)
    assert list(chosen) == list(range(rows)) or rows > SETTINGS.trial_rows


def test_a_few_rows_speak_for_all() -> None:
    """Useless for 20 rows, then good: what eight of them showed brings all of them back."""
    turn = 500
    spec = Spec(name="m", alpha=lambda step, row: 0.02 if step < turn else 0.9, cost=LEVEL)
    world = World(spec, rows=20, passes=Passes(0.002))
    asked = world.drafters[0].asked
    world.run(200)
    before = world.drafters[0].asked
    world.run(turn - 200)
    assert world.drafters[0].asked - before <= 8 * 2 * 4 and before > asked
    depths = world.run(500).depths[-100:]
    assert all(sum(row[index] > 0 for row in depths) > 90 for index in range(20))


def test_the_best_depth_is_that_of_the_rows_for_which_drafting_pays() -> None:
    good, bad = [0.9**depth for depth in range(1, 9)], [0.05**depth for depth in range(1, 9)]

    def time(depth: int, rows: int) -> float:
        return 1.0 + 0.01 * depth * rows + 0.05 * depth

    both, alone = (best_depth(curves, time, 8) for curves in ([good] * 4 + [bad] * 4, [good] * 4))
    assert both == alone and both[1] == 4 and both[0] > 3 and both[2] > 1
    assert best_depth([bad] * 8, time, 8)[2] < 1


def test_the_policy_has_few_tuned_constants() -> None:
    assert len(dataclasses.fields(SETTINGS)) <= 15
