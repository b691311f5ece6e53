"""A drafter that samples from what is no distribution loses what it drew from it, in that row alone, and it is counted.

What remains is submitted by no value of its own, so the output keeps the target's distribution exactly.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.conftest import checkpoint
from forerun.certify.enumeration import Distributions, World, exact_distribution, toy_distributions
from forerun.core.rng import Rng
from forerun.core.rules import rule_named
from forerun.core.sampling import Sampler
from forerun.core.tree import TokenTree, fetch_masses, without
from forerun.decode.drafter import DraftContext, Drafter, DrafterSetup
from forerun.decode.row import Row
from forerun.decode.step import Emitted, Group, first_tokens, step
from forerun.drafters.guarded import Guarded
from forerun.model import TransformersTarget
from forerun.types import Budget, DraftKind, Drawn, SamplingParams

__all__ = ["checkpoint"]
WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "NaN": lambda probs: probs.clone().fill_(math.nan),
    "one NaN": lambda probs: probs.clone().index_fill_(0, torch.tensor([5]), math.nan),
    "infinite": lambda probs: probs.clone().index_fill_(0, torch.tensor([5]), math.inf),
    "negative": lambda probs: probs.clone().index_add_(0, torch.tensor([5, 6]), torch.tensor([-0.2, 0.2])),
    "too much": lambda probs: 2 * probs,
    "too little": lambda probs: 0.9 * probs,
    "nothing": torch.zeros_like,
    "log": torch.log,
}
PARAMS = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0)


class Guessing(Drafter):
    """Samples a chain of three from a distribution of its own, which is wrong in some rows from some place on."""

    name = "guessing"

    def __init__(self, spoil: Callable[[Tensor], Tensor], places: Sequence[int]) -> None:
        """`places`: by row, the first node whose children are drawn from a wrong distribution; 3 is behind the last."""
        self.spoil, self.places = spoil, places

    def kind(self, sampler: Sampler) -> DraftKind:
        return DraftKind(sampled=True, chain=True)

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        trees = context.trees()
        for row, rng, tree in zip(context.rows, context.rng, trees, strict=True):
            for node in range(3):
                probs = torch.linspace(2, 1, 100).softmax(-1)
                probs = self.spoil(probs) if node >= self.places[row] else probs
                tree.set_probs(node, probs)
                tree.add(rng.drafted(probs, node), node, drawn=Drawn.IID, confidence=0.5)
        return trees


@pytest.fixture(scope="module")
def target(checkpoint: Path) -> TransformersTarget:
    return TransformersTarget.load(str(checkpoint), rows=3, slots=64, dtype="float32", self_check=False)


def stepped(
    target: TransformersTarget, drafter: Drafter | None, seed: int = 0, steps: int = 1
) -> tuple[list[Row], list[Emitted]]:
    """Three rows after some steps behind their first tokens, and what the last step emitted."""
    texts = [[7, 8, 9 + index] for index in range(3)]
    common = {"prompt_length": 3, "stop_ids": frozenset(), "tokens_left": 20}
    rows = [
        Row(cache_row=index, tokens=text, sampler=Sampler(PARAMS, text), seed=seed + index, **common)
        for index, text in enumerate(texts)
    ]
    target.truncate(range(3), [0] * 3)
    first_tokens(rows, target.prefill(range(3), [row.tokens for row in rows]).logits)
    if drafter is None:
        return rows, step(target, rows, [], isolate=True)
    setup = DrafterSetup(target=target, tokenizer=None, rows=3, slots=64)
    groups = [
        Group(name="guessing", drafter=Guarded(drafter, "guessing", setup), members=range(3), depths=[3] * 3, nodes=8)
    ]
    found = [step(target, rows, groups, isolate=True) for _ in range(steps)]
    for row in rows:
        row.drafter_errors += setup.failures[row.cache_row]
    return rows, found[-1]


@pytest.mark.parametrize(("wrong", "place"), [("NaN", 0), *((wrong, 1) for wrong in WRONG), ("NaN", 2)])
def test_what_was_drawn_from_it_is_lost(target: TransformersTarget, wrong: str, place: int) -> None:
    for seed in range(3):
        sound, expected = stepped(target, Guessing(WRONG[wrong], [3, 3, 3]), seed)
        rows, emitted = stepped(target, Guessing(WRONG[wrong], [3, place, 3]), seed)
        assert [row.drafter_errors for row in rows] == [0, 1, 0] and not any(row.error for row in rows)
        assert [one.drafted for one in emitted] == [3, place, 3]
        assert [rows[index].tokens for index in (0, 2)] == [sound[index].tokens for index in (0, 2)]
        assert [row.drafter_errors for row in sound] == [0, 0, 0] and expected[1].drafted == 3


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        *(
            ("NaN", "hold NaN"),
            ("negative", "hold the negative number -0.18"),
            ("too much", "they add up to 2; record"),
        ),
        *(("log", "are negative, as log-probabilities are"), ("nothing", "they add up to 0; record")),
    ],
)
def test_the_row_is_closed_and_the_log_says_once_what_is_wrong(
    target: TransformersTarget, wrong: str, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    rows, emitted = stepped(target, Guessing(WRONG[wrong], [3, 1, 3]), steps=3)
    assert [row.drafter_errors for row in rows] == [0, 1, 0]
    assert [one.drafted for one in emitted] == [3, 0, 3]
    stepped(target, Guessing(lambda probs: 0.99 * WRONG[wrong](probs), [3, 1, 1]))
    (said,) = (record.getMessage() for record in caplog.records if "failed" in record.getMessage())
    assert "the draft probs of node 1 " in said and named in said


class Denying(Guessing):
    """Records that what it drew at one node has the probability 0."""

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        trees = super().propose(context, budget)
        for row, tree in zip(context.rows, trees, strict=True):
            for node in range(self.places[row], 3):
                probs = tree.draft_probs[node].clone()
                probs[tree.tokens[node + 1]] = 0
                tree.set_probs(node, probs / probs.sum())
        return trees


def test_a_token_with_a_recorded_probability_of_0_is_an_error_and_decides_nothing_itself(
    target: TransformersTarget, caplog: pytest.LogCaptureFixture
) -> None:
    rows, emitted = stepped(target, Denying(torch.clone, [3, 2, 3]))
    assert [row.drafter_errors for row in rows] == [0, 1, 0]
    assert [one.drafted for one in emitted] == [3, 3, 3], "it stays, for its token must not decide"
    assert "node 3 was sampled, but the draft probs of its parent give its token the probability 0" in caplog.text
    rows, emitted = stepped(target, Denying(torch.clone, [3, 2, 3]), steps=2)
    assert [row.drafter_errors for row in rows] == [0, 1, 0] and [one.drafted for one in emitted] == [3, 0, 3]


@pytest.mark.parametrize("wrong", ["one NaN", "too much", "nothing"])
def test_the_row_goes_on_as_without_a_draft(target: TransformersTarget, wrong: str) -> None:
    """Token by token what plain decoding draws, over 60 seeds: not token 0, nor any other of the drafter's making."""
    found = [stepped(target, Guessing(WRONG[wrong], [0, 0, 0]), 3 * seed)[0] for seed in range(20)]
    plain = [stepped(target, None, 3 * seed)[0] for seed in range(20)]
    assert [row.tokens for rows in found for row in rows] == [row.tokens for rows in plain for row in rows]
    assert len({row.tokens[-1] for rows in found for row in rows}) > 10


