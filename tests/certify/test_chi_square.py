"""The chi-square test: its arithmetic, its cells, and that it tells a wrong distribution from the right one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from forerun import LLM, SamplingParams
from forerun.certify import checks
from forerun.certify.checks import Check, Plan
from forerun.certify.reference import Reference
from forerun.core.probs import NodeProbs
from forerun.core.rules.sample_walk import SampleWalk
from forerun.core.sampling import Rng
from forerun.core.tree import TokenTree
from forerun.errors import ArgumentError
from forerun.types import Source, Verdict

PLAN = Plan(detect=0.3)
PARAMS = SamplingParams(temperature=1.0, top_k=3, top_p=1.0, min_p=0.0, repetition_penalty=1.0)


@pytest.fixture(scope="module")
def llm(checkpoint: Path, draft_checkpoint: Path) -> LLM:
    config = {
        "method": "draft_model",
        "model": str(draft_checkpoint),
        "num_speculative_tokens": 3,
        "draw": "deterministic",
    }
    return LLM(checkpoint, speculative_config=config, max_num_seqs=8)


@pytest.fixture(scope="module")
def reference(llm: LLM) -> Reference:
    return Reference.of(llm)


def examined(llm: LLM, reference: Reference, prompt: list[int], *, seeded: bool = False) -> tuple[Check, set[str]]:
    run = checks.Run(llm=llm, reference=reference, prompts=[prompt], plan=PLAN)
    check = checks.chi_square_check(run, prompt, checks.Setting(params=PARAMS, seeded=seeded), tests=1)
    return check, run.rules


@pytest.fixture(scope="module")
def prompt(llm: LLM) -> list[int]:
    assert llm.tokenizer is not None
    return list(llm.tokenizer("the cat sat on the mat and the cat sat on the")["input_ids"])


@pytest.mark.parametrize(("statistic", "freedom"), [(0.5, 1), (9.8, 6), (80.0, 12), (300.0, 150)])
def test_survival_is_scipys(statistic: float, freedom: int) -> None:
    assert checks.survival(statistic, freedom) == pytest.approx(stats.chi2.sf(statistic, freedom), rel=1e-9)


def test_pearson_is_scipys() -> None:
    cells = {(1,): 0.5, (2,): 0.3, (): 0.2}
    counts = Counter({(1,): 55, (2,): 20, (): 25})
    expected = stats.chisquare([55, 20, 25], [50, 30, 20])
    assert checks.pearson(cells, counts, 100) == (pytest.approx(expected.statistic), 2)


def test_an_impossible_answer_is_infinitely_wrong() -> None:
    statistic, freedom = checks.pearson({(1,): 0.5, (2,): 0.5, (): 0.0}, Counter({(1,): 5, (2,): 4, (): 1}), 10)
    assert checks.survival(statistic, freedom) == 0.0


def test_cells_are_a_partition_with_the_distributions_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    def toy(_: Reference, tokens: list[int], __: SamplingParams) -> Tensor:
        distributions = {0: [0.6, 0.4, 0.0], 1: [0.97, 0.03, 0.0], 2: [0.5, 0.25, 0.25]}
        return torch.tensor(distributions[tokens[-1]] if len(tokens) > 1 else [0.5, 0.25, 0.25], dtype=torch.float64)

    monkeypatch.setattr(Reference, "probs", toy)
    reference = Reference.__new__(Reference)
    cells = checks.exact_cells(reference, [9], PARAMS, Plan(sample_tokens=2))
    assert sum(cells.values()) == pytest.approx(1.0)
    assert cells[0, 0] == pytest.approx(0.3) and cells[2, 2] == pytest.approx(0.0625)
    # (1, 1) is too rare for a cell of its own; nor is that enough for the rest, which takes a likely one in. After 0
    # only 0 and 1 may follow: the cell of the others stays, and is impossible.
    assert (1, 1) not in cells and cells[()] > 0.01 and cells[0,] == 0.0
    counts = checks.count(cells, [(0, 0), (0, 2), (1, 1), (7, 7)])
    assert counts == {(0, 0): 1, (0,): 1, (): 2}


def test_few_cells_take_the_likeliest_beginnings(reference: Reference, prompt: list[int]) -> None:
    cells = checks.exact_cells(reference, prompt, PARAMS, Plan(cells=6))
    assert 3 <= len(cells) <= 6 + 2 and sum(cells.values()) == pytest.approx(1.0)


@pytest.mark.parametrize(("freedom", "level", "detect"), [(1, 1e-6, 0.02), (23, 2.5e-7, 0.05), (60, 1e-3, 0.3)])
def test_the_power_is_scipys(freedom: int, level: float, detect: float) -> None:
    plan = Plan(detect=detect)
    draws = checks.draws_for(freedom, level, plan)
    critical = stats.chi2.isf(level, freedom)
    assert stats.ncx2.sf(critical, freedom, 4 * draws * detect**2) == pytest.approx(plan.power, abs=2e-3)


def test_the_power_is_kept() -> None:
    """Counts from a distribution that is as far away as is to be detected fail as often as promised."""
    plan, level, cells = Plan(detect=0.1, power=0.9), 1e-4, {(token,): 1 / 8 for token in range(8)}
    draws = checks.draws_for(7, level, plan)
    away = np.array([1 / 8 + (0.025 if token % 2 else -0.025) for token in range(8)])
    rng, failed = np.random.default_rng(0), 0
    for _ in range(400):
        counts = Counter({(token,): int(seen) for token, seen in enumerate(rng.multinomial(draws, away))})
        failed += checks.survival(*checks.pearson(cells, counts, draws)) < level
    assert 0.85 < failed / 400 < 0.95


@pytest.mark.parametrize("seeded", [False, True], ids=["no seed", "seeded"])
def test_the_real_distribution_passes(llm: LLM, reference: Reference, prompt: list[int], seeded: bool) -> None:
    check, rules = examined(llm, reference, prompt, seeded=seeded)
    assert check.passed and check.figures["drafted"] > 100 and check.figures["cells"] > 5
    assert rules == {"sample_walk"} and check.figures["depth"] == 3
    assert "detect a total variation of 0.3" in check.summary


def test_a_certain_answer_is_refused(llm: LLM, reference: Reference, prompt: list[int]) -> None:
    with pytest.raises(ArgumentError, match="nothing to compare"):
        checks.exact_cells(reference, prompt, replace(PARAMS, top_k=1), PLAN)


def test_a_rule_that_favours_drafts_fails(
    llm: LLM, reference: Reference, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = SampleWalk.verify

    def eager(self: SampleWalk, tree: TokenTree, target: NodeProbs, rng: Rng) -> Verdict:
        if tree.size and target.probs(0).of_child(1) > 0:
            return Verdict(path=(1,), next_token=target.probs(1).draw(rng), kind=Source.RECOVERED)
        return honest(self, tree, target, rng)

    monkeypatch.setattr(SampleWalk, "verify", eager)
    check = examined(llm, reference, prompt)[0]
    assert not check.passed and check.figures["p_value"] < 1e-6


def test_no_draft_is_no_proof(
    prompt: list[int], llm: LLM, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = llm.generate

    def undrafted(prompts: Any, params: Any, **options: Any) -> Any:
        return whole(prompts, params, **{**options, "speculative": False})

    monkeypatch.setattr(llm, "generate", undrafted)
    check = examined(llm, reference, prompt)[0]
    assert not check.passed and "nothing was drafted" in check.summary
