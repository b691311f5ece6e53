"""Estimates of survival: sensible before anything was seen, right after much was."""

from __future__ import annotations

import random

import pytest

from forerun.drafters.calibration import Calibration, Signs
from forerun.types import Drawn

KINDS = list(Drawn)


@pytest.mark.parametrize("drawn", KINDS)
def test_first_guesses_rise_with_the_drafts_own_probability_and_fall_with_rank(drawn: Drawn) -> None:
    fresh = Calibration()
    by_raw = [fresh.estimate(Signs(drawn, 0, raw / 10)) for raw in range(11)]
    assert by_raw == sorted(by_raw)
    assert 0 <= by_raw[0] <= by_raw[-1] <= 1
    if drawn is not Drawn.GIVEN:
        assert fresh.estimate(Signs(drawn, 1, 0.5)) < fresh.estimate(Signs(drawn, 0, 0.5))


@pytest.mark.parametrize("drawn", KINDS)
def test_it_learns_what_really_happens(drawn: Drawn) -> None:
    rng, learned = random.Random(0), Calibration()
    truth = {0.15: 0.5, 0.85: 0.3}
    for _ in range(2000):
        raw = rng.choice(list(truth))
        learned.learn(Signs(drawn, 0, raw), rng.random() < truth[raw])
    for raw, rate in truth.items():
        assert learned.estimate(Signs(drawn, 0, raw)) == pytest.approx(rate, abs=0.05)
    untouched = Signs(drawn, 2, 0.15)
    assert learned.estimate(untouched) == Calibration().estimate(untouched)
