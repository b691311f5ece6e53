"""The parts: what may be pruned, what a drafter is shown, what `auto` is made of, what a failing drafter leaves."""

import inspect
import json
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from contract.harness import PROMPTS, as_prompts, dflash_head, eagle_head, llm, model, plain_greedy, relative
from contract.test_greedy import NEUTRAL
from forerun import LLM, SamplingParams
from forerun.control import costs, explore
from forerun.control.choice import Bid, Offer, allocate, best_depth, choose
from forerun.control.config import SpeculativeConfig, arms_of, method_of
from forerun.control.costs import READING, DraftCost, Nominal, PassShape, StepCosts, Times
from forerun.control.explore import Survival
from forerun.control.policy import policy_for
from forerun.control.ranking import Confidence, Ranking
from forerun.core.sampling import Sampler
from forerun.core.tree import Resume, TokenTree, prune
from forerun.decode.drafter import DraftContext, Drafter, DrafterSetup
from forerun.decode.row import Row
from forerun.drafters import DRAFTERS, DrafterEntry, drafter_class, guarded
from forerun.drafters.guarded import Deferred
from forerun.drafters.lookup.ngram import NgramConfig
from forerun.drafters.lookup.prediction import PredictionDrafter
from forerun.engine import drafting
from forerun.errors import ArgumentError
from forerun.types import Boundary, Budget, Drawn

PROBS = torch.full((4,), 0.25)


class Passes:
    """A pass costs 1 ms and a little per node; nothing is known of drafters."""

    drafts: dict[str, Any] = {}  # noqa: RUF012

    def pass_ms(self, nodes: int, rows: int = 1, context: int = 0) -> float:
        return 1.0 + 0.02 * nodes


@pytest.fixture(autouse=True)
def no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    def controlled(*arguments: Any, **keywords: Any) -> Any:
        return policy_for(*arguments, **{**keywords, "costs": Passes()})

    monkeypatch.setattr(drafting, "policy_for", controlled)


def given(*nodes: tuple[int, int, float], root: int = 0) -> TokenTree:
    """(token, parent, confidence) of node 1, 2, ..."""
    tree = TokenTree(root)
    for token, parent, confidence in nodes:
        tree.add(token, parent, confidence=confidence)
    return tree


def sampled(*tokens: int) -> TokenTree:
    tree, parent = TokenTree(0), 0
    for token in tokens:
        tree.set_probs(parent, PROBS)
        parent = tree.add(token, parent, drawn=Drawn.IID, confidence=0.01)
    return tree


def surest(holders: int, stated: float) -> float:
    """Whoever holds it."""
    return stated


def test_the_best_prefix_is_a_subtree_ranked_by_path() -> None:
    tree = given((1, 0, 0.5), (2, 0, 0.4), (3, 1, 0.9), (1, 2, 0.1), (2, 3, 0.9))
    ranking = Ranking.of(tree, surest)
    assert ranking.order == (1, 3, 5, 2, 4)
    assert ranking.survival == pytest.approx((1, 0.5, 0.4, 0.45, 0.04, 0.405)) and ranking.holders == (0,) * 6
    assert ranking.worth == pytest.approx((0, 0.5, 0.95, 1.355, 1.755, 1.795))
    (kept,) = prune([tree], {0: ranking.order[:3]})
    assert (kept.tokens, kept.parents) == ((0, 1, 3, 2), (-1, 0, 1, 2))


def test_siblings_are_not_worth_more_than_their_parent() -> None:
    tree = given((1, 0, 0.8), (2, 0, 0.7), (3, 0, 0.6))
    assert Ranking.of(tree, surest).worth[-1] == pytest.approx(1.0)


def test_what_a_likelier_sibling_leaves_is_all_that_a_node_and_those_below_it_have() -> None:
    """A node that counts little does not stand before one that counts more, nor does its child count more than it."""
    tree = given((1, 0, 0.9), (2, 0, 0.6), (3, 2, 0.9), (4, 1, 0.3))
    ranking = Ranking.of(tree, surest)
    assert ranking.order == (1, 4, 2, 3)
    assert ranking.worth == pytest.approx((0, 0.9, 1.17, 1.27, 1.36))


