"""What a tree must be before it is scored: each row's for itself, and what becomes of the sound rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core.test_tree import contents, random_tree
from forerun.certify.enumeration import Distributions, World, exact_distribution, toy_distributions
from forerun.core.rules import rule_named
from forerun.core.sampling import Rng, Sampler
from forerun.core.tree import Resume, TokenTree
from forerun.decode.drafter import DraftContext, Drafter, DrafterSetup, warn_drafter
from forerun.drafters.guarded import Checked, Guarded, check
from forerun.errors import InvalidDraftError
from forerun.types import Budget, Drawn, SamplingParams

ROOT = 7
TARGET: Any = SimpleNamespace(vocab_size=10, hidden_size=4, num_layers=3, dtype=torch.float32)


def nodes(tokens: Sequence[Any], parents: Sequence[Any], /, **columns: Any) -> TokenTree:
    """A tree with these nodes 1, 2, ..., whatever they are; `columns` hold the root, too."""
    tree = TokenTree(ROOT)
    tree.tokens, tree.parents = [ROOT, *tokens], [-1, *parents]
    tree.drawn *= len(tokens) + 1
    tree.confidence *= len(tokens) + 1
    for name, column in columns.items():
        setattr(tree, name, column)
    return tree


def sampled(probs: Any = None, **columns: Any) -> TokenTree:
    """One node that was sampled; `probs` instead of the distribution that it was drawn from."""
    recorded = {0: torch.full((10,), 0.1) if probs is None else probs}
    return nodes([1], [0], **{"drawn": [Drawn.DETERMINISTIC, Drawn.IID], "draft_probs": recorded, **columns})


def two() -> TokenTree:
    return nodes([1, 2], [0, 1])


def checked(tree: Any, *, most: int = 8, deepest: int = 8) -> Checked:
    return check(tree, ROOT, most, deepest, TARGET)


FLAWS: list[tuple[Any, str]] = [
    (nodes([1, 2], [0, 2]), r"node 2 has parent 2; a parent comes before its child \(0\.\.1\)"),
    (nodes([1, 2], [2, 1]), "node 1 has parent 2"),
    (nodes([1], [1]), "node 1 has parent 1"),
    (nodes([1], [-1]), "node 1 has parent -1"),
    (nodes([1, 10], [0, 1]), "node 2 holds token 10, outside the vocabulary of 10"),
    (nodes([-1], [0]), "node 1 holds token -1"),
    (nodes([1], [0], confidence=[1.0, float("nan")]), "confidence nan"),
    (nodes([1], [0], confidence=[1.0, -0.1]), "confidence -0.1"),
    (nodes([1], [0], confidence=[1.0, 1.01]), "a probability is from 0 to 1"),
    (sampled(probes={1}), "sampled and is a probe"),
    (nodes([1] * 9, list(range(9))), "9 nodes, 9 deep, exceed the budget of 8 nodes"),
    (None, "one TokenTree for each row, got NoneType"),
    ([1, 2], "one TokenTree for each row, got list"),
    (TokenTree, "one TokenTree for each row, got type"),
    (TokenTree(3), "the tree's root holds token 3; the last committed token is 7"),
    (nodes([1], []), r"have the lengths \[2, 1, 2, 2\]"),
    (nodes([1], [0], confidence=[1.0]), r"have the lengths \[2, 2, 2, 1\]"),
    (nodes([1], [0], drawn=[Drawn.DETERMINISTIC] * 3), r"have the lengths \[2, 2, 3, 2\]"),
    (nodes([], [], tokens=[], parents=[], drawn=[], confidence=[]), r"have the lengths \[0, 0, 0, 0\]"),
    (nodes([1.0], [0]), "a tree that cannot be read"),
    (nodes(["1"], [0]), "a tree that cannot be read"),
    (nodes([1], [None]), "a tree that cannot be read"),
    (nodes([1], [0], confidence=[1.0, "sure"]), "a tree that cannot be read"),
    (nodes([1], [0], probes={0.5}), "a tree that cannot be read"),
    (nodes([1], [0], tokens=None), "a tree that cannot be read"),
    (nodes([1], [0], drawn=[Drawn.DETERMINISTIC, 9]), "a tree that cannot be read.*9 is not a valid Drawn"),
    (nodes([1], [0], probes={2}), r"node 2 is a probe, but there are the drafted nodes 1\.\.1"),
    (nodes([1], [0], probes={0}), "node 0 is a probe"),
    (nodes([1], [0], drawn=[Drawn.DETERMINISTIC, Drawn.IID]), "node 0 has sampled children, but the draft records no"),
    (sampled([0.1] * 10), "the draft probs of node 0 are list, expected floats"),
    (sampled(torch.ones(1, 10)), r"float32 of the shape \(1, 10\), expected floats of the shape \(V,\)"),
    (sampled(torch.ones(10, dtype=torch.int64)), "int64 of the shape"),
    (sampled(torch.ones(())), r"float32 of the shape \(\)"),
    (sampled(torch.ones(11)), r"float32 of the shape \(11,\), expected .* V at most 10"),
    (sampled(draft_probs=[torch.ones(10)]), "a tree that cannot be read"),
    (sampled(masses={0: "one"}), "a tree that cannot be read"),
    (nodes([1], [0], resume=3), "a tree that cannot be read"),
]


@pytest.mark.parametrize(("tree", "message"), FLAWS)
def test_a_tree_at_fault_says_what_is_wrong(tree: Any, message: str) -> None:
    found = checked(tree)
    assert found.error is not None
    with pytest.raises(InvalidDraftError, match=message):
        raise found.error
    again = checked(found.tree)
    assert again.error is None and again.tree.tokens == found.tree.tokens, "what is left is sound"


class Proposing(Drafter):
    """Proposes what it was given."""

    name = "proposing"

    def __init__(self, found: Any) -> None:
        self.found = found

    def propose(self, context: DraftContext, budget: Budget) -> Any:
        return self.found


def proposed(found: Any, rows: int) -> tuple[list[TokenTree], list[int]]:
    """What the guard submits of a proposal for these rows, and how often it counted each as failed."""
    made = Guarded(Proposing(found), "proposing", DrafterSetup(target=TARGET, tokenizer=None, rows=rows, slots=64))
    context = DraftContext(
        rows=range(rows),
        tokens=[[1, ROOT]] * rows,
        prompt_lengths=[1] * rows,
        fresh=[0] * rows,
        samplers=[Sampler(SamplingParams(temperature=0.0), [1])] * rows,
        rng=[Rng(0, 2)] * rows,
        hidden_states={},
    )
    trees = made.propose(context, Budget(nodes=[8] * rows, depth=[8] * rows))
    return trees, [made._failures.pop(row, 0) for row in range(rows)]


@pytest.mark.parametrize(("tree", "message"), FLAWS)
def test_rows_beside_it_are_sound(tree: Any, message: str) -> None:
    trees, failures = proposed([two(), tree, two()], 3)
    assert [trees[row].tokens for row in (0, 2)] == [(ROOT, 1, 2)] * 2 and failures == [0, 1, 0]
    assert trees[1].tokens == checked(tree).tree.tokens


@pytest.mark.parametrize(
    ("found", "got"),
    [
        (None, "NoneType"),
        (two(), "TokenTree"),
        ({0: two()}, "dict"),
        (iter([two()]), "list_iterator"),
        ([], "0"),
        ([two(), two()], "2"),
    ],
)
def test_what_is_no_list_of_a_tree_a_row_is_refused(found: Any, got: str, caplog: pytest.LogCaptureFixture) -> None:
    warn_drafter.cache_clear()
    trees, failures = proposed(found, 1)
    assert [tree.tokens for tree in trees] == [(ROOT,)] and failures == [1]
    assert f"a drafter proposes a list of 1 TokenTrees, one a row; got {got}" in caplog.text


def test_a_tree_that_is_too_large_is_cut_to_what_was_drawn_first() -> None:
    wide = nodes([1, 2, 3], [0, 0, 1])
    for tree, most, deepest, kept in (
        (two(), 1, 2, [1]),
        (two(), 2, 1, [1]),
        (two(), 0, 2, []),
        (two(), 2, 0, []),
        (two(), 2, 2, [1, 2]),
        (wide, 3, 1, [1, 2]),
        (wide, 2, 2, [1, 2]),
        (wide, 3, 2, [1, 2, 3]),
    ):
        found = checked(tree, most=most, deepest=deepest)
        assert found.tree.tokens == (ROOT, *(tree.tokens[node] for node in kept))
        assert (found.error is None) == (len(kept) == tree.size)
        assert checked(found.tree, most=most, deepest=deepest).error is None


def test_a_confidence_that_is_none_does_not_decide_what_is_submitted() -> None:
    tree = nodes([1, 2, 3], [0, 1, 2], drawn=[Drawn.DETERMINISTIC, *[Drawn.IID] * 3])
    tree.confidence = [1.0, float("nan"), 0.5, 2.0]
    tree.draft_probs = {node: torch.full((10,), 0.1) for node in range(3)}
    found = checked(tree)
    assert found.error is not None
    assert found.tree.tokens == (ROOT, 1, 2, 3) and found.tree.confidence == (1.0, 0.0, 0.5, 0.0)
    assert set(found.tree.draft_probs) == {0, 1, 2}
    assert all(torch.equal(probs, tree.draft_probs[node]) for node, probs in found.tree.draft_probs.items())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", [0, 3, 12])
def test_what_is_built_is_accepted(seed: int, size: int) -> None:
    tree = random_tree(seed, size, 10)
    found = check(tree, tree.tokens[0], 12, 12, TARGET)
    assert found.error is None and contents(found.tree) == contents(tree)


def test_probs_over_the_first_tokens_mean_these() -> None:
    probs = checked(sampled(torch.tensor([0.25, 0.75]))).tree.draft_probs[0]
    assert probs.tolist() == [0.25, 0.75, *[0.0] * 8]


def _growing(distributions: Distributions, submitted: Callable[[TokenTree], TokenTree]) -> Callable[[Rng], TokenTree]:
    """Draws a chain of two, of three behind token 0, where the budget is two; `submitted` is what becomes of it."""

    def draw(rng: Rng) -> TokenTree:
        tree, path = TokenTree(0), tuple[int, ...]()
        while len(path) < (3 if path[:1] == (0,) else 2):
            tree.set_probs(len(path), distributions[path].float())
            tree.add(rng.drafted(distributions[path].float(), len(path)), len(path), drawn=Drawn.IID)
            path = (*path, tree.tokens[-1])
        return submitted(tree)

    return draw


@pytest.mark.parametrize("rule", ["block", "traversal", "token_rejection", "recursive_rejection"])
def test_a_cut_by_the_order_of_drawing_keeps_the_distribution(rule: str) -> None:
    """Exactly, though whether a tree is too large depends on what was drawn; to lose it as a whole would be a bias."""

    def cut(tree: TokenTree) -> TokenTree:
        return check(tree, 0, 2, 2, three).tree

    def lost(tree: TokenTree) -> TokenTree:
        return tree if tree.size <= 2 else TokenTree(0)

    three: Any = SimpleNamespace(vocab_size=3)

    for seed in range(3):
        target, draft = toy_distributions(World.RANDOM, vocabulary=3, depth=3, seed=seed)
        distribution = exact_distribution(rule_named(rule), target, _growing(draft, cut), horizon=3)
        assert distribution.error(target) < 1e-6, "distributions travel in float32"
        assert exact_distribution(rule_named(rule), target, _growing(draft, lost), horizon=3).error(target) > 1e-3


def test_what_is_submitted_is_a_copy_that_nobody_writes_to() -> None:
    tree = random_tree(3, 8, 10)
    found, before = check(tree, tree.tokens[0], 8, 8, TARGET).tree, contents(tree)
    tree.tokens[1], tree.parents[2] = (tree.tokens[1] + 1) % 10, 0
    tree.add(1, 0)
    tree.probes.add(1)
    tree.draft_probs.clear()
    assert contents(found) == before != contents(tree) and found.draft_probs
    for write in (
        lambda: found.tokens.__setitem__(1, 3),
        lambda: found.parents.append(0),
        lambda: found.probes.add(1),
        lambda: found.add(1, 0),
        lambda: setattr(found, "tokens", [1]),
    ):
        with pytest.raises((AttributeError, TypeError)):
            write()


def test_states_that_were_begun_fit_the_target() -> None:
    good = Resume(boundary=2, states=torch.zeros(3, 4), stamp=1)
    found = checked(nodes([1, 2], [0, 1], resume=good))
    assert found.error is None and found.tree.resume is good
    for wrong in (
        replace(good, states=torch.zeros(4, 4)),
        replace(good, states=torch.zeros(0, 4)),
        replace(good, states=torch.zeros(3, 5)),
        replace(good, states=torch.zeros(1, 3, 4)),
        replace(good, states=torch.zeros(3, 4, dtype=torch.float64)),
        replace(good, boundary=0),
        replace(good, boundary=4),
    ):
        found = checked(nodes([1, 2], [0, 1], resume=wrong))
        assert found.tree.size == 0
        with pytest.raises(InvalidDraftError, match="resumes"):
            raise found.error or AssertionError
