"""What a draft must be: of the right form as a whole, and sound row by row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forerun.drafters.guarded import Checked, check
from forerun.errors import InvalidDraftError
from forerun.sampling import Rng
from forerun.target import Resume
from forerun.tree import TokenTree, TreeBuilder, gather, rebuild, select, stack, token_trees
from forerun.types import Budget, Draft, Drawn, empty_draft
from forerun.verify import rule_named
from forerun.verify.enumeration import Laws, World, exact_law, toy_laws
from test_tree import SAMPLED, chain, random_builder

TARGET: Any = SimpleNamespace(vocab_size=10, hidden_size=4, num_layers=3, dtype=torch.float32)
TWO = chain([1, 2], [0, 1])
SAMPLED_CHAIN = chain([1], [0], drawn=SAMPLED, laws=torch.ones(1, 2, 10))


def checked(draft: Any, *, nodes: int = 8, depth: int = 8, rows: int | None = None) -> Checked:
    batch = len(draft.counts) if rows is None else rows
    return check(draft, Budget(nodes=[nodes] * batch, depth=[depth] * batch), TARGET)


FLAWS: list[tuple[Any, str]] = [
    (chain([1, 2], [0, 2]), r"node 2 has parent 2; a parent comes before its child \(0\.\.1\)"),
    (chain([1, 2], [2, 1]), "node 1 has parent 2"),
    (chain([1], [1]), "node 1 has parent 1"),
    (chain([1], [-1]), "node 1 has parent -1"),
    (chain([1, 10], [0, 1]), "node 2 holds token 10, outside the vocabulary of 10"),
    (chain([-1], [0]), "node 1 holds token -1"),
    (chain([1], [0], confidence=torch.tensor([[float("nan")]])), "confidence nan"),
    (chain([1], [0], confidence=torch.tensor([[-0.1]])), "confidence -0.1"),
    (chain([1], [0], confidence=torch.tensor([[1.01]])), "a probability is from 0 to 1"),
    (replace(SAMPLED_CHAIN, probes=torch.tensor([[True]])), "sampled and is a probe"),
    (chain([1] * 9, list(range(9))), "9 nodes, 9 deep, exceed the budget of 8 nodes"),
]
BROKEN: list[tuple[Any, str]] = [
    (None, "proposes a Draft, got NoneType"),
    ([], "proposes a Draft, got list"),
    (TreeBuilder(), "proposes a Draft, got TreeBuilder"),
    (chain([1], [0], counts=torch.tensor([2])), r"count 2 is not in 0\.\.1"),
    (chain([1], [0], counts=torch.tensor([-1])), "count -1"),
    (chain([1], [0], counts=torch.tensor([1, 1])), "counts of a draft for 1 rows"),
    (chain([1], [0], counts=torch.tensor([1.0])), "counts of a draft"),
    (chain([1], [0], drawn=SAMPLED * 9), r"unknown way, \[9\]"),
    (chain([1], [0], drawn=SAMPLED), "records no laws"),
    (chain([1], [0], drawn=torch.zeros(1, 1)), "drawn of a draft"),
    (replace(chain([1], [0]), tokens=torch.ones(1, 1)), "tokens of a draft"),
    (replace(chain([1], [0]), tokens=torch.ones(1, dtype=torch.int64)), "tokens of a draft"),
    (replace(chain([1], [0]), parents=torch.zeros(1, 2, dtype=torch.int64)), "parents of a draft"),
    (chain([1], [0], confidence=torch.ones(1)), "confidence of a draft"),
    (chain([1], [0], confidence=torch.ones(1, 1, dtype=torch.float64)), "confidence of a draft"),
    (chain([1], [0], probes=torch.zeros(1, 1)), "probes of a draft"),
    (replace(SAMPLED_CHAIN, laws=torch.ones(1, 1, 10)), r"expected floats of the shape \(1, 2, V\)"),
    (replace(SAMPLED_CHAIN, laws=torch.ones(1, 2, 10, dtype=torch.int64)), "expected floats"),
    (replace(SAMPLED_CHAIN, laws=torch.ones(2)), "expected floats"),
    (replace(SAMPLED_CHAIN, laws=torch.ones(1, 2, 11)), "over 11 tokens"),
    (replace(SAMPLED_CHAIN, laws=torch.ones(1, 2, 3), law_ids=torch.tensor([0, 1, 10])), "law_ids"),
    (replace(SAMPLED_CHAIN, laws=torch.ones(1, 2, 3), law_ids=torch.tensor([0, 1])), "law_ids"),
]


@pytest.mark.parametrize(("draft", "message"), FLAWS)
def test_a_row_at_fault_is_named(draft: Draft, message: str) -> None:
    found = checked(draft)
    assert list(found.faults) == [0]
    with pytest.raises(InvalidDraftError, match=message):
        raise found.faults[0].error


@pytest.mark.parametrize(("draft", "message"), FLAWS)
def test_rows_beside_it_are_sound(draft: Draft, message: str) -> None:
    both = gather([([1], draft), ([0], TWO)], 3)
    assert list(checked(both).faults) == [1]


@pytest.mark.parametrize(("draft", "message"), BROKEN)
def test_what_is_no_draft_is_refused(draft: Any, message: str) -> None:
    with pytest.raises(InvalidDraftError, match=message):
        checked(draft, rows=1)


def test_a_draft_for_other_rows_is_refused() -> None:
    for rows in (0, 2):
        with pytest.raises(InvalidDraftError, match=f"a draft for {rows} rows"):
            checked(TWO, rows=rows)


def test_a_tree_that_is_too_large_is_cut_to_what_was_drawn_first() -> None:
    draft = stack([rebuild(TWO, 0), rebuild(TWO, 0), rebuild(chain([1, 2, 3], [0, 0, 1]), 0)])
    for nodes, depth, kept in (
        ([2, 1, 3], [2, 2, 2], {1: [1]}),
        ([2, 2, 3], [1, 2, 1], {0: [1], 2: [1, 2]}),
        ([0, 2, 2], [2, 0, 2], {0: [], 1: [], 2: [1, 2]}),
        ([2, 2, 3], [2, 2, 2], {}),
    ):
        budget = Budget(nodes=nodes, depth=depth)
        found = check(draft, budget, TARGET)
        assert {row: list(fault.kept) for row, fault in found.faults.items()} == kept
        sound = found.sound(draft)
        assert sound.counts.tolist() == [len(kept.get(row, range(count))) for row, count in enumerate((2, 2, 3))]
        assert not check(sound, budget, TARGET).faults


def test_a_confidence_that_is_none_does_not_decide_what_is_submitted() -> None:
    nodes = torch.tensor([[float("nan"), 0.5, 2.0]])
    draft = chain([1, 2, 3], [0, 1, 2], drawn=torch.ones(1, 3, dtype=torch.uint8), laws=torch.ones(1, 4, 10) / 10)
    sound = checked(replace(draft, confidence=nodes)).sound(replace(draft, confidence=nodes))
    assert sound.rows[0].tokens == (1, 2, 3) and sound.rows[0].confidence == (0.0, 0.5, 0.0)
    assert torch.equal(sound.laws[0, :3], draft.laws[0, :3])  # type: ignore[index]


@pytest.mark.parametrize("seed", range(3))
def test_what_is_built_is_accepted(seed: int) -> None:
    builders = [random_builder(seed, 12, 10), TreeBuilder(), random_builder(seed + 50, 3, 10)]
    assert checked(stack(builders), nodes=12, depth=12) == checked(empty_draft(4)) == Checked(faults={}, clean=True)


def _growing(laws: Laws, submitted: Callable[[Draft], Draft]) -> Callable[[Rng], TokenTree]:
    """Draws a chain of two, of three behind token 0, where the budget is two; `submitted` is what becomes of it."""

    def draw(rng: Rng) -> TokenTree:
        builder, path = TreeBuilder(), tuple[int, ...]()
        while len(path) < (3 if path[:1] == (0,) else 2):
            builder.set_law(len(path), laws[path].float())
            builder.add(rng.drafted(laws[path].float(), len(path)), len(path), drawn=Drawn.IID)
            path = (*path, builder.tokens[-1])
        [tree] = token_trees(submitted(stack([builder])), [0], len(laws[()]))
        return tree

    return draw


@pytest.mark.parametrize("rule", ["block", "traversal", "token_rejection", "recursive_rejection"])
def test_a_cut_by_the_order_of_drawing_keeps_the_law(rule: str) -> None:
    """Exactly, though whether a tree is too large depends on what was drawn; to lose it as a whole would be a bias."""

    def cut(draft: Draft) -> Draft:
        return check(draft, Budget(nodes=[2], depth=[2]), TARGET).sound(draft)

    def lost(draft: Draft) -> Draft:
        return draft if draft.size <= 2 else empty_draft(1)

    for seed in range(3):
        target, draft = toy_laws(World.RANDOM, vocabulary=3, depth=3, seed=seed)
        law = exact_law(rule_named(rule), target, _growing(draft, cut), horizon=3)
        assert law.error(target) < 1e-6, "laws travel in float32"
        assert exact_law(rule_named(rule), target, _growing(draft, lost), horizon=3).error(target) > 1e-3


def test_padding_is_not_judged_but_must_not_go_through_a_pass() -> None:
    counts, drawn = torch.tensor([1]), torch.tensor([[0, 9, 9]], dtype=torch.uint8)
    for draft in (
        chain([1, 99, 1], [0, 0, 1], counts=counts, drawn=drawn),
        chain([1, -1, 1], [0, 0, 1], counts=counts, drawn=drawn),
        chain([1, 1, 1], [0, 77, 1], counts=counts, drawn=drawn),
        chain([1, 1, 1], [0, 0, -1], counts=counts, drawn=drawn),
        chain([1] * 9, [0] * 9, counts=counts),
    ):
        assert checked(draft) == Checked(faults={}, clean=False)
        rebuilt = checked(draft).sound(draft)
        assert checked(rebuilt) == Checked(faults={}, clean=True) and rebuilt.tokens.tolist() == [[1]]
    assert checked(chain([1, 1, 1], [0, 0, 1], counts=counts, drawn=drawn)).clean


def test_the_tensors_count_and_not_what_was_stacked() -> None:
    draft = stack([rebuild(TWO, 0)])
    draft.tokens[0, 1] = 7
    checked(draft)
    assert draft.rows[0].tokens == (1, 7)
    draft.tokens[0, 1] = 10
    assert checked(draft).faults


def test_states_that_were_begun_fit_the_target() -> None:
    good = Resume(boundary=2, states=torch.zeros(1, 3, 4), counts=[3], stamps=[1])
    assert not checked(replace(TWO, resume=good)).faults
    for wrong in (
        replace(good, states=torch.zeros(2, 3, 4)),
        replace(good, states=torch.zeros(1, 4, 4)),
        replace(good, states=torch.zeros(1, 3, 5)),
        replace(good, states=torch.zeros(1, 3)),
        replace(good, states=torch.zeros(1, 3, 4, dtype=torch.float64)),
        replace(good, boundary=0),
        replace(good, boundary=4),
        replace(good, counts=[4]),
        replace(good, counts=[1, 1]),
        replace(good, stamps=[]),
    ):
        with pytest.raises(InvalidDraftError, match="resumes"):
            checked(replace(TWO, resume=wrong))


def test_begun_states_of_the_rows_that_are_left_are_cut_to_their_trees() -> None:
    """The larger of two trees is left out, with it the nodes that only it had states for."""
    two = stack([rebuild(TWO, 0), rebuild(chain([1], [0]), 0)])
    begun = replace(two, resume=Resume(boundary=2, states=torch.ones(2, 3, 4), counts=[3, 2], stamps=[5, 6]))
    left = gather([([1], select(begun, [1]))], 2)
    assert left.resume is not None and left.resume.states.shape == (2, 2, 4) and left.size == 1
    assert list(left.resume.counts) == [0, 2] and list(left.resume.stamps) == [0, 6]
    assert not checked(left).faults
