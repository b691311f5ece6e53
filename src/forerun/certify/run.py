"""The order of the checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forerun.certify import chi_square, greedy
from forerun.certify.reference import Reference
from forerun.certify.report import Check, Plan, Report
from forerun.certify.ties import TIE_EPSILON, dtype_name
from forerun.errors import ArgumentError
from forerun.types import SamplingParams
from forerun.verify import rule_named
from forerun.verify.enumeration import TOLERANCE, check_rules

if TYPE_CHECKING:
    from forerun import LLM

Progress = Callable[[str], None]
NUCLEUS = 0.9
"""The top-p of the second chi-square test at each temperature, in float32: neither side may forget to cut."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Subject:
    llm: LLM
    reference: Reference
    prompts: list[list[int]]
    """Token ids, as long as the plan wants them."""
    plan: Plan
    progress: Progress


def certify(
    llm: LLM,
    prompts: Sequence[str],
    plan: Plan | None = None,
    progress: Progress = lambda _: None,
    *,
    reference: Reference | None = None,
) -> Report:
    """Prove, as far as a run can, that `llm`'s speculation changes nothing.

    Args:
        llm: configured with the drafter to examine.
        prompts: texts; the ends of the first few are used.
        plan: how much to check.
        progress: is told what is being done.
        reference: the target as transformers runs it; None loads its checkpoint a second time.

    Raises:
        ArgumentError: the model has no drafter or no tokenizer, or there are no prompts.
    """
    plan = plan or Plan()
    if llm.speculative is None:
        raise ArgumentError(
            "there is nothing to certify without a drafter; name one with --drafter (see: forerun drafters)"
        )
    texts = _token_prompts(llm, prompts, plan)
    if reference is None:
        progress("loading the target as transformers runs it")
        reference = Reference.of(llm)
    subject = _Subject(llm=llm, reference=reference, prompts=texts, plan=plan, progress=progress)
    checks, rules = _text_checks(subject)
    sampled, more = _distribution_checks(subject)
    checks, rules = checks + sampled, rules | more
    return Report(
        model=llm.target.name_or_path,
        drafter=llm.speculative.method,
        dtype=dtype_name(llm),
        device=str(llm.target.device),
        checks=[*_rule_checks(subject, rules), *checks],
    )


def _token_prompts(llm: LLM, prompts: Sequence[str], plan: Plan) -> list[list[int]]:
    if llm.tokenizer is None:
        raise ArgumentError("certify needs the model's tokenizer to read its prompts")
    length = min(plan.prompt_tokens, llm.max_model_len - plan.max_tokens - 1)
    if length < 1:
        raise ArgumentError(f"answers of {plan.max_tokens} tokens leave no room for a prompt in {llm.max_model_len}")
    tokens = [list(llm.tokenizer(text, verbose=False)["input_ids"])[:length] for text in prompts[: plan.prompts]]
    tokens = [prompt for prompt in tokens if prompt]
    if not tokens:
        raise ArgumentError("certify needs at least one prompt that is not empty")
    return tokens


def _text_checks(subject: _Subject) -> tuple[list[Check], set[str]]:
    checks: list[Check] = []
    rules: set[str] = set()
    for temperature in subject.plan.temperatures:
        if temperature == 0:
            subject.progress("greedy text against plain decoding")
            found, judges = greedy.greedy_checks(subject.llm, subject.reference, subject.prompts, subject.plan)
            rules |= judges
            checks += found
        else:
            subject.progress(f"sampled text for a seed, T = {temperature:g}")
            check, judges = greedy.seed_check(subject.llm, subject.prompts, subject.plan, temperature)
            checks += [check] if check is not None else []
            rules |= judges
    return checks, rules


def _distribution_checks(subject: _Subject) -> tuple[list[Check], set[str]]:
    plan, rules = subject.plan, set[str]()
    # Rounding moves the border of the nucleus, and a token at the border is then all or nothing.
    cuts = (1.0, NUCLEUS) if TIE_EPSILON.get(dtype_name(subject.llm), 0.0) == 0 else (1.0,)
    settings = [
        chi_square.Setting(
            params=SamplingParams(temperature=temperature, top_p=top_p, top_k=0, min_p=0.0, repetition_penalty=1.0),
            seeded=seeded,
        )
        for temperature in plan.temperatures
        if temperature > 0
        for top_p in cuts
        for seeded in (False, True)
    ]
    checks = []
    for index, setting in enumerate(settings):
        prompt = subject.prompts[index % len(subject.prompts)][: plan.sample_prompt_tokens]
        subject.progress(f"sampled answers against the exact distribution, {setting.name}")
        check, judges = chi_square.chi_square_check(
            subject.llm, subject.reference, prompt, setting, plan, tests=len(settings)
        )
        checks.append(check)
        rules |= judges
    return checks, rules


def _rule_checks(subject: _Subject, rules: set[str]) -> list[Check]:
    checks = []
    for name in sorted(rules):
        subject.progress(f"the exact law of the rule {name}")
        if not rule_named(name).lossless:
            checks.append(
                Check(name=f"rule {name}", passed=False, summary="this rule is not lossless, by its own account")
            )
            continue
        found = list(check_rules([name]))
        worst = max((case.error for case in found), default=float("inf"))
        cases = f"{len(found)} cases enumerated, largest error {worst:.1e} (tolerance {TOLERANCE:.0e})"
        figures = {"cases": len(found), "largest_error": worst, "tolerance": TOLERANCE}
        checks.append(
            Check(
                name=f"rule {name}",
                passed=all(case.passed for case in found) and bool(found),
                summary=cases,
                figures=figures,
            )
        )
    return checks
