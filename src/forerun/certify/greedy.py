"""Greedy text, log-probabilities and the text for a seed: speculative against plain decoding of the same model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from forerun.certify import ties
from forerun.certify.report import Check, Plan
from forerun.types import CompletionOutput, SamplingParams, SpeculationStats

if TYPE_CHECKING:
    from forerun import LLM

Tokens = list[int]


def greedy_checks(llm: LLM, prompts: Sequence[Tokens], plan: Plan) -> tuple[list[Check], set[str]]:
    """Greedy equality and equality of log-probabilities, and the names of the rules that judged."""
    params = SamplingParams(temperature=0.0, max_tokens=plan.max_tokens, logprobs=1, ignore_eos=True, detokenize=False)
    plain, speculative = _both(llm, prompts, params)
    rules = {step.rule for answer in speculative for step in answer.trace if step.nodes}
    return [_equality(llm, prompts, plain, speculative), _logprob_equality(llm, plain, speculative)], rules


def seed_check(llm: LLM, prompts: Sequence[Tokens], plan: Plan, temperature: float) -> tuple[Check | None, set[str]]:
    """With deterministic drafts, sampled text equals plain decoding's for the same seed; None where drafts are sampled.

    Also the names of the rules that judged.
    """
    params = SamplingParams(
        temperature=temperature, max_tokens=plan.max_tokens, seed=plan.seed, ignore_eos=True, detokenize=False
    )
    plain, speculative = _both(llm, prompts, params)
    rules = {step.rule for answer in speculative for step in answer.trace if step.nodes}
    if rules != {"sample_walk"}:
        return None, rules
    same = sum(one.token_ids == other.token_ids for one, other in zip(plain, speculative, strict=True))
    exact = ties.TIE_EPSILON.get(ties.dtype_name(llm), 0.0) == 0
    share = f"{same} of {len(prompts)} sampled answers equal plain decoding's for the same seed"
    check = Check(
        name=f"same seed, same text, T = {temperature:g}",
        passed=same == len(prompts) or not exact,
        summary=share if exact or same == len(prompts) else f"{share}; the format's rounding moves the others",
        figures={"equal": same, "prompts": len(prompts), "temperature": temperature},
    )
    return check, rules


def _both(
    llm: LLM, prompts: Sequence[Tokens], params: SamplingParams
) -> tuple[list[CompletionOutput], list[CompletionOutput]]:
    batch = [{"prompt_token_ids": prompt} for prompt in prompts]
    plain = [output.outputs[0] for output in llm.generate(batch, params, speculative=False)]
    speculative = [output.outputs[0] for output in llm.generate(batch, params, trace=True)]
    return plain, speculative


def _equality(
    llm: LLM, prompts: Sequence[Tokens], plain: Sequence[CompletionOutput], speculative: Sequence[CompletionOutput]
) -> Check:
    total = SpeculationStats()
    found = []
    for index, (prompt, one, other) in enumerate(zip(prompts, plain, speculative, strict=True)):
        total.add(other.speculation)
        parted = ties.difference(llm, prompt, (one.token_ids, other.token_ids), index)
        if parted is not None:
            found.append(parted)
    tokens = sum(len(answer.token_ids) for answer in plain)
    bugs = [parted for parted in found if not parted.tie]
    return Check(
        name="greedy equality",
        passed=not bugs and total.num_spec_steps > 0,
        summary=_equality_summary(len(prompts), tokens, found, total),
        figures={
            "prompts": len(prompts),
            "tokens": tokens,
            "ties": len(found) - len(bugs),
            "bugs": len(bugs),
            "differences": [asdict(parted) | {"tie": parted.tie} for parted in found],
            "mean_acceptance_length": round(total.mean_acceptance_length, 4),
        },
    )


def _equality_summary(prompts: int, tokens: int, found: Sequence[ties.Difference], total: SpeculationStats) -> str:
    if not total.num_spec_steps:
        return "nothing was drafted, so nothing was proved; choose other prompts or another drafter"
    text = f"{prompts - len(found)} of {prompts} answers equal, {tokens} tokens, "
    text += f"{total.mean_acceptance_length:.2f} tokens per target pass"
    for parted in found:
        kind = "a numeric tie" if parted.tie else "NOT a tie"
        text += (
            f"; prompt {parted.prompt} parts at token {parted.position}: {parted.plain} or {parted.speculative}, "
            f"gap {parted.gap:.3g} nats, {kind} (epsilon {parted.epsilon:g})"
        )
    return text


def _logprob_equality(llm: LLM, plain: Sequence[CompletionOutput], speculative: Sequence[CompletionOutput]) -> Check:
    tolerance = ties.LOGPROB_TOLERANCE.get(ties.dtype_name(llm), 5e-4)
    worst, compared = 0.0, 0
    for one, other in zip(plain, speculative, strict=True):
        common = ties.first_difference(one.token_ids, other.token_ids)
        for left, right in zip(one.tokens[:common], other.tokens[:common], strict=True):
            assert left.logprob is not None and right.logprob is not None
            worst, compared = max(worst, abs(left.logprob.logprob - right.logprob.logprob)), compared + 1
    return Check(
        name="log-probabilities",
        passed=worst <= tolerance and compared > 0,
        summary=f"largest difference {worst:.2g} nats over {compared} tokens (tolerance {tolerance:g})",
        figures={"largest_difference": worst, "tokens": compared, "tolerance": tolerance},
    )
