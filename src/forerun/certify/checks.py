"""The checks of ``forerun certify``: rules enumerated, greedy text and log-probabilities, seeded and sampled text.

Sampled text is compared with the target's exact distribution of the first few tokens, which comes from transformers'
own passes (`reference`), by Pearson's chi-square; unlikely answers share a cell. How many answers are drawn follows
from what is to be detected. The level is shared among the tests (Bonferroni).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from forerun.certify.enumeration import TOLERANCE, check_rules
from forerun.certify.reference import LOGPROB_TOLERANCE, Difference, Reference, epsilon_of, first_worse
from forerun.core.rules import rule_named
from forerun.errors import ArgumentError
from forerun.types import CompletionOutput, SamplingParams, SpeculationStats

if TYPE_CHECKING:
    from forerun import LLM

NUCLEUS = 0.9  # The top-p of the second chi-square test at each temperature, in float32: neither side may forget to cut
IMPOSSIBLE = 1e-12  # Probability below which a cell counts as outside the distribution: one answer there is a failure
_TOGETHER = 1024  # Answers asked for at once

Tokens = list[int]
Outcome = tuple[int, ...]
REST: Outcome = ()  # The cell of everything that has no cell of its own


def certify(
    llm: LLM,
    prompts: Sequence[str],
    plan: Plan | None = None,
    progress: Callable[[str], None] = lambda _: None,
    *,
    reference: Reference | None = None,
) -> Report:
    """Prove, as far as a run can, that `llm`'s speculation changes nothing. ArgumentError: the model has no drafter or
    no tokenizer, or there are no prompts.

    Args:
        llm: configured with the drafter to examine.
        prompts: texts; the beginnings of the first few are used.
        plan: how much to check.
        progress: is told what is being done.
        reference: the target as transformers runs it; None loads its checkpoint a second time.
    """
    plan = plan or Plan()
    if llm.speculative is None:
        raise ArgumentError("nothing to certify without a drafter; name one with --drafter (see: forerun drafters)")
    texts = _token_prompts(llm, prompts, plan)
    if reference is None:
        progress("loading the target as transformers runs it")
        reference = Reference.of(llm)
    run = Run(llm=llm, reference=reference, prompts=texts, plan=plan, progress=progress)
    checks = examined(run)
    model, device, dtype = llm.target.name_or_path, str(llm.target.device), llm.target.dtype_name
    return Report(model=model, drafter=llm.speculative.method, dtype=dtype, device=device, checks=checks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How much to check."""

    prompts: int = 6  # Prompts for the greedy and the log-probability check
    prompt_tokens: int = 192  # First tokens of each
    max_tokens: int = 96  # Tokens of each greedy answer
    detect: float = 0.1  # Total variation that each chi-square test is to detect; sets how many answers are drawn
    power: float = 0.99  # Probability with which it does
    sample_tokens: int = 5  # Tokens of each sampled answer: the first has no draft, the next have up to three levels
    sample_prompt_tokens: int = 24
    temperatures: tuple[float, ...] = (0.0, 1.0)  # 0 asks for the greedy checks, any other for a chi-square test
    family_error: float = 1e-6  # Probability that any chi-square test of this run fails although all is well
    cells: int = 24  # Most cells of a chi-square test: more see finer, and need more answers
    least: float = 0.01  # Least probability of a cell
    seed: int = 20_260_101

    @property
    def longest(self) -> int:
        """Most tokens of a prompt and its answer."""
        sampled = self.sample_prompt_tokens + self.sample_tokens
        return max(self.prompt_tokens + self.max_tokens, sampled) + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One check and its outcome."""

    name: str
    passed: bool
    summary: str  # One line for people
    figures: Mapping[str, Any] = field(default_factory=dict)  # The same and more for programs


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Everything one run found."""

    model: str
    drafter: str
    dtype: str
    device: str
    checks: list[Check]

    @property
    def passed(self) -> bool:
        """Whether every check passed; no check is no proof."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    def record(self) -> dict[str, Any]:
        """The report as ``certify --json`` prints it."""
        checks = [
            {"name": check.name, "passed": check.passed, "summary": check.summary, **check.figures}
            for check in self.checks
        ]
        return {"passed": self.passed, **asdict(self), "checks": checks}


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What is examined, and the rules that were seen to verify drafts."""

    llm: LLM
    reference: Reference
    prompts: list[Tokens]  # As long as the plan wants them
    plan: Plan
    progress: Callable[[str], None] = lambda _: None
    rules: set[str] = field(default_factory=set)

    def answers(self, prompts: Sequence[Tokens], params: Sequence[SamplingParams]) -> Iterator[CompletionOutput]:
        """Speculative answers with drafting counted as free: a policy that drafts nothing, which is often right in
        answers as short as these, would leave nothing to compare."""
        with self.llm.engine.drafting.free_of_charge():
            for start in range(0, len(prompts), _TOGETHER):
                some = slice(start, start + _TOGETHER)
                requests = [{"prompt_token_ids": prompt} for prompt in prompts[some]]
                for output in self.llm.generate(requests, list(params[some])):
                    self.rules.update(output.outputs[0].speculation.steps_per_rule)
                    yield output.outputs[0]