def test_copies_are_joined_path_by_path() -> None:
    """A path that two drafters hold is one path, as likely as the likelier of them says; the rest stands beside it."""
    first = given((5, 0, 0.6), (6, 1, 0.5))
    second = given((9, 0, 0.1), (5, 0, 0.8), (7, 2, 0.5), (6, 2, 0.25))
    ranking = Ranking.merge({0: first, 2: second}, 8, surest)
    tree = ranking.tree
    paths = {node: tuple(tree.tokens[step] for step in tree.path(node)) for node in range(1, tree.size + 1)}
    alive = {paths[node]: ranking.survival[node] for node in paths}
    assert alive == pytest.approx({(5,): 0.8, (5, 6): 0.3, (5, 7): 0.4, (9,): 0.1})
    assert [paths[node] for node in ranking.order] == [(5,), (5, 7), (5, 6), (9,)]
    assert ranking.worth == pytest.approx((0, 0.8, 1.2, 1.5, 1.6))
    assert tree.survival() == pytest.approx(ranking.survival), "what is stated is what the surest say"
    held = {paths[node]: ranking.holders[node] for node in paths}
    assert held == {(5,): 0b101, (5, 6): 0b101, (5, 7): 0b100, (9,): 0b100}


def test_what_a_joined_node_is_worth_depends_on_who_holds_it() -> None:
    """Of a text in which only what both proposed was ever right: the rest loses its place, children with parents."""
    trees = {0: given((5, 0, 0.6), (6, 1, 0.5)), 1: given((9, 0, 0.6), (5, 0, 0.5), (8, 1, 0.9))}
    agreement = Confidence()
    for _ in range(200):
        agreement.learn(0, Ranking.merge(trees, 8, surest), [5, 7])
    ranking = Ranking.merge(trees, 8, agreement.of(3))
    named = zip(ranking.tree.tokens, ranking.holders, ranking.survival, strict=True)
    alive = {(token, holders): survival for token, holders, survival in named}
    assert alive[5, 0b11] > 0.9
    assert alive[9, 0b10] < 0.1 and alive[8, 0b10] < alive[9, 0b10]
    assert alive[6, 0b01] < 0.1
    stated = Ranking.merge(trees, 8, surest).tree
    assert (stated.tokens, stated.parents) == (ranking.tree.tokens, ranking.tree.parents)
    assert stated.confidence == ranking.tree.confidence, "what is learned from stays what was stated"


def test_the_step_with_numbers_on_the_page_is_what_the_policy_computes() -> None:
    """docs/control.md, before calibration and after it."""
    page = (Path(__file__).parents[2] / "docs" / "control.md").read_text(encoding="utf-8")
    found = {
        0: given((1, 0, 0.9), (2, 1, 0.8), (3, 2, 0.7), (4, 3, 0.6)),
        1: given((1, 0, 0.6), (2, 1, 0.5), (9, 0, 0.3)),
    }
    times, price, agreement = [10.0, 10.6, 11.2, 11.8, 12.4, 15.0], 0.2, Confidence()

    def weighed() -> tuple[list[str], list[int]]:
        ranking = Ranking.merge(found, 8, agreement.of(0))
        gains = [worth - price * (times[nodes] - times[0]) for nodes, worth in enumerate(ranking.worth)]
        sizes = Times(5, lambda: times.__getitem__)
        return [f"{gain:.3f}" for gain in gains], allocate([ranking.worth], PassShape(), times=sizes, goodput=price)

    rows = re.findall(r"^\|.* \| \**([\d.]+)\** \|$", page[page.index("### A step with numbers") :], re.MULTILINE)[:6]
    gains, best = weighed()
    assert gains[1:] == rows[1:] and best == [4]
    for right in [True] * 3 + [False] * 9:
        agreement.learn(1, Ranking.merge({0: given((3, 0, 0.7))}, 8, surest), [3 if right else 8])
    gains, best = weighed()
    assert f"{gains[2]}, {gains[3]} and {gains[4]}" in page and best == [4]
    assert f"{agreement.of(0)(1, 0.7):.3f}" == "0.475"


