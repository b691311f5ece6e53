"""Static trees against brute force over all trees of small size."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from forerun.drafters.growth import Shape
from forerun.drafters.static_trees import best_size, best_tree, depths_of, likeliest_nodes
from forerun.errors import ArgumentError

CHANCES = [(0.6, 0.2, 0.1), (0.4, 0.3, 0.2), (0.9, 0.05), (0.5,), (0.0, 0.0)]


def every_tree(nodes: int) -> Iterator[tuple[int, ...]]:
    """All parent vectors of that size."""
    yield from itertools.product(*(range(node + 1) for node in range(nodes)))


def worth(parents: tuple[int, ...], chances: tuple[float, ...]) -> float:
    """Accepted tokens, by the definition."""
    alive, ranks, total = [1.0], dict[int, int](), 0.0
    for parent in parents:
        rank = ranks.get(parent, 0)
        ranks[parent] = rank + 1
        alive.append(alive[parent] * (chances[rank] if rank < len(chances) else 0.0))
        total += alive[-1]
    return total


@pytest.mark.parametrize("chances", CHANCES)
@pytest.mark.parametrize("depth", [1, 2, 3, 6])
def test_the_programme_finds_the_best_tree(chances: tuple[float, ...], depth: int) -> None:
    for nodes in range(7):
        fitting = (tree for tree in every_tree(nodes) if max(depths_of(tree), default=0) <= depth)
        wanted = max((worth(tree, chances) for tree in fitting), default=0.0)
        found = best_tree(chances, nodes, depth)
        assert found.expected == pytest.approx(wanted)
        assert worth(found.parents, chances) == pytest.approx(found.expected)
        assert len(found.parents) <= nodes and found.depth <= depth
        assert list(found.parents) == sorted(found.parents)


def test_the_size_is_that_of_the_best_rate() -> None:
    chances, level_ms = (0.6, 0.2, 0.1), 0.15
    times = [1 + 0.08 * nodes + (0.3 if nodes > 3 else 0.0) for nodes in range(7)]
    every = [tree for nodes in range(7) for tree in every_tree(nodes)]
    rates = [(1 + worth(t, chances)) / (times[len(t)] + level_ms * max(depths_of(t), default=0)) for t in every]
    found = best_size(chances, times, level_ms, 6)
    rate = (1 + found.expected) / (times[len(found.parents)] + level_ms * found.depth)
    assert rate == pytest.approx(max(rates))


def test_where_nothing_pays_nothing_is_drafted() -> None:
    assert best_size((0.05, 0.01), [1.0, 1.5, 2.0, 2.5], 0.3, 3).parents == ()


def test_the_likeliest_nodes_are_a_subtree_and_the_best_one() -> None:
    parents, given = (0, 0, 1, 1, 2, 3), (0.5, 0.4, 0.9, 0.1, 0.3, 0.8)
    path = [1.0]
    for parent, probability in zip(parents, given, strict=True):
        path.append(path[parent] * probability)
    for count in range(7):
        found = likeliest_nodes(parents, given, count)
        assert all(parents[node - 1] in (0, *found) for node in found)
        closed = (
            nodes
            for nodes in itertools.combinations(range(1, 7), count)
            if all(parents[node - 1] in (0, *nodes) for node in nodes)
        )
        assert sum(path[node] for node in found) == pytest.approx(max(sum(path[n] for n in nodes) for nodes in closed))


def test_the_best_tree_is_a_shape_that_drafters_take() -> None:
    for nodes in range(1, 14):
        tree = best_tree((0.6, 0.2, 0.1), nodes, 5)
        assert Shape.of(tree.parents).parents == tree.parents


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: best_tree((0.8, 0.3), 3, 3),
        lambda: best_tree((-0.1,), 3, 3),
        lambda: best_tree((0.5,), -1, 3),
        lambda: best_size((0.5,), [], 0.1, 3),
        lambda: likeliest_nodes((1, 0), (0.5, 0.5), 1),
        lambda: likeliest_nodes((0,), (), 1),
    ],
)
def test_what_makes_no_sense_is_refused(wrong: object) -> None:
    with pytest.raises(ArgumentError):
        wrong()  # type: ignore[operator]
