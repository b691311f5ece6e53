"""Greedy text and log-probabilities against transformers' own, and sampled text for a seed against plain decoding's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from forerun.certify import ties
from forerun.certify.reference import Reference
from forerun.certify.report import Check, Plan
from forerun.types import CompletionOutput, SamplingParams, SpeculationStats

if TYPE_CHECKING:
    from forerun import LLM

Tokens = list[int]


def greedy_checks(
    llm: LLM, reference: Reference, prompts: Sequence[Tokens], plan: Plan
) -> tuple[list[Check], set[str]]:
    """Greedy equality and equality of log-probabilities, and the names of the rules that verified.

    One pass of transformers over prompt and answer shows at every place which token is its own greedy one, as far as
    the answer had not yet parted from its own.
    """
    params = SamplingParams(temperature=0.0, max_tokens=plan.max_tokens, logprobs=1, ignore_eos=True, detokenize=False)
    answers = _answers(llm, prompts, params)
    stats, parted, worst, compared = SpeculationStats(), list[ties.Difference](), 0.0, 0
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        stats.add(answer.speculation)
        logits = reference.logits([*prompt, *answer.token_ids[:-1]], len(answer.token_ids))
        difference = ties.first_worse(logits, answer.token_ids, index, ties.epsilon_of(llm))
        if difference is not None:
            parted.append(difference)
        common = len(answer.token_ids) if difference is None else difference.position
        for place, token in enumerate(answer.tokens[:common]):
            assert token.logprob is not None
            expected = float(logits[place].log_softmax(-1)[token.id])
            worst, compared = max(worst, abs(expected - token.logprob.logprob)), compared + 1
    checks = [_equality(answers, parted, stats), _logprob_equality(llm, worst, compared)]
    return checks, _rules(answers)


def seed_check(llm: LLM, prompts: Sequence[Tokens], plan: Plan, temperature: float) -> tuple[Check | None, set[str]]:
    """With deterministic drafts, sampled text equals plain decoding's for the same seed; None where drafts are sampled.

    Also the names of the rules that verified.
    """
    params = SamplingParams(
        temperature=temperature, max_tokens=plan.max_tokens, seed=plan.seed, ignore_eos=True, detokenize=False
    )
    speculative = _answers(llm, prompts, params)
    rules = _rules(speculative)
    if rules != {"sample_walk"}:
        return None, rules
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, speculative=False)
    plain = [output.outputs[0] for output in outputs]
    same = sum(one.token_ids == other.token_ids for one, other in zip(plain, speculative, strict=True))
    exact = ties.epsilon_of(llm) == 0
    share = f"{same} of {len(prompts)} sampled answers equal plain decoding's for the same seed"
    check = Check(
        name=f"same seed, same text, T = {temperature:g}",
        passed=same == len(prompts) or not exact,
        summary=share if exact or same == len(prompts) else f"{share}; the format's rounding moves the others",
        figures={"equal": same, "prompts": len(prompts), "temperature": temperature},
    )
    return check, rules


def _answers(llm: LLM, prompts: Sequence[Tokens], params: SamplingParams) -> list[CompletionOutput]:
    """With drafts that are free: a policy may rightly draft nothing on a busy machine, which would prove nothing."""
    with llm.engine.drafting.free_of_charge():
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    return [output.outputs[0] for output in outputs]


def _rules(answers: Sequence[CompletionOutput]) -> set[str]:
    """Those that verified drafts."""
    return {rule for answer in answers for rule in answer.speculation.steps_per_rule}


def _equality(answers: Sequence[CompletionOutput], found: Sequence[ties.Difference], total: SpeculationStats) -> Check:
    tokens = sum(len(answer.token_ids) for answer in answers)
    bugs = [parted for parted in found if not parted.tie]
    return Check(
        name="greedy equality",
        passed=not bugs and total.num_spec_steps > 0,
        summary=_equality_summary(len(answers), tokens, found, total),
        figures={
            "prompts": len(answers),
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
    text = f"{prompts - len(found)} of {prompts} answers are transformers' own, {tokens} tokens, "
    text += f"{total.mean_acceptance_length:.2f} tokens per target pass"
    for parted in found:
        kind = "a numeric tie" if parted.tie else "NOT a tie"
        text += (
            f"; prompt {parted.prompt} parts at token {parted.position}: {parted.plain} or {parted.speculative}, "
            f"gap {parted.gap:.3g} nats, {kind} (epsilon {parted.epsilon:g})"
        )
    return text


def _logprob_equality(llm: LLM, worst: float, compared: int) -> Check:
    tolerance = ties.LOGPROB_TOLERANCE.get(ties.dtype_name(llm), 5e-4)
    return Check(
        name="log-probabilities",
        passed=worst <= tolerance and compared > 0,
        summary=f"at most {worst:.2g} nats from transformers' over {compared} tokens (tolerance {tolerance:g})",
        figures={"largest_difference": worst, "tokens": compared, "tolerance": tolerance},
    )