def test_a_join_keeps_the_likeliest_nodes_of_its_budget_and_their_parents() -> None:
    first, second = given((1, 0, 0.3), (2, 1, 0.9)), given((3, 0, 0.6), (4, 1, 0.9), (5, 2, 0.1))
    tree = Ranking.merge({0: first, 1: second}, 3, surest).tree
    assert (tree.tokens, tree.parents) == ((0, 1, 3, 4), (-1, 0, 0, 2))
    alone = Ranking.merge({1: second}, 8, surest)
    of_it = Ranking.of(given((3, 0, 0.6), (4, 1, 0.9), (5, 2, 0.1)), surest)
    assert list(alone.tree.tokens) == of_it.tree.tokens, "one tree stays what it is"
    assert list(alone.tree.parents) == of_it.tree.parents
    assert alone.worth == pytest.approx(of_it.worth)


def test_what_is_joined_or_pruned_begins_with_the_same_root() -> None:
    first, second = given((1, 0, 0.3), root=7), given((3, 0, 0.6), (4, 1, 0.9), root=7)
    ranking = Ranking.merge({0: first, 1: second}, 2, surest)
    assert ranking.tree.tokens == (7, 3, 4) and ranking.holders == (0, 0b10, 0b10)
    assert prune([first, ranking.tree], {1: (1,)})[1].tokens == (7, 3)


def test_who_holds_what_of_a_merged_tree() -> None:
    """By this what copies save is shared out: both hold the first node, one the second, and only the best two count."""
    found = {0: given((5, 0, 0.6), (6, 1, 0.5)), 3: given((5, 0, 0.5), (7, 1, 0.1))}
    ranking = Ranking.merge(found, 8, surest)
    assert ranking.held(0, 2) == pytest.approx(0.6 + 0.3) and ranking.held(3, 2) == pytest.approx(0.6)
    assert ranking.held(0, 0) == 0.0


def test_a_sampled_node_cannot_be_pruned() -> None:
    mixed = given((1, 0, 0.9))
    mixed.set_probs(1, PROBS)
    mixed.add(2, 1, drawn=Drawn.WITHOUT_REPLACEMENT)
    scouting = given((1, 0, 0.9))
    scouting.add(2, 0, probe=True)
    begun = given((1, 0, 0.9))
    begun.resume = Resume(boundary=1, states=torch.zeros(1, 4), stamp=0)
    trees = [sampled(1, 2), mixed, scouting, begun, given((1, 0, 0.9))]
    assert [tree.prunable for tree in trees] == [False, False, False, False, True]
    for row in range(4):
        with pytest.raises(AssertionError, match="only deterministic nodes"):
            Ranking.of(trees[row], surest)
        with pytest.raises(AssertionError, match="only deterministic nodes"):
            prune(trees, {row: ()})
        with pytest.raises(AssertionError, match="only deterministic nodes"):
            Ranking.merge({0: trees[row]}, 8, surest)


def test_pruning_one_row_leaves_the_others_and_their_draft_probs() -> None:
    trees = [sampled(1, 2), given((1, 0, 0.9), (2, 1, 0.1))]
    found = prune(trees, {1: (1,)})
    assert found[0] is trees[0] and [tree.size for tree in found] == [2, 1]
    assert torch.equal(found[0].draft_probs[0], PROBS)
    assert found[0].drawn == [Drawn.DETERMINISTIC, Drawn.IID, Drawn.IID]
    assert trees[1].size == 2, "what was proposed stays what it was"


def test_what_decides_before_drawing_never_sees_a_draft() -> None:
    for module in (explore, costs):
        assert not [name for name, value in vars(module).items() if value is TokenTree or value is Ranking]
    for function in (best_depth, choose):
        hints = inspect.get_annotations(function).values()
        assert not [hint for hint in hints if "Tree" in hint or "Ranking" in hint]


def taking(*ms: float) -> Times:
    """Passes of size 0, 1, ... take so long."""
    return Times(len(ms) - 1, lambda: ms.__getitem__)


