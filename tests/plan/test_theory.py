"""The formulas: the table of the reference, its list of best draft lengths, trees by brute force, and simulation."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from forerun.control.costs import CostModel, DraftCost, PassCost
from forerun.drafters.drawing import Shape
from forerun.errors import ArgumentError
from forerun.plan import theory
from forerun.plan.assumptions import FreeVerification
from forerun.plan.planner import PlanLine, PlanLoad, plan

TABLE = {
    0.5: (1.500, 1.750, 1.875, 1.938, 1.969, 1.992, 1.999, 2.000),
    0.6: (1.600, 1.960, 2.176, 2.306, 2.383, 2.458, 2.491, 2.499),
    0.7: (1.700, 2.190, 2.533, 2.773, 2.941, 3.141, 3.267, 3.322),
    0.8: (1.800, 2.440, 2.952, 3.362, 3.689, 4.161, 4.571, 4.859),
    0.9: (1.900, 2.710, 3.439, 4.095, 4.686, 5.695, 6.862, 8.147),
    0.95: (1.950, 2.852, 3.710, 4.524, 5.298, 6.732, 8.624, 11.197),
}
"""Tokens per pass by alpha for k = 1, 2, 3, 4, 5, 7, 10, 15 (reference, section 1.1)."""
BEST = {
    0.5: ((0.02, 4, 1.79), (0.1, 2, 1.46)),
    0.7: ((0.02, 8, 2.76), (0.05, 6, 2.35), (0.1, 4, 1.98), (0.2, 3, 1.58)),
    0.8: ((0.02, 11, 3.82), (0.05, 8, 3.09), (0.1, 6, 2.47), (0.2, 4, 1.87)),
    0.9: ((0.02, 19, 6.37), (0.05, 13, 4.67), (0.1, 10, 3.43), (0.2, 7, 2.37)),
}
"""By alpha: c, best k, speed-up with v = 1 (same section)."""


@pytest.mark.parametrize("alpha", TABLE)
def test_tokens_per_pass_are_those_of_the_table(alpha: float) -> None:
    for k, expected in zip((1, 2, 3, 4, 5, 7, 10, 15), TABLE[alpha], strict=True):
        found = theory.expected_tokens_per_pass(alpha, k)
        assert found == pytest.approx(expected, abs=5.1e-4)
        assert found == pytest.approx((1 - alpha ** (k + 1)) / (1 - alpha))
        assert theory.alpha_of(found, k) == pytest.approx(alpha, abs=1e-9)


def test_the_ends_of_alpha_and_the_errors_in_circulation() -> None:
    assert (theory.expected_tokens_per_pass(0.0, 5), theory.expected_tokens_per_pass(1.0, 5)) == (1.0, 6.0)
    assert theory.expected_tokens_per_pass(0.7, 5) == pytest.approx(2.941, abs=1e-3), "tables that print 3.16 are wrong"
    dropped = 0.7 * (1 - 0.7**5) / (1 - 0.7)
    assert theory.expected_tokens_per_pass(0.7, 5) - dropped == pytest.approx(1.0), "the bonus token counts"


class Passes:
    """Passes that cost v(n)."""

    def __init__(self, verify: Callable[[float], float]) -> None:
        self.verify = verify

    def pass_ms(self, nodes: float, rows: int = 1, context: int = 0) -> float:
        return self.verify(nodes)


def best(survival: list[float], *, level_cost: float, cost: PassCost | None = None) -> PlanLine:
    """The best draft length of a chain, as the planner finds it."""
    draft = DraftCost(fixed_ms=0.0, level_ms=level_cost)
    load = PlanLoad(survival=survival, cost=cost or FreeVerification(), draft=lambda rows: draft)
    return plan(load, k=len(survival)).best


@pytest.mark.parametrize("alpha", BEST)
def test_best_lengths_are_those_of_the_list(alpha: float) -> None:
    for cost, k, speedup in BEST[alpha]:
        choice = best(theory.geometric(alpha, 40), level_cost=cost)
        assert (choice.k, choice.speedup) == (k, pytest.approx(speedup, abs=5.1e-3))


def test_a_gain_exists_only_above_the_cost_of_drafting() -> None:
    for alpha, cost in itertools.product((0.05, 0.2, 0.5, 0.9), (0.1, 0.3, 0.7)):
        found = best(theory.geometric(alpha, 30), level_cost=cost)
        assert (found.k > 0) == (alpha > cost)
        if alpha > cost:
            assert found.speedup >= (1 + alpha) / (1 + cost) - 1e-12


def test_v_shortens_the_best_draft_and_can_turn_it_off() -> None:
    survival = theory.geometric(0.8, 20)
    free = best(survival, level_cost=0.02)
    stairs = best(survival, level_cost=0.02, cost=Passes(lambda nodes: 1.0 if nodes <= 4 else 1.0 + 0.3 * nodes))
    dear = best(survival, level_cost=0.02, cost=Passes(float))
    assert (free.k, stairs.k, dear.k) == (11, 3, 0)
    assert dear.speedup == 1.0


def test_acceptance_by_position() -> None:
    rates = [0.9, 0.5, 0.8]
    survival = theory.survival_of(rates)
    assert survival == pytest.approx([0.9, 0.45, 0.36])
    assert theory.conditional_of(survival) == pytest.approx(rates)
    assert theory.stretch(survival, 5) == pytest.approx([0.9, 0.45, 0.36, 0.288, 0.2304])
    assert theory.stretch(survival, 2) == survival[:2] and theory.stretch([], 2) == [0.0, 0.0]
    assert theory.tokens_of(survival) == pytest.approx(1 + 0.9 + 0.45 + 0.36)


class TestBreakEven:
    @pytest.mark.parametrize(
        ("gain", "last"),
        [
            (lambda batch: 2.0 if batch <= 77 else 1.0, 77),
            (lambda _: 1.5, None),
            (lambda _: 1.01, 0),
            pytest.param(lambda batch: 1.3 if 8 <= batch <= 40 else 0.9, 40, id="it begins at moderate batches"),
        ],
    )
    def test_is_the_last_batch_that_gains(self, gain: Callable[[int], float], last: int | None) -> None:
        assert theory.break_even_batch(gain) == last


class TestTrees:
    RANKS = ((0.6, 0.2, 0.1), (0.5, 0.3))

    def nodes_of(self, parents: Sequence[int]) -> list[theory.TreeNode]:
        """The tree of those parents; a node's rank is its index among its siblings."""
        nodes, born = [theory.TreeNode(parent=-1, level=0, survival=1.0)], Counter[int]()
        for parent in parents:
            above = nodes[parent]
            line = self.RANKS[min(above.level, len(self.RANKS) - 1)]
            rate = line[born[parent]] if born[parent] < len(line) else 0.0
            nodes.append(theory.TreeNode(parent, above.level + 1, above.survival * rate))
            born[parent] += 1
        return nodes[1:]

    @pytest.mark.parametrize("nodes", [1, 4, 9, 24])
    def test_the_fastest_tree_is_numbered_as_drafters_take_it(self, nodes: int) -> None:
        """The same tree as the best one of its size, level by level."""
        chosen = theory.best_tree_size(self.RANKS, level_cost=0.0, verify=lambda count: 1.0, nodes=nodes, depth=4)
        assert Shape.of(chosen.parents).parents[1:] == chosen.parents and len(chosen.parents) == nodes
        best = theory.best_tree(self.RANKS, nodes=nodes, depth=4)
        survivals = (sorted(node.survival for node in tree) for tree in (self.nodes_of(chosen.parents), best))
        assert next(survivals) == pytest.approx(next(survivals))
        assert chosen.depth == max(node.level for node in best)

    def test_survival_by_rank(self) -> None:
        found = self.nodes_of([0, 0, 1, 1, 2, 2])
        assert [node.survival for node in found] == pytest.approx([0.6, 0.2, 0.3, 0.18, 0.1, 0.06])

    @pytest.mark.parametrize(("nodes", "depth"), [(1, 3), (2, 3), (4, 3), (5, 2), (6, 1), (5, 4)])
    def test_the_best_tree_is_the_best_of_all(self, nodes: int, depth: int) -> None:
        found = theory.best_tree(self.RANKS, nodes=nodes, depth=depth)
        assert found == self.nodes_of([node.parent for node in found]) and len(found) <= nodes
        every = map(self.nodes_of, itertools.product(*(range(node + 1) for node in range(nodes))))
        allowed = [tree for tree in every if max(node.level for node in tree) <= depth]
        assert max(node.level for node in found) <= depth
        most = max(sum(node.survival for node in tree) for tree in allowed)
        assert sum(node.survival for node in found) == pytest.approx(most)

    def test_the_size_follows_the_cost(self) -> None:
        def chosen(slope: float) -> theory.TreeChoice:
            return theory.best_tree_size(
                self.RANKS, level_cost=0.05, verify=lambda nodes: 1 + slope * (nodes - 1), nodes=12, depth=5
            )

        cheap, dear, useless = chosen(0.005), chosen(0.1), chosen(2.0)
        assert len(cheap.parents) > len(dear.parents) > 0 == len(useless.parents)
        assert cheap.speedup > dear.speedup > useless.speedup == 1.0
        assert cheap.speedup == pytest.approx(cheap.tokens / (0.05 * cheap.depth + 1 + 0.005 * len(cheap.parents)))


