"""What is worth training: by the plan's figures, with the reason in words."""

from dataclasses import replace

import pytest

from forerun.control.costs import CostModel, DraftCost
from forerun.speedup.training import (
    FreeSpeed,
    HeadChoice,
    HeadShape,
    TrainingBudget,
    TrainingProbe,
    choose_head,
    expected_acceptance,
    forecast_head,
)

COST = CostModel(nodes=(1, 64), rows=(1,), contexts=(64,), pass_times_ms=(((10.0, 12.0),),), stairs=False)
SHAPE = HeadShape(kind="eagle3", vocab_size=8192, steps=3, parameters=10_000_000, coverage=0.98)
PROBE = TrainingProbe(shape=SHAPE, step_s=1.0, counted=400.0, draft=DraftCost(fixed_ms=0.5, level_ms=0.5))
PLENTY = TrainingBudget(seconds=28_800.0, tokens=2_000_000, target_parameters=135_000_000)
NONE_FREE = {"chat": FreeSpeed(speedup=1.0, share=1.0)}


def chosen(budget: TrainingBudget, free: dict[str, FreeSpeed], *, forced: bool = False) -> HeadChoice:
    shapes = [SHAPE, replace(SHAPE, steps=7), replace(SHAPE, vocab_size=None, parameters=33_000_000, coverage=1.0)]
    return choose_head([forecast_head(one, PROBE, budget, COST, free) for one in shapes], free, budget, forced=forced)


def test_a_long_budget_trains_and_says_what_is_expected() -> None:
    found = chosen(PLENTY, NONE_FREE)
    assert found.train and "draft vocabulary 8,192 tokens" in found.reason and "is expected to have" in found.reason
    record = found.record()
    assert record["expected_speedup"] > 1.5 and record["training_steps"] == pytest.approx(28_800, rel=0.01)


def test_a_budget_too_short_for_any_head() -> None:
    found = chosen(replace(PLENTY, seconds=50.0), NONE_FREE)
    assert not found.train and "the budget is too short for any head: 50 training steps" in found.reason
    assert chosen(replace(PLENTY, seconds=50.0), NONE_FREE, forced=True).train
    assert not chosen(replace(PLENTY, seconds=0.0), NONE_FREE, forced=True).train


def test_nothing_is_trained_where_copying_is_as_good() -> None:
    found = chosen(PLENTY, {"edit": FreeSpeed(speedup=5.0, share=1.0)})
    assert not found.train and "no head is worth its training" in found.reason


def test_a_head_pays_for_the_categories_that_copying_leaves() -> None:
    both = {"edit": FreeSpeed(speedup=5.0, share=1.0), "chat": FreeSpeed(speedup=1.0, share=1.0)}
    assert chosen(PLENTY, both).train


def test_few_answers_are_said_to_be_few() -> None:
    found = chosen(replace(PLENTY, tokens=4_000), {"chat": FreeSpeed(speedup=1.3, share=1.0)})
    assert not found.train and "More prompts help most" in found.reason


def test_more_tokens_are_accepted_more_often() -> None:
    rates = [expected_acceptance(10.0**power) for power in range(10)]
    assert rates == sorted(rates) and rates[0] == 0.0 and rates[-1] < 1