def test_width_follows_the_staircase_and_goodput() -> None:
    worth, stairs = (0.0, 0.5, 0.9, 1.0, 1.05), taking(1.0, 1.3, 1.3, 1.9, 1.9)

    def best(count: int, goodput: float, *fixed: int) -> list[int]:
        return allocate([worth] * count, PassShape(padded=True), times=stairs, goodput=goodput, fixed=fixed)

    assert best(1, 1.0) == [2]
    assert best(1, 10.0) == [0]
    assert best(1, 0.01) == [4]
    assert best(1, 10.0, 1, 3) == [4], "what is paid for in any case is filled"
    assert best(4, 5.0) == [2] * 4, "rows share the price"


def test_where_padding_is_left_out_every_node_is_paid_for_and_the_best_come_first() -> None:
    line = taking(*(1.0 + 0.1 * size for size in range(9)))
    sure, vague, none = (0.0, 0.9, 1.7, 2.4), (0.0, 0.5, 0.6), (0.0,)

    def best(goodput: float, *fixed: int) -> list[int]:
        return allocate([sure, vague, none], PassShape(), times=line, goodput=goodput, fixed=fixed)

    assert best(0.5) == [3, 2, 0]
    assert best(4.0) == [3, 1, 0]
    assert best(6.0) == [3, 0, 0]
    assert best(7.5) == [2, 0, 0]
    assert best(10.0) == [0, 0, 0]
    assert best(0.5, 4, 2) == [2, 0, 0], "no larger than a pass may be"
    assert allocate([], PassShape(), times=line, goodput=1.0) == []
    free = taking(*[1.0] * 4, *[9.0] * 5)
    found = allocate([vague, sure], PassShape(), times=free, goodput=1.0, fixed=(1,))
    assert found == [0, 2], "the step before the stair"


def test_sizes_of_a_pass() -> None:
    padded, packed = PassShape(padded=True), PassShape()
    for shape in (padded, packed):
        assert shape.size([3] * 5) == shape.size_of_equal_rows(5, 3)
        assert shape.nodes(shape.size_of_equal_rows(5, 3), 5) == 3
    assert padded.size([1, 4, 0]) == 4 and packed.size([1, 4, 0]) == 5


def test_a_copy_and_a_model_are_weighed_by_gain() -> None:
    times = taking(*(1.0 + 0.1 * nodes for nodes in range(9)))
    offer = Offer(arm=1, depth=4, ms=1.0, bids=dict.fromkeys((0, 1), Bid(1, 4, 2.0)))
    copies, shape = {0: Bid(0, 3, 2.4)}, PassShape(padded=True)
    assert choose(copies, [offer], shape, times=times, goodput=1.0) == {0: 0, 1: 1}
    assert choose(copies, [offer], shape, times=times, goodput=3.0) == {0: 0}


def test_costs_fall_back_on_what_was_seen() -> None:
    known = StepCosts(Passes(), {"m": drafting_cost(0.5)})
    for _ in range(12):
        known.saw_pass(2, 1, 0, 3 * Passes().pass_ms(3))
        known.saw_draft("m", 2, 1, 4.0)
    times = known.times(1, 0, 4)
    assert [times[size] for size in range(5)] == pytest.approx(
        [3 * Passes().pass_ms(n + 1) for n in range(5)], rel=0.01
    )
    assert known.draft_ms("m", 2, 1) == pytest.approx(4.0, rel=0.01)
    known.saw_pass(2, 1, 0, 500.0)
    assert known.times(1, 0, 2)[2] < 4.0, "one outlier moves nothing"


def test_what_was_seen_on_a_slow_machine_follows_when_it_is_fast_again() -> None:
    """A size that looked dear is drafted no more: that its passes have become quicker is known from plain ones."""
    known = StepCosts(Passes())
    for _ in range(30):
        known.saw_pass(0, 1, 0, 6.0)
        known.saw_pass(8, 1, 0, 12.0)
    for _ in range(costs.SETTINGS.interval + costs.SETTINGS.window):
        known.saw_pass(0, 1, 0, 3.0)
    times = known.times(1, 0, 8)
    assert (times[0], times[8]) == pytest.approx((3.0, 6.0))


