"""Sampled text against the target's exact distribution: counts of short answers, compared by Pearson's chi-square.

The distribution of the first few tokens comes from transformers' own passes (`reference`); unlikely answers share a
cell. How many answers are drawn follows from what is to be detected. The level is shared among the tests (Bonferroni).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from forerun.certify.reference import Reference
from forerun.certify.report import Check, Plan
from forerun.errors import ArgumentError
from forerun.types import SamplingParams, SpeculationStats

if TYPE_CHECKING:
    from forerun import LLM

Outcome = tuple[int, ...]
REST: Outcome = ()
"""The cell of everything that has no cell of its own."""
IMPOSSIBLE = 1e-12
"""Probability below which a cell counts as outside the distribution: one answer there is a failure."""
_TOGETHER = 1024
"""Answers asked for at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One way to ask for sampled answers."""

    params: SamplingParams
    seeded: bool
    """Whether each request has a seed of its own. Without one, `auto`, `merge` and `first_of` may sample drafts."""

    @property
    def name(self) -> str:
        """As a report calls it."""
        cut = self.params.top_p is not None and self.params.top_p < 1
        nucleus = f", top-p {self.params.top_p:g}" if cut else ""
        return f"T = {self.params.temperature:g}{nucleus}, {'seeded' if self.seeded else 'no seed'}"


def chi_square_check(
    llm: LLM, reference: Reference, prompt: Sequence[int], setting: Setting, plan: Plan, tests: int
) -> tuple[Check, set[str]]:
    """Draw speculative answers to `prompt` and compare them with the exact distribution; one of `tests` tests.

    Where the engine decides how much to draft, it decides as if drafts were free: a policy that drafts nothing in such
    short answers, which is often right, would leave nothing to compare.

    Returns:
        The check, and the names of the rules that verified drafts.
    """
    params = replace(setting.params, max_tokens=plan.sample_tokens, ignore_eos=True, detokenize=False)
    level = plan.family_error / tests
    cells = exact_cells(reference, prompt, params, plan)
    possible = sum(chance > 0 for chance in cells.values())
    samples = draws_for(possible - 1, level, plan)
    with llm.engine.drafting.free_of_charge():
        answers, stats = draw(llm, prompt, setting, params, samples, plan.seed)
    statistic, freedom = pearson(cells, count(cells, answers), samples)
    chance = survival(statistic, freedom)
    judged = stats.num_draft_tokens > 0
    check = Check(
        name=f"sampled distribution, {setting.name}",
        passed=chance >= level and judged,
        summary=(
            f"chi-square {statistic:.1f}, {freedom} degrees of freedom, p = {chance:.3g} (fails below {level:.1g}); "
            f"{samples} answers detect a total variation of {plan.detect:.3g} over {possible} cells with "
            f"{plan.power:.0%}; {stats.num_accepted_draft_tokens} of {stats.num_draft_tokens} drafted tokens accepted, "
            f"drafts up to {len(stats.drafted_per_depth)} deep"
            + ("" if judged else "; nothing was drafted, so nothing was proved")
        ),
        figures={
            "chi_square": statistic,
            "degrees_of_freedom": freedom,
            "p_value": chance,
            "level": level,
            "samples": samples,
            "cells": possible,
            "detects_total_variation": plan.detect,
            "power": plan.power,
            "drafted": stats.num_draft_tokens,
            "accepted": stats.num_accepted_draft_tokens,
            "depth": len(stats.drafted_per_depth),
        },
    )
    return check, set(stats.steps_per_rule)


def draws_for(freedom: int, level: float, plan: Plan) -> int:
    """The fewest answers by which whatever is `plan.detect` away in total variation fails with `plan.power`.

    The chi-square statistic grows least with differences in proportion to the probabilities: by 4 N detect^2, the
    noncentrality of its distribution (Cauchy-Schwarz).
    """
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


def exact_cells(
    reference: Reference, prompt: Sequence[int], params: SamplingParams, plan: Plan
) -> dict[Outcome, float]:
    """Probability of every cell: the likeliest beginnings of answers that no other cell continues, and `REST`.

    The likeliest beginning is continued until there are `plan.cells`; what is less likely than `plan.least` joins the
    cell of its own beginning. They sum to 1.
    """
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
    """What is left of a beginning beside its own cells joins a shorter one where it is little, and is impossible where
    it is nothing."""
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


def draw(
    llm: LLM, prompt: Sequence[int], setting: Setting, params: SamplingParams, samples: int, seed: int
) -> tuple[list[Outcome], SpeculationStats]:
    """Speculative answers as a user gets them: under consecutive seeds, or without any."""
    answers, stats = list[Outcome](), SpeculationStats()
    for start in range(0, samples, _TOGETHER):
        number = min(_TOGETHER, samples - start)
        seeds = [seed + start + index if setting.seeded else None for index in range(number)]
        many = [replace(params, seed=own) for own in seeds]
        for output in llm.generate([{"prompt_token_ids": list(prompt)}] * number, many):
            stats.add(output.outputs[0].speculation)
            answers.append(tuple(output.outputs[0].token_ids))
    return answers, stats


def count(cells: Mapping[Outcome, float], answers: Iterable[Outcome]) -> Counter[Outcome]:
    """How many answers fall into each cell."""
    return Counter(_home(answer, cells) for answer in answers)


def pearson(cells: dict[Outcome, float], counts: Counter[Outcome], samples: int) -> tuple[float, int]:
    """The statistic and its degrees of freedom; infinite if an answer came that the law excludes."""
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
