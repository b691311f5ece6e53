"""Sampling parameters: what is refused when the request is made, and what reads as greedy."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from forerun.core.sampling import distribution_of
from forerun.drafters.draft_models.draft_model import DraftModelConfig
from forerun.drafters.heads.drafting import HeadDrafterConfig
from forerun.errors import ArgumentError
from forerun.types import SamplingParams

SUBNORMAL, SMALLEST, LARGEST = 5e-324, 1e-46, 1.7976931348623157e308


@pytest.mark.parametrize("temperature", [0, 0.0, -0.0, SUBNORMAL, SMALLEST, 1e-40, 1e-30, 1e-6, 9.9e-6])
def test_temperatures_next_to_zero_are_greedy(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_p=0.9)
    assert params.greedy and params.temperature == 0.0
    assert distribution_of(torch.tensor([50.0, 80.0, 79.9]), params).tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("temperature", [1e-5, 2e-5, 1e-3, 1.0, 100.0, 1e4])
@pytest.mark.parametrize("more", [{}, {"top_p": 0.9}, {"min_p": 0.1, "top_k": 2}])
def test_every_other_temperature_gives_a_distribution(temperature: float, more: dict[str, Any]) -> None:
    """Whatever the logits are, as far as float32 goes; tokens that are banned stay banned."""
    for spread in (1e-30, 1.0, 80.0, 3e38):
        probs = distribution_of(
            torch.tensor([0.0, spread / 2, -math.inf, spread]), SamplingParams(temperature=temperature, **more)
        )
        assert probs[2] == 0 and bool((probs >= 0).all()) and float(probs.sum()) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("temperature", [-1e-9, -1.0, math.nan, math.inf, -math.inf, 1.1e4, 1e39, LARGEST])
def test_other_temperatures_are_refused(temperature: float) -> None:
    with pytest.raises(ArgumentError, match=r"temperature must be in \[0, 10000\], 0 is greedy, got"):
        SamplingParams(temperature=temperature)


@pytest.mark.parametrize("config", [DraftModelConfig, HeadDrafterConfig])
@pytest.mark.parametrize("temperature", [0.0, SMALLEST, 1e-6, -1.0, math.nan, math.inf, 1e39])
def test_temperatures_of_a_draft_are_refused(config: Any, temperature: float) -> None:
    with pytest.raises(ArgumentError, match=r"temperature must be in \[1e-05, 10000\], got"):
        config(model="demo-draft", temperature=temperature)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"repetition_penalty": value}, "repetition_penalty must be in") for value in (SMALLEST, 0, math.inf, math.nan)]
    + [({"logit_bias": {3: value}}, "logit_bias must hold finite numbers") for value in (math.inf, math.nan)]
    + [({name: math.nan}, name) for name in ("top_p", "min_p", "presence_penalty", "frequency_penalty")],
)
def test_numbers_that_leave_float32_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        SamplingParams(**changes)


def test_a_bias_may_ban() -> None:
    assert SamplingParams(logit_bias={3: -math.inf}).logit_bias == {3: -math.inf}