def test_a_slower_machine_is_found_out_by_plain_passes_that_are_seen_now_and_then() -> None:
    known, slower = StepCosts(Passes()), False
    times = {size: Passes().pass_ms(1 + size) * (1.5 if size else 1) for size in (0, 3)}
    plain = list[int]()
    for step in range(4000):
        slower = step >= 2000
        size = 0 if known.plain_is_due(1) else 3
        plain += [step] if size == 0 else []
        known.saw_pass(size, 1, 0, times[size] * (2 if slower else 1))
        known.saw_host(0.0, 1, lookup_ms=0.0)
    assert len(plain) < 20
    seen = known.times(1, 0, 3)
    assert seen[3] / seen[0] <= 2 * times[3] / times[0], "at most so much dearer for having become slower"
    for _ in range(30):
        known.saw_pass(0, 1, 0, 2 * times[0])
    seen = known.times(1, 0, 3)
    assert seen[3] / seen[0] == pytest.approx(times[3] / times[0], rel=0.01)


@pytest.mark.parametrize("first", [0, 2, 5], ids=["plain", "two nodes", "five nodes"])
def test_what_took_long_once_is_not_believed(first: int) -> None:
    """A process's first passes take many times as long; so does one beside which something else runs."""
    known = StepCosts(Passes())
    known.saw_pass(0, 1, 0, 1.0)
    known.saw_pass(first, 1, 0, 58.0)
    for size in (0, 0, 1, 17, 0, 1):
        known.saw_pass(size, 1, 0, Passes().pass_ms(1 + size))
    seen = known.times(1, 0, 20)
    assert [seen[n] for n in (0, 2, 5, 17)] == pytest.approx([Passes().pass_ms(1 + n) for n in (0, 2, 5, 17)], rel=0.05)


def test_more_nodes_never_make_a_pass_quicker() -> None:
    known = StepCosts(Passes())
    for size, ms in [(0, 1.0), (2, 9.0), (5, 9.0), (17, 2.4)] * 30:
        known.saw_pass(size, 1, 0, ms)
    seen = known.times(1, 0, 17)
    rising = [seen[n] for n in range(18)]
    assert rising == sorted(rising) and rising[2] == pytest.approx(2.4)


def test_a_proposal_for_many_rows_is_no_proposal_for_one() -> None:
    known = StepCosts(Nominal(), {"m": drafting_cost(0.5)})
    growth = Nominal().pass_ms(1, 16)
    assert known.draft_ms("m", 4, 16) == pytest.approx(growth * known.draft_ms("m", 4, 1))
    for _ in range(12):
        known.saw_draft("m", 4, 1, 2.0)
        known.saw_draft("m", 4, 16, 9.0)
    assert known.draft_ms("m", 4, 1) == pytest.approx(2.0, rel=0.1)
    assert known.draft_ms("m", 4, 16) == pytest.approx(9.0, rel=0.15)


def test_what_was_useless_for_long_is_not_hoped_for_anew() -> None:
    survival = Survival()
    for _ in range(400):
        survival.record(0, accepted=0, drafted=1)
        survival.age()
    seen = survival.curve(None, 1)[0]
    for _ in range(3000):
        survival.age()
    assert survival.curve(None, 1)[0] < seen + 0.1 < 0.2
    assert survival.evidence(1) < 2.0, "but little stands behind it"


def test_reading_a_text_is_told_from_drafting() -> None:
    known = StepCosts(Nominal(), {"m": drafting_cost(0.5)})
    assert known.reading_ms("m", 300) == 0.0, "nothing is known yet"
    known.saw_draft("m", 4, 1, 2.0 + 30.0, unread=300)
    assert known.draft_ms("m", 4, 1) == 2.0
    assert known.reading_ms("m", 600) == pytest.approx(60.0)
    assert known.reading_ms("m", READING - 1) == 0.0


def drafting_cost(level_ms: float) -> DraftCost:
    return DraftCost(fixed_ms=0.0, level_ms=level_ms)


class Heard(Drafter):
    """Notes what it is shown."""

    name = "heard"

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], list[int], list[list[float]]]] = []

    @property
    def requires(self) -> frozenset[Boundary]:
        return frozenset({3})

    def extend(self, context: DraftContext) -> None:
        counts = [min(f, len(t) - 1) for f, t in zip(context.fresh, context.tokens, strict=True)]
        states = [context.hidden_states[3][i, :count, 0].tolist() for i, count in enumerate(counts)]
        self.calls.append((list(context.rows), list(context.fresh), states))

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        return context.trees()


