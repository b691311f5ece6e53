"""EAGLE-2's dynamic tree: the likeliest nodes of everything that was looked at, within any budget."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from forerun.drafters.drawing import DraftVocabulary
from forerun.drafters.trees import DynamicTree
from forerun.types import Drawn

VOCABULARY = 5
BATCH = 3


class Markov:
    """A model whose distribution depends on row and last token alone; remembers what it was asked."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.first = torch.randn(BATCH, 1, VOCABULARY, generator=generator)
        self.table = 2 * torch.randn(BATCH, VOCABULARY, VOCABULARY, generator=generator)
        self.asked: list[tuple[Tensor, Tensor]] = []

    def descend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        self.asked.append((tokens, parents))
        return self.table[torch.arange(BATCH)[:, None], tokens]

    def probability(self, row: int, path: tuple[int, ...]) -> float:
        """Of a path from the root."""
        probs = [self.first[row, 0], *(self.table[row, token] for token in path[:-1])]
        return float(sum(probs.log_softmax(-1)[token] for probs, token in zip(probs, path, strict=True)).exp())


def paths_of(tree: DynamicTree, model: Markov, depth: int, nodes: int) -> list[set[tuple[int, ...]]]:
    """The token path of every submitted node, row by row."""
    grown = tree.grow(model.first, model.descend, None, depth)
    found = []
    for row in grown.fetch():
        cut, _ = tree.cut(0, row, nodes, depth)
        found.append({tuple(cut.tokens[step] for step in cut.path(node)) for node in range(1, cut.size + 1)})
    return found


def test_with_full_width_it_is_the_best_tree_there_is() -> None:
    model = Markov()
    found = paths_of(DynamicTree(depth=3, top_k=VOCABULARY**2, nodes=12), model, 3, 12)
    every = [path for size in (1, 2, 3) for path in itertools.product(range(VOCABULARY), repeat=size)]
    for row, paths in enumerate(found):
        best = sorted(every, key=lambda path, row=row: -model.probability(row, path))[:12]  # type: ignore[misc]
        assert paths == set(best)


@pytest.mark.parametrize(("depth", "nodes"), [(1, 3), (2, 4), (4, 1), (4, 9)])
def test_a_budget_keeps_the_likeliest_and_their_ancestors(depth: int, nodes: int) -> None:
    model = Markov(1)
    for row, paths in enumerate(paths_of(DynamicTree(depth=4, top_k=3, nodes=10), model, depth, nodes)):
        assert len(paths) == min(nodes, 3) if depth == 1 else len(paths) == nodes
        assert all(len(path) <= depth for path in paths)
        assert all(path[:-1] in paths for path in paths if len(path) > 1)
        assert max(paths, key=lambda path, row=row: model.probability(row, path)) in paths  # type: ignore[misc]


def test_the_model_runs_a_level_at_a_time_and_never_the_leaves() -> None:
    model = Markov()
    tree = DynamicTree(depth=4, top_k=3, nodes=8)
    tree.grow(model.first, model.descend, None, 4)
    assert [tokens.shape for tokens, _ in model.asked] == [(BATCH, 3)] * 3
    assert sum(tokens.shape[1] for tokens, _ in model.asked) == tree.run
    assert all(bool((parents < 3).all()) for _, parents in model.asked)


def test_it_stops_where_every_path_has_become_unlikely() -> None:
    model = Markov()
    DynamicTree(depth=6, top_k=2, nodes=8, stop_below=0.99).grow(model.first, model.descend, None, 6)
    assert model.asked == []


def test_tokens_are_the_targets_and_nodes_are_given() -> None:
    model = Markov()
    ids = torch.tensor([3, 10, 11, 40, 41])
    vocabulary = DraftVocabulary(token_ids=ids, size=50)

    def descend(tokens: Tensor, parents: Tensor) -> Tensor:
        assert set(tokens.flatten().tolist()) <= set(ids.tolist())
        return model.descend(torch.searchsorted(ids, tokens), parents)

    tree = DynamicTree(depth=2, top_k=2, nodes=5)
    row = tree.grow(model.first, descend, vocabulary, 2).fetch()[0]
    cut, submitted = tree.cut(7, row, 5, 2)
    assert cut.tokens[0] == 7 and cut.size == 5 and set(cut.tokens[1:]) <= set(ids.tolist())
    assert set(cut.drawn) == {Drawn.DETERMINISTIC}
    assert (submitted.tokens, submitted.parents) == (cut.tokens, cut.parents)
    assert set(submitted.evidence) == set(range(1, 6))
