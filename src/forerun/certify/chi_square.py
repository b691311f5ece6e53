"""Pearson's chi-square test for ``forerun certify``: the number of samples that it needs, and its verdict.

A test fails if two independent samples are both unlikely. The level of each is then the square root of the test's
level, where the chi-square approximation is good and fewer samples suffice. The level of a run is divided among its
tests (Bonferroni).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from forerun.certify import CertifyPlan, Check
from forerun.certify.reference import Cells, Outcome

EDGES = (*(tenth / 10 for tenth in range(1, 10)), 0.99, 0.999)
"""Edges of the cells for tokens' quantiles. Rare tokens have narrow cells: errors of rejection show most there."""
_FEWEST = 5  # Least expected count of a cell: with fewer the distribution of a count is too skewed for chi-square


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledTest:
    """Compares samples with their exact distribution."""

    name: str
    key: str  # Its part of the check's id
    cells: Cells
    level: float  # Probability below which a sample is unlikely
    samples: int  # Number of outcomes in a sample: completions, or tokens of completions
    detects: float  # Total variation at which the test fails with the plan's power
    each: str = "completions"  # What the outcomes are

    @classmethod
    def over(cls, cells: Cells, plan: CertifyPlan, tests: int, *, batch: int = 1, **fields: Any) -> Self:
        """Return one of `tests` tests, with enough samples, in whole batches, to detect the plan's total variation and
        to give each cell a sufficient expected count.
        """
        likely = [chance for chance in cells.values() if chance > 0]
        level = level_of(plan, tests)
        draws = draws_for(len(likely) - 1, level, plan.detect, math.sqrt(plan.power))
        samples = batch * math.ceil(max(draws, _FEWEST / min(likely)) / batch)
        detects = plan.detect * math.sqrt(draws / samples)
        return cls(cells=cells, level=level, samples=samples, detects=detects, **fields)

    def check(
        self, plan: CertifyPlan, draw: Callable[[int], Counter[Outcome]], where: str = ""
    ) -> tuple[Check, Counter[Outcome]]:
        """Return the check, and the last sample's counts. `draw` returns the counts of a sample by cell, and gets the
        number of earlier samples; `where` begins the summary.
        """
        drawn = Counter[Outcome]()

        def fit_next(turn: int) -> tuple[float, int, float]:
            nonlocal drawn
            drawn = draw(turn)
            return fit(self.cells, drawn)

        fits, words, figures = judged(fit_next, self.level)
        possible = sum(chance > 0 for chance in self.cells.values())
        summary = (
            f"{where}{words}; {drawn.total()} {self.each} detect a total variation of {self.detects:.2g} over "
            f"{possible} cells with {plan.power:.0%}"
        )
        sample = {"samples": drawn.total(), "cells": possible}
        power = {"detects_total_variation": self.detects, "power": plan.power}
        name = f"sampled distribution, {self.name}"
        figures |= sample | power
        return Check(id=f"sampled_{self.key}", name=name, passed=fits, summary=summary, figures=figures), drawn


def fit(cells: Cells, drawn: Counter[Outcome]) -> tuple[float, int, float]:
    """Return chi-square, its degrees of freedom and its p-value."""
    statistic, freedom = pearson(cells, drawn, drawn.total())
    return statistic, freedom, survival(statistic, freedom)


def judged(
    draw: Callable[[int], tuple[float, int, float]], level: float, what: str = ""
) -> tuple[bool, str, dict[str, Any]]:
    """Judge a sample by its statistic, degrees of freedom and p-value; after an unlikely one, unless it is impossible,
    another is drawn. `draw` gets the number of earlier samples. Return whether it passed, a summary (`what` follows the
    statistic in it), and the figures."""
    first = None
    statistic, freedom, chance = draw(0)
    if 0 < chance < level:
        first = chance
        statistic, freedom, chance = draw(1)
    words = (
        f"chi-square {statistic:.1f}{what}, {freedom} degrees of freedom, p = {chance:.3g} (fails below {level:.1g}, "
        f"twice{'' if first is None else f'; p = {first:.3g} at first'})"
    )
    fit = {"chi_square": statistic, "degrees_of_freedom": freedom, "p_value": chance, "first_p_value": first}
    return chance >= level, words, {**fit, "level": level}


def level_of(plan: CertifyPlan, tests: int) -> float:
    """Return the p-value below which each of the two samples of one of `tests` tests is unlikely."""
    return math.sqrt(plan.family_error / tests)


def place_cells(edges: Sequence[float]) -> Cells:
    """Return the cells of tokens' quantiles between these edges."""
    return {(index,): high - low for index, (low, high) in enumerate(itertools.pairwise([0.0, *edges, 1.0]))}


def draws_for(freedom: int, level: float, detect: float, power: float) -> int:
    """Return the fewest samples with which any distribution at a total variation of `detect` fails with probability
    `power`. The statistic grows least if differences are proportional to the probabilities: by 4 N detect^2, the
    noncentrality of its distribution (Cauchy-Schwarz)."""
    freedom = max(freedom, 1)
    critical = _smallest(lambda value: survival(value, freedom) <= level)
    wanted = _smallest(lambda apart: _survival_apart(critical, freedom, apart) >= power)
    return math.ceil(wanted / (4 * detect**2))


def _smallest(holds: Callable[[float], bool]) -> float:
    """Return the smallest number above 0 from which on `holds` is true, to one part in a thousand."""
    high = 1.0
    while not holds(high):
        high *= 2
    low = high / 2 if high > 1 else 0.0
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _survival_apart(statistic: float, freedom: int, apart: float) -> float:
    """Return the probability that a noncentral chi-square variable exceeds `statistic`: a Poisson mixture of central
    ones."""
    most = int(apart / 2 + 12 * math.sqrt(apart / 2 + 1)) + 12
    terms = torch.arange(most, dtype=torch.float64)
    weights = (terms * math.log(apart / 2) - apart / 2 - torch.lgamma(terms + 1)).exp()
    tails = torch.special.gammaincc(freedom / 2 + terms, torch.full_like(terms, statistic / 2))
    return float((weights * tails).sum())


def pearson(cells: Cells, counts: Counter[Outcome], samples: int) -> tuple[float, int]:
    """Return the statistic, infinite if an impossible outcome was drawn, and its degrees of freedom."""
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
    """Return the probability that a chi-square variable exceeds `statistic`: the regularised upper incomplete gamma
    function."""
    if statistic == float("inf"):
        return 0.0
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
