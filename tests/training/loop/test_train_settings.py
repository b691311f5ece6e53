"""Settings are checked by name, and the schedule is a function of the step."""

from __future__ import annotations

import math
from typing import Any

import pytest

from forerun.errors import ArgumentError
from forerun.training.loop.settings import TrainSettings
from forerun.training.loop.trainer import rate_factor


@pytest.mark.parametrize(
    ("values", "allowed"),
    [
        ({"learning_rate": 0.0}, "greater than 0"),
        ({"learning_rate": math.nan}, "a finite number"),
        ({"learning_rate": "fast"}, "a valid number"),
        ({"steps": 0}, "greater than or equal to 1, or none"),
        ({"steps": 2.5}, "a valid integer, or none"),
        ({"betas": (0.9, 1.0)}, "less than 1"),
        ({"optimizer": "sgd"}, "'adamw' or 'muon'"),
        ({"schedule": "linaer"}, "'cosine', 'linear' or 'constant', got 'linaer'. Did you mean 'linear'"),
        ({"warmup_share": 1.5}, "less than or equal to 1"),
        ({"accumulation": True}, "a valid integer"),
        ({"max_seconds": -1.0}, "greater than 0, or none"),
        ({"dtype": "float16"}, "'auto', 'bfloat16' or 'float32'"),
    ],
)
def test_a_bad_value_is_refused_by_field_value_and_what_is_allowed(values: dict[str, Any], allowed: str) -> None:
    name, value = next(iter(values.items()))
    with pytest.raises(ArgumentError) as caught:
        TrainSettings(**values)
    wrong = value[1] if isinstance(value, tuple) else value
    assert f"{name} must be" in str(caught.value) and f"got {wrong!r}" in str(caught.value)
    assert allowed in str(caught.value)


def test_steps_come_from_epochs_unless_given() -> None:
    assert TrainSettings(epochs=2.0).total_steps(10) == 20
    assert TrainSettings(epochs=0.5, accumulation=2).total_steps(10) == 3
    assert TrainSettings(epochs=0.001).total_steps(10) == 1
    assert TrainSettings(steps=7, epochs=3.0).total_steps(10) == 7


def test_steps_come_from_the_pace_where_seconds_end_a_run() -> None:
    settings = TrainSettings(seconds=60.0)
    assert settings.total_steps(10) == 10, "before the first step"
    assert settings.total_steps(10, step=1, spent=2.0) == 30
    assert settings.total_steps(10, step=50, spent=30.0) == 100
    assert settings.total_steps(10, step=50, spent=59.9) == 51, "there is time left, so there is another step"
    assert settings.total_steps(10, step=50, spent=60.0) == 50


def test_steps_and_seconds_are_not_given_both() -> None:
    with pytest.raises(ArgumentError, match="steps and seconds both say when training ends"):
        TrainSettings(steps=5, seconds=5.0)


def test_warmup_in_steps_beats_the_share() -> None:
    assert TrainSettings(warmup_share=0.25).warmup(40) == 10
    assert TrainSettings(warmup_steps=3, warmup_share=0.25).warmup(40) == 3


@pytest.mark.parametrize(
    ("shape", "values"),
    [
        ("cosine", [0.5, 1.0, 1.0, 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)), 0.55, 0.2318, 0.1]),
        ("linear", [0.5, 1.0, 1.0, 0.775, 0.55, 0.325, 0.1]),
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_schedule_values(shape: str, values: list[float]) -> None:
    settings = TrainSettings(warmup_steps=2, schedule=shape, min_rate_share=0.1)
    found = [rate_factor(step, 6, settings) for step in range(7)]
    assert found == pytest.approx(values, abs=1e-4)


def test_no_step_of_a_run_has_rate_zero() -> None:
    for shape in ("cosine", "linear"):
        settings = TrainSettings(warmup_steps=0, schedule=shape)
        assert all(rate_factor(step, 5, settings) > 0 for step in range(5))
        assert rate_factor(0, 1, settings) == 1.0
    assert rate_factor(0, 1, TrainSettings(warmup_steps=1, schedule="linear")) == 1.0