def shown(texts: dict[int, list[int]], fresh: Sequence[int]) -> DraftContext:
    """All rows; the state before token i is i."""
    rows = list(texts)
    width = max(fresh)
    states = torch.zeros(len(rows), width, 1)
    for index, row in enumerate(rows):
        count = min(fresh[index], len(texts[row]) - 1)
        states[index, :count, 0] = torch.arange(len(texts[row]) - count, len(texts[row])).float()
    return DraftContext(
        rows=rows,
        tokens=[texts[row] for row in rows],
        prompt_lengths=[1] * len(rows),
        fresh=fresh,
        samplers=[None] * len(rows),
        rng=[None] * len(rows),
        hidden_states={3: states},
    )


def put_off(drafter: Drafter) -> Deferred:
    target: Any = SimpleNamespace(vocab_size=4, num_layers=4)
    return Deferred(drafter, "heard", DrafterSetup(target=target, tokenizer=None, rows=8, slots=64))


@pytest.mark.parametrize("remembers", [False, True])
def test_a_deferred_drafter_says_what_the_drafter_says(remembers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Heard, "remembers", property(lambda _: remembers))
    deferred = put_off(Heard())
    assert deferred.remembers is remembers
    assert deferred.requires == Heard().requires and deferred.watches == Heard().watches


def test_tokens_and_states_are_put_aside_until_the_drafter_is_asked() -> None:
    heard = Heard()
    deferred = put_off(heard)
    texts = {4: [1, 1, 1], 7: [1, 1]}
    deferred.extend(shown(texts, [3, 2]))
    texts[4] += [1, 1]
    texts[7] += [1]
    deferred.extend(shown(texts, [2, 1]))
    assert not heard.calls
    deferred.propose(shown(texts, [0, 0]), Budget(nodes=[2, 0], depth=[2, 0]))
    assert heard.calls == [([4], [5], [[1, 2, 3, 4]])]
    texts[4] += [1]
    texts[7] += [1, 1]
    deferred.extend(shown(texts, [1, 2]))
    assert len(heard.calls) == 1, "one that reads states reads once for each proposal, also behind one"
    deferred.propose(shown(texts, [0, 0]), Budget(nodes=[2, 2], depth=[2, 2]))
    assert heard.calls[1:] == [([4], [1], [[5]]), ([7], [5], [[1, 2, 3, 4]])]
    deferred.truncate([7], [0])
    assert deferred._rows.keys() == {4}


def test_what_became_of_proposals_is_shown_together_and_copied_only_where_no_other_follows() -> None:
    heard, texts = Heard(), {4: [1, 1, 1], 7: [1, 1], 8: [1, 1]}
    deferred = put_off(heard)
    deferred.extend(shown(texts, [3, 2, 2]))
    deferred.propose(shown(texts, [0, 0, 0]), Budget(nodes=[2] * 3, depth=[2] * 3))
    for text in texts.values():
        text += [1, 1]
    deferred.extend(shown(texts, [2, 2, 2]))
    assert not any(row.states for row in deferred._rows.values())
    deferred.propose(shown(texts, [0, 0, 0]), Budget(nodes=[2, 0, 2], depth=[2, 0, 2]))
    assert heard.calls[1:] == [([4, 8], [2, 2], [[3, 4], [2, 3]])]
    assert deferred._rows[7].held == 2 and deferred.unread(7, 4) == 2
    texts[7] += [1]
    deferred.extend(shown({7: texts[7]}, [1]))
    deferred.propose(shown({7: texts[7]}, [0]), Budget(nodes=[2], depth=[2]))
    assert heard.calls[2:] == [([7], [3], [[2, 3, 4]])]


