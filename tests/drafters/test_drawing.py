"""Children drawn from distributions, node by node on the host and a level at once, and EAGLE-2's dynamic tree."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from contract.test_recorded import LoggedRng
from drafters.asking import contexts
from forerun.core.rng import Rng
from forerun.core.sampling import Sampler
from forerun.core.tree import TokenTree
from forerun.decode.drafter import DraftContext
from forerun.drafters.drawing import (
    Children,
    DraftVocabulary,
    Draw,
    Draws,
    Grower,
    HostDraws,
    Shape,
    children_of,
    on_host,
    resolve,
)
from forerun.drafters.trees import DynamicTree, FixedTree
from forerun.errors import ArgumentError
from forerun.types import Drawn, SamplingParams

CPU = torch.device("cpu")
VOCABULARY = 13
SHAPES = [Shape.regular((1, 1, 1)), Shape.regular((3, 2, 1)), Shape.of([0, 0, 0, 1, 1, 2, 4])]
DRAWS = [Draw.DETERMINISTIC, Draw.IID, Draw.WITHOUT_REPLACEMENT, Draw.GREEDY_K]
NEUTRAL = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0)
PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"top_k": 2},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"temperature": 1.7, "top_k": 6, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.8, "top_k": -1, "top_p": 0.3},
]
PROCESSED: list[dict[str, Any]] = [
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "top_p": 0.9},
    {"repetition_penalty": 1.5, "logit_bias": {3: 2.0, 5: -1.0}},
    {"allowed_token_ids": [2, 3, 4, 5, 9, 12], "min_tokens": 2},
    {"temperature": 0.0, "presence_penalty": 2.0, "repetition_penalty": 0.7},
]


def growers(draw: Draw, params: list[dict[str, Any]], seed: int = 0) -> list[Grower]:
    """One for each of the parameters; at temperature 0 there is nothing to draw."""
    found = []
    for row, changes in enumerate(params):
        sampler = Sampler(replace(NEUTRAL, **changes), [1, 2])
        own = Draw.DETERMINISTIC if sampler.greedy else draw
        found.append(Grower(draw=own, sampler=sampler, rng=Rng(100 * seed + row, 7), output=()))
    return found


def random_logits(rows: int, level: range, vocabulary: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(31 * seed + level.start)
    return 2 * torch.randn(rows, len(level), vocabulary, generator=generator)


def both(
    draw: Draw,
    shape: Shape,
    params: list[dict[str, Any]],
    seed: int,
    vocabulary: DraftVocabulary | None = None,
    sorts: bool = True,
) -> list[tuple[Children, Children]]:
    """(at once, one by one) for every level."""
    rows, found = growers(draw, params, seed), []
    draws = Draws.of(rows, shape, CPU, vocabulary=VOCABULARY, sorts=sorts)
    size = VOCABULARY if vocabulary is None else len(vocabulary.token_ids)
    ids = torch.zeros(len(rows), 0, dtype=torch.int64)
    for depth, level in enumerate(shape.levels[:-1]):
        logits = random_logits(len(rows), level, size, seed)
        single = HostDraws(shape=shape, growers=rows).children(logits, depth, ids, vocabulary)
        found.append((draws.children(logits, depth, ids, vocabulary), single))
        chosen = shape.chosen(depth)
        kept = found[-1][0] if chosen is None else found[-1][0].only(chosen)
        ids = torch.cat([ids, kept.tokens.flatten(1)], dim=1)
    return found


def check_alike(at_once: Children, single: Children) -> None:
    """The same children; those that are not valid hold anything."""
    valid = torch.ones_like(single.tokens, dtype=torch.bool) if single.valid is None else single.valid
    assert at_once.valid is None or torch.equal(at_once.valid, valid)
    for name in ("tokens", "drawn", "confidence"):
        torch.testing.assert_close(getattr(at_once, name)[valid], getattr(single, name)[valid], atol=1e-6, rtol=1e-5)
    sampled = (single.drawn != int(Drawn.DETERMINISTIC)) & valid
    if bool(sampled.any()):
        torch.testing.assert_close(at_once.probs[sampled.any(-1)], single.probs[sampled.any(-1)], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("sorts", [True, False])
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: str(shape.counts))
def test_at_once_is_one_by_one(draw: Draw, shape: Shape, sorts: bool) -> None:
    """Rows of all kinds side by side, and one that takes the likeliest tokens."""
    for seed in range(4):
        for pair in both(draw, shape, [*PARAMS, {"temperature": 0.0}], seed, sorts=sorts):
            check_alike(*pair)


@pytest.mark.parametrize("draw", DRAWS)
def test_rows_of_one_kind(draw: Draw) -> None:
    for changes in PARAMS:
        for pair in both(draw, SHAPES[1], [changes, changes], 5):
            check_alike(*pair)
    greedy = both(draw, SHAPES[1], [{"temperature": 0.0}] * 2, 5)
    for at_once, single in greedy:
        assert at_once.probs is None and at_once.valid is None
        check_alike(at_once, single)


@pytest.mark.parametrize("draw", DRAWS)
def test_a_drafters_own_vocabulary(draw: Draw) -> None:
    vocabulary = DraftVocabulary(token_ids=torch.tensor([1, 4, 5, 8, 12]), size=VOCABULARY)
    for seed in range(3):
        for at_once, single in both(draw, Shape.regular((3, 2)), PARAMS, seed, vocabulary):
            check_alike(at_once, single)
            valid = slice(None) if at_once.valid is None else at_once.valid
            assert set(at_once.tokens[valid].flatten().tolist()) <= {1, 4, 5, 8, 12}


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_penalties_biases_and_bans_see_each_nodes_path(draw: Draw, shape: Shape) -> None:
    for seed in range(3):
        for at_once, single in both(draw, shape, [*PROCESSED, {}], seed):
            check_alike(at_once, single)


def test_more_children_than_tokens() -> None:
    vocabulary = DraftVocabulary(token_ids=torch.tensor([3, 7]), size=VOCABULARY)
    for draw in (Draw.WITHOUT_REPLACEMENT, Draw.GREEDY_K):
        for at_once, single in both(draw, Shape.regular((4,)), [{}, {"top_k": 1}], 1, vocabulary):
            check_alike(at_once, single)
            assert at_once.valid is not None and at_once.valid.sum(-1).flatten().tolist() == [2, 1]


def test_where_the_host_has_to_look_there_is_none() -> None:
    shape = SHAPES[0]
    for row in (
        replace(growers(Draw.IID, [{}])[0], sampler=Sampler(replace(NEUTRAL), [1], bad_words=[[3, 4]])),
        replace(growers(Draw.IID, [{}])[0], sampler=Sampler(replace(NEUTRAL, logits_processors=[lambda _, x: x]), [1])),
        replace(growers(Draw.IID, [{}])[0], rng=LoggedRng(Rng(1, 1))),
    ):
        assert Draws.of([*growers(Draw.IID, [{}]), row], shape, CPU, vocabulary=VOCABULARY, sorts=True) is None


def test_no_level_needs_a_value() -> None:
    """On the meta device there is none."""
    params = [*PARAMS, {"temperature": 0.0}, {"presence_penalty": 1.0, "logit_bias": {3: 2.0}, "min_tokens": 5}]
    for draw in DRAWS:
        draws = Draws.of(growers(draw, params), SHAPES[1], CPU, vocabulary=VOCABULARY, sorts=True)
        draws = draws.with_tensors(tuple(number.to("meta") for number in draws.tensors))
        for depth, width in enumerate(SHAPES[1].widths):
            level = SHAPES[1].levels[depth]
            ids = torch.zeros(len(params), level.start - 1 + len(level), dtype=torch.int64, device="meta")
            children = draws.children(torch.zeros(len(params), len(level), VOCABULARY, device="meta"), depth, ids)
            assert children.tokens.shape == (len(params), len(level), width)


def grown(
    draw: Draw, context: DraftContext, logits: Callable[[range], Tensor], *, sorts: bool = True
) -> list[TokenTree]:
    """The context's trees, at once on the device or (not `sorts`) with one distribution after the other."""
    tree, rows = FixedTree(shape=SHAPES[1], draw=draw), list(range(len(context.rows)))
    draws = tree.draws(context, rows, CPU, VOCABULARY, recorded=sorts)
    found = tree.grow(draws, 15, logits(range(1)), lambda ids, level: logits(level))
    return [token_tree for _, token_tree, _ in tree.cuts(context, rows, found, [15] * len(rows))]


