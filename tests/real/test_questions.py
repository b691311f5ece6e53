"""`make test-real`: a hundred real questions to every drafter. ``FORERUN_QUESTIONS`` names a file of them.

Any file that ``forerun data`` reads will do; Spec-Bench's is where the maintainers keep their data.
"""

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from forerun import LLM, SamplingParams
from forerun.training.data.records import BadRecords, read_records
from real.conftest import ROOT
from real.test_answers import DRAFTERS, configured, corpus

__all__ = ["configured", "corpus"]
pytestmark = pytest.mark.slow
COUNT, TOKENS, PROMPT_TOKENS = 100, 48, 400
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=TOKENS),
    "T = 0.8": SamplingParams(temperature=0.8, top_p=0.95, max_tokens=TOKENS, seed=3),
}
FILE = Path(os.environ.get("FORERUN_QUESTIONS") or ROOT.parent / "shared" / "data" / "spec_bench.jsonl")
SAMPLES = ("draft_model", "early_exit", "skip_layers", "quantized_self", "tli", "first_of", "merge", "cascade")
"""Drafters that may sample their drafts above T = 0: they keep the distribution, not the text."""


@pytest.fixture(scope="session")
def prompts(llm: LLM) -> list[dict[str, Any]]:
    return questions(llm, COUNT)


def questions(llm: LLM, count: int) -> list[dict[str, Any]]:
    """The questions, as many as there are of an even spread, each as the model reads it."""
    if not FILE.is_file():
        pytest.skip(f"no questions: there is no {FILE}; name a file in FORERUN_QUESTIONS")
    records = [record for record in read_records(FILE, BadRecords(skip=True)) if record.messages]
    asked = [[dict(record.messages[0])] for record in records]
    asked = asked[:: max(1, len(asked) // count)][:count]
    read = (llm.chat_prompt(messages)["prompt_token_ids"] for messages in asked)
    # A long one loses its middle, not its question or the mark of the answer.
    half = PROMPT_TOKENS // 2
    return [{"prompt_token_ids": ids if len(ids) <= 2 * half else [*ids[:half], *ids[-half:]]} for ids in read]


@pytest.fixture(scope="session")
def expected(llm: LLM, prompts: list[dict[str, Any]]) -> Callable[[str], list[list[int]]]:
    """The plain answers, by the name of the parameters."""

    @cache
    def found(name: str) -> list[list[int]]:
        outputs = llm.generate(prompts, PARAMS[name], speculative=False)
        return [output.outputs[0].token_ids for output in outputs]

    return found


@pytest.mark.parametrize("how", PARAMS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_hundred_answers_are_plain_decodings(
    llm: LLM,
    prompts: list[dict[str, Any]],
    expected: Callable[[str], list[list[int]]],
    configured: Callable[[str], dict[str, Any]],
    how: str,
    name: str,
) -> None:
    if how != "greedy" and name.partition(",")[0] in SAMPLES:
        pytest.skip("a sampled draft keeps the distribution, which certify tests")
    asked = [dict(prompt) for prompt in prompts]
    if name == "prediction":
        for prompt, answer in zip(asked, expected(how), strict=True):
            prompt["prediction"] = answer[: TOKENS // 2]
    outputs = llm.generate(asked, PARAMS[how], speculative=configured(name))
    answers = [output.outputs[0].token_ids for output in outputs]
    unlike = [index for index, pair in enumerate(zip(answers, expected(how), strict=True)) if pair[0] != pair[1]]
    assert not unlike, f"{len(unlike)} of {len(answers)} answers differ: questions {unlike[:10]}"
