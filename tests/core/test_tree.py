"""The token tree: masks against brute force, what is merged, cut, joined and packed."""

import random

import pytest
import torch

from forerun.core.tree import Resume, TokenTree, ancestor_mask, fetch_masses, graft, join, without
from forerun.model.inputs import Nodes
from forerun.types import Drawn


def random_tree(seed: int, size: int, vocabulary: int = 20, *, sampled: bool = True) -> TokenTree:
    chance = random.Random(seed)
    tree = TokenTree(chance.randrange(vocabulary))
    while tree.size < size:
        drawn = chance.choice(list(Drawn)) if sampled else Drawn.DETERMINISTIC
        probe = sampled and drawn is Drawn.DETERMINISTIC and chance.random() < 0.2
        parent = chance.randint(0, tree.size)
        tree.add(chance.randrange(vocabulary), parent, drawn=drawn, confidence=chance.random(), probe=probe)
        if drawn is not Drawn.DETERMINISTIC:
            tree.set_probs(parent, torch.rand(vocabulary, generator=torch.Generator().manual_seed(parent)))
    return tree


def brute_force_ancestors(parents: list[int]) -> list[set[int]]:
    seen = [{0}]
    for node, parent in enumerate(parents, start=1):
        seen.append({node} | seen[parent])
    return seen


def contents(tree: TokenTree) -> tuple[object, ...]:
    """All of it, to compare."""
    columns = (tree.tokens, tree.parents, tree.depths, tree.drawn, tree.confidence)
    probs = {node: found.tolist() for node, found in tree.draft_probs.items()}
    return (*map(list, columns), set(tree.probes), probs, dict(tree.masses), tree.resume)


class TestMask:
    @pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 9, 33, 64])
    def test_against_brute_force(self, size: int) -> None:
        rows = [[random.Random(97 * row + size).randint(0, node) for node in range(size)] for row in range(5)]
        rows += [list(range(size)), [0] * size]
        mask = ancestor_mask(torch.tensor(rows))
        for row, parents in enumerate(rows):
            for node, ancestors in enumerate(brute_force_ancestors(parents)):
                assert set(torch.nonzero(mask[row, node]).flatten().tolist()) == ancestors

    def test_of_nothing_is_the_root(self) -> None:
        assert ancestor_mask(torch.zeros(3, 0, dtype=torch.int64)).tolist() == [[[True]]] * 3

    def test_a_chain_sees_everything_before_it(self) -> None:
        mask = ancestor_mask(torch.arange(40).unsqueeze(0))
        assert torch.equal(mask[0], torch.ones(41, 41, dtype=torch.bool).tril())


class TestReading:
    @pytest.mark.parametrize("seed", range(5))
    def test_agrees_with_the_tensors(self, seed: int) -> None:
        tree = random_tree(seed, 30)
        nodes = Nodes.of_trees([tree])
        assert nodes.ids[0].tolist() == tree.tokens and nodes.depths[0].tolist() == tree.depths
        for node in range(31):
            assert [0, *tree.path(node)] == torch.nonzero(nodes.sees[0, node]).flatten().tolist()
            expected = [child for child in range(1, 31) if tree.parents[child] == node and child not in tree.probes]
            assert list(tree.children[node]) == expected
            assert sorted(tree.tried[node]) == expected

    def test_sampled_children_are_asked_first(self) -> None:
        tree = TokenTree(0)
        for token, drawn in enumerate([Drawn.DETERMINISTIC, Drawn.IID, Drawn.DETERMINISTIC, Drawn.IID]):
            tree.add(token, 0, drawn=drawn)
        assert tree.children[0] == (1, 2, 3, 4) and tree.tried[0] == (2, 4, 1, 3)

    def test_probes_have_no_place_among_the_children(self) -> None:
        tree = TokenTree(9)
        tree.add(1, 0, probe=True)
        tree.add(2, 0)
        assert tree.children[0] == (2,) and tree.probes == {1}

    def test_the_root_has_no_path(self) -> None:
        tree = TokenTree(4)
        assert tree.path(0) == () and tree.size == 0 and tree.children == ((),) and not tree.sampled and tree.prunable

    def test_nodes_with_the_same_tokens_count_as_the_first(self) -> None:
        tree = TokenTree(0)
        first, twin = (tree.add(5, 0, drawn=Drawn.IID) for _ in range(2))
        below = tree.add(6, twin)
        assert (tree.child(0, 5), tree.child(first, 6), tree.child(twin, 6)) == (first, below, None)
        assert tree.child(0, 6) is None and tree.child(None, 5) is None

    def test_survival_is_the_product_along_the_path(self) -> None:
        tree = TokenTree(0)
        tree.add_path([1, 2], confidence=0.5)
        tree.add(3, 1, confidence=1.5)
        tree.add(4, 1, probe=True)
        assert tree.survival() == [1, 0.5, 0.25, 0.5, 0]

    @pytest.mark.parametrize("why", ["sampled", "probe", "begun"])
    def test_what_may_not_be_pruned(self, why: str) -> None:
        tree = TokenTree(0)
        assert tree.prunable
        tree.add(1, 0, drawn=Drawn.IID if why == "sampled" else Drawn.DETERMINISTIC, probe=why == "probe")
        if why == "begun":
            tree.resume = Resume(boundary=1, states=torch.zeros(1, 4), stamp=0)
        assert not tree.prunable