def context_of(samplers: list[Sampler]) -> DraftContext:
    rows = [7 + row for row in range(len(samplers))]
    return replace(contexts([[1, 2]] * len(rows)), rows=rows, samplers=samplers)


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("changes", [{}, {"top_p": 0.9}, {"presence_penalty": 1.0}, {"temperature": 0.0}], ids=str)
def test_a_row_without_a_distribution_has_no_tree(draw: Draw, wrong: float, changes: dict[str, Any]) -> None:
    """It is said of that row; those beside it have the trees that they would have had."""

    def logits(level: range) -> Tensor:
        return random_logits(3, level, VOCABULARY, 1)

    def broken(level: range) -> Tensor:
        values = logits(level)
        values[1, :, 4] = wrong
        return values

    samplers = [Sampler(replace(NEUTRAL, **changes), [1]) for _ in range(3)]
    for sorts in (True, False):
        context, sound = context_of(samplers), context_of(samplers)
        expected, found = grown(draw, sound, logits, sorts=sorts), grown(draw, context, broken, sorts=sorts)
        for kept, wanted in zip((found[0], found[2]), (expected[0], expected[2]), strict=True):
            assert (kept.tokens, kept.parents, kept.drawn) == (wanted.tokens, wanted.parents, wanted.drawn)
            assert (kept.confidence, kept.probes) == (wanted.confidence, wanted.probes)
        assert expected[1].size > 0 and found[1].size == 0 and not sound.failures
        assert list(context.failures) == [8] and "drafter" in str(context.failures[8])