def chains(probs: Distributions, lost: Callable[[TokenTree], TokenTree]) -> Callable[[Rng], TokenTree]:
    """Draws a chain of two; behind token 0 it samples from NaN, and the tree goes through `lost`."""

    def draw(rng: Rng) -> TokenTree:
        tree = TokenTree(0)
        tree.set_probs(0, probs[()])
        first = tree.add(rng.drafted(probs[()], 0), 0, drawn=Drawn.IID)
        token = tree.tokens[first]
        below = probs[(token,)] if token else torch.full_like(probs[()], math.nan)
        tree.set_probs(first, below)
        tree.add(rng.drafted(below, first) if token else 1, first, drawn=Drawn.IID)
        fetch_masses([tree])
        return lost(tree)

    return draw


@pytest.mark.parametrize("rule", ["block", "traversal", "token_rejection", "recursive_rejection"])
def test_the_output_keeps_its_distribution(rule: str) -> None:
    """Exactly, though which chains are cut depends on what was drawn above; to lose the whole chain would bias it."""

    def guarded(tree: TokenTree) -> TokenTree:
        return without(tree, {node: mass for node, mass in tree.masses.items() if not abs(mass - 1) < 1e-3})

    def planted(tree: TokenTree) -> TokenTree:
        bad = any(math.isnan(mass) for mass in tree.masses.values())
        return without(tree, {0: math.nan}) if bad else tree

    for seed in range(3):
        target, draft = toy_distributions(World.RANDOM, vocabulary=3, depth=3, seed=seed)
        probs = exact_distribution(rule_named(rule), target, chains(draft, guarded), horizon=3)
        assert probs.error(target) < 1e-7, "distributions travel in float32"
        assert exact_distribution(rule_named(rule), target, chains(draft, planted), horizon=3).error(target) > 1e-3
