"""The checks of ``forerun certify``: rules enumerated, greedy text and log-probabilities, seeded and sampled text.

Sampled text is compared with the target's exact distribution of the first few tokens, which is computed from
transformers' or llama.cpp's own passes (`reference`), by Pearson's chi-square test; unlikely completions share a cell.
Longer completions are compared token by token, by each token's quantile in the distribution (`Reference.places`). The
number of samples follows from the difference that is to be detected (`chi_square`).
"""

from __future__ import annotations

import itertools
import math
import time
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forerun.certify import CertifyPlan, Check, Report, Stage, run_stages
from forerun.certify.chi_square import EDGES, SampledTest, place_cells
from forerun.certify.enumeration import TOLERANCE, check_rules
from forerun.certify.reference import (
    LOGPROB_TOLERANCE,
    QUANTISED,
    Difference,
    Outcome,
    Reference,
    count,
    epsilon_of,
    exact_cells,
    first_worse,
)
from forerun.control.config import SpeculativeConfig
from forerun.core.rules import rule_named
from forerun.drafters.draft_models.token_bytes import token_to_bytes
from forerun.errors import ArgumentError, UnsupportedModelError
from forerun.types import CompletionOutput, SamplingParams, SpeculationStats, StructuredOutputs

if TYPE_CHECKING:
    from forerun import LLM
    from forerun.engine.prompts import Speculative

CUTS: tuple[dict[str, Any], ...] = ({"top_k": 8}, {"top_p": 0.7}, {"min_p": 0.1})
"""Parameters that cut tokens off, each tested by itself. In float32: rounding moves the border of what is cut, and a
token at the border is then all or nothing."""
PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": -2.0, "frequency_penalty": -2.0}
"""Below 0, so that tokens are repeated within a few tokens: these penalties only show there."""
LETTERS = b"abcdefghijklmnopqrstuvwxyz "  # What the grammar of a test allows, for longer than its answers are
_TOGETHER = 128  # Completions requested at once
_TRIED = 32  # Completions in which the examined drafter must draft at least once; else another drafter takes its place

Tokens = list[int]