def examined(run: Run) -> list[Check]:
    """All checks of a run: the rules that were seen to verify drafts, greedy and seeded text, sampled distributions."""
    checks = [*_text_checks(run), *_distribution_checks(run)]
    return [*_rule_checks(run), *checks]


def _token_prompts(llm: LLM, prompts: Sequence[str], plan: Plan) -> list[Tokens]:
    if llm.tokenizer is None:
        raise ArgumentError("certify needs the model's tokenizer to read its prompts")
    length = min(plan.prompt_tokens, llm.max_model_len - plan.max_tokens - 1)
    if length < 1:
        raise ArgumentError(f"answers of {plan.max_tokens} tokens leave no room for a prompt in {llm.max_model_len}")
    texts = (llm.tokenizer(text, verbose=False)["input_ids"] for text in prompts[: plan.prompts])
    tokens = [list(prompt[:length]) for prompt in texts if len(prompt)]
    if not tokens:
        raise ArgumentError("certify needs at least one prompt that is not empty")
    return tokens


def _text_checks(run: Run) -> Iterator[Check]:
    for temperature in run.plan.temperatures:
        if temperature == 0:
            run.progress("greedy text against plain decoding")
            yield from _greedy_checks(run)
        else:
            run.progress(f"sampled text for a seed, T = {temperature:g}")
            yield from _seed_check(run, temperature)


def _distribution_checks(run: Run) -> Iterator[Check]:
    # Rounding moves the border of the nucleus, and a token at the border is then all or nothing.
    cuts = (1.0, NUCLEUS) if epsilon_of(run.llm) == 0 else (1.0,)
    settings = [
        Setting(
            params=SamplingParams(temperature=temperature, top_p=top_p, top_k=0, min_p=0.0, repetition_penalty=1.0),
            seeded=seeded,
        )
        for temperature in run.plan.temperatures
        if temperature > 0
        for top_p in cuts
        for seeded in (False, True)
    ]
    for index, setting in enumerate(settings):
        prompt = run.prompts[index % len(run.prompts)][: run.plan.sample_prompt_tokens]
        run.progress(f"sampled answers against the exact distribution, {setting.name}")
        yield chi_square_check(run, prompt, setting, tests=len(settings))


def _rule_checks(run: Run) -> Iterator[Check]:
    for name in sorted(run.rules):
        run.progress(f"the exact distributions of the rule {name}")
        passed, summary, figures = False, "this rule is not lossless, by its own account", dict[str, Any]()
        if rule_named(name).lossless:
            found = list(check_rules([name]))
            worst = max((case.error for case in found), default=float("inf"))
            passed = bool(found) and all(case.passed for case in found)
            summary = f"{len(found)} cases enumerated, largest error {worst:.1e} (tolerance {TOLERANCE:.0e})"
            figures = {"cases": len(found), "largest_error": worst, "tolerance": TOLERANCE}
        yield Check(name=f"rule {name}", passed=passed, summary=summary, figures=figures)


