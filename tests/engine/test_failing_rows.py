"""A request whose numbers fail ends alone, with the reason; those beside it get what they would get alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun import LLM, AsyncLLM, SamplingParams, StructuredOutputs
from forerun.errors import NoTokenLeftError, NumericError
from forerun.target import Target

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
PROMPTS = ["the cat sat", "the dog and the dog", "on the log the cat"]
DRAFTERS: list[Any] = [False, {"method": "ngram"}, {"method": "auto"}]


def breaking(value: float, after: int) -> Any:
    """A processor that turns the logits into `value` once so many tokens are there."""

    def process(tokens: Sequence[int], logits: Tensor) -> Tensor:
        return torch.full_like(logits, value) if len(tokens) >= after else logits

    return process


async def together(checkpoint: Path, bad: SamplingParams, speculative: Any, good: SamplingParams = GREEDY) -> list[Any]:
    async with AsyncLLM(str(checkpoint), dtype="float32", max_num_seqs=3) as llm:
        params = [good, bad, good]
        answers = [llm.generate(p, q, speculative=speculative) for p, q in zip(PROMPTS, params, strict=True)]
        found = await asyncio.gather(*answers, return_exceptions=True)
        assert not llm.llm.engine.busy
        again = await llm.generate(PROMPTS[1], good, speculative=speculative)
    return [*found, again]


@pytest.mark.parametrize("speculative", DRAFTERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("value", "error"), [(torch.nan, NumericError), (torch.inf, NumericError), (-torch.inf, NoTokenLeftError)]
)
async def test_processors_that_leave_nothing(
    checkpoint: Path, speculative: Any, temperature: float, value: float, error: type[Exception]
) -> None:
    params = {"temperature": temperature, "max_tokens": 20, "ignore_eos": True, "seed": 5}
    good = SamplingParams(**params)
    for after in (0, 9):
        bad = SamplingParams(**params, logits_processors=[breaking(value, after)])
        found = await together(checkpoint, bad, speculative, good)
        assert isinstance(found[1], error)
        alone = LLM(str(checkpoint), dtype="float32", max_num_seqs=3)
        expected = [alone.generate(prompt, good, speculative=speculative)[0].outputs[0].token_ids for prompt in PROMPTS]
        assert [found[i][0].outputs[0].token_ids for i in (0, 2, 3)] == [expected[0], expected[2], expected[1]]


@pytest.mark.parametrize("speculative", DRAFTERS)
async def test_a_model_that_fails_for_one_row(
    checkpoint: Path, speculative: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    score = Target.score

    def broken(self: Target, rows: Sequence[int], *args: Any, **keywords: Any) -> Any:
        scored = score(self, rows, *args, **keywords)
        if len(rows) == 3:
            scored.logits[1, 0] = torch.nan
        return scored

    monkeypatch.setattr(Target, "score", broken)
    found = await together(checkpoint, GREEDY, speculative)
    assert isinstance(found[1], NumericError)
    assert [len(found[i][0].outputs[0].token_ids) for i in (0, 2, 3)] == [20, 20, 20]


async def test_a_grammar_that_ends_before_it_may(checkpoint: Path) -> None:
    """Behind its last letter the grammar allows the end alone, which `min_tokens` forbids."""
    wish = StructuredOutputs(regex="(the|cat)")
    bad = SamplingParams(temperature=0.0, max_tokens=20, min_tokens=15, structured_outputs=wish)
    found = await together(checkpoint, bad, None)
    assert isinstance(found[1], NoTokenLeftError)
    assert len(found[0][0].outputs[0].token_ids) == 20


def test_all_answers_of_a_request_end_with_it(checkpoint: Path) -> None:
    llm = LLM(str(checkpoint), dtype="float32", max_num_seqs=4)
    bad = SamplingParams(n=3, max_tokens=20, ignore_eos=True, logits_processors=[breaking(torch.nan, 8)])
    with pytest.raises(NumericError, match="nan"):
        llm.generate(PROMPTS[0], bad)
    assert not llm.engine.busy and len(llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].token_ids) == 20