class TestPredict:
    COST = CostModel(nodes=(1, 2, 4, 8), rows=(1,), contexts=(0,), pass_times_ms=(((10.0, 11.0, 12.0, 16.0),),))

    @pytest.mark.parametrize(
        ("acceptance", "draft", "nodes", "coverage", "tokens", "step"),
        [
            ([0.8, 0.6, 0.4], (1.0, 0.5), 3, 1.0, 2.8, 12.0 + 1.0 + 1.5),
            pytest.param(
                *([1.0] * 3, (1.0, 2.0), 3, 0.25, 1.75, 0.25 * (12 + 6) + 0.75 * 10 + 1.0),
                id="steps without a draft cost a plain pass and the looking",
            ),
            pytest.param([0.5], (0, 0), 0.5, 1.0, 1.5, 10.5, id="a mean of sizes lies between them"),
            ([0.5], (0, 0), 1, 1.0, 1.5, 11.0),
            pytest.param([], (0, 0), 0, 1.0, 1.0, 10.0, id="nothing drafted is plain"),
        ],
    )
    def test_is_the_formula_with_measured_costs(
        self, acceptance: list[float], draft: Any, nodes: float, coverage: float, tokens: float, step: float
    ) -> None:
        costs, depth = DraftCost(fixed_ms=draft[0], level_ms=draft[1]), len(acceptance)
        found = theory.predict(
            self.COST, acceptance_per_depth=acceptance, draft=costs, depth=depth, nodes=nodes, coverage=coverage
        )
        assert found.tokens_per_pass == pytest.approx(tokens) and found.plain_ms == 10.0
        assert found.step_ms == pytest.approx(step) and found.speedup == pytest.approx(tokens * 10 / step)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: theory.expected_tokens_per_pass(1.2, 5),
        lambda: theory.expected_tokens_per_pass(-0.1, 5),
        lambda: theory.expected_tokens_per_pass(math.nan, 5),
        lambda: theory.expected_tokens_per_pass(0.7, 0),
        lambda: theory.survival_of([0.7, 1.1]),
        lambda: theory.alpha_of(7.0, 5),
        lambda: theory.check_ranks([[0.4, 0.6]]),
        lambda: theory.check_ranks([[0.7, 0.4]]),
        lambda: theory.check_ranks([]),
    ],
)
def test_nonsense_is_refused(wrong: object) -> None:
    with pytest.raises(ArgumentError):
        wrong()
