"""A request whose numbers fail ends alone, with the reason; those beside it get what they would get alone."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun import LLM, AsyncLLM, SamplingParams
from forerun.engine import scheduling
from forerun.engine.prompts import PromptReader
from forerun.errors import ArgumentError, EngineError, NoTokenLeftError, NumericError, RequestError
from forerun.model import TransformersTarget
from selection import in_turn, one_in

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


@pytest.mark.parametrize("speculative", one_in(2, DRAFTERS))
@pytest.mark.parametrize(
    ("value", "temperature", "error"),
    [(torch.nan, 1.0, NumericError), (torch.inf, 0.0, NumericError), (-torch.inf, 1.0, NoTokenLeftError)],
)
async def test_processors_that_leave_nothing(
    checkpoint: Path, speculative: Any, value: float, temperature: float, error: type[Exception]
) -> None:
    params = {"temperature": temperature, "max_tokens": 20, "ignore_eos": True, "seed": 5}
    good = SamplingParams(**params)
    alone = LLM(str(checkpoint), dtype="float32", max_num_seqs=3)
    expected = [alone.generate(prompt, good, speculative=speculative)[0].outputs[0].token_ids for prompt in PROMPTS]
    for after in (0, 9):
        bad = SamplingParams(**params, logits_processors=[breaking(value, after)])
        found = await together(checkpoint, bad, speculative, good)
        assert isinstance(found[1], error)
        assert [found[i][0].outputs[0].token_ids for i in (0, 2, 3)] == [expected[0], expected[2], expected[1]]


@pytest.mark.parametrize("speculative", DRAFTERS)
async def test_a_model_fails_for_one_row(checkpoint: Path, speculative: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its draft and without."""
    score, before = TransformersTarget.score, [0]

    def broken(self: TransformersTarget, rows: Sequence[int], *args: Any, **keywords: Any) -> Any:
        scored = score(self, rows, *args, **keywords)
        before.append(len(rows))
        if before[-1] == 3 or before[-2:] == [3, 1]:
            scored.logits[len(rows) // 2, 0] = torch.nan
        return scored

    monkeypatch.setattr(TransformersTarget, "score", broken)
    found = await together(checkpoint, GREEDY, speculative)
    assert isinstance(found[1], NumericError)
    assert [len(found[i][0].outputs[0].token_ids) for i in (0, 2, 3)] == [20, 20, 20]


class Panic(BaseException):
    """As the libraries written in Rust raise: no `Exception`."""


def raising(error: BaseException, after: int) -> Any:
    """A processor that raises on every path that is so long, drafted ones included."""

    def process(tokens: Sequence[int], logits: Tensor) -> Tensor:
        if len(tokens) >= after:
            raise error
        return logits

    return process


INNER = {"method": "ngram"}
SAMPLING: list[dict[str, Any]] = [
    {"method": "draft_model", "num_speculative_tokens": 4},
    {"method": "draft_model", "shape": [2, 2], "draw": "greedy_k"},
    {"method": "cascade", "inner": INNER, "num_speculative_tokens": 5},
    {"method": "cascade", "inner": INNER, "num_speculative_tokens": 3, "tail": 2},
]


FAILURES: list[tuple[type[BaseException], int]] = [(Panic, 0), (RuntimeError, 9), (Panic, 12), (ArgumentError, 9)]
"""What a processor raises, and after how many tokens."""


@pytest.mark.parametrize(("drafter", "failures"), in_turn(SAMPLING, [FAILURES[:2], FAILURES[2:]]), ids=str)
async def test_a_processor_that_raises_costs_the_others_not_even_a_draft(
    checkpoint: Path, draft_checkpoint: Path, drafter: dict[str, Any], failures: list[Any]
) -> None:
    """What they are told under a seed depends on what is drafted for them. With few tokens to choose from, a draw
    hardly ever falls where the rounding of a batch decides."""
    speculative = {**drafter, "model": str(draft_checkpoint), "adaptive": False}
    good = SamplingParams(temperature=1.0, top_k=8, max_tokens=14, ignore_eos=True, seed=5)
    alone = LLM(str(checkpoint), dtype="float32", max_num_seqs=3)
    expected = [alone.generate(prompt, good, speculative=speculative)[0].outputs[0] for prompt in PROMPTS]
    for kind, after in failures:
        error = kind("boom")
        bad = replace(good, logits_processors=[raising(error, after)])
        found = await together(checkpoint, bad, speculative, good)
        told = found[1]
        assert told is error or (isinstance(told, RequestError) and told.__cause__ is error)
        whole = [found[i][0].outputs[0] for i in (0, 2, 3)]
        assert [answer.token_ids for answer in whole] == [expected[i].token_ids for i in (0, 2, 1)]
        assert [answer.speculation.drafter_errors for answer in whole] == [0, 0, 0]


@pytest.mark.parametrize(("drafter", "temperature"), [*((one, 1.0) for one in SAMPLING), (SAMPLING[0], 0.0)], ids=str)
def test_a_draft_model_that_fails_for_one_row(
    checkpoint: Path, draft_checkpoint: Path, drafter: Any, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That one goes on without a draft, and it is counted; the others keep theirs."""
    speculative = {**drafter, "model": str(draft_checkpoint), "adaptive": False}
    good = SamplingParams(temperature=temperature, max_tokens=14, ignore_eos=True, seed=5)
    llm = LLM(str(checkpoint), dtype="float32", max_num_seqs=3, speculative_config=speculative)
    expected = [output.outputs[0] for output in llm.generate(PROMPTS, good)]
    score, prefill = TransformersTarget.score, TransformersTarget.prefill

    def broken(whole: Any) -> Any:
        def run(self: TransformersTarget, rows: Sequence[int], *args: Any, **keywords: Any) -> Any:
            scored = whole(self, rows, *args, **keywords)
            if self is not llm.target and 1 in rows:
                scored.logits[list(rows).index(1)] = torch.nan
            return scored

        return run

    llm = LLM(str(checkpoint), dtype="float32", max_num_seqs=3, speculative_config=speculative)
    monkeypatch.setattr(TransformersTarget, "score", broken(score))
    monkeypatch.setattr(TransformersTarget, "prefill", broken(prefill))
    found = [output.outputs[0] for output in llm.generate(PROMPTS, good)]
    for i in (0, 2):
        assert found[i].token_ids == expected[i].token_ids
        counts = [one[i].speculation.num_accepted_draft_tokens for one in (found, expected)]
        assert counts[0] == counts[1]
    assert [answer.speculation.drafter_errors for answer in found] == [0, 1, 0], "it is closed to that row"
    assert found[1].speculation.num_plain_steps == 13
    plain = llm.generate(PROMPTS[1], good, speculative=False)[0].outputs[0]
    assert found[1].token_ids == plain.token_ids


async def test_log_probabilities_of_a_prompt_that_fail(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: Any) -> Any:
        raise Panic("boom")

    monkeypatch.setattr(scheduling, "logprobs_of", failing)
    bad = SamplingParams(temperature=0.0, max_tokens=20, prompt_logprobs=1)
    found = await together(checkpoint, bad, None)
    assert isinstance(found[1], RequestError)
    alone = [output.outputs[0].token_ids for output in LLM(str(checkpoint), dtype="float32").generate(PROMPTS, GREEDY)]
    assert [found[i][0].outputs[0].token_ids for i in (0, 2, 3)] == [alone[0], alone[2], alone[1]]


@pytest.mark.parametrize("error", [RuntimeError("boom"), Panic("boom"), SystemExit(1)], ids=repr)
async def test_all_hear_of_a_failing_step(
    checkpoint: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for ever, and the engine answers the next."""
    score = TransformersTarget.score

    def failing(self: TransformersTarget, rows: Sequence[int], *args: Any, **keywords: Any) -> Any:
        if len(rows) < 3:
            return score(self, rows, *args, **keywords)
        monkeypatch.undo()
        raise error

    async with AsyncLLM(str(checkpoint), dtype="float32", max_num_seqs=3) as llm:
        monkeypatch.setattr(TransformersTarget, "score", failing)
        found = await asyncio.gather(*(llm.generate(prompt, GREEDY) for prompt in PROMPTS), return_exceptions=True)
        assert [type(one) for one in found] == [EngineError] * 3 and found[0].__cause__ is error
        assert len((await llm.generate(PROMPTS[0], GREEDY))[0].outputs[0].token_ids) == 20


async def test_a_prompt_that_cannot_be_read(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where the error is one that no future carries."""
    async with AsyncLLM(str(checkpoint), dtype="float32") as llm:
        whole = PromptReader.tokens

        def failing(self: PromptReader, prompt: Any, *more: Any) -> Any:
            if prompt == PROMPTS[1]:
                raise error
            return whole(self, prompt, *more)

        monkeypatch.setattr(PromptReader, "tokens", failing)
        for error in (Panic("boom"), StopIteration("boom"), KeyError("boom")):
            both = [llm.generate(prompt, GREEDY) for prompt in PROMPTS[:2]]
            fine, told = await asyncio.gather(*both, return_exceptions=True)
            assert len(fine[0].outputs[0].token_ids) == 20
            assert told is error or (isinstance(told, RequestError) and told.__cause__ is error)


async def test_the_other_prompts_of_a_call_end_with_the_one_that_fails(checkpoint: Path) -> None:
    async with AsyncLLM(str(checkpoint), dtype="float32", max_num_seqs=3, max_model_len=250) as llm:
        long = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
        answers, add = list[Any](), llm.llm.engine.add
        llm.llm.engine.add = lambda request: (answers.append(request.completions[0]), add(request))[1]
        bad = replace(long, logits_processors=[raising(RuntimeError("boom"), 12)])
        with pytest.raises(RequestError, match="RuntimeError: boom"):
            await llm.generate(PROMPTS, [long, bad, long])
        await llm.generate(PROMPTS[0], GREEDY)
        assert [answer.finish_reason for answer in answers] == ["abort"] * 3 + ["length"]


def test_and_without_asyncio(checkpoint: Path) -> None:
    llm = LLM(str(checkpoint), dtype="float32", max_num_seqs=3)
    bad = replace(GREEDY, logits_processors=[raising(RuntimeError("boom"), 12)])
    with pytest.raises(RequestError, match="RuntimeError: boom"):
        llm.generate(PROMPTS, [GREEDY, bad, GREEDY])
    assert not llm.engine.busy
    with pytest.raises(RequestError, match="RuntimeError: boom"):
        list(llm.stream(PROMPTS[0], bad))


def test_all_answers_of_a_request_end_with_it(checkpoint: Path) -> None:
    llm = LLM(str(checkpoint), dtype="float32", max_num_seqs=4)
    bad = SamplingParams(n=3, max_tokens=20, ignore_eos=True, logits_processors=[breaking(torch.nan, 8)])
    with pytest.raises(NumericError, match="nan"):
        llm.generate(PROMPTS[0], bad)
    assert not llm.engine.busy and len(llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].token_ids) == 20
