"""Children drawn from a distribution: in which order, from what, and what is recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from forerun.drafters.drawing import Draw, Shape, children_of, likeliest, on_host, resolve
from forerun.errors import ArgumentError
from forerun.types import Drawn

LAW = torch.tensor([0.1, 0.4, 0.0, 0.3, 0.2])


def scripted(*tokens: int) -> tuple[Callable[[Tensor, int], int], list[Tensor]]:
    """A pick that returns these tokens, and the distributions that it was shown."""
    seen: list[Tensor] = []

    def pick(probs: Tensor, index: int) -> int:
        seen.append(probs.clone())
        assert index >= 0 and probs[tokens[len(seen) - 1]] > 0
        return tokens[len(seen) - 1]

    return pick, seen


@dataclass
class Siblings:
    """The children of one node on the host."""

    tokens: list[int]
    drawn: list[int]
    confidence: list[float]
    probs: Tensor | None


def siblings(probs: Tensor, count: int, draw: Draw, pick: Callable[[Tensor, int], int]) -> Siblings:
    """Those that are valid."""
    found = children_of(probs.view(1, 1, -1), count, draw, on_host(pick))
    valid = found.validity()[0, 0]
    columns = [values[0, 0][valid].tolist() for values in (found.tokens, found.drawn, found.confidence)]
    return Siblings(*columns, probs=None if found.probs is None else found.probs[0, 0])


def test_given_children_are_the_likeliest_and_carry_their_probability() -> None:
    found = siblings(LAW, 2, Draw.DETERMINISTIC, scripted()[0])
    assert (found.tokens, found.drawn, found.probs) == ([1, 3], [Drawn.DETERMINISTIC] * 2, None)
    assert found.confidence == pytest.approx([0.4, 0.3])


def test_iid_children_are_all_drawn_from_the_recorded_distribution() -> None:
    pick, seen = scripted(1, 1, 0)
    found = siblings(LAW, 3, Draw.IID, pick)
    assert (found.tokens, found.drawn) == ([1, 1, 0], [Drawn.IID] * 3)
    assert found.probs is not None and torch.equal(found.probs, LAW)
    assert all(torch.equal(probs, LAW) for probs in seen)


def test_without_replacement_the_elder_are_removed_and_the_rest_renormalised() -> None:
    pick, seen = scripted(1, 4, 3)
    found = siblings(LAW, 3, Draw.WITHOUT_REPLACEMENT, pick)
    assert (found.tokens, found.drawn) == ([1, 4, 3], [Drawn.WITHOUT_REPLACEMENT] * 3)
    assert found.probs is not None and torch.equal(found.probs, LAW)
    torch.testing.assert_close(seen[1], torch.tensor([1, 0, 0, 3, 2]) / 6)
    torch.testing.assert_close(seen[2], torch.tensor([1, 0, 0, 3, 0]) / 4)


def test_greedy_k_draws_one_from_the_distribution_restricted_to_the_others_and_records_that() -> None:
    pick, seen = scripted(0)
    found = siblings(LAW, 3, Draw.GREEDY_K, pick)
    assert (found.tokens, found.drawn) == ([1, 3, 0], [Drawn.DETERMINISTIC, Drawn.DETERMINISTIC, Drawn.IID])
    restricted = torch.tensor([1, 0, 0, 0, 2]) / 3
    assert found.probs is not None
    torch.testing.assert_close(found.probs, restricted)
    torch.testing.assert_close(seen[0], restricted)


def test_greedy_one_is_an_ordinary_draw() -> None:
    found = siblings(LAW, 1, Draw.GREEDY_K, scripted(4)[0])
    assert (found.tokens, found.drawn) == ([4], [Drawn.IID])
    assert found.probs is not None and torch.equal(found.probs, LAW)


@pytest.mark.parametrize("draw", [Draw.DETERMINISTIC, Draw.WITHOUT_REPLACEMENT, Draw.GREEDY_K])
def test_no_more_children_than_the_distribution_has_tokens(draw: Draw) -> None:
    narrow = torch.tensor([0.0, 0.7, 0.0, 0.3])
    found = siblings(narrow, 4, draw, scripted(3, 1)[0])
    assert sorted(found.tokens) == [1, 3]


def test_the_confidence_of_a_drawn_child_does_not_depend_on_it() -> None:
    for draw in (Draw.IID, Draw.WITHOUT_REPLACEMENT, Draw.GREEDY_K):
        first, second = (siblings(LAW, 1, draw, scripted(token)[0]).confidence for token in (0, 1))
        assert first == second


def test_the_batched_way_gives_what_the_distribution_gives() -> None:
    logits = torch.randn(3, 2, 9, generator=torch.Generator().manual_seed(0))
    found = likeliest(logits, 3)
    for row in range(3):
        for node in range(2):
            one = siblings(logits[row, node].softmax(-1), 3, Draw.DETERMINISTIC, scripted()[0])
            assert found.tokens[row, node].tolist() == one.tokens
            assert found.confidence[row, node].tolist() == pytest.approx(one.confidence, abs=1e-6)


def test_what_auto_means() -> None:
    assert resolve(Draw.AUTO, greedy=True, chain=False) is Draw.DETERMINISTIC
    assert resolve(Draw.IID, greedy=True, chain=True) is Draw.DETERMINISTIC
    assert resolve(Draw.AUTO, greedy=False, chain=True) is Draw.IID
    assert resolve(Draw.AUTO, greedy=False, chain=False) is Draw.WITHOUT_REPLACEMENT
    assert resolve(Draw.GREEDY_K, greedy=False, chain=True) is Draw.GREEDY_K


def test_a_shape_is_numbered_level_by_level() -> None:
    shape = Shape.regular((3, 2, 1))
    assert shape.size == 15 and shape.parents == (-1, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8, 9)
    assert shape.depths == (0,) + (1,) * 3 + (2,) * 6 + (3,) * 6
    assert not shape.chain and Shape.regular((1, 1)).chain


@pytest.mark.parametrize(
    ("nodes", "depth", "count"), [(99, 9, 15), (5, 9, 5), (99, 1, 3), (2, 1, 2), (99, 0, 0), (0, 9, 0), (99, -1, 0)]
)
def test_how_much_of_a_shape_fits_a_budget(nodes: int, depth: int, count: int) -> None:
    assert Shape.regular((3, 2, 1)).within(nodes, depth) == count


def test_any_tree_is_a_shape() -> None:
    parents = (0, 0, 0, 1, 1, 3, 5)
    shape = Shape.of(parents)
    assert shape.parents == (-1, *parents) and shape.ranks == (0, 0, 1, 2, 0, 1, 0, 0)
    assert shape.depths == (0, 1, 1, 1, 2, 2, 2, 3) and shape.size == 7 and shape.widths == (3, 2, 1)
    assert [shape.chosen(depth) for depth in range(3)] == [None, [0, 1, 4], [1]]
    assert shape.within(99, 2) == 6 and shape.within(4, 9) == 4
    assert Shape.of(Shape.regular((3, 2, 1)).parents[1:]) == Shape.regular((3, 2, 1))
    for wrong in ((1,), (0, 0, 3), (0, 1, 0)):
        with pytest.raises(ArgumentError, match="level by level"):
            Shape.of(wrong)
