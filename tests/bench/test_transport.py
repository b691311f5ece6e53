"""The transport bound against its definition by brute force, and what rules reach against their exact distributions."""

from itertools import chain, combinations, permutations, product

import pytest
import torch
from torch import Tensor

from benchmarks.suite.acceptance import rejection_reach, transport_bound
from forerun.certify.enumeration import Drawing, branching, exact_distribution, toy_drafter
from forerun.core.rules import rule_named
from forerun.drafters.drawing import Draw
from forerun.errors import ArgumentError

DRAWING = {
    **{Draw.IID: Drawing.IID, Draw.WITHOUT_REPLACEMENT: Drawing.WITHOUT_REPLACEMENT, Draw.GREEDY_K: Drawing.GREEDY_K},
    Draw.DETERMINISTIC: Drawing.DETERMINISTIC,
}
SAMPLED = [Draw.IID, Draw.WITHOUT_REPLACEMENT]


def random_distributions(vocabulary: int, nodes: int, *, seed: int, sharpness: float = 2.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, nodes, vocabulary, generator=generator, dtype=torch.float64) * sharpness
    target, draft = logits.softmax(-1)
    return target, draft


def sibling_sets(draft: list[float], count: int, draw: Draw) -> list[tuple[set[int], float]]:
    """Every outcome of drawing, with its probability, by the definition."""
    tokens = range(len(draft))
    if draw is Draw.IID:
        return [(set(drawn), float(torch.tensor([draft[t] for t in drawn]).double().prod())) for drawn in
                product(tokens, repeat=count)]  # fmt: skip
    if draw is Draw.GREEDY_K:
        top = sorted(tokens, key=lambda token: -draft[token])[: count - 1]
        mass = sum(draft[token] for token in tokens if token not in top)
        return [({*top, token}, draft[token] / mass) for token in tokens if token not in top]
    if draw is Draw.DETERMINISTIC:
        return [(set(sorted(tokens, key=lambda token: -draft[token])[:count]), 1.0)]
    possible = [token for token in tokens if draft[token] > 0]
    found = []
    for drawn in permutations(possible, min(count, len(possible))):
        chance, left = 1.0, 1.0
        for token in drawn:
            chance, left = chance * draft[token] / left, left - draft[token]
        found.append((set(drawn), chance))
    return found


def by_definition(target: Tensor, draft: Tensor, count: int, draw: Draw) -> float:
    """1 + min over every set of tokens."""
    drawn = sibling_sets(draft.tolist(), count, draw)
    tokens = range(len(target))
    sets = chain.from_iterable(combinations(tokens, size) for size in range(len(target) + 1))
    return 1 + min(
        sum(float(target[token]) for token in inside)
        - sum(chance for siblings, chance in drawn if siblings <= set(inside))
        for inside in sets
    )


@pytest.mark.parametrize("draw", DRAWING)
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("vocabulary", [3, 5])
def test_the_bound_is_the_minimum_over_every_set(draw: Draw, count: int, vocabulary: int) -> None:
    target, draft = random_distributions(vocabulary, 12, seed=count)
    expected = [by_definition(p, q, count, draw) for p, q in zip(target, draft, strict=True)]
    assert transport_bound(target, draft, count, draw).tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("draw", SAMPLED)
def test_peaked_distributions_and_distributions_with_zeros(draw: Draw) -> None:
    """Where one token has all but 1e-6 of the draft, and where there are fewer tokens than children."""
    draft = torch.tensor([[1 - 1e-6, 5e-7, 5e-7, 0.0], [0.3, 0.7, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
    target = torch.tensor([[0.2, 0.3, 0.4, 0.1], [0.25, 0.25, 0.25, 0.25], [0.1, 0.6, 0.2, 0.1]], dtype=torch.float64)
    for count in (1, 2, 3):
        expected = [by_definition(p, q, count, draw) for p, q in zip(target, draft, strict=True)]
        assert transport_bound(target, draft, count, draw).tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("draw", "rule"), [(Draw.GREEDY_K, "greedy_k"), (Draw.DETERMINISTIC, "sample_walk")])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_real_rules_of_given_and_greedy_k_children_reach_the_bound(draw: Draw, rule: str, count: int) -> None:
    target, draft = random_distributions(4, 4, seed=7)
    assert transport_bound(target, draft, count, draw).tolist() == pytest.approx(
        real(rule, target, draft, count, draw), abs=1e-9
    )


@pytest.mark.parametrize("rule", ["recursive_rejection", "traversal"])
@pytest.mark.parametrize("draw", SAMPLED)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_rejection_reaches_what_the_real_rules_keep(rule: str, draw: Draw, count: int) -> None:
    target, draft = random_distributions(4, 4, seed=3)
    found = rejection_reach(target, draft, count, draw, samples=40_000)
    sampled = draw is Draw.WITHOUT_REPLACEMENT and count > 1
    assert found.tolist() == pytest.approx(real(rule, target, draft, count, draw), abs=0.01 if sampled else 1e-9)


def real(rule: str, target: Tensor, draft: Tensor, count: int, draw: Draw) -> list[float]:
    """What the rule keeps of a single level, by enumeration of every outcome."""
    return [
        exact_distribution(rule_named(rule), {(): p, **{(t,): p for t in range(len(p))}},
                  toy_drafter({(): q}, branching(count), DRAWING[draw]), 2).accepted
        for p, q in zip(target, draft, strict=True)
    ]  # fmt: skip


def test_nonsense_is_refused() -> None:
    probs = torch.full((1, 4), 0.25)
    with pytest.raises(ArgumentError, match="auto"):
        transport_bound(probs, probs, 2, Draw.AUTO)
    with pytest.raises(ArgumentError, match="child"):
        transport_bound(probs, probs, 0, Draw.IID)
    with pytest.raises(ArgumentError, match="tokens"):
        transport_bound(probs, probs[:, :3], 1, Draw.IID)
    with pytest.raises(ArgumentError, match="deterministic"):
        rejection_reach(probs, probs, 2, Draw.DETERMINISTIC)
