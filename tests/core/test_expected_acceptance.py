"""How much each rule keeps: exact expectations against published figures, formulas and upper bounds."""

import random
from itertools import chain, product

import pytest
import torch

from benchmarks.suite.acceptance import transport_bound
from forerun.certify.enumeration import (
    SHAPES,
    Distributions,
    Drawing,
    World,
    branching,
    check_rule,
    exact_distribution,
    toy_distributions,
    toy_drafter,
)
from forerun.core.acceptance import Acceptance, Evidence, Proposal, by_draft_prob, compare_draft
from forerun.core.rules import rule_named
from forerun.drafters.drawing import Draw
from forerun.types import Drawn
from selection import slow

ONE_STEP = [
    *((Drawing.IID, Draw.IID, count) for count in (1, 2, 3)),
    (Drawing.WITHOUT_REPLACEMENT, Draw.WITHOUT_REPLACEMENT, 2),
    (Drawing.GREEDY_K, Draw.GREEDY_K, 2),
]


def same_distribution(distribution: list[float], depth: int) -> Distributions:
    """A memoryless world."""
    prefixes = chain.from_iterable(product(range(len(distribution)), repeat=length) for length in range(depth + 1))
    return {prefix: torch.tensor(distribution, dtype=torch.float64) for prefix in prefixes}


def accepted(
    name: str, target: Distributions, draft: Distributions, counts: tuple[int, ...], drawing: Drawing = Drawing.IID
) -> float:
    draw = toy_drafter(draft, branching(*counts), drawing)
    return exact_distribution(rule_named(name), target, draw, len(counts) + 1).accepted


def test_the_papers_toy() -> None:
    """arXiv 2403.10444, section 2: target (1/3, 2/3), draft (2/3, 1/3), two drafted tokens."""
    target, draft = same_distribution([1 / 3, 2 / 3], 2), same_distribution([2 / 3, 1 / 3], 2)
    ninths = {"token_rejection": 10, "recursive_rejection": 10, "block": 11, "traversal": 11}
    for name, expected in ninths.items():
        assert accepted(name, target, draft, (1, 1)) == pytest.approx(expected / 9, abs=1e-14)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_leviathans_expectation(depth: int) -> None:
    """(1 - a^(g+1)) / (1 - a) tokens per pass, bonus included, where every position accepts with probability a."""
    target, draft = same_distribution([0.5, 0.3, 0.2], depth), same_distribution([0.2, 0.6, 0.2], depth)
    alpha = 0.2 + 0.3 + 0.2
    emitted = 1 + accepted("token_rejection", target, draft, (1,) * depth)
    assert emitted == pytest.approx((1 - alpha ** (depth + 1)) / (1 - alpha), abs=1e-14)


@pytest.mark.parametrize("seed", range(5))
def test_one_draft_reaches_one_minus_total_variation(seed: int) -> None:
    target, draft = toy_distributions(World.RANDOM, vocabulary=4, depth=1, seed=seed)
    expected = float(torch.minimum(target[()], draft[()]).sum())
    for name in ("token_rejection", "block", "recursive_rejection", "traversal", "greedy_k"):
        assert accepted(name, target, draft, (1,)) == pytest.approx(expected, abs=1e-14)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("drawing", "draw", "count"), ONE_STEP)
def test_no_rule_beats_the_transport_bound(drawing: Drawing, draw: Draw, count: int, seed: int) -> None:
    """The bound itself: `tests/bench/test_transport.py`."""
    target, draft = toy_distributions(World.RANDOM, vocabulary=3, depth=1, seed=seed)
    bound = float(transport_bound(target[()][None], draft[()][None], count, draw))
    for name in ("sample_walk", "recursive_rejection", "traversal"):
        assert accepted(name, target, draft, (count,), drawing) <= bound + 1e-6
    if drawing is Drawing.GREEDY_K:
        assert accepted("greedy_k", target, draft, (count,), drawing) == pytest.approx(bound, abs=1e-6)


