"""Heads with a sliding window: drafting equals a reference that looks at one entry after the other and has no mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun import LLM, SamplingParams
from forerun.errors import ArgumentError
from forerun.heads.eagle import Advanced, EagleConfig, EagleHead
from forerun.heads.runner import SequentialRunner
from forerun.model import Target
from forerun.types import LAST_HIDDEN
from training.ttt import features, head, model, tokens

LENGTH = 17
"""Tokens of the text: beyond every window here."""
CASES: dict[str, dict[str, Any]] = {
    "none": {},
    "one": {"sliding_window": 1},
    "shorter than the chain": {"sliding_window": 3},
    "longer than the chain": {"sliding_window": 8},
    "longer than the text": {"sliding_window": 64},
    "first layer": {"num_hidden_layers": 2, "sliding_window": 3, "full_layers": (1,)},
    "EAGLE-1": {
        "generation": 1,
        "boundaries": (LAST_HIDDEN,),
        "own_lm_head": False,
        "draft_vocab_size": 40,
        "sliding_window": 3,
    },
    "second layer": {"num_hidden_layers": 2, "sliding_window": 3, "full_layers": (0,)},
}
LEVELS: tuple[tuple[list[int], list[int]], ...] = (
    ([3, 7, 9], [0, 0, 0]),
    ([1, 2, 5, 6], [2, 0, 0, 1]),
    ([4, 4], [3, 0]),
    ([8], [1]),
)
"""A tree: the tokens of each level, and the places of their parents in the level above."""


@dataclass
class Naive:
    """One path, entry by entry; keys and values of each layer in a list, the place in it is the position."""

    head: EagleHead
    past: list[tuple[list[Tensor], list[Tensor]]] = field(default_factory=list)

    def run(self, token: int, feature: Tensor) -> Advanced:
        """The next entry: the embedding of `token` beside `feature` (H)."""
        self.past = self.past or [([], []) for _ in self.head.layers]
        position = torch.tensor([[len(self.past[0][0])]])
        embeds = model().get_input_embeddings()(torch.tensor([[token]]))
        return self.head.advance(embeds, feature.view(1, 1, -1), self.head.angles(position, embeds), self.attend)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self.past[layer]
        keys.append(key[0, :, 0]), values.append(value[0, :, 0])
        window = self.head.config.window(layer) or len(keys)
        seen = [(k, v) for place, (k, v) in enumerate(zip(keys, values, strict=True)) if len(keys) - 1 - place < window]
        groups, found = len(key[0]), []
        for number, vector in enumerate(query[0, :, 0]):
            group = number * groups // query.shape[1]
            scores = torch.stack([vector @ k[group] for k, _ in seen]) * len(vector) ** -0.5
            found.append(sum(weight * v[group] for weight, (_, v) in zip(scores.softmax(0), seen, strict=True)))
        return torch.stack(found).view(1, 1, len(found), -1)


@torch.no_grad()
def naive(made: EagleHead, text: list[int], path: Sequence[int]) -> Tensor:
    """(V') logits after the text and then the drafted tokens of `path`."""
    reference = Naive(made)
    seen = features(text[:-1], made.config.boundaries)
    fused = made.fuse([seen[boundary] for boundary in made.config.boundaries])[0]
    for token, feature in zip(text[1:], fused, strict=True):
        last = reference.run(token, feature)
    for token in path:
        last = reference.run(token, last.feature[0, 0])
    return (made.lm_head if made.config.own_lm_head else model().lm_head)(last.output[0, 0])


@torch.no_grad()
def drafted(made: EagleHead, texts: Sequence[list[int]]) -> list[Tensor]:
    """(B, F, V') logits of the root and of each level of the tree."""
    runner = SequentialRunner(made, Target(model(), rows=1, slots=64), rows=len(texts), slots=64)
    for row, text in enumerate(texts):
        runner.ingest([row], [text[1:]], features(text[:-1], made.config.boundaries))

    def grow(root: Tensor) -> list[Tensor]:
        spread = [(torch.tensor([ids] * len(texts)), torch.tensor([above] * len(texts))) for ids, above in LEVELS]
        return [root, *(runner.descend(ids, above) for ids, above in spread)]

    return runner.unroll(list(range(len(texts))), sum(len(ids) for ids, _ in LEVELS), grow)


def paths() -> list[list[list[int]]]:
    """The drafted tokens above and at each node, level by level."""
    found: list[list[list[int]]] = [[[]]]
    for ids, above in LEVELS:
        found.append([[*found[-1][parent], token] for token, parent in zip(ids, above, strict=True)])
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_tree_behind_texts_of_unequal_length_equals_a_naive_reference(case: str) -> None:
    made, texts = head(**CASES[case]), [tokens(LENGTH), tokens(6, seed=8)]
    for level, expected in zip(drafted(made, texts), paths(), strict=True):
        for row, text in enumerate(texts):
            for node, path in enumerate(expected):
                torch.testing.assert_close(level[row, node], naive(made, text, path), atol=2e-5, rtol=1e-4)


def test_windows_differ_where_they_differ_and_nowhere_else() -> None:
    """A window beyond the text changes nothing; a shorter one changes every node from the root on."""
    full, longer, shorter, shortest = (drafted(head(sliding_window=w), [tokens(LENGTH)]) for w in (None, 64, 8, 3))
    for level in range(len(full)):
        torch.testing.assert_close(full[level], longer[level])
        for one, other in ((full, shorter), (shorter, shortest)):
            assert float((one[level] - other[level]).abs().amax(-1).min()) > 1e-3


def test_a_prompt_in_pieces_equals_the_prompt_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = head(sliding_window=4)
    whole = drafted(made, [tokens(LENGTH)])
    monkeypatch.setattr("forerun.heads.runner.PREFILL_CHUNK", 5)
    for one, other in zip(whole, drafted(made, [tokens(LENGTH)]), strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("options", [{"num_speculative_tokens": 4}, {"shape": (2, 2, 1)}, {"top_k": 3, "nodes": 9}])
def test_the_engine_drafts_with_the_window_and_answers_the_same(options: dict[str, Any]) -> None:
    """Greedy text is the target's own; what is drafted at the root is the naive reference's choice, step after step."""
    made, prompt = head(sliding_window=3), tokens(LENGTH)
    config = {"method": "eagle3", "model": made, "adaptive": False, **options}
    llm = LLM(model(), tokenizer=False, speculative_config=config, self_check=False)
    ask = SamplingParams(temperature=0, max_tokens=10, detokenize=False)
    plain = llm.generate({"prompt_token_ids": prompt}, ask, speculative=False)[0].outputs[0].token_ids
    (active,) = llm.engine.drafting._active.values()
    seen: list[tuple[list[int], int]] = []
    propose = active.drafter.propose

    def watched(context: Any, budget: Any) -> Any:
        trees = propose(context, budget)
        if trees[0].size:
            seen.append((list(context.tokens[0]), trees[0].tokens[1]))
        return trees

    active.drafter.propose = watched
    assert llm.generate({"prompt_token_ids": prompt}, ask)[0].outputs[0].token_ids == plain
    assert len(seen) >= 3
    for text, first in seen:
        assert first == int(made.token_ids[naive(made, text, []).argmax()])


def test_a_recipe_can_ask_for_a_window() -> None:
    asked = {"num_hidden_layers": 2, "sliding_window": 8, "full_layers": [0]}
    made = EagleConfig.for_target("eagle3", model(), options=asked)
    assert [made.window(layer) for layer in range(2)] == [None, 8]
    assert EagleConfig.for_target("eagle3", model()).sliding_window is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sliding_window": 0}, "at least 1 position"),
        ({"full_layers": (0,)}, "a head with a sliding_window"),
        ({"sliding_window": 4, "full_layers": (0,)}, "some, not all"),
        ({"sliding_window": 4, "num_hidden_layers": 2, "full_layers": (2,)}, "counted from 0"),
        ({"sliding_window": 4, "num_hidden_layers": 3, "full_layers": (1, 0)}, "in order"),
    ],
)
def test_windows_that_make_no_sense_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        head(**options)