def _greedy_checks(run: Run) -> list[Check]:
    """Greedy equality and equality of log-probabilities. One pass of transformers over prompt and answer shows at every
    position which token is its own greedy one, as far as the answer had not yet parted from its own."""
    params = SamplingParams(
        temperature=0.0, max_tokens=run.plan.max_tokens, logprobs=1, ignore_eos=True, detokenize=False
    )
    answers = list(run.answers(run.prompts, [params] * len(run.prompts)))
    stats, parted, worst, compared = SpeculationStats(), list[Difference](), 0.0, 0
    for index, (prompt, answer) in enumerate(zip(run.prompts, answers, strict=True)):
        stats.add(answer.speculation)
        logits = run.reference.logits([*prompt, *answer.token_ids[:-1]], len(answer.token_ids))
        difference = first_worse(logits, answer.token_ids, index, epsilon_of(run.llm))
        if difference is not None:
            parted.append(difference)
        common = len(answer.token_ids) if difference is None else difference.position
        for position, token in enumerate(answer.tokens[:common]):
            assert token.logprob is not None
            expected = float(logits[position].log_softmax(-1)[token.id])
            worst, compared = max(worst, abs(expected - token.logprob.logprob)), compared + 1
    tolerance = LOGPROB_TOLERANCE.get(run.llm.target.dtype_name, 5e-4)
    logprobs = Check(
        name="log-probabilities",
        passed=worst <= tolerance and compared > 0,
        summary=f"at most {worst:.2g} nats from transformers' over {compared} tokens (tolerance {tolerance:g})",
        figures={"largest_difference": worst, "tokens": compared, "tolerance": tolerance},
    )
    return [_equality(answers, parted, stats), logprobs]


def _equality(answers: Sequence[CompletionOutput], found: Sequence[Difference], total: SpeculationStats) -> Check:
    tokens = sum(len(answer.token_ids) for answer in answers)
    bugs = [parted for parted in found if not parted.tie]
    summary = "nothing was drafted, so nothing was proved; choose other prompts or another drafter"
    if total.num_spec_steps:
        summary = f"{len(answers) - len(found)} of {len(answers)} answers are transformers' own, {tokens} tokens, "
        summary += f"{total.tokens_per_pass:.2f} tokens per pass"
        for parted in found:
            summary += (
                f"; prompt {parted.prompt} parts at token {parted.position}: {parted.plain} or {parted.speculative}, "
                f"gap {parted.gap:.3g} nats, {'a numeric tie' if parted.tie else 'NOT a tie'} "
                f"(epsilon {parted.epsilon:g})"
            )
    counts = {"prompts": len(answers), "tokens": tokens, "ties": len(found) - len(bugs), "bugs": len(bugs)}
    differences = [asdict(parted) | {"tie": parted.tie} for parted in found]
    length = {
        "tokens_per_pass": round(total.tokens_per_pass, 4),
        "mean_acceptance_length": round(total.mean_acceptance_length, 4),
    }
    return Check(
        name="greedy equality",
        passed=not bugs and total.num_spec_steps > 0,
        summary=summary,
        figures={**counts, "differences": differences, **length},
    )


