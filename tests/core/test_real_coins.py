"""The rules with real rng and real drafts: seeded sequences over several steps, float32 distributions, draft
vocabularies."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
import torch
from scipy import stats

from forerun.certify.enumeration import (
    TOLERANCE,
    Distributions,
    Drawing,
    PrefixProbs,
    World,
    branching,
    exact_distribution,
    joint_distribution,
    toy_distributions,
    toy_drafter,
)
from forerun.core.rules import rule_named
from forerun.core.sampling import Rng
from forerun.core.tree import TokenTree
from forerun.types import Drawn
from selection import slow

SEQUENCES = 1000
"""Of each rule in `make test`; twice as many in the slow tests, and where a wrong rule must be seen."""
CASES = [
    ("sample_walk", (2, 1), Drawing.DETERMINISTIC),
    ("token_rejection", (1, 1), Drawing.IID),
    ("block", (1, 1), Drawing.IID),
    ("recursive_rejection", (2, 1), Drawing.WITHOUT_REPLACEMENT),
    ("traversal", (2, 1), Drawing.WITHOUT_REPLACEMENT),
    ("traversal", (2, 1), Drawing.IID),
    ("greedy_k", (2, 1), Drawing.GREEDY_K),
]


class After:
    """A world as it looks after each text."""

    def __init__(self, distributions: tuple[Distributions, Distributions]) -> None:
        self.distributions, self.seen = distributions, {}

    def __call__(self, text: tuple[int, ...]) -> tuple[Distributions, Distributions]:
        if text not in self.seen:
            at = len(text)
            target, draft = (
                {key[at:]: distribution for key, distribution in distributions.items() if key[:at] == text}
                for distributions in self.distributions
            )
            self.seen[text] = (target, draft)
        return self.seen[text]


def write(name: str, after: After, shape: tuple[tuple[int, ...], Drawing], seed: int) -> tuple[int, ...]:
    """Three tokens by as many steps as it takes, every step with fresh rng at its position."""
    text: tuple[int, ...] = ()
    while len(text) < 3:
        target, draft = after(text)
        rng = Rng(seed, 100 + len(text))
        tree = toy_drafter(draft, branching(*shape[0]), shape[1])(rng)
        verdict = rule_named(name).verify(tree, PrefixProbs(target, tree), rng)
        text += (*(tree.tokens[node] for node in verdict.path), verdict.next_token)
    return text[:3]


@pytest.mark.parametrize("sequences", [SEQUENCES, *slow(2 * SEQUENCES)])
@pytest.mark.parametrize(("name", "counts", "drawing"), CASES)
def test_seeded_sequences_follow_the_target(
    name: str, counts: tuple[int, ...], drawing: Drawing, sequences: int
) -> None:
    """Chi-square over all 27 texts of three tokens; family-wise error 1e-6."""
    distributions = toy_distributions(World.RANDOM, vocabulary=3, depth=5, seed=11)
    after = After(distributions)
    seen = Counter(write(name, after, (counts, drawing), seed) for seed in range(sequences))
    joint = joint_distribution(distributions[0], (), 3)
    texts = sorted(product(range(3), repeat=3), key=lambda text: float(joint[text]))
    observed, expected = [0.0], [0.0]
    for text in texts:
        if expected[-1] >= 8:
            observed.append(0.0)
            expected.append(0.0)
        observed[-1] += seen[text]
        expected[-1] += sequences * float(joint[text])
    assert len(expected) > 10
    assert stats.chisquare(observed, expected).pvalue > 1e-6 / len(CASES)


def test_the_chi_square_would_see_a_biased_rule() -> None:
    distributions = toy_distributions(World.RANDOM, vocabulary=3, depth=5, seed=11)
    after = After(distributions)
    seen = Counter(write("typical", after, ((1, 1), Drawing.IID), seed) for seed in range(2 * SEQUENCES))
    joint = joint_distribution(distributions[0], (), 3)
    texts = list(product(range(3), repeat=3))
    expected = [2 * SEQUENCES * float(joint[text]) for text in texts]
    assert stats.chisquare([seen[text] for text in texts], expected).pvalue < 1e-12


@pytest.mark.parametrize("name", ["token_rejection", "block", "traversal", "recursive_rejection", "greedy_k"])
def test_float32_distributions_over_a_draft_vocabulary_stay_exact(name: str) -> None:
    """Recorded in float32 over the few tokens that the drafter knows, judged over the target's vocabulary."""
    ids = torch.tensor([3, 0])

    def draw(rng: Rng) -> TokenTree:
        tree = TokenTree(0)
        for node in range(2):
            probs = torch.zeros(4).index_copy(0, ids, torch.tensor([0.3, 0.7 + 0.1 * node]))
            tree.set_probs(node, probs)
            tree.add(rng.drafted(probs, node), node, drawn=Drawn.WITHOUT_REPLACEMENT)
        return tree

    for seed in range(3):
        target, _ = toy_distributions(World.RANDOM, vocabulary=4, depth=2, seed=seed)
        distribution = exact_distribution(rule_named(name), target, draw, 3)
        assert distribution.error(target) <= TOLERANCE
        assert distribution.accepted > 0.2
