"""When copying drafters are asked follows what they save, how much they are asked for what is taken of it."""

import pytest

from forerun.control.explore import LookupTrials, settle


@pytest.mark.parametrize(
    ("ms", "gain_ms", "share"),
    [(0.1, 0.0, 1.0), (2.0, 3.0, 1.0), (2.0, 1.0, 8 / 72)],
    ids=["cheap", "repays itself", "does not"],
)
def test_one_that_is_dear_is_asked_all_the_time_only_if_it_repays_itself(
    ms: float, gain_ms: float, share: float
) -> None:
    trials, asked = LookupTrials(), 0
    for step in range(1000 + 20 * 72):
        if trials.due(step):
            settle([(trials, ms, gain_ms)], step, plain_ms=20.0)
            asked += step >= 1000
    assert asked == pytest.approx(share * 20 * 72, abs=8)


def test_one_that_was_put_off_stays_once_it_repays_itself() -> None:
    trials, asked = LookupTrials(), list[int]()
    for step in range(1000):
        if trials.due(step):
            asked.append(step)
            gain = 9.0 if step > 200 else 0.0
            settle([(trials, 2.0, gain)], step, plain_ms=20.0)
    assert asked[-500:] == list(range(500, 1000))


def test_of_two_that_draft_the_same_one_is_put_off() -> None:
    """Either saves 3 ms and takes 2; beside it the other saves nothing more."""
    both = [LookupTrials(), LookupTrials()]
    asked = [0, 0]
    for step in range(1000):
        due = [(index, one) for index, one in enumerate(both) if one.due(step)]
        turns = [(one, 2.0 + index / 4, 3.0 if len(due) == 1 else 0.0) for index, one in due]
        settle(turns, step, plain_ms=20.0)
        asked = [count + one.due(step) for count, one in zip(asked, both, strict=True)]
    assert asked[0] > 900 and asked[1] < 200


def test_after_a_rest_a_few_stand_for_all_until_it_has_shown_that_it_pays() -> None:
    trials, asked = LookupTrials(), list[int]()
    for step in range(160):
        if trials.due(step):
            asked.append(len(trials.of(range(20))))
            gain = 9.0 if step > 90 else 0.0
            settle([(trials, 2.0, gain)], step, plain_ms=20.0)
    assert asked == [20] * 24 + [7] * 9 + [20] * (160 - 103 - 9)
    assert list(trials.of([])) == []