def test_what_became_of_a_proposal_is_shown_at_once_where_no_states_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    heard, fresh = Drafter(), list[Sequence[int]]()
    monkeypatch.setattr(heard, "extend", lambda context: fresh.append(context.fresh))
    monkeypatch.setattr(heard, "propose", lambda context, _budget: context.trees())
    deferred, texts = put_off(heard), {4: [1, 1, 1]}
    deferred.extend(shown(texts, [3]))
    deferred.propose(shown(texts, [0]), Budget(nodes=[2], depth=[2]))
    texts[4] += [1]
    deferred.extend(shown(texts, [1]))
    assert fresh == [[3], [1]]


def test_a_long_prompt_is_read_only_where_a_draft_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the states that are put aside for it take more than its share of the memory for all rows."""
    heard = Heard()
    deferred = put_off(heard)
    for length, fresh in ((512, 512), (1024, 512), (2000, 976)):
        deferred.extend(shown({4: [1] * length}, [fresh]))
    assert not heard.calls and deferred.unread(4, 2000) == 2000
    monkeypatch.setattr(guarded, "_MOST_BYTES", 8 * 4 * 600)  # Of 8 rows, a float for each token
    deferred.extend(shown({7: [1] * 601}, [601]))  # None stands before its first token
    assert not heard.calls
    deferred.extend(shown({7: [1] * 602}, [1]))
    assert [(rows, fresh) for rows, fresh, _ in heard.calls] == [([7], [602])]


@pytest.mark.parametrize(("options", "asked"), [({}, [0]), ({"text": [1, 2, 3]}, [0, 1])], ids=["theirs", "given"])
def test_a_prediction_is_followed_only_where_there_is_one(
    options: dict[str, Any], asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def propose(self: PredictionDrafter, context: DraftContext, budget: Budget) -> list[TokenTree]:
        rows.extend(context.rows)
        return context.trees()

    rows = list[int]()
    monkeypatch.setattr(PredictionDrafter, "propose", propose)
    target: Any = SimpleNamespace(vocab_size=16, computes_padding=False, memory_bytes=lambda: 1)
    config = SpeculativeConfig.parse({"method": "prediction", **options})
    assert config is not None
    setup = DrafterSetup(target=target, tokenizer=None, rows=2, slots=64)
    policy = policy_for([config], setup, nodes=8, costs=Passes())
    greedy = Sampler(SamplingParams(temperature=0.0), ())
    shared: Any = {"prompt_length": 2, "sampler": greedy, "seed": 0, "stop_ids": frozenset[int](), "tokens_left": 9}
    texts = [Row(cache_row=row, tokens=[1, 2], prediction=found, **shared) for row, found in enumerate([(3, 4), ()])]
    policy.plan(texts, [0, 1], [8, 8])
    assert rows == asked


def test_what_auto_is_made_of(tmp_path: Path) -> None:
    def parsed(**options: Any) -> list[SpeculativeConfig]:
        config = SpeculativeConfig.parse({"method": "auto", **options})
        assert config is not None and config.adaptive
        return arms_of(config)

    free = [arm.method for arm in parsed()]
    assert {"suffix", "recycling", "prediction"} <= set(free) and not {"ngram", "rest"} & set(free)
    assert all(DRAFTERS[name].is_lookup for name in free)
    arms = parsed(
        drafters=[{"method": "ngram", "max_branches": 2}, "lookahead"], model=relative(), num_speculative_tokens=3
    )
    assert [arm.method for arm in arms].count("ngram") == 1
    assert {"lookahead", "draft_model"} < {arm.method for arm in arms}
    assert next(arm for arm in arms if arm.method == "ngram").drafter_options == {
        "num_speculative_tokens": 3,
        "max_branches": 2,
    }
    assert method_of(eagle_head(3)) == "eagle3" and method_of(eagle_head(1)) == "eagle"
    assert method_of(dflash_head()) == "dflash" and method_of(relative()) == "draft_model"
    hub = {"EAGLE3-Qwen": "eagle3", "Qwen-P-EAGLE": "peagle", "Qwen-DFlash-b16": "dflash", "tiny": "draft_model"}
    assert {name: method_of(f"someone/{name}") for name in hub} == hub
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8, "architectures": ["LlamaForCausalLM"]}))
    assert method_of(tmp_path) == "draft_model"


@pytest.mark.parametrize(
    "wrong",
    [
        {"draftes": []},
        {"drafters": "ngram"},
        {"drafters": [{"method": "auto"}]},
        {"drafters": [3]},
        {"drafters": None},
        {"drafters": 5},
        {"greedy_with_seed": "yes"},
        {"drafters": [{"method": "ngram", "enabled": False}]},
    ],
)
def test_what_auto_refuses(wrong: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="auto"):
        llm(None).generate(as_prompts([[1, 2]]), speculative={"method": "auto", **wrong})


def test_auto_is_no_drafter_and_cannot_be_unadaptive() -> None:
    with pytest.raises(ArgumentError, match="chooses among drafters"):
        drafter_class("auto")
    with pytest.raises(ArgumentError, match="adaptive"):
        SpeculativeConfig.parse({"method": "auto", "adaptive": False})
    with pytest.raises(ArgumentError, match="true or false"):
        SpeculativeConfig.parse({"method": "ngram", "adaptive": 1})


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"method": "ngram", "rule": []}, "rule"),
        ({"method": "ngram", "num_speculative_tokens": True}, "num_speculative_tokens"),
        ({"method": "ngram", "enabled": "false"}, "enabled is true or false"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_values_of_other_types_are_refused_by_name(given: Any, why: str) -> None:
    with pytest.raises(ArgumentError, match=why):
        SpeculativeConfig.parse(given)


@pytest.mark.parametrize("given", [{"method": "ngram"}, {"method": "auto"}, '{"model": "somewhere"}'])
def test_every_drafter_is_under_the_policy_unless_it_is_told_not_to_be(given: Any) -> None:
    config = SpeculativeConfig.parse(given)
    assert config is not None and config.adaptive


@pytest.mark.parametrize(("more", "policy"), [({}, True), ({"adaptive": True}, True), ({"adaptive": False}, False)])
def test_what_is_not_adaptive_has_no_policy(more: dict[str, bool], policy: bool) -> None:
    """And shares no drafter with what is."""
    engine = LLM(model(), tokenizer=False, max_model_len=64, self_check=False)
    config = {"method": "ngram", "num_speculative_tokens": 3}
    engine.generate(as_prompts([PROMPTS[0]]), NEUTRAL, speculative={**config, **more})
    (active,) = engine.engine.drafting._active.values()
    assert (active.policy is not None) == policy
    engine.generate(as_prompts([PROMPTS[0]]), NEUTRAL, speculative={**config, "adaptive": not policy})
    assert [one.policy is not None for one in engine.engine.drafting._active.values()] == [policy, not policy]


class Failing(Drafter):
    """Raises from its third proposal on."""

    name = "failing"
    Config = NgramConfig

    def __init__(self, config: NgramConfig, setup: DrafterSetup) -> None:
        self.proposals = 0

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        self.proposals += 1
        if self.proposals > 2:
            raise RuntimeError("out of ideas")
        return [given((1, 0, 0.5), root=tokens[-1]) for tokens in context.tokens]


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_drafter_that_raises_is_counted_and_the_answer_goes_on(
    adaptive: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(DRAFTERS, "failing", DrafterEntry(path=f"{__name__}:Failing", summary="raises"))
    engine = LLM(model(), tokenizer=False, max_model_len=64, self_check=False)
    config = {"method": "failing", "adaptive": adaptive}
    output = engine.generate(as_prompts([PROMPTS[0]]), NEUTRAL, speculative=config)[0].outputs[0]
    assert output.token_ids == plain_greedy(PROMPTS[0], NEUTRAL)
    assert output.speculation.drafter_errors == 1, "it is not asked again in this answer"
    assert sum("out of ideas" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize(("padded", "nodes"), [(False, 8 + 5), (True, 8 * 6)])
def test_what_a_pass_took_is_kept_by_all_its_nodes(padded: bool, nodes: int) -> None:
    """Roots and padding are among them: the next process reads from it what any number of rows takes."""
    known = StepCosts(Nominal(), shape=PassShape(padded=padded))
    known.saw_pass(5, 8, 300, 20.0)
    assert {point: [*times] for point, times in known.passes.items()} == {(256, nodes): [20.0]}
