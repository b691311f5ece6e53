"""Sampled text against the target's exact law: counts of whole short answers, compared by Pearson's chi-square.

The law of the first few tokens comes from plain forward passes after every likely beginning; all unlikely ones share a
cell. Seeds are fixed, so a run can be repeated; the level is shared among the tests (Bonferroni).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forerun.certify.report import Check, Plan
from forerun.errors import ArgumentError
from forerun.types import SamplingParams, SpeculationStats

if TYPE_CHECKING:
    from forerun import LLM

Outcome = tuple[int, ...]
REST: Outcome = ()
"""The cell of everything that has no cell of its own."""
IMPOSSIBLE = 1e-6
"""Expected answers below which a cell counts as outside the law: one answer there is a failure."""


def chi_square_check(llm: LLM, prompt: Sequence[int], params: SamplingParams, plan: Plan, tests: int) -> Check:
    """Draw `plan.samples` speculative answers to `prompt` and compare them with the exact law; one of `tests` tests."""
    params = replace(params, max_tokens=plan.sample_tokens, ignore_eos=True, detokenize=False)
    cells = exact_cells(llm, prompt, params, plan)
    answers, stats = draw(llm, prompt, params, plan)
    statistic, freedom = pearson(cells, count(cells, answers), plan.samples)
    chance = survival(statistic, freedom)
    level = plan.family_error / tests
    judged = stats.num_draft_tokens > 0
    cut = params.top_p is not None and params.top_p < 1
    name = f"sampled law, T = {params.temperature:g}" + (f", top-p {params.top_p:g}" if cut else "")
    return Check(
        name=name,
        passed=chance >= level and judged,
        summary=(
            f"chi-square {statistic:.1f}, {freedom} degrees of freedom, p = {chance:.3g} (fails below {level:.1g}); "
            f"{plan.samples} answers, {stats.num_accepted_draft_tokens} of {stats.num_draft_tokens} drafted tokens kept"
            + ("" if judged else "; nothing was drafted, so nothing was proved")
        ),
        figures={
            "chi_square": statistic,
            "degrees_of_freedom": freedom,
            "p_value": chance,
            "level": level,
            "samples": plan.samples,
            "cells": len(cells),
            "drafted": stats.num_draft_tokens,
            "accepted": stats.num_accepted_draft_tokens,
        },
    )


def exact_cells(llm: LLM, prompt: Sequence[int], params: SamplingParams, plan: Plan) -> dict[Outcome, float]:
    """Probability of every cell: beginnings of answers that no other cell continues, and `REST`. They sum to 1."""
    cells: dict[Outcome, float] = {}
    open_beginnings: list[tuple[Outcome, float]] = [((), 1.0)]
    for beginning, chance in open_beginnings:
        likely: list[tuple[Outcome, float]] = []
        if len(beginning) < plan.sample_tokens:
            likely = _likely(next_law(llm, [*prompt, *beginning], params), beginning, chance, plan)
        open_beginnings += likely
        cells[beginning] = max(0.0, chance - sum(share for _, share in likely)) if likely else chance
    return _merge(cells, plan)


def next_law(llm: LLM, tokens: list[int], params: SamplingParams) -> Tensor:
    """(V,) float64, the processed law of the token after `tokens`, from a plain forward pass."""
    wanted = replace(
        params,
        max_tokens=1,
        logprobs=llm.target.vocab_size,
        logprobs_mode="processed_logprobs",
        seed=0,
    )
    token = llm.generate({"prompt_token_ids": tokens}, wanted, speculative=False)[0].outputs[0].tokens[0]
    law = torch.zeros(llm.target.vocab_size, dtype=torch.float64)
    for name, entry in (token.top_logprobs or {}).items():
        law[name] = entry.logprob
    law = law.exp()
    return law / law.sum()


def _likely(law: Tensor, beginning: Outcome, chance: float, plan: Plan) -> list[tuple[Outcome, float]]:
    shares = law * chance
    enough = torch.nonzero(shares * plan.samples >= plan.least_expected).flatten().tolist()
    return [((*beginning, token), float(shares[token])) for token in enough]


def _merge(cells: dict[Outcome, float], plan: Plan) -> dict[Outcome, float]:
    """Cells with too few expected answers join the cell of their beginning; impossible ones stay by themselves."""
    for outcome in sorted(cells, key=len, reverse=True):
        if outcome and IMPOSSIBLE < cells[outcome] * plan.samples < plan.least_expected:
            cells[_home(outcome[:-1], cells)] += cells.pop(outcome)
    while IMPOSSIBLE < cells[REST] * plan.samples < plan.least_expected:
        below = [outcome for outcome in cells if outcome and _home(outcome[:-1], cells) == REST]
        possible = [outcome for outcome in below if cells[outcome] * plan.samples > IMPOSSIBLE]
        if not possible:
            break
        cells[REST] += cells.pop(min(possible, key=lambda outcome: cells[outcome]))
    if sum(chance * plan.samples > IMPOSSIBLE for chance in cells.values()) < 2:
        raise ArgumentError(
            f"{plan.samples} answers to this prompt leave nothing to compare; raise the number of samples"
        )
    return cells


def _home(beginning: Outcome, cells: Mapping[Outcome, float]) -> Outcome:
    """The cell that answers with this beginning fall into: the longest part of it that has one."""
    lengths = range(len(beginning), 0, -1)
    return next((beginning[:length] for length in lengths if beginning[:length] in cells), REST)


def draw(llm: LLM, prompt: Sequence[int], params: SamplingParams, plan: Plan) -> tuple[list[Outcome], SpeculationStats]:
    """`plan.samples` speculative answers under consecutive seeds."""
    many = [replace(params, seed=plan.seed + index) for index in range(plan.samples)]
    outputs = llm.generate([{"prompt_token_ids": list(prompt)}] * plan.samples, many)
    stats = SpeculationStats()
    for output in outputs:
        stats.add(output.outputs[0].speculation)
    return [tuple(output.outputs[0].token_ids) for output in outputs], stats


def count(cells: Mapping[Outcome, float], answers: Iterable[Outcome]) -> Counter[Outcome]:
    """How many answers fall into each cell."""
    return Counter(_home(answer, cells) for answer in answers)


def pearson(cells: dict[Outcome, float], counts: Counter[Outcome], samples: int) -> tuple[float, int]:
    """The statistic and its degrees of freedom; infinite if an answer came that the law excludes."""
    statistic, used = 0.0, 0
    for outcome, chance in cells.items():
        expected = chance * samples
        if expected <= IMPOSSIBLE:
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
