"""The chi-square test: its arithmetic, its cells, and that it tells a wrong distribution from the right one."""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from forerun import LLM, SamplingParams
from forerun.certify import CertifyPlan, Check, checks, chi_square
from forerun.certify.reference import Reference, count, exact_cells
from forerun.core import sampling
from forerun.core.probs import HostResidual, NodeProbs
from forerun.core.rng import Rng, Stream
from forerun.core.rules import SampleWalk
from forerun.core.tree import TokenTree
from forerun.errors import ArgumentError
from forerun.types import Source, SpeculationStats, Verdict

PLAN = CertifyPlan(detect=0.3)
PARAMS = SamplingParams(temperature=1.0, top_k=3, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
SETTING = checks.Setting(params=PARAMS, seeded=False)


@pytest.fixture(scope="module")
def llm(checkpoint: Path, draft_checkpoint: Path) -> LLM:
    config = {"method": "draft_model", "model": str(draft_checkpoint), "num_speculative_tokens": 3}
    return LLM(checkpoint, speculative_config=config | {"draw": "deterministic"}, max_num_seqs=32)


@pytest.fixture(scope="module")
def reference(llm: LLM) -> Reference:
    return Reference.of(llm)


def toy(monkeypatch: pytest.MonkeyPatch, probs: Callable[[list[int], Sequence[int]], Any]) -> Reference:
    """A model that says these probabilities behind a prompt and the beginning of an answer."""

    def told(_: Reference, prompt: list[int], answer: Sequence[int], *__: object) -> Tensor:
        return torch.as_tensor(probs(prompt, answer), dtype=torch.float64)

    monkeypatch.setattr(Reference, "probs", told)
    return Reference.__new__(Reference)


def toy_run(monkeypatch: pytest.MonkeyPatch, probs: dict[int, list[float]]) -> checks.Run:
    """A run whose prompts are single tokens; each has answers of one token with these probabilities."""
    reference, nobody = toy(monkeypatch, lambda prompt, _: probs[prompt[0]]), SimpleNamespace()
    prompts = [[token] for token in probs]
    return checks.Run(llm=nobody, reference=reference, prompts=prompts, plan=CertifyPlan(sample_tokens=1))


def examined(
    llm: LLM, reference: Reference, prompt: list[int], *, seeded: bool = False, plan: CertifyPlan = PLAN
) -> tuple[Check, set[str]]:
    run = checks.Run(llm=llm, reference=reference, prompts=[prompt], plan=plan)
    test = checks.uncertain(run, checks.Setting(params=PARAMS, seeded=seeded), 0, tests=1)
    return checks.chi_square_check(run, test), run.rules


@pytest.fixture(scope="module")
def prompt(llm: LLM) -> list[int]:
    return list(llm.tokenizer("the cat sat on the mat and the cat sat on the")["input_ids"])


@pytest.mark.parametrize(("statistic", "freedom"), [(0.5, 1), (9.8, 6), (80.0, 12), (300.0, 150)])
def test_survival_is_scipys(statistic: float, freedom: int) -> None:
    assert chi_square.survival(statistic, freedom) == pytest.approx(stats.chi2.sf(statistic, freedom), rel=1e-9)


def test_test_pearson_is_scipys_and_an_impossible_answer_infinitely_wrong() -> None:
    cells = {(1,): 0.5, (2,): 0.3, (): 0.2}
    counts = Counter({(1,): 55, (2,): 20, (): 25})
    expected = stats.chisquare([55, 20, 25], [50, 30, 20])
    assert chi_square.pearson(cells, counts, 100) == (pytest.approx(expected.statistic), 2)
    statistic, freedom = chi_square.pearson({(1,): 0.5, (2,): 0.5, (): 0.0}, Counter({(1,): 5, (2,): 4, (): 1}), 10)
    assert chi_square.survival(statistic, freedom) == 0.0


def test_cells_are_a_partition_with_the_distributions_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    behind = {0: [0.6, 0.4, 0.0], 1: [0.97, 0.03, 0.0], 2: [0.5, 0.25, 0.25]}
    reference = toy(monkeypatch, lambda _, answer: behind[answer[-1]] if answer else behind[2])
    cells = exact_cells(reference, [9], PARAMS, CertifyPlan(sample_tokens=2))
    assert sum(cells.values()) == pytest.approx(1.0)
    assert cells[0, 0] == pytest.approx(0.3) and cells[2, 2] == pytest.approx(0.0625)
    # (1, 1) is too rare for a cell of its own; nor is that enough for the rest, which takes a likely one in. After 0
    # only 0 and 1 may follow: the cell of the others stays, and is impossible.
    assert (1, 1) not in cells and cells[()] > 0.01 and cells[0,] == 0.0
    counts = count(cells, [(0, 0), (0, 2), (1, 1), (7, 7)])
    assert counts == {(0, 0): 1, (0,): 1, (): 2}


def test_a_cell_has_the_probability_of_the_answers_that_are_counted_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(30):
        tables = np.random.default_rng(seed).dirichlet([0.3] * 4, size=(5, 5))
        reference = toy(monkeypatch, lambda _, answer, tables=tables: tables[tuple([4, 4, *answer][-2:])])
        cells = exact_cells(reference, [9], PARAMS, CertifyPlan(sample_tokens=3, cells=12))
        found = dict.fromkeys(cells, 0.0)
        for one, two, three in itertools.product(range(4), repeat=3):
            [cell] = count(cells, [(one, two, three)])
            found[cell] += tables[4, 4, one] * tables[4, one, two] * tables[one, two, three]
        assert found == pytest.approx(cells, abs=1e-9)


def test_few_cells_take_the_likeliest_beginnings(reference: Reference, prompt: list[int]) -> None:
    cells = exact_cells(reference, prompt, PARAMS, CertifyPlan(cells=6))
    assert 3 <= len(cells) <= 6 + 2 and sum(cells.values()) == pytest.approx(1.0)


@pytest.mark.parametrize(("freedom", "level", "detect"), [(1, 1e-6, 0.02), (23, 2.5e-7, 0.05), (60, 1e-3, 0.3)])
def test_the_power_is_scipys(freedom: int, level: float, detect: float) -> None:
    draws = chi_square.draws_for(freedom, level, detect, 0.99)
    critical = stats.chi2.isf(level, freedom)
    assert stats.ncx2.sf(critical, freedom, 4 * draws * detect**2) == pytest.approx(0.99, abs=2e-3)


def test_the_power_is_kept() -> None:
    """Counts from a distribution that is as far away as is to be detected fail as often as promised."""
    level, cells = 1e-4, {(token,): 1 / 8 for token in range(8)}
    draws = chi_square.draws_for(7, level, 0.1, 0.9)
    away = np.array([1 / 8 + (0.025 if token % 2 else -0.025) for token in range(8)])
    rng, failed = np.random.default_rng(0), 0
    for _ in range(400):
        counts = Counter({(token,): int(seen) for token, seen in enumerate(rng.multinomial(draws, away))})
        failed += chi_square.survival(*chi_square.pearson(cells, counts, draws)) < level
    assert 0.85 < failed / 400 < 0.95


@pytest.mark.parametrize("chances", [[0.988, 0.012], [0.01] * 23 + [0.77], [0.3, 0.3, 0.2, 0.19, 0.01]], ids=len)
def test_what_is_right_fails_hardly_more_often_than_allowed(
    monkeypatch: pytest.MonkeyPatch, chances: list[float]
) -> None:
    """Chi-square is an approximation: where a cell expects two or three answers, eight times as many drawings fail."""
    test = checks.uncertain(toy_run(monkeypatch, {1: chances}), SETTING, 0, tests=10)
    assert sorted(test.cells.values()) == pytest.approx(sorted([*chances, 0.0]))
    expected = test.samples * np.array(chances)
    counts = np.random.default_rng(0).multinomial(test.samples, chances, size=200_000)
    failed = ((counts - expected) ** 2 / expected).sum(1) > stats.chi2.isf(test.level, len(chances) - 1)
    assert failed.mean() < 4 * test.level and test.level**2 == pytest.approx(1e-7)


@pytest.mark.parametrize("seeded", [False, True], ids=["no seed", "seeded"])
def test_the_real_distribution_passes(llm: LLM, reference: Reference, prompt: list[int], seeded: bool) -> None:
    check, rules = examined(llm, reference, prompt, seeded=seeded)
    assert check.passed and check.figures["drafted"] > 100 and check.figures["cells"] > 5
    assert rules == {"sample_walk"} and check.figures["depth"] == 3
    assert "detect a total variation of 0.3" in check.summary


def test_prompts_with_nothing_to_compare_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = {1: [1.0, 0.0], 2: [0.999, 0.001], 3: [1 / 200] * 200, 4: [0.5, 0.5]}
    run = toy_run(monkeypatch, heard)
    test = checks.uncertain(run, SETTING, 1, tests=1)
    assert test.prompts == [[4]] and test.passed_over == 2
    certain = replace(run, prompts=[[1], [2], [3]])
    with pytest.raises(ArgumentError, match=r"nothing to compare.*each of the 3 prompts.*--temperature"):
        checks.uncertain(certain, SETTING, 0, tests=1)


def test_a_report_says_which_prompts_were_passed_over(llm: LLM, reference: Reference, prompt: list[int]) -> None:
    run = checks.Run(llm=llm, reference=reference, prompts=[prompt], plan=PLAN)
    test = replace(checks.uncertain(run, SETTING, 0, tests=1), passed_over=2)
    assert "2 of the prompts passed over" in checks.chi_square_check(run, test).summary


def test_answers_that_become_uncertain_late_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    run = replace(toy_run(monkeypatch, {1: []}), plan=CertifyPlan(sample_tokens=3))
    toy(monkeypatch, lambda _, answer: [0.6, 0.4] if len(answer) == 2 else [0.0, 1.0])
    test = checks.uncertain(run, SETTING, 0, tests=1)
    assert {outcome for outcome, chance in test.cells.items() if chance} == {(1, 1, 0), (1, 1, 1)}


@pytest.mark.parametrize(
    ("chances", "passed"), [((0.5,), True), ((1e-6, 0.5), True), ((1e-6, 1e-6), False), ((0.0,), False)], ids=str
)
def test_an_unlikely_drawing_is_drawn_again_and_an_impossible_one_is_not(
    monkeypatch: pytest.MonkeyPatch, chances: tuple[float, ...], passed: bool
) -> None:
    seeds = list[int]()

    def drawing(_: object, __: object, stats: SpeculationStats, ___: object, first: int) -> list[Any]:
        stats.num_draft_tokens += 1
        seeds.append(first)
        return []

    run = toy_run(monkeypatch, {1: [0.5, 0.5]})
    monkeypatch.setattr(checks, "_drawing", drawing)
    monkeypatch.setattr(chi_square, "fit", lambda cells, drawn: (1.0, 1, chances[len(seeds) - 1]))
    check = checks.chi_square_check(run, checks.uncertain(run, SETTING, 0, tests=1))
    assert check.passed is passed and len(set(seeds)) == len(seeds) == len(chances)


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


def test_places_of_drawn_tokens_are_uniform(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of equal probability share their width, and a shift of all logits moves nothing."""
    logits = torch.tensor([2.0, 0.0, 2.0, -1.0, 0.0, -30.0]) + 100
    monkeypatch.setattr(Reference, "logits", lambda _, tokens, last: logits.expand(last, -1))
    drawn = (logits / 0.7).softmax(-1).multinomial(20_000, replacement=True, generator=torch.Generator().manual_seed(0))
    uniform = torch.Generator().manual_seed(1)
    places = Reference.__new__(Reference).places([1], drawn.tolist(), 0.7, uniform)
    assert stats.kstest(places, "uniform").pvalue > 0.01
    warmer = Reference.__new__(Reference).places([1], drawn.tolist(), 1.0, uniform)
    assert stats.kstest(warmer, "uniform").pvalue < 1e-6


def _residual_not_normalised(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(rng: Rng, probs: Tensor, depth: int = 0) -> int:
        uniform = rng._uniform(rng.position + depth, Stream.TARGET, 0)
        found = int(torch.searchsorted(probs.double().cumsum(0), uniform, right=True))
        return min(found, int(torch.nonzero(probs)[-1]))

    monkeypatch.setattr(Rng, "draw", draw)


def _draft_accepted_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three in ten drafts are accepted whatever the target drew."""
    honest, coin = SampleWalk.verify, random.Random(0)

    def eager(self: SampleWalk, tree: TokenTree, target: NodeProbs, rng: Rng) -> Verdict:
        if tree.size and coin.random() < 0.3:
            return Verdict(path=(1,), next_token=target.probs(1).draw(rng), kind=Source.BONUS)
        return honest(self, tree, target, rng)

    monkeypatch.setattr(SampleWalk, "verify", eager)


SAMPLES = {"method": "early_exit", "exit_layer": 1, "num_speculative_tokens": 3, "adaptive": False}
COPIES = {"method": "recycling", "nodes": 4, "adaptive": False}


@pytest.mark.parametrize(
    ("drafter", "plant"),
    [(SAMPLES, _residual_not_normalised), (COPIES, _draft_accepted_unseen)],
    ids=["sampled", "copied"],
)
def test_a_fault_in_late_tokens_is_seen(
    llm: LLM,
    reference: Reference,
    prompt: list[int],
    monkeypatch: pytest.MonkeyPatch,
    drafter: dict[str, Any],
    plant: Callable[[pytest.MonkeyPatch], None],
) -> None:
    run = checks.Run(
        llm=llm, reference=reference, prompts=[prompt, prompt[:3]], plan=replace(PLAN, detect=0.6, max_tokens=40)
    )
    setting = checks.Setting(params=replace(PARAMS, top_k=0), seeded=False, speculative=drafter)
    test = checks.token_test(run, setting, tests=1)
    check = checks.chi_square_check(run, test)
    assert check.passed and check.figures["drafted"] > 100 and "tokens detect a total variation" in check.summary
    assert check.figures["samples"] == 40 * test.answers and check.figures["detects_total_variation"] <= 0.6
    plant(monkeypatch)
    assert not checks.chi_square_check(run, test).passed


def test_no_draft_no_proof(prompt: list[int], llm: LLM, reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = llm.generate

    def undrafted(prompts: Any, params: Any, **options: Any) -> Any:
        return whole(prompts, params, **{**options, "speculative": False})

    monkeypatch.setattr(llm, "generate", undrafted)
    check = examined(llm, reference, prompt)[0]
    assert not check.passed and "nothing was drafted" in check.summary


def test_the_pace_tells_what_is_left() -> None:
    heard = list[str]()
    news = list[str]()
    pace = checks.Pace(tell=heard.append, total=200, news=news.append)
    pace.told("T = 0.7")
    pace.drawn = 200
    pace.told("T = 0.7")
    pace.told("T = 0.7")
    assert heard == ["T = 0.7", *["T = 0.7, about 0 s left"] * 2]
    assert len(news) == 1 and news[0].endswith("about 0 s left")


def _nucleus_before_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = sampling.distribution_of

    def early(logits: Tensor, params: SamplingParams, highest: float | None = None) -> Tensor:
        nucleus = honest(logits.clone(), replace(params, temperature=1.0), highest) > 0
        kept = honest(logits, replace(params, top_p=1.0), highest) * nucleus
        return kept / kept.sum()

    monkeypatch.setattr(sampling, "distribution_of", early)


def _without(**neutral: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """Requests lose parameters on their way to the engine."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        honest = checks.Run.answers

        def answers(run: checks.Run, prompts: Any, params: Sequence[SamplingParams], speculative: Any = None) -> Any:
            return honest(run, prompts, [replace(one, **neutral) for one in params], speculative)

        monkeypatch.setattr(checks.Run, "answers", answers)

    return plant


FAULTS = {
    "no seed": _without(temperature=1.0),
    "top-k 8": _without(top_k=0),
    "top-p 0.7": _nucleus_before_temperature,
    "min-p 0.1": _without(min_p=0.0),
    "penalties": _without(repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0),
    "logit bias": _without(logit_bias=None),
    "grammar": _without(structured_outputs=None),
}


@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_of_every_parameter_is_seen(
    llm: LLM, reference: Reference, prompt: list[int], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    run = checks.Run(llm=llm, reference=reference, prompts=[prompt], plan=replace(PLAN, detect=0.5))
    [setting] = [one for one in checks.settings_for(run, 0.7) if one.what == what]
    FAULTS[what](monkeypatch)
    assert not checks.chi_square_check(run, checks.uncertain(run, setting, 0, tests=1)).passed


def test_a_residual_that_is_not_taken_is_seen(
    checkpoint: Path, draft_checkpoint: Path, reference: Reference, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a rejection emits is drawn from the target's whole distribution."""
    config = {"method": "draft_model", "model": str(draft_checkpoint), "num_speculative_tokens": 3, "temperature": 3.0}
    llm = LLM(checkpoint, speculative_config=config, max_num_seqs=32)
    assert examined(llm, reference, prompt)[0].passed
    honest = HostResidual.reject
    monkeypatch.setattr(HostResidual, "reject", lambda probs, weight=1.0: (probs, honest(probs, weight)[1]))
    check, rules = examined(llm, reference, prompt, plan=replace(PLAN, detect=0.2))
    assert not check.passed and rules == {"block"}