@pytest.mark.parametrize("seed", [0, *slow(1, 2, 3)])
@pytest.mark.parametrize("drawing", list(Drawing))
@pytest.mark.parametrize("shape", ["chain of 3", "tree 2 x 1", "deep left, leaf right"])
def test_rules_keep_their_order(shape: str, drawing: Drawing, seed: int) -> None:
    """Traversal never keeps less than recursive rejection, nor that less than walking; block never less than tokens."""
    kept = {}
    for name in ("sample_walk", "recursive_rejection", "traversal", "token_rejection", "block", "greedy_k"):
        kept[name] = check_rule(rule_named(name), shape, drawing, World.RANDOM, seed=seed).accepted
    assert kept["traversal"] >= kept["recursive_rejection"] - 1e-12 >= kept["sample_walk"] - 2e-12
    assert kept["block"] >= kept["token_rejection"] - 1e-12
    if len(SHAPES[shape]) == 1:
        assert kept["block"] == pytest.approx(kept["traversal"], abs=1e-12)
    assert kept["traversal"] >= max(kept["greedy_k"], kept["block"]) - 1e-12


KINDS = list(Drawn)


@pytest.mark.parametrize("drawn", KINDS)
def test_first_guesses_rise_with_the_drafts_own_probability_and_fall_with_rank(drawn: Drawn) -> None:
    fresh = Acceptance()
    by_raw = [fresh.estimate(*by_draft_prob(drawn, 0, raw / 10)) for raw in range(11)]
    assert by_raw == sorted(by_raw)
    assert 0 <= by_raw[0] <= by_raw[-1] <= 1
    if drawn is not Drawn.DETERMINISTIC:
        assert fresh.estimate(*by_draft_prob(drawn, 1, 0.5)) < fresh.estimate(*by_draft_prob(drawn, 0, 0.5))


@pytest.mark.parametrize("drawn", KINDS)
def test_it_learns_what_really_happens(drawn: Drawn) -> None:
    rng, learned = random.Random(0), Acceptance()
    truth = {0.15: 0.5, 0.85: 0.3}
    for _ in range(2000):
        raw = rng.choice(list(truth))
        learned.learn(by_draft_prob(drawn, 0, raw).key, rng.random() < truth[raw])
    for raw, rate in truth.items():
        assert learned.estimate(*by_draft_prob(drawn, 0, raw)) == pytest.approx(rate, abs=0.05)
    untouched = by_draft_prob(drawn, 2, 0.15)
    assert learned.estimate(*untouched) == Acceptance().estimate(*untouched)


def test_memory_and_fading_weigh_what_is_old_less() -> None:
    lasting, fading = Acceptance(), Acceptance(memory=0.5)
    for accepted in (False, False, True):
        lasting.learn("key", accepted)
        fading.learn("key", accepted)
    assert lasting.counts("key") == (1.0, 3.0) and fading.counts("key") == (1.0, 1.75)
    fading.fade(0.1)
    assert fading.counts("key") == pytest.approx((0.1, 0.175))
    assert fading.counts("other") == (0.0, 0.0) and fading.estimate("other", 0.3) == pytest.approx(0.3)


def test_a_text_decides_on_every_node_whose_parent_it_holds() -> None:
    """Siblings 5 and 7, below the second 9 and 6, below the 9 a 4, of which the text does not tell yet."""
    tokens, parents = [2, 5, 7, 9, 6, 4, 3], [-1, 0, 0, 2, 2, 3, 1]
    assert list(compare_draft(tokens, parents, [7, 9])) == [(1, False), (2, True), (3, True), (4, False)]
    assert list(compare_draft(tokens, parents, [8])) == [(1, False), (2, False)]
    assert not list(compare_draft(tokens, parents, []))


def test_a_proposal_teaches_what_was_submitted_only() -> None:
    acceptance = Acceptance()
    evidence = {1: Evidence("first", 0.5), 3: Evidence("third", 0.5)}
    Proposal(acceptance=acceptance, tokens=[2, 5, 7, 9], parents=[-1, 0, 1, 2], evidence=evidence).learn([5, 7, 8])
    assert acceptance.counts("first") == (1.0, 1.0) and acceptance.counts("third") == (0.0, 1.0)
