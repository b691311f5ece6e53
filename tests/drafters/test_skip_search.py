"""The searches for a set of sub-layers, on values that are known; and what a set costs and brings."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from drafters.test_skip_layers import LAYERS, TEXT, deep
from forerun import SamplingParams
from forerun.drafters.self_drafting.skip_layers import (
    GOOD_ENOUGH,
    OnlineSearch,
    Search,
    SkipLayersConfig,
    SkipSet,
    Space,
    evenly,
    every,
    names,
    predict,
)
from forerun.drafters.self_drafting.tuning import Costs, Probe, tune, worth
from forerun.errors import ArgumentError
from forerun.model import Target

COUNT = 14
"""Sub-layers of the planted objective: 16382 subsets."""


def planted(seed: int) -> tuple[Space, SkipSet, dict[SkipSet, float]]:
    """A space, its best subset, and the value of every subset: effects that add up, and pairs that do not."""
    random = np.random.default_rng(seed)
    effects, pairs = random.normal(0, 1, COUNT), np.triu(random.normal(0, 0.3, (COUNT, COUNT)), 1)
    space = Space(allowed=every(COUNT // 2))
    chosen = (itertools.combinations(space.allowed, size) for size in range(1, COUNT))
    subsets = [frozenset(some) for some in itertools.chain.from_iterable(chosen)]
    vectors = np.stack([space.vector(skip) for skip in subsets])
    values = vectors @ effects + ((vectors @ pairs) * vectors).sum(1)
    table = dict(zip(subsets, values.tolist(), strict=True))
    return space, max(table, key=lambda skip: table[skip]), table


@pytest.mark.parametrize("seed", range(3))
def test_the_planted_best_subset_is_found(seed: int) -> None:
    space, best, table = planted(seed)
    search = Search(space, seed=seed)
    for _ in range(90):
        skip = search.ask()
        assert skip is not None
        search.tell(skip, table[skip])
    found = max(search.trials, key=lambda trial: trial.value).skip
    assert found == best or table[found] > np.quantile(list(table.values()), 0.9999)
    assert len({trial.skip for trial in search.trials}) == 90, "no subset is tried twice"


def test_a_small_space_is_tried_out_and_left() -> None:
    search = Search(Space(allowed=every(2)))
    tried = []
    while (skip := search.ask()) is not None:
        tried.append(skip)
        search.tell(skip, float(len(skip)))
    assert len(tried) == len(set(tried)) == 2**4 - 2


def test_the_process_goes_through_what_it_was_told() -> None:
    random = np.random.default_rng(0)
    points = random.integers(0, 2, (30, 12)).astype(float)
    values = 5 + points @ random.normal(0, 1, 12)
    mean, spread = predict(points, values, points, noise=1e-6)
    assert np.abs(mean - values).max() < 0.05 and spread.max() < 0.1
    other = 1 - points[:5]
    assert predict(points[:3], values[:3], other)[1].min() > spread.max()


def test_a_neighbour_stays_in_the_space() -> None:
    random = np.random.default_rng(0)
    fixed, free = Space(allowed=every(4), size=3), Space(allowed=every(4))
    for space in (fixed, free):
        skip = space.random(random)
        for _ in range(200):
            skip = space.neighbour(skip, random)
            assert skip <= set(space.allowed) and 0 < len(skip) < 8
            assert space.size is None or len(skip) == 3


def test_a_beginning_at_even_distances_has_both_parts() -> None:
    assert names(evenly(every(8), 4)) == ["2.attn", "2.mlp", "6.attn", "6.mlp"]
    for count in range(1, 16):
        assert len(evenly(every(8), count)) == count


def agreement_of(skip: SkipSet) -> float:
    """A model whose middle layers can go, whose others cannot."""
    return 1.0 - sum(0.02 if 3 <= layer <= 6 else 0.3 for layer, _ in skip) / 2


def searching(ratio: float = 0.3, **options: int) -> OnlineSearch:
    return OnlineSearch(10, SkipLayersConfig(search="swift", skip_ratio=ratio, **options))  # type: ignore[arg-type]


def decode(search: OnlineSearch, steps: int, seed: int = 0) -> None:
    random = np.random.default_rng(seed)
    for _ in range(steps):
        skip = search.choose()
        search.observe(skip, int(random.binomial(8, max(0.0, agreement_of(skip)))), 8)


def test_swift_finds_a_better_set_than_it_began_with_and_keeps_first_and_last() -> None:
    search = searching(search_patience=200)
    begin = agreement_of(search.best)
    decode(search, 1500)
    assert len(search.best) == 6
    assert {layer for layer, _ in search.best}.isdisjoint({0, 9})
    assert agreement_of(search.best) > begin + 0.15


def test_swift_ends_at_its_score_and_then_only_the_best_drafts() -> None:
    search = searching(search_window=16)
    while not search.done:
        skip = search.choose()
        search.observe(skip, 8, 8)
    assert search._best.score >= GOOD_ENOUGH
    assert {search.choose() for _ in range(10)} == {search.best}


def test_swift_loses_patience() -> None:
    search = searching(search_window=16, search_patience=5)
    first = search.best
    for _ in range(60):
        skip = search.choose()
        search.observe(skip, 6 if skip == first else 1, 8)
    assert search.done and search.candidates == 5 and search.best == first


def test_a_lucky_set_is_replaced() -> None:
    """The best set's score is measured on while it drafts."""
    search = searching(search_window=16)
    first = search.best
    for _ in range(8):
        search.observe(search.choose(), 7, 8)
    while search.best == first and search.candidates < 50:
        skip = search.choose()
        search.observe(skip, 2 if skip == first else 5, 8)
    assert search.best != first


