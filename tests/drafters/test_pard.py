"""PARD drafts in one pass, drops what its masks leave behind, and keeps to its context. Lossless: tests/contract."""

from typing import Any

import pytest
import torch

from drafters.asking import DRAWN, GREEDY, contexts, counted
from drafters.asking import trees_of as propose
from drafters.test_draft_model import PROMPT, WORDS, model
from forerun.decode.drafter import DrafterSetup
from forerun.drafters.draft_models.pard import PardConfig, PardDrafter
from forerun.model import TransformersTarget
from forerun.types import Drawn, SamplingParams

MASK = WORDS - 1


def drafter(rows: int = 1, slots: int = 96, **options: Any) -> PardDrafter:
    draft = model(seed=3)
    draft.config.pard_token = MASK
    setup = DrafterSetup(
        target=TransformersTarget.load(model(), rows=rows, slots=slots), tokenizer=None, rows=rows, slots=slots
    )
    return PardDrafter(PardConfig(model=draft, **options), setup)


@torch.no_grad()
def levels(text: list[int], depths: int) -> torch.Tensor:
    """(depths, V) log-probabilities, by transformers' own forward."""
    draft = model(seed=3)
    return draft(torch.tensor([[*text, *[MASK] * (depths - 1)]])).logits[0, len(text) - 1 :].log_softmax(-1)


@pytest.mark.parametrize("text", [PROMPT, list(range(WORDS)) * 3])
def test_a_chain_is_the_likeliest_token_of_each_level(text: list[int]) -> None:
    (tree,) = propose(drafter(shape=(1,) * 5), [text])
    assert tree.tokens == [text[-1], *levels(text, 5).argmax(-1).tolist()] and not tree.sampled


def test_the_default_is_the_tree_of_the_likeliest_paths() -> None:
    """No path that was left out is likelier than one that was taken."""
    (tree,) = propose(drafter(num_speculative_tokens=4, nodes=9), [PROMPT])
    logs = levels(PROMPT, 4)
    scores = dict[tuple[int, ...], float]({(): 0.0})
    for depth in range(4):
        paths = [path for path in scores if len(path) == depth]
        scores |= {(*path, token): scores[path] + float(logs[depth, token]) for path in paths for token in range(WORDS)}
    taken = {tuple(tree.tokens[node] for node in tree.path(node)) for node in range(1, tree.size + 1)}
    best = sorted((path for path in scores if path), key=lambda path: -scores[path])[:9]
    assert tree.size == 9 and taken == set(best)
    assert all(kind is Drawn.DETERMINISTIC for kind in tree.drawn[1:])


def test_a_sampled_tree_records_the_marginals_that_it_was_drawn_from() -> None:
    made = drafter(num_speculative_tokens=3, nodes=14)
    (tree,) = propose(made, [PROMPT], DRAWN)
    logs, depths = levels(PROMPT, 3), tree.depths
    assert tree.size == 14 and set(tree.draft_probs) == {node for node in range(7)}
    for node, probs in tree.draft_probs.items():
        torch.testing.assert_close(probs.float(), logs[depths[node]].exp(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_step_is_one_pass_over_what_is_new_and_the_masks(params: SamplingParams) -> None:
    made, text = drafter(rows=2, num_speculative_tokens=4), list(PROMPT)
    first = propose(made, [text, [5, 6]], params)
    grown = [[*text, first[0].tokens[1], 7], [5, 6, 8, 9, 1]]
    made.extend(contexts(grown, [2, 3], params))
    with counted(made) as passes:
        propose(made, grown, params)
    assert passes == [2 * (3 + 3)], "two and three new tokens, padded to three, and three masks each"
    fresh = propose(drafter(rows=2, num_speculative_tokens=4), grown, params)
    again = propose(made, grown, params)
    assert [tree.tokens for tree in fresh] == [tree.tokens for tree in again]


@pytest.mark.parametrize(
    "options", [{"nodes": 300, "num_speculative_tokens": 4}, {"shape": (1,) * 4}], ids=["best-first", "chain"]
)
def test_rows_near_the_end_of_the_context_draft_less(options: dict[str, Any]) -> None:
    texts = [[1] * (96 - left) for left in (0, 1, 3, 40)]
    trees = propose(drafter(rows=4, **options), texts, nodes=300)
    assert [max(tree.depths) for tree in trees] == [0, 1, 3, 4]
