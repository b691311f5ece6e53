"""The token tree: masks and depths against brute force, what is refused, what is merged, and round trips."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from torch import Tensor

from forerun.errors import InvalidDraftError
from forerun.tree import TokenTree, TreeBuilder, ancestor_mask, depths, gather, rebuild, stack, token_trees
from forerun.types import Draft, Drawn


def random_builder(seed: int, size: int, vocabulary: int = 20, *, laws: bool = True) -> TreeBuilder:
    chance = random.Random(seed)
    builder = TreeBuilder()
    while len(builder) < size:
        drawn = chance.choice(list(Drawn)) if laws else Drawn.DETERMINISTIC
        probe = drawn is Drawn.DETERMINISTIC and chance.random() < 0.2
        parent = chance.randint(0, len(builder))
        builder.add(chance.randrange(vocabulary), parent, drawn=drawn, confidence=chance.random(), probe=probe)
        if drawn is not Drawn.DETERMINISTIC:
            builder.set_law(parent, torch.rand(vocabulary, generator=torch.Generator().manual_seed(parent)))
    return builder


def brute_force_ancestors(parents: list[int]) -> list[set[int]]:
    seen = [{0}]
    for node, parent in enumerate(parents, start=1):
        seen.append({node} | seen[parent])
    return seen


def same(left: Draft, right: Draft) -> None:
    for field in dataclasses.fields(Draft):
        one, other = getattr(left, field.name), getattr(right, field.name)
        assert (one is None) == (other is None), field.name
        if isinstance(one, Tensor):
            assert one.dtype == other.dtype and torch.equal(one, other), field.name


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 9, 33, 64])
def test_ancestor_mask_and_depths_against_brute_force(size: int) -> None:
    rows = [[random.Random(97 * row + size).randint(0, node) for node in range(size)] for row in range(5)]
    rows += [list(range(size)), [0] * size]
    mask, depth = ancestor_mask(torch.tensor(rows)), depths(torch.tensor(rows))
    for row, parents in enumerate(rows):
        for node, ancestors in enumerate(brute_force_ancestors(parents)):
            assert set(torch.nonzero(mask[row, node]).flatten().tolist()) == ancestors
            assert depth[row, node] == len(ancestors) - 1


def test_mask_of_nothing_is_the_root() -> None:
    assert ancestor_mask(torch.zeros(3, 0, dtype=torch.int64)).tolist() == [[[True]]] * 3


def test_a_chain_sees_everything_before_it() -> None:
    mask = ancestor_mask(torch.arange(40).unsqueeze(0))
    assert torch.equal(mask[0], torch.ones(41, 41, dtype=torch.bool).tril())


@pytest.mark.parametrize("seed", range(5))
def test_host_tree_agrees_with_the_tensors(seed: int) -> None:
    builder = random_builder(seed, 30)
    draft = stack([builder])
    (tree,) = token_trees(draft, [3], 20)
    assert tree.tokens[0] == 3 and tree.size == 30
    assert list(tree.depths) == depths(draft.parents)[0].tolist()
    mask = ancestor_mask(draft.parents)[0]
    for node in range(31):
        assert [0, *tree.path(node)] == torch.nonzero(mask[node]).flatten().tolist()
        expected = [child for child in range(1, 31) if tree.parents[child] == node and child not in tree.probes]
        assert list(tree.children[node]) == expected
    assert tree.kinds() == set(builder.drawn)


def chain(tokens: list[int], parents: list[int], **changes: Tensor | None) -> Draft:
    count = len(tokens)
    fields = {
        "tokens": torch.tensor([tokens]),
        "parents": torch.tensor([parents]),
        "counts": torch.tensor([count]),
        "drawn": torch.zeros(1, count, dtype=torch.uint8),
    }
    return Draft(**{**fields, **changes})


SAMPLED = torch.ones(1, 1, dtype=torch.uint8)


def test_given_twins_are_merged_and_nothing_else() -> None:
    builder = TreeBuilder()
    assert builder.add_path([5, 6, 7]) == 3
    assert builder.add_path([5, 6, 8]) == 4, "shares 5 and 6"
    assert builder.add(5, 0) == 1
    assert builder.add(5, 1) == 5, "the same token below another parent"
    assert builder.add(5, 0, drawn=Drawn.IID) == 6, "a sampled twin stays a node"
    assert builder.add(5, 0, drawn=Drawn.IID) == 7
    assert builder.add(5, 0, probe=True) == 8, "a probe may not stand in for a node"
    assert builder.add(5, 0) == 1
    assert builder.parents == [0, 1, 2, 2, 1, 0, 0, 0]


def test_scouts_have_no_place_among_the_children() -> None:
    builder = TreeBuilder()
    builder.add(1, 0, probe=True)
    builder.add(2, 0)
    tree = builder.tree(9)
    assert tree.children[0] == (2,) and tree.probes == {1}


@pytest.mark.parametrize("law_ids", [None, torch.tensor([0, 3, 5, 11])])
def test_stack_and_rebuild_round_trip(law_ids: Tensor | None) -> None:
    builders = [random_builder(seed, size) for seed, size in [(1, 9), (2, 4), (3, 0), (4, 16)]]
    if law_ids is not None:
        for builder in builders:
            builder.laws = {node: law[:4] for node, law in builder.laws.items()}
    draft = stack(builders, law_ids=law_ids)
    assert draft.counts.tolist() == [9, 4, 0, 16] and draft.size == 16
    same(stack([rebuild(draft, row, widen=False) for row in range(4)], law_ids=law_ids), draft)
    for row, builder in enumerate(builders):
        again = rebuild(draft, row)
        assert (again.tokens, again.parents, again.drawn, again.probes) == (
            builder.tokens,
            builder.parents,
            builder.drawn,
            builder.probes,
        )
        assert again.confidence == pytest.approx(builder.confidence)
        assert set(again.laws) == set(builder.laws)


def test_a_rebuilt_builder_still_merges_twins() -> None:
    builder = TreeBuilder()
    builder.add_path([1, 2])
    builder.add(3, 0, drawn=Drawn.IID)
    builder.set_law(0, torch.ones(4))
    again = rebuild(stack([builder]), 0)
    assert again.add_path([1, 2, 3]) == 4
    assert again.add(3, 0) == 5, "a deterministic node is no twin of a sampled one"


def test_laws_are_widened_to_the_targets_vocabulary() -> None:
    builder = TreeBuilder()
    builder.add(5, 0, drawn=Drawn.IID)
    builder.set_law(0, torch.tensor([0.25, 0.75]))
    (tree,) = token_trees(stack([builder], law_ids=torch.tensor([2, 5])), [0], 8)
    assert tree.laws[0].tolist() == [0, 0, 0.25, 0, 0, 0.75, 0, 0]
    builder.set_law(0, torch.tensor([0, 0, 0, 0, 0, 1.0]))
    (tree,) = token_trees(stack([builder]), [0], 8)
    assert tree.laws[0].tolist() == [0, 0, 0, 0, 0, 1, 0, 0], "a drafter whose head is padded to fewer tokens"


def one_law(token: int, law: list[float], ids: list[int] | None) -> Draft:
    builder = TreeBuilder()
    builder.add(token, 0, drawn=Drawn.IID)
    builder.set_law(0, torch.tensor(law))
    return stack([builder], law_ids=None if ids is None else torch.tensor(ids))


def test_gather_keeps_what_one_law_ids_means() -> None:
    """Rows out of order, one row without a draft: laws stay narrow, and mean the same tokens."""
    draft = gather([([2], one_law(5, [0.25, 0.75], [2, 5])), ([0], one_law(2, [0.5, 0.5], [2, 5]))], 3)
    assert draft.counts.tolist() == [1, 0, 1] and draft.laws.shape == (3, 2, 2)
    trees = token_trees(draft, [0, 0, 0], 8)
    assert trees[0].laws[0].tolist() == [0, 0, 0.5, 0, 0, 0.5, 0, 0]
    assert trees[2].laws[0].tolist() == [0, 0, 0.25, 0, 0, 0.75, 0, 0]
    assert trees[1].size == 0


@pytest.mark.parametrize("other", [None, [0, 7]])
def test_gather_mixes_drafters_with_different_vocabularies(other: list[int] | None) -> None:
    full = [0.0] * 7 + [1.0]
    drafts = [([1], one_law(5, [0.25, 0.75], [2, 5])), ([0], one_law(7, full if other is None else [0.0, 1.0], other))]
    trees = token_trees(gather(drafts, 2), [0, 0], 8)
    assert trees[0].laws[0].tolist() == full
    assert trees[1].laws[0].tolist() == [0, 0, 0.25, 0, 0, 0.75, 0, 0]


def test_gather_mixes_sampled_and_given_drafts() -> None:
    given = TreeBuilder()
    given.add_path([1, 2, 3], confidence=0.5)
    draft = gather([([0], stack([given])), ([1], one_law(5, [0.25, 0.75], [2, 5]))], 2)
    trees = token_trees(draft, [0, 0], 8)
    assert trees[0].tokens == (0, 1, 2, 3) and not trees[0].laws
    assert trees[1].laws[0][5] == 0.75
    assert draft.confidence[0].tolist() == [0.5, 0.5, 0.5]


def test_gather_of_one_whole_draft_is_that_draft() -> None:
    draft = stack([random_builder(1, 5), random_builder(2, 3)])
    assert gather([([0, 1], draft)], 2) is draft
    swapped = gather([([1, 0], draft)], 2)
    assert swapped.tokens[0, :3].tolist() == draft.tokens[1, :3].tolist()
    assert gather([], 2).counts.tolist() == [0, 0]


@pytest.mark.parametrize("seed", range(3))
def test_gather_in_pieces_is_the_whole(seed: int) -> None:
    builders = [random_builder(10 * seed + row, size) for row, size in enumerate([4, 7, 2])]
    pieces = [([1], stack([builders[1]])), ([2, 0], stack([builders[2], builders[0]]))]
    same(gather(pieces, 3), stack(builders))


def test_a_sampled_node_without_a_law_cannot_be_rebuilt() -> None:
    draft = chain([1], [0], drawn=SAMPLED)
    with pytest.raises(InvalidDraftError, match="records no law"):
        rebuild(draft, 0)


def test_the_root_has_no_path() -> None:
    tree = TokenTree(tokens=(4,), parents=(-1,), drawn=(Drawn.DETERMINISTIC,), laws={})
    assert tree.path(0) == () and tree.depths == (0,) and tree.children == ((),) and tree.kinds() == frozenset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_torchs_default_dtype_does_not_matter(dtype: torch.dtype) -> None:
    """It is that of a model which another engine loads meanwhile: recorded laws are those that were drawn from."""
    builder, before = random_builder(3, 9), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        draft = stack([builder])
        mask = ancestor_mask(draft.parents)
    finally:
        torch.set_default_dtype(before)
    assert (
        draft.laws is not None and draft.laws.dtype == torch.float32 and mask.sum() == depths(draft.parents).sum() + 10
    )
    assert builder.laws and all(torch.equal(draft.laws[0, node], law) for node, law in builder.laws.items())
