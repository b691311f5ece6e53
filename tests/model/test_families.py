"""Every family: ragged rows, branching trees and uneven acceptance must reproduce plain forwards of each path."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from forerun.core.tree import TokenTree
from forerun.model import Buckets, TransformersTarget
from forerun.types import LAST_HIDDEN, Drawn
from model.families import FAMILIES, make, plain, random_tokens

TOLERANCE = 2e-5
SHAPES = [[0, 0, 1, 1, 2, 5, 0], [0, 1, 2, 2], [0, 0, 0, 3, 3, 5]]
"""Parents of the nodes of each row's tree."""
PATHS = [[(1, 3), (), (3, 5)], [(2, 5, 6), (1, 2, 4), (2,)], [(7,), (1,), (3, 5, 6)]]
"""What is accepted, by round and row."""


def trees(round_: int, roots: Sequence[int] = (4, 5, 6)) -> list[TokenTree]:
    """A tree per root, by the parents in `SHAPES`; siblings may hold the same token."""
    made = []
    for row, (root, parents) in enumerate(zip(roots, SHAPES, strict=False)):
        tree = TokenTree(root)
        for token, parent in zip(random_tokens(len(parents), 100 + 10 * round_ + row), parents, strict=True):
            tree.add(token, parent, drawn=Drawn.IID)
        tree.draft_probs = {node: torch.full((99,), 1 / 99) for node in {*parents}}
        made.append(tree)
    return made


def node_error(model: Any, committed: list[int], tree: TokenTree, logits: torch.Tensor) -> float:
    """Largest error of one row's node logits (N, V) against plain forwards of the paths to the leaves."""
    worst = 0.0
    for leaf in range(tree.size + 1):
        if leaf in tree.parents[1:]:
            continue
        path = tree.path(leaf)
        expected = plain(model, committed + [tree.tokens[node] for node in path])[len(committed) - 1 :]
        worst = max(worst, (logits[[0, *path]] - expected).abs().max().item())
    return worst


@pytest.mark.parametrize("name", FAMILIES)
def test_every_node_equals_a_plain_forward_of_its_path(name: str) -> None:
    model = make(name)
    target = TransformersTarget.load(model, rows=4, slots=64, self_check=False)
    rows = [0, 1, 3]
    sequences = [random_tokens(count, row) for row, count in enumerate((6, 20, 34))]
    prefilled = target.prefill(rows, [tokens[:-1] for tokens in sequences], all_logits=True)
    for index, tokens in enumerate(sequences):
        expected = plain(model, tokens[:-1])
        assert (prefilled.logits[index, : len(expected)] - expected).abs().max() <= TOLERANCE
    for round_, paths in enumerate(PATHS):
        drafted = trees(round_, [tokens[-1] for tokens in sequences])
        logits = target.score(rows, drafted).logits
        for index, tree in enumerate(drafted):
            assert node_error(model, sequences[index], tree, logits[index]) <= TOLERANCE, (round_, index)
            sequences[index] += [tree.tokens[node] for node in paths[index]] + [7 + round_]
        target.commit(rows, paths)
        assert [target.lengths[row] for row in rows] == [len(tokens) - 1 for tokens in sequences]
    compare_cache(target, rows, sequences)


def compare_cache(target: TransformersTarget, rows: list[int], sequences: list[list[int]]) -> None:
    """What the rounds left in the slots is what a prefill of the same tokens writes."""
    fresh = TransformersTarget.load(target.model, rows=len(rows), slots=64, self_check=False)
    fresh.prefill(range(len(rows)), [tokens[:-1] for tokens in sequences])
    assert fresh.cache._stores.keys() == target.cache._stores.keys()
    for layer in fresh.cache._stores:
        for index, row in enumerate(rows):
            grown = target.cache.read(layer, row, target.lengths[row])
            for ours, theirs in zip(grown, fresh.cache.read(layer, index, fresh.lengths[index]), strict=True):
                assert (ours - theirs).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "deepseek_v3"])
def test_a_chain_mask_is_caught(name: str) -> None:
    """The negative control: the same tokens as a chain give other logits, so the comparison above can fail."""
    model = make(name)
    target = TransformersTarget.load(model, rows=1, slots=64, self_check=False)
    tokens = random_tokens(20, 1)
    target.prefill([0], [tokens[:-1]])
    tree = trees(0, [tokens[-1]])[0]
    chain = TokenTree(tokens[-1])
    chain.add_path(tree.tokens[1:])
    logits = target.score([0], [chain]).logits
    assert node_error(model, tokens, tree, logits[0]) > 0.1


@pytest.mark.parametrize("name", FAMILIES)
def test_boundaries_are_the_models_hidden_states(name: str) -> None:
    model = make(name)
    target = TransformersTarget.load(model, rows=2, slots=64, self_check=False)
    wanted = frozenset({0, 1, 3, LAST_HIDDEN})
    tokens = [random_tokens(13, 1), random_tokens(5, 2)]
    caught = target.prefill([0, 1], tokens, boundaries=wanted).hidden_states
    with torch.inference_mode():
        for row, ids in enumerate(tokens):
            states = model(torch.tensor([ids]), use_cache=False, output_hidden_states=True).hidden_states
            for boundary in wanted:
                assert (caught[boundary][row, : len(ids)] - states[boundary][0]).abs().max() <= 5 * TOLERANCE
    scored = target.score([0, 1], trees(0, [5, 6]), boundaries=wanted)
    assert {boundary: value.shape for boundary, value in scored.hidden_states.items()} == dict.fromkeys(
        wanted, (2, 8, 64)
    )
    assert torch.equal(target.lm_head(scored.hidden_states[LAST_HIDDEN]), scored.logits)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "deepseek_v3"])
def test_padding_to_buckets_changes_nothing(name: str) -> None:
    model = make(name)
    exact = TransformersTarget.load(model, rows=3, slots=256, self_check=False)
    padded = TransformersTarget.load(model, rows=3, slots=256, self_check=False)
    padded.buckets = Buckets(nodes=(4, 16), width=128)
    tokens = [random_tokens(count, count) for count in (3, 9, 17)]
    results = []
    for target in (exact, padded):
        target.prefill([0, 1, 2], tokens)
        results.append(target.score([0, 1, 2], trees(0)).logits)
    counts = [len(parents) + 1 for parents in SHAPES]
    for row, count in enumerate(counts):
        assert (results[0][row, :count] - results[1][row, :count]).abs().max() <= TOLERANCE
