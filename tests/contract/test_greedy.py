"""In float32 greedy output is the target's own, token by token, as transformers' forward without a cache says it is."""

from dataclasses import replace

import pytest

from contract.harness import PROMPTS, Variant, as_prompts, each_drafter, each_family, llm, plain_greedy, tokens_of
from forerun import SamplingParams

LENGTH = 24
NEUTRAL = SamplingParams(temperature=0.0, max_tokens=LENGTH)
PENALISED = replace(NEUTRAL, repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.3, logit_bias={3: 1.0})


def reference(params: SamplingParams) -> list[list[int]]:
    """The answers to `PROMPTS`."""
    return [plain_greedy(prompt, params) for prompt in PROMPTS]


def is_the_targets(variant: Variant | None, params: SamplingParams) -> bool:
    return tokens_of(llm(variant, rows=3).generate(as_prompts(PROMPTS), params)) == reference(params)


@pytest.mark.parametrize("variant", [None, *each_drafter()], ids=str)
def test_greedy_output_is_the_targets(variant: Variant | None) -> None:
    assert is_the_targets(variant, NEUTRAL)


@pytest.mark.parametrize("variant", [None, *each_family(2)], ids=str)
def test_penalised_output_is_the_targets(variant: Variant | None) -> None:
    assert is_the_targets(variant, PENALISED)


@pytest.mark.parametrize("variant", each_family(6), ids=str)
def test_rows_that_differ_in_everything_do_not_disturb_each_other(variant: Variant) -> None:
    params = [replace(NEUTRAL, max_tokens=length) for length in (3, 17, 1, 9, 22)]
    outputs = llm(variant, rows=2).generate(as_prompts(PROMPTS), params)
    wanted = [tokens[: own.max_tokens] for tokens, own in zip(reference(NEUTRAL), params, strict=True)]
    assert tokens_of(outputs) == wanted


@pytest.mark.parametrize("variant", each_family(1), ids=str)
def test_an_engine_that_has_grown_drafts_for_more_rows_and_longer_texts(variant: Variant) -> None:
    engine = llm(variant, rows=1)
    [first] = engine.generate(as_prompts(PROMPTS[:1]), NEUTRAL)
    engine.grow(len(PROMPTS), engine.max_model_len + 32)
    assert engine.target.slots > engine.max_model_len
    outputs = engine.generate(as_prompts(PROMPTS), NEUTRAL)
    assert tokens_of(outputs) == reference(NEUTRAL)
    assert sum(output.outputs[0].speculation.drafter_errors for output in (first, *outputs)) == 0