class TestBuilding:
    def test_deterministic_twins_are_merged_and_nothing_else(self) -> None:
        tree = TokenTree(0)
        assert tree.add_path([5, 6, 7]) == 3
        assert tree.add_path([5, 6, 8]) == 4, "shares 5 and 6"
        assert tree.add(5, 0) == 1
        assert tree.add(5, 1) == 5, "the same token below another parent"
        assert tree.add(5, 0, drawn=Drawn.IID) == 6, "a sampled twin stays a node"
        assert tree.add(5, 0, drawn=Drawn.IID) == 7
        assert tree.add(5, 0, probe=True) == 8, "a probe may not stand in for a node"
        assert tree.add(5, 0) == 1
        assert tree.parents == [-1, 0, 1, 2, 2, 1, 0, 0, 0] and tree.depths == [0, 1, 2, 3, 3, 2, 1, 1, 1]

    def test_a_whole_tree_is_the_same_as_node_by_node(self) -> None:
        tree, parents = TokenTree(9), [0, 0, 1, 3]
        for token, parent in enumerate(parents):
            tree.add(token, parent, confidence=0.1 * token)
        whole = TokenTree.of(9, range(4), parents, [0.1 * token for token in range(4)])
        assert contents(whole) == contents(tree)
        assert whole.add(2, 1) == 3, "and knows its twins"

    @pytest.mark.parametrize("seed", range(3))
    def test_a_copy_is_its_own(self, seed: int) -> None:
        tree = random_tree(seed, 12)
        fetch_masses([tree])
        before, copy = contents(tree), tree.copy()
        assert contents(copy) == before
        copy.add(3, 2, confidence=0.5)
        copy.add(4, 1, probe=True)
        copy.set_probs(7, torch.ones(20))
        assert contents(tree) == before

    def test_a_copy_still_merges_twins(self) -> None:
        tree = TokenTree(0)
        tree.add_path([1, 2])
        tree.add(3, 0, drawn=Drawn.IID)
        again = tree.seal().copy()
        assert again.add_path([1, 2, 3]) == 4
        assert again.add(3, 0) == 5, "a deterministic node is no twin of a sampled one"

    def test_who_writes_to_a_sealed_tree_gets_an_error(self) -> None:
        tree = TokenTree(0)
        tree.add(1, 0)
        tree.seal()
        with pytest.raises(AttributeError):
            tree.add(2, 0)
        with pytest.raises(AttributeError):
            tree.add(2, 0, probe=True)
        with pytest.raises(TypeError):
            tree.tokens[1] = 3
        with pytest.raises(AttributeError, match="read-only"):
            tree.tokens = []