@pytest.mark.parametrize("draw", DRAWS)
def test_below_a_node_without_a_distribution_there_is_nothing(draw: Draw) -> None:
    """What was drawn above it stays: its fate may not depend on what follows from its value."""

    def logits(level: range) -> Tensor:
        return random_logits(1, level, VOCABULARY, 1)

    def broken(level: range) -> Tensor:
        return logits(level) if level.start == 0 else logits(level).fill_(torch.nan)

    for changes in ({}, {"presence_penalty": 1.0}):
        samplers = [Sampler(replace(NEUTRAL, **changes), [1])]
        [whole], [cut] = grown(draw, context_of(samplers), logits), grown(draw, context := context_of(samplers), broken)
        assert cut.tokens == whole.tokens[: cut.size + 1] and cut.parents == [-1, 0, 0, 0]
        assert not context.failures


def test_a_processor_that_raises_costs_its_own_row_its_tree() -> None:
    """Nothing is said of the drafter: the target meets the same error."""

    def panic(tokens: Sequence[int], logits: Tensor) -> Tensor:
        raise BaseException("no Exception, as the panics of Rust libraries")

    samplers = [Sampler(replace(NEUTRAL, logits_processors=(process,)), [1]) for process in (lambda _, x: x, panic)]
    context = context_of(samplers)
    first, second = grown(Draw.IID, context, lambda level: random_logits(2, level, VOCABULARY, 1))
    assert first.size == 15 and second.size == 0 and not context.failures


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
    torch.testing.assert_close(found.probs, restricted)
    torch.testing.assert_close(seen[0], restricted)


@pytest.mark.parametrize("draw", [Draw.DETERMINISTIC, Draw.WITHOUT_REPLACEMENT, Draw.GREEDY_K])
def test_no_more_children_than_the_distribution_has_tokens(draw: Draw) -> None:
    narrow = torch.tensor([0.0, 0.7, 0.0, 0.3])
    found = siblings(narrow, 4, draw, scripted(3, 1)[0])
    assert sorted(found.tokens) == [1, 3]


def test_the_confidence_of_a_drawn_child_does_not_depend_on_it() -> None:
    for draw in (Draw.IID, Draw.WITHOUT_REPLACEMENT, Draw.GREEDY_K):
        first, second = (siblings(LAW, 1, draw, scripted(token)[0]).confidence for token in (0, 1))
        assert first == second


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
        with pytest.raises(ArgumentError, match="depth by depth"):
            Shape.of(wrong)


FIVE = 5
BATCH = 3


class Markov:
    """A model whose distribution depends on row and last token alone; remembers what it was asked."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.first = torch.randn(BATCH, 1, FIVE, generator=generator)
        self.table = 2 * torch.randn(BATCH, FIVE, FIVE, generator=generator)
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
    found = paths_of(DynamicTree(depth=3, top_k=FIVE**2, nodes=12), model, 3, 12)
    every = [path for size in (1, 2, 3) for path in itertools.product(range(FIVE), repeat=size)]
    for row, paths in enumerate(found):
        best = sorted(every, key=lambda path, row=row: -model.probability(row, path))[:12]
        assert paths == set(best)


@pytest.mark.parametrize(("depth", "nodes"), [(1, 3), (2, 4), (4, 1), (4, 9)])
def test_a_budget_keeps_the_likeliest_and_their_ancestors(depth: int, nodes: int) -> None:
    model = Markov(1)
    for row, paths in enumerate(paths_of(DynamicTree(depth=4, top_k=3, nodes=10), model, depth, nodes)):
        assert len(paths) == min(nodes, 3) if depth == 1 else len(paths) == nodes
        assert all(len(path) <= depth for path in paths)
        assert all(path[:-1] in paths for path in paths if len(path) > 1)
        assert max(paths, key=lambda path, row=row: model.probability(row, path)) in paths


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