def _seed_check(run: Run, temperature: float) -> Iterator[Check]:
    """With deterministic drafts, sampled text equals plain decoding's for the same seed; else no check."""
    plan, number = run.plan, len(run.prompts)
    params = SamplingParams(
        temperature=temperature, max_tokens=plan.max_tokens, seed=plan.seed, ignore_eos=True, detokenize=False
    )
    speculative = list(run.answers(run.prompts, [params] * number))
    if {rule for answer in speculative for rule in answer.speculation.steps_per_rule} != {"sample_walk"}:
        return
    outputs = run.llm.generate([{"prompt_token_ids": prompt} for prompt in run.prompts], params, speculative=False)
    plain = [output.outputs[0] for output in outputs]
    same = sum(one.token_ids == other.token_ids for one, other in zip(plain, speculative, strict=True))
    fine = same == number or epsilon_of(run.llm) > 0
    share = f"{same} of {number} sampled answers equal plain decoding's for the same seed"
    yield Check(
        name=f"same seed, same text, T = {temperature:g}",
        passed=fine,
        summary=f"{share}; the format's rounding moves the others" if fine and same < number else share,
        figures={"equal": same, "prompts": number, "temperature": temperature},
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One way to ask for sampled answers."""

    params: SamplingParams
    seeded: bool  # Each request has a seed of its own; without, `auto`, `merge` and `first_of` may sample drafts

    @property
    def name(self) -> str:
        """As a report calls it."""
        nucleus = f", top-p {self.params.top_p:g}" if (self.params.top_p or 1) < 1 else ""
        return f"T = {self.params.temperature:g}{nucleus}, {'seeded' if self.seeded else 'no seed'}"


def chi_square_check(run: Run, prompt: Tokens, setting: Setting, *, tests: int) -> Check:
    """Compare speculative answers to `prompt` with the exact distribution; one of `tests` tests."""
    plan = run.plan
    params = replace(setting.params, max_tokens=plan.sample_tokens, ignore_eos=True, detokenize=False)
    level = plan.family_error / tests
    cells = exact_cells(run.reference, prompt, params, plan)
    possible = sum(chance > 0 for chance in cells.values())
    samples = draws_for(possible - 1, level, plan)
    asked = [replace(params, seed=plan.seed + index if setting.seeded else None) for index in range(samples)]
    answers, stats = list[Outcome](), SpeculationStats()
    for answer in run.answers([prompt] * samples, asked):
        stats.add(answer.speculation)
        answers.append(tuple(answer.token_ids))
    statistic, freedom = pearson(cells, count(cells, answers), samples)
    chance, depth = survival(statistic, freedom), len(stats.drafted_per_depth)
    drafted, accepted = stats.num_draft_tokens, stats.num_accepted_draft_tokens
    fit = {"chi_square": statistic, "degrees_of_freedom": freedom, "p_value": chance, "level": level}
    sample = {"samples": samples, "cells": possible, "detects_total_variation": plan.detect, "power": plan.power}
    return Check(
        name=f"sampled distribution, {setting.name}",
        passed=chance >= level and drafted > 0,
        summary=(
            f"chi-square {statistic:.1f}, {freedom} degrees of freedom, p = {chance:.3g} (fails below {level:.1g}); "
            f"{samples} answers detect a total variation of {plan.detect:.3g} over {possible} cells with "
            f"{plan.power:.0%}; {accepted} of {drafted} drafted tokens accepted, drafts up to {depth} deep"
            + ("" if drafted else "; nothing was drafted, so nothing was proved")
        ),
        figures={**fit, **sample, "drafted": drafted, "accepted": accepted, "depth": depth},
    )


def draws_for(freedom: int, level: float, plan: Plan) -> int:
    """The fewest answers by which whatever is `plan.detect` away in total variation fails with `plan.power`. The
    statistic grows least with differences in proportion to the probabilities: by 4 N detect^2, the noncentrality of its
    distribution (Cauchy-Schwarz)."""
    freedom = max(freedom, 1)
    critical = _smallest(lambda value: survival(value, freedom) <= level)
    wanted = _smallest(lambda apart: _survival_apart(critical, freedom, apart) >= plan.power)
    return math.ceil(wanted / (4 * plan.detect**2))


def _smallest(holds: Callable[[float], bool]) -> float:
    """The smallest number above 0 for which `holds`, which stays true from there on; to one part in a thousand."""
    high = 1.0
    while not holds(high):
        high *= 2
    low = high / 2 if high > 1 else 0.0
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _survival_apart(statistic: float, freedom: int, apart: float) -> float:
    """Probability that a noncentral chi-square variable exceeds `statistic`: a Poisson mixture of central ones."""
    most = int(apart / 2 + 12 * math.sqrt(apart / 2 + 1)) + 12
    terms = torch.arange(most, dtype=torch.float64)
    weights = (terms * math.log(apart / 2) - apart / 2 - torch.lgamma(terms + 1)).exp()
    tails = torch.special.gammaincc(freedom / 2 + terms, torch.full_like(terms, statistic / 2))
    return float((weights * tails).sum())


def exact_cells(reference: Reference, prompt: Tokens, params: SamplingParams, plan: Plan) -> dict[Outcome, float]:
    """Probability of every cell: the likeliest beginnings of answers that no other cell continues, and `REST`. The
    likeliest beginning is continued until there are `plan.cells`; what is less likely than `plan.least` joins the cell
    of its own beginning. They sum to 1."""
    cells: dict[Outcome, float] = {REST: 1.0}
    going = [REST]
    while going and len(cells) < plan.cells:
        beginning = max(going, key=cells.__getitem__)
        going.remove(beginning)
        probs = reference.probs([*prompt, *beginning], params) * cells[beginning]
        for token in torch.nonzero(probs >= plan.least).flatten().tolist():
            longer = (*beginning, token)
            cells[longer] = float(probs[token])
            cells[beginning] -= cells[longer]
            if len(longer) < plan.sample_tokens:
                going.append(longer)
    return _merge(cells, plan)


def _merge(cells: dict[Outcome, float], plan: Plan) -> dict[Outcome, float]:
    """What is left of a beginning beside its own cells joins a shorter one where it is little."""
    for outcome in sorted(cells, key=len, reverse=True):
        if outcome and cells[outcome] < IMPOSSIBLE:
            cells[outcome] = 0.0
        elif outcome and cells[outcome] < plan.least:
            cells[_home(outcome[:-1], cells)] += cells.pop(outcome)
    while IMPOSSIBLE < cells[REST] < plan.least and len(cells) > 2:
        likely = [outcome for outcome in cells if outcome and cells[outcome] > 0]
        cells[REST] += cells.pop(min(likely, key=cells.__getitem__))
    cells[REST] = cells[REST] if cells[REST] > IMPOSSIBLE else 0.0
    if sum(chance > 0 for chance in cells.values()) < 2:
        raise ArgumentError(
            "the answers to this prompt are certain, there is nothing to compare; give another prompt or temperature"
        )
    return cells


def _home(beginning: Outcome, cells: Mapping[Outcome, float]) -> Outcome:
    """The cell that answers with this beginning fall into: the longest part of it that has one."""
    lengths = range(len(beginning), 0, -1)
    return next((beginning[:length] for length in lengths if beginning[:length] in cells), REST)


def count(cells: Mapping[Outcome, float], answers: Iterable[Outcome]) -> Counter[Outcome]:
    return Counter(_home(answer, cells) for answer in answers)


def pearson(cells: dict[Outcome, float], counts: Counter[Outcome], samples: int) -> tuple[float, int]:
    """The statistic and its degrees of freedom; infinite if an answer came that the distribution excludes."""
    statistic, used = 0.0, 0
    for outcome, chance in cells.items():
        expected = chance * samples
        if expected <= 0:
            statistic += float("inf") if counts[outcome] else 0.0
            continue
        statistic += (counts[outcome] - expected) ** 2 / expected
        used += 1
    return statistic, max(used - 1, 1)


def survival(statistic: float, freedom: int) -> float:
    """Probability that a chi-square variable exceeds `statistic`: the regularised upper incomplete gamma function."""
    if statistic == float("inf"):
        return 0.0
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
