"""Sampling parameters: what is refused when the request is made, and what reads as greedy."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from forerun.core.sampling import distribution_of
from forerun.drafters.draft_models.draft_model import DraftModelConfig
from forerun.errors import ArgumentError
from forerun.heads.drafting import HeadDrafterConfig
from forerun.params import INSTEAD
from forerun.types import SamplingParams, StructuredOutputs, StructuredOutputsParams

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


WHOLE = ("n", "top_k", "seed", "max_tokens", "logprobs", "prompt_logprobs", "truncate_prompt_tokens")


@pytest.mark.parametrize(
    ("changes", "message"),
    [({name: value}, f"{name} must be an integer, got") for name in (*WHOLE, "min_tokens") for value in (2.0, 2.5, "2")]
    + [({name: "0"}, f"{name} must be a number, got '0'") for name in ("temperature", "top_p", "presence_penalty")]
    + [({name: value}, f"{name} must be token ids") for name in ("stop_token_ids", "allowed_token_ids")
       for value in (5, "5", ["5"], [1.5], b"ab", {5: 1})]
    + [({name: value}, f"{name} must be a list of strings") for name in ("stop", "bad_words")
       for value in (5, [5], b"x")]
    + [({"bad_words": "from"}, "bad_words must be a list of strings, got 'from'")]
    + [({"logit_bias": value}, "logit_bias must") for value in ([5], {"x": 1.0}, {1.5: 1.0}, {5: "1"})]
    + [({"logit_bias": {"x": 1.0}}, r"logit_bias must map token ids to numbers, got \{'x': 1.0\}")]
    + [({"logits_processors": value}, "logits_processors must be a list of functions") for value in (5, [5], len)]
    + [({"structured_outputs": value}, "structured_outputs must be StructuredOutputs") for value in ("json", 5, ["a"])]
    + [({"structured_outputs": {"choice": value}}, "choice must be a list of strings") for value in ("ab", [1], 5)]
    + [({"structured_outputs": {name: 5}}, f"{name} must be a string") for name in ("json", "regex", "grammar")]
    + [({"structured_outputs": {"json_object": "no"}}, "json_object must be True or False, got 'no'")]
    + [({"stop": "a", "detokenize": False}, "stop strings are only supported when detokenize is True")]
    + [({name: "false"}, f"{name} must be True or False") for name in ("ignore_eos", "detokenize", "allow_biased")]
    + [({"seed": value}, "seed must be from") for value in (2**64, -(2**63) - 1, 2**70)]
    + [({name: -2}, "or -1 for the whole vocabulary") for name in ("logprobs", "prompt_logprobs")],
)  # fmt: skip
def test_values_of_another_type_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        SamplingParams(**changes)


def test_a_dict_and_strings_are_read_as_vllm_reads_them() -> None:
    read = SamplingParams(structured_outputs={"choice": ["a"]}, logit_bias={"5": 1.0}, logits_processors=None)
    assert read.structured_outputs == StructuredOutputs(choice=["a"]) == StructuredOutputsParams(choice=["a"])
    assert read.logit_bias == {5: 1.0} and read.logits_processors == () and read.clone() == read
    assert not isinstance(SamplingParams(logit_bias={5: 1.0}).sealed().logit_bias, dict)


@pytest.mark.parametrize("name", sorted(INSTEAD))
def test_arguments_of_vllm_say_what_takes_their_place(name: str) -> None:
    with pytest.raises(TypeError, match=f"SamplingParams.. has no argument '{name}': [a-z]"):
        SamplingParams(**{name: None})


def test_the_nearest_argument_is_named_if_it_is_near() -> None:
    for given, hint in {"max_new_tokens": "max_tokens", "temprature": "temperature", "top-p": "top_p"}.items():
        with pytest.raises(TypeError, match=f"'{given}'. Did you mean '{hint}'"):
            SamplingParams(**{given: 1})
    for given in ("beams", "stop_words_ids", "prompt_embeddings", "min_length"):
        with pytest.raises(TypeError, match=f"has no argument '{given}'\\.$"):
            SamplingParams(**{given: 1})
    with pytest.raises(TypeError, match="'structural_tag': grammar="):
        StructuredOutputs(structural_tag="x")


def test_numbers_and_ids_may_be_of_numpy_or_torch() -> None:
    for name in WHOLE:
        value = getattr(SamplingParams(**{name: np.int64(3)}), name)
        assert value == 3 and type(value) is int
    assert SamplingParams(temperature=np.float32(0.5), stop="a").temperature == 0.5
    for made in (np.array, torch.tensor):
        params = SamplingParams(stop_token_ids=made([5, 6]), allowed_token_ids=made([7]))
        assert params.stop_token_ids == [5, 6] and params.allowed_token_ids == [7]