@pytest.mark.parametrize("ratio", [0.01, 0.95])
def test_a_ratio_that_leaves_no_choice_is_refused(ratio: float) -> None:
    with pytest.raises(ArgumentError, match="skip_ratio"):
        searching(ratio)


def test_what_a_set_is_worth_written_out() -> None:
    costs = Costs(rest_ms=1.0, sublayer_ms={"attn": 2.0, "mlp": 3.0}, verify_ms=(11.0, 12.0, 13.0, 14.0))
    skip = frozenset({(0, "attn"), (1, "mlp")})
    found = worth(skip, [0, 3, 3, 1], costs, 2)
    assert found.draft_ms == 1 + 3 + 2
    candidates = {1: (6 + 12) / (1 + 3 / 4), 2: (12 + 13) / (1 + 5 / 4), 3: (18 + 14) / (1 + 7 / 4)}
    assert found.num_speculative_tokens == min(candidates, key=lambda length: candidates[length])
    assert found.ms_per_token == pytest.approx(min(candidates.values()))
    assert found.mean_acceptance_length == pytest.approx(1 + 5 / 4) or found.num_speculative_tokens != 2


def probe(weights: LlamaForCausalLM, temperature: float = 0.0, tokens: int = 20) -> Probe:
    target = Target.load(weights, rows=2, slots=96)
    params = SamplingParams(temperature=temperature, top_k=0)
    return Probe(target, [TEXT, [4, 9] * 3], length=3, tokens=tokens, params=params)


def still(weights: LlamaForCausalLM, layers: list[int]) -> LlamaForCausalLM:
    """The same model; these layers add nothing any more."""
    with torch.no_grad():
        for layer in layers:
            weights.model.layers[layer].self_attn.o_proj.weight.zero_()
            weights.model.layers[layer].mlp.down_proj.weight.zero_()
    return weights


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_layers_that_add_nothing_can_go(temperature: float) -> None:
    measured = probe(still(deep(), [1, 2]), temperature)
    free = frozenset({(1, "attn"), (1, "mlp"), (2, "attn"), (2, "mlp")})
    assert set(measured.accepted(free)) == {3}
    dear = measured.accepted(frozenset({(0, "attn"), (0, "mlp"), (4, "mlp")}))
    assert sum(dear) / len(dear) < 2.5
    assert measured.accepted(free) == measured.accepted(free), "every set decodes the same text anew"


def test_tuning_finds_the_layers_that_add_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = probe(still(deep(), [1, 2]), tokens=8)
    costs = Costs(rest_ms=0.1, sublayer_ms={"attn": 1.0, "mlp": 1.0}, verify_ms=(10.0, 10.1, 10.2, 10.3))
    monkeypatch.setattr(measured, "costs", lambda: costs)
    found = tune(measured, LAYERS, iterations=30)
    assert {(1, "attn"), (1, "mlp"), (2, "attn"), (2, "mlp")} <= found.best.skip
    assert len(found.trials) == 30 and not found.interrupted
    assert found.speedup == 10.0 / found.best.ms_per_token > 1.2


def test_measured_costs_are_positive_and_complete() -> None:
    costs = probe(deep()).costs(repeats=2)
    assert len(costs.verify_ms) == 4 and min(costs.verify_ms) > 0
    assert costs.draft_ms(frozenset(), LAYERS) > 0