class TestCutting:
    @pytest.mark.parametrize("seed", range(5))
    def test_only_some_nodes(self, seed: int) -> None:
        tree, chance = random_tree(seed, 20), random.Random(seed)
        kept = {0}
        for node in range(1, 21):
            if tree.parents[node] in kept and chance.random() < 0.7:
                kept.add(node)
        cut, old = tree.only(kept - {0}), sorted(kept)
        assert cut.tokens == [tree.tokens[node] for node in old] and cut.drawn == [tree.drawn[node] for node in old]
        assert [old[parent] for parent in cut.parents[1:]] == [tree.parents[node] for node in old[1:]]
        assert {old[node] for node in cut.probes} == {node for node in tree.probes if node in kept}
        assert {old[node] for node in cut.draft_probs} == {node for node in tree.draft_probs if node in kept}
        assert cut.depths == [len(cut.path(node)) for node in range(cut.size + 1)]

    def test_what_was_drawn_from_nothing_goes_with_all_below(self) -> None:
        tree = TokenTree(0)
        tree.add(1, 0, drawn=Drawn.IID)
        below = tree.add(2, 1, drawn=Drawn.IID)
        tree.add(3, below)
        tree.add(4, 1)
        cut = without(tree, {1: 0.5})
        assert cut.tokens == [0, 1, 4] and cut.drawn[1] is Drawn.IID, "what was drawn above stays"

    def test_masses_that_are_known_are_not_asked_again(self) -> None:
        tree, probs = TokenTree(0), torch.tensor([0.5, 0.25])
        tree.set_probs(0, probs, mass=7.0)
        tree.set_probs(1, probs)
        tree.set_probs(2, -probs)
        fetch_masses([tree, TokenTree(1)])
        assert tree.masses[0] == 7.0 and tree.masses[1] == 0.75 and tree.masses[2] != tree.masses[2]


class TestJoining:
    def test_the_base_goes_in_whole_and_keeps_its_numbers(self) -> None:
        base, other = random_tree(1, 8), random_tree(2, 20, sampled=False)
        base.resume = Resume(boundary=1, states=torch.zeros(3, 4), stamp=5)
        joined = join(base, [other], 12)
        assert joined.size == 12 and joined.tokens[:9] == base.tokens and joined.parents[:9] == base.parents
        assert joined.resume is base.resume and joined.draft_probs.keys() == base.draft_probs.keys()
        assert not any(joined.drawn[9:]), "all else is deterministic"

    def test_one_that_is_too_large_already_stays(self) -> None:
        base = random_tree(1, 8)
        assert contents(join(base, [random_tree(2, 5)], 3)) == contents(base)

    def test_the_likeliest_of_the_others_are_taken(self) -> None:
        one, two = TokenTree(0), TokenTree(0)
        one.add_path([1, 2, 3], confidence=0.9)
        two.add_path([1, 5], confidence=0.95)
        two.add(7, 0, confidence=0.1)
        joined = join(TokenTree(0), [one, two], 4)
        assert sorted(joined.tokens[1:]) == [1, 2, 3, 5] and joined.confidence[1] == 0.95, "the surest says how likely"

    def test_grafted_below_a_node(self) -> None:
        tree, other = TokenTree(0), TokenTree(4)
        tree.add_path([1, 2])
        other.add_path([3, 4])
        other.add(5, 0, drawn=Drawn.IID)
        assert graft(tree, other, 2, since=2) == {0: 2, 1: 3, 2: 4}
        assert tree.tokens == [0, 1, 2, 3, 4] and tree.parents == [-1, 0, 1, 2, 3]


class TestPacking:
    def test_trees_of_unequal_size(self) -> None:
        trees = [random_tree(seed, size) for seed, size in [(1, 9), (2, 4), (3, 0), (4, 16)]]
        nodes = Nodes.of_trees(trees)
        assert nodes.ids.shape == (4, 17) and nodes.real.sum(1).tolist() == [10, 5, 1, 17]
        for row, tree in enumerate(trees):
            assert nodes.ids[row, : tree.size + 1].tolist() == tree.tokens
            for node in range(tree.size + 1):
                assert torch.nonzero(nodes.sees[row, node]).flatten().tolist() == [0, *tree.path(node)]

    @pytest.mark.parametrize("start", [0, 2])
    def test_levels_are_the_same_as_trees(self, start: int) -> None:
        parents = [-1, 0, 0, 1, 2, 2]
        trees = [TokenTree.of(root, [root + 1 + node for node in range(5)], parents[1:]) for root in (3, 30)]
        ids = torch.tensor([tree.tokens[1:] for tree in trees])
        levels = Nodes.of_levels([3, 30], ids, [*parents, 3, 3], counts=[5, 9], start=start)
        whole = Nodes.of_trees(trees, start=start)
        for name in ("ids", "depths", "sees", "real"):
            assert torch.equal(getattr(levels, name), getattr(whole, name)), name
        assert levels.start == whole.start == start

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
    def test_torchs_default_dtype_does_not_matter(self, dtype: torch.dtype) -> None:
        """It is that of a model which another engine loads meanwhile."""
        tree, before = random_tree(3, 9), torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            nodes = Nodes.of_trees([tree])
        finally:
            torch.set_default_dtype(before)
        assert nodes.ids.dtype is torch.int64 and nodes.sees.sum() == sum(tree.depths) + 10