def certify(
    llm: LLM,
    prompts: Sequence[str],
    plan: CertifyPlan | None = None,
    progress: Callable[[str], None] = lambda _: None,
    *,
    news: Callable[[str], None] = lambda _: None,
    reference: Reference | None = None,
) -> Report:
    """Test, as far as a run can, that `llm`'s speculation changes nothing. ArgumentError: the model has no drafter or
    no tokenizer, or there are no prompts.

    Args:
        llm: configured with the drafter to examine.
        prompts: texts; the beginnings of the first few are used.
        plan: how much to check.
        progress: is told what is being done.
        news: is told what should stay to be read: each stage, each check's verdict, how long the rest takes.
        reference: the target as transformers, or llama.cpp, runs it; None loads its checkpoint a second time.
    """
    plan = plan or CertifyPlan()
    if llm.speculative is None:
        raise ArgumentError("nothing to certify without a drafter; name one with --drafter (see: forerun drafters)")
    texts = token_prompts(llm, prompts, plan)
    if reference is None:
        progress("loading the target once more, to compare with")
        reference = Reference.of(llm)
    run = Run(llm=llm, reference=reference, prompts=texts, plan=plan, progress=progress, news=news)
    checks = examined(run)
    target = llm.target
    return Report(
        model=llm.name,
        drafter=llm.speculative.method,
        dtype=target.dtype_name,
        device=str(target.device),
        runs_as=target.runs_as,
        checks=checks,
        quick=plan.ways is not None,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A plan with the model that is examined, and the rules that were seen to verify drafts."""

    llm: LLM
    reference: Reference
    prompts: list[Tokens]  # As long as the plan wants them
    plan: CertifyPlan
    progress: Callable[[str], None] = lambda _: None
    news: Callable[[str], None] = lambda _: None
    rules: set[str] = field(default_factory=set)

    def answers(
        self, prompts: Sequence[Tokens], params: Sequence[SamplingParams], speculative: Speculative = None
    ) -> Iterator[CompletionOutput]:
        """Return speculative completions, with a policy for which drafts are free: the usual one often drafts nothing
        in completions as short as these, and nothing would be tested."""
        with self.llm.engine.drafting.free_of_charge():
            for start in range(0, len(prompts), _TOGETHER):
                some = slice(start, start + _TOGETHER)
                requests = [{"prompt_token_ids": prompt} for prompt in prompts[some]]
                for output in self.llm.generate(requests, list(params[some]), speculative=speculative):
                    self.rules.update(output.outputs[0].speculation.steps_per_rule)
                    yield output.outputs[0]


def examined(run: Run) -> list[Check]:
    """Return all checks of a run: greedy and seeded text, sampled distributions, and the rules that verified drafts."""
    stages = list[Stage]()
    for temperature in run.plan.temperatures:
        if temperature == 0:
            stages.append(("greedy text against plain decoding", partial(_greedy_checks, run)))
        else:
            stages.append((f"sampled text for a seed, T = {temperature:g}", partial(_seed_check, run, temperature)))
    if any(run.plan.temperatures):
        stages.append(("the exact distributions of sampled completions", partial(_distribution_checks, run)))
    stages.append(("the rules that verified drafts, enumerated", partial(_rule_checks, run)))
    *others, rules = run_stages(stages, run.progress, run.news)
    return [*rules, *itertools.chain(*others)]


def token_prompts(llm: LLM, prompts: Sequence[str], plan: CertifyPlan) -> list[Tokens]:
    """Return the first tokens of the examined prompts, as token ids."""
    if llm.tokenizer is None:
        raise ArgumentError("certify needs the model's tokenizer to read its prompts")
    length = min(plan.prompt_tokens, llm.max_model_len - plan.max_tokens - 1)
    if length < 1:
        raise ArgumentError(
            f"completions of {plan.max_tokens} tokens leave no room for a prompt in {llm.max_model_len}"
        )
    texts = (llm.tokenizer(text, verbose=False)["input_ids"] for text in prompts[: plan.prompts])
    tokens = [list(prompt[:length]) for prompt in texts if len(prompt)]
    if not tokens:
        raise ArgumentError("certify needs at least one prompt that is not empty")
    return tokens


def _distribution_checks(run: Run) -> Iterator[Check]:
    settings = [
        setting for warm in run.plan.temperatures if warm > 0 for setting in settings_for(run, warm)[: run.plan.ways]
    ]
    if not settings:
        return
    number = len(settings) + 3  # With the one over longer answers, and two drafted by another drafter
    tests = [uncertain(run, setting, index, tests=number) for index, setting in enumerate(settings)]
    longer = token_test(run, settings[0], tests=number)
    every = [*tests, longer] if run.plan.ways else [*tests, longer, tests[0], longer]
    pace = Pace(tell=run.progress, news=run.news, total=sum(test.answers * test.tokens for test in every))
    for test in [*tests, longer]:
        check = chi_square_check(run, test if _drafts(run, test) else _by_a_sampling_drafter(run, test) or test, pace)
        yield check
    if run.plan.ways is not None:
        return
    # Drafts that were never sampled test no residual: another drafter's do.
    for test, rules in ((tests[0], run.rules), (longer, check.figures["rules"])):
        sampled = _by_a_sampling_drafter(run, test) if {*rules} <= {"argmax_walk", "sample_walk"} else None
        if sampled is not None:
            yield chi_square_check(run, sampled, pace)


def _drafts(run: Run, test: Test) -> bool:
    """Return whether the examined drafter drafts in a few such completions: a lookup drafter may find no match."""
    answers = test.drawn(run, max(4, _TRIED * run.plan.sample_tokens // test.tokens), first=0)
    return any(answer.speculation.num_draft_tokens for _, answer in answers)


def _by_a_sampling_drafter(run: Run, test: Test) -> Test | None:
    """Return the same test with a drafter that samples and is often right (`early_exit`); None if the target cannot run
    only a part of its layers.
    """
    layers = run.llm.target.num_layers
    if layers < 2:
        return None
    # Each depth costs most of a pass, and longer completions have many steps
    depth = 3 if test.each == "completions" else 2
    config = {"method": "early_exit", "exit_layer": layers - max(1, layers // 8), "num_speculative_tokens": depth}
    config["adaptive"] = False
    try:
        run.llm.engine.drafting.ensure(SpeculativeConfig.parse(config))
    except UnsupportedModelError:
        return None
    setting = replace(
        test.setting, speculative=config, what=f"{test.setting.what}, drafted by early_exit, which samples"
    )
    return replace(test, name=setting.name, key=f"{test.key}_early_exit", setting=setting)


def settings_for(run: Run, temperature: float) -> list[Setting]:
    """Return the settings of sampled requests at a temperature: every sampling parameter by itself."""
    base = SamplingParams(temperature=temperature, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0)
    bias: dict[int, float] = {}
    for prompt in run.prompts:
        likeliest = run.reference.logits(prompt[: run.plan.sample_prompt_tokens], 1)[0].topk(2).indices.tolist()
        bias |= zip(likeliest, (-1.0, 1.0), strict=True)
    named: list[tuple[str, str, dict[str, Any]]] = [("unseeded", "no seed", {}), ("seeded", "seeded", {})]
    if epsilon_of(run.llm) == 0:
        named += [(name, f"{name.replace('_', '-')} {value:g}", cut) for cut in CUTS for name, value in cut.items()]
    named += [("penalties", "penalties", PENALTIES), ("logit_bias", "logit bias", {"logit_bias": bias})]
    settings = [
        Setting(params=replace(base, **more), seeded=key == "seeded", key=key, what=what) for key, what, more in named
    ]
    allowed = _letters(run.llm)
    if find_spec("llguidance") is not None and bool(allowed.any()):
        form = StructuredOutputs(regex="[a-z ]{100,}")
        settings.append(
            Setting(
                params=replace(base, structured_outputs=form),
                seeded=False,
                key="grammar",
                what="grammar",
                allowed=allowed,
            )
        )
    return settings


def _letters(llm: LLM) -> Tensor:
    """Return (V,) bool: the tokens that consist of `LETTERS`, which the grammar allows, computed without the grammar's
    code. All are False without a tokenizer, and so without a grammar.
    """
    allowed = torch.zeros(llm.target.vocab_size, dtype=torch.bool)
    if llm.tokenizer is None:
        return allowed
    text = token_to_bytes(llm.tokenizer)
    size = min(len(llm.tokenizer), llm.target.vocab_size)
    special = set(llm.tokenizer.all_special_ids)
    for token in range(size):
        written = b"" if token in special else text(token)
        allowed[token] = bool(written) and all(byte in LETTERS for byte in written)
    return allowed


def _rule_checks(run: Run) -> Iterator[Check]:
    for name in sorted(run.rules):
        run.progress(f"the exact distributions of the rule {name}")
        passed, summary, figures = False, "this rule is not lossless, by its own account", dict[str, Any]()
        if rule_named(name).lossless:
            cases = list(check_rules([name]))
            worst = max((case.error for case in cases), default=float("inf"))
            passed = bool(cases) and all(case.passed for case in cases)
            summary = f"{len(cases)} cases enumerated, largest error {worst:.1e} (tolerance {TOLERANCE:.0e})"
            figures = {"cases": len(cases), "largest_error": worst, "tolerance": TOLERANCE}
        yield Check(id=f"rule_{name}", name=f"rule {name}", passed=passed, summary=summary, figures=figures)


def _greedy_checks(run: Run) -> list[Check]:
    """Check equality of greedy text and of log-probabilities. The reference's logits over prompt and completion show
    its greedy token at every position up to the first difference.
    """
    params = SamplingParams(
        temperature=0.0, max_tokens=run.plan.max_tokens, logprobs=1, ignore_eos=True, detokenize=False
    )
    answers = list(run.answers(run.prompts, [params] * len(run.prompts)))
    stats = SpeculationStats()
    parted = list[Difference]()
    worst = 0.0
    compared = 0
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
            worst = max(worst, abs(expected - token.logprob.logprob))
            compared += 1
    tolerance = LOGPROB_TOLERANCE.get(run.llm.target.dtype_name, QUANTISED)
    logprobs = Check(
        id="logprobs",
        name="log-probabilities",
        passed=worst <= tolerance and compared > 0,
        summary=f"at most {worst:.2g} nats from {run.reference.whose} over {compared} tokens (tolerance {tolerance:g})",
        figures={"largest_difference": worst, "tokens": compared, "tolerance": tolerance},
    )
    return [_equality(run, answers, parted, stats), logprobs]


def _equality(
    run: Run, answers: Sequence[CompletionOutput], parted_answers: Sequence[Difference], total: SpeculationStats
) -> Check:
    tokens = sum(len(answer.token_ids) for answer in answers)
    bugs = [parted for parted in parted_answers if not parted.tie]
    summary = "nothing was drafted, so nothing was tested; choose other prompts or another drafter"
    if total.num_spec_steps:
        equal = len(answers) - len(parted_answers)
        summary = f"{equal} of {len(answers)} completions are {run.reference.whose} own, {tokens} tokens, "
        summary += f"{total.tokens_per_pass:.2f} tokens per pass"
        for parted in parted_answers:
            summary += (
                f"; prompt {parted.prompt} parts at token {parted.position}: {show_token(run.llm, parted.plain)} or "
                f"{show_token(run.llm, parted.speculative)}, "
                f"gap {parted.gap:.3g} nats, {'a numeric tie' if parted.tie else 'NOT a tie'} "
                f"(epsilon {parted.epsilon:g})"
            )
    counts = {"prompts": len(answers), "tokens": tokens, "ties": len(parted_answers) - len(bugs), "bugs": len(bugs)}
    differences = [asdict(parted) | {"tie": parted.tie} for parted in parted_answers]
    length = {
        "tokens_per_pass": round(total.tokens_per_pass, 4),
        "mean_acceptance_length": round(total.mean_acceptance_length, 4),
    }
    return Check(
        id="greedy",
        name="greedy equality",
        passed=not bugs and total.num_spec_steps > 0,
        summary=summary,
        figures={**counts, "differences": differences, **length},
    )


def show_token(llm: LLM, token: int | None) -> str:
    """Return a token's text in quotes, its id for a model without a tokenizer; None is the completion's end."""
    if token is None:
        return "the end"
    return str(token) if llm.tokenizer is None else repr(llm.tokenizer.decode([token]))


def _seed_check(run: Run, temperature: float) -> Iterator[Check]:
    """Check, for deterministic drafts only, that sampled text equals that of plain decoding for the same seed."""
    plan = run.plan
    number = len(run.prompts)
    params = SamplingParams(
        temperature=temperature, max_tokens=plan.max_tokens, seed=plan.seed, ignore_eos=True, detokenize=False
    )
    speculative = list(run.answers(run.prompts, [params] * number))
    if {rule for answer in speculative for rule in answer.speculation.steps_per_rule} != {"sample_walk"}:
        return
    outputs = run.llm.generate([{"prompt_token_ids": prompt} for prompt in run.prompts], params, speculative=False)
    plain = [output.outputs[0] for output in outputs]
    same = sum(mine.token_ids == drafted.token_ids for mine, drafted in zip(plain, speculative, strict=True))
    fine = same == number or epsilon_of(run.llm) > 0
    share = f"{same} of {number} sampled completions equal plain decoding's for the same seed"
    yield Check(
        id=f"seed_t{temperature:g}",
        name=f"same seed, same text, T = {temperature:g}",
        passed=fine,
        summary=f"{share}; the format's rounding moves the others" if fine and same < number else share,
        figures={"equal": same, "prompts": number, "temperature": temperature},
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The settings of sampled requests."""

    params: SamplingParams
    seeded: bool  # Each request has a seed of its own; without, `auto`, `merge` and `first_of` may sample drafts
    key: str = "unseeded"  # Its special parameter, in a check's id
    what: str = ""  # The same in words
    allowed: Tensor | None = None  # (V,) tokens that its grammar allows everywhere in these completions
    speculative: dict[str, Any] | None = None  # Another drafter than the examined one

    @property
    def name(self) -> str:
        """Name it for a report."""
        return f"T = {self.params.temperature:g}, {self.what or ('seeded' if self.seeded else 'no seed')}"

    @property
    def id(self) -> str:
        """Return its part of a check's id."""
        return f"{self.key}_t{self.params.temperature:g}"

    def requests(self, number: int, tokens: int, first: int) -> list[SamplingParams]:
        """Return `number` requests; seeds, if they have any, count from `first` on."""
        params = replace(self.params, max_tokens=tokens, ignore_eos=True, detokenize=False)
        return [replace(params, seed=first + index if self.seeded else None) for index in range(number)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Test(SampledTest):
    """Compares sampled completions of an engine with their exact distribution."""

    setting: Setting
    prompts: list[Tokens]  # Used in turn
    tokens: int  # Of each completion
    passed_over: int = 0  # Number of earlier prompts, whose completions were certain

    @property
    def answers(self) -> int:
        """Return the number of completions of one sample."""
        return self.samples // (1 if self.each == "completions" else self.tokens)

    def drawn(self, run: Run, number: int, first: int) -> Iterator[tuple[Tokens, CompletionOutput]]:
        """Yield `number` sampled completions, each with its prompt; seeds, if they have any, count from `first` on."""
        prompts = [self.prompts[index % len(self.prompts)] for index in range(number)]
        requests = self.setting.requests(number, self.tokens, first)
        return zip(prompts, run.answers(prompts, requests, self.setting.speculative), strict=True)


def token_test(run: Run, setting: Setting, *, tests: int) -> Test:
    """Return the test, one of `tests`, of the quantiles of longer completions' tokens in their distributions. The
    setting has a temperature and nothing else.
    """
    plan = run.plan
    longer = replace(setting, key="tokens", what="each token of longer completions")
    least = plan.least / (20 if plan.ways is None else 5)
    cells = place_cells([edge for edge in EDGES if 1 - edge > least])  # A coarse test draws few completions
    prompts = [prompt[: plan.sample_prompt_tokens] for prompt in run.prompts]
    about: dict[str, Any] = {"setting": longer, "prompts": prompts, "tokens": plan.max_tokens, "each": "tokens"}
    return Test.over(cells, plan, tests, batch=plan.max_tokens, name=longer.name, key=longer.id, **about)


def uncertain(run: Run, setting: Setting, index: int, *, tests: int) -> Test:
    """Return the test of a setting, one of `tests`, for the first prompt from `index` on whose completions are not
    certain. Raises ArgumentError if there is none."""
    plan = run.plan
    params = replace(setting.params, max_tokens=run.plan.sample_tokens)
    for turn in range(len(run.prompts)):
        prompt = run.prompts[(index + turn) % len(run.prompts)][: plan.sample_prompt_tokens]
        cells = exact_cells(run.reference, prompt, params, plan, setting.allowed)
        if sum(chance > 0 for chance in cells.values()) > 1:
            about: dict[str, Any] = {"setting": setting, "prompts": [prompt], "tokens": plan.sample_tokens}
            return Test.over(cells, plan, tests, name=setting.name, key=setting.id, **about, passed_over=turn)
    raise ArgumentError(
        f"{setting.name}: there is nothing to compare, for the completions to each of the {len(run.prompts)} prompts "
        f"are certain, or none has a probability of {plan.least:g}; give more prompts (--prompts, --prompt-file) or "
        "another --temperature"
    )


@dataclass(kw_only=True, slots=True)
class Pace:
    """Reports how many completions are drawn and about how long the others will take."""

    tell: Callable[[str], None]
    total: int  # Tokens of the completions of all tests together
    drawn: int = 0
    news: Callable[[str], None] | None = None  # Called once, as soon as the pace is known
    began: float = field(default_factory=time.perf_counter)

    def told(self, what: str) -> None:
        """Report what is being done and how long the rest will take."""
        spent = time.perf_counter() - self.began
        rest = f", about {math.ceil(spent / self.drawn * (self.total - self.drawn))} s left" if self.drawn else ""
        self.tell(what + rest)
        if rest and self.news is not None:
            self.news(f"  sampled completions at the pace of the first{rest}")
            self.news = None


def chi_square_check(run: Run, test: Test, pace: Pace | None = None) -> Check:
    """Compare speculative completions with the exact distribution. The check fails if two samples with different seeds
    are both unlikely, or if a completion is impossible."""
    pace = pace or Pace(tell=run.progress, total=test.answers * test.tokens)
    stats = SpeculationStats()

    def draw(turn: int) -> Counter[Outcome]:
        pace.total += turn * test.answers * test.tokens
        return count(test.cells, _drawing(run, test, stats, pace, turn * test.answers))

    check, _ = test.check(run.plan, draw)
    drafted, accepted, depth = stats.num_draft_tokens, stats.num_accepted_draft_tokens, len(stats.drafted_per_depth)
    summary = (
        f"{check.summary}; {accepted} of {drafted} drafted tokens accepted, drafts up to {depth} deep"
        + ("" if drafted else "; nothing was drafted, so nothing was tested")
        + (f"; {test.passed_over} of the prompts passed over: nothing to compare" if test.passed_over else "")
    )
    drafts = {"drafted": drafted, "accepted": accepted, "depth": depth, "rules": sorted(stats.steps_per_rule)}
    figures = {**check.figures, "passed_over": test.passed_over, **drafts}
    return replace(check, passed=check.passed and drafted > 0, summary=summary, figures=figures)


def _drawing(run: Run, test: Test, stats: SpeculationStats, pace: Pace, first: int) -> list[Outcome]:
    """Draw a test's completions, with seeds from `first` on, and return the outcomes to count."""
    outcomes = list[Outcome]()
    seed = run.plan.seed + first
    uniform = torch.Generator().manual_seed(seed)
    for index, (prompt, answer) in enumerate(test.drawn(run, test.answers, seed)):
        if index % _TOGETHER == 0:
            pace.told(f"{test.setting.name}: {index} of {test.answers} completions")
        stats.add(answer.speculation)
        if test.each == "completions":
            outcomes.append(tuple(answer.token_ids))
        else:
            temperature = float(test.setting.params.temperature or 1.0)
            quantiles = run.reference.places(prompt, answer.token_ids, temperature, uniform)
            outcomes += [(min(bisect(EDGES, quantile), len(test.cells) - 1),) for quantile in quantiles]
        pace.drawn += test.tokens
    return outcomes
