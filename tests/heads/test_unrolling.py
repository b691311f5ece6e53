"""The head in training is the head in drafting, step by step, and both are a reference that has no mask."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.drafters.kinds import kind_named, objective_for
from forerun.heads.base import SequentialHead
from forerun.heads.eagle import Advanced, Eagle3Objective, Eagle3Settings, EagleConfig, EagleHead
from forerun.heads.layers import LatentConfig
from forerun.heads.mtp import ExpertsConfig
from forerun.heads.runner import SequentialRunner
from forerun.losses.objective import FrozenTarget
from forerun.model import TransformersTarget
from forerun.types import LAST_HIDDEN
from training.ttt import FIRST, HYBRID, batch_of, features, head, model, mtp, tokens

LATENT: dict[str, Any] = {
    "num_key_value_heads": 2,
    "latent": LatentConfig(kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=12, q_lora_rank=20),
}
YARN = {
    **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0},
    "mscale_all_dim": 1.0,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "eagle-3.1": {"fc_norm": True, "norm_output": True},
    "norm-before-fc": {"norm_before_fc": True},
    "norm-before-residual": {"norm_before_residual": True},
    "qk-norm": {"qk_norm": True},
    "two-layers": {"num_hidden_layers": 2},
    "embedding-everywhere": {"num_hidden_layers": 2, "next_layer_regular": False, "norm_before_residual": True},
    "one-boundary": {"boundaries": (4,)},
    "unfused": {"use_aux_hidden_state": False, "boundaries": (LAST_HIDDEN,)},
    "scaled-rope": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "own-embedding": {"own_embedding": True},
    "shared-lm-head": {"own_lm_head": False, "draft_vocab_size": 40},
    "window": {"sliding_window": 6},
    "window-shorter-than-the-chain": {"sliding_window": 2},
    "window-of-one": {"sliding_window": 1},
    "mixed-layers": {"num_hidden_layers": 2, "sliding_window": 3, "full_layers": (1,)},
    "mtp": {},
    "mtp-before-the-norm": {"boundaries": (4,), "attention_bias": True, "partial_rotary_factor": 0.5},
    "mtp-latent-experts": {
        **LATENT,
        "experts": ExpertsConfig(n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, n_group=3),
    },
    "mtp-of-a-hybrid": {"target_keys": HYBRID, "partial_rotary_factor": 0.5},
    "latent": LATENT,
    "latent-two-layers": {**LATENT, "num_hidden_layers": 2, "rope_scaling": YARN, "norm_output": True},
    "eagle-1": FIRST,
    "eagle-1-with-its-own": {**FIRST, "own_lm_head": True, "fc_bias": True},
}
STEPS = 4


def drafted(made: SequentialHead, text: list[int], index: int) -> list[torch.Tensor]:
    """Logits (V') of each step when drafting behind token `index` + 1, told the true tokens as it goes."""
    runner = SequentialRunner(made, TransformersTarget(model(), rows=1, slots=64), rows=1, slots=64)
    seen = {boundary: states[:, : index + 1] for boundary, states in features(text, made.config.boundaries).items()}
    runner.ingest([0], [text[1 : index + 2]], seen)

    def chain(first: torch.Tensor) -> list[torch.Tensor]:
        logits = [first[0, 0]]
        for step in range(1, STEPS):
            following = torch.tensor([[text[index + 1 + step]]])
            logits.append(runner.descend(following, torch.zeros(1, 1, dtype=torch.int64))[0, 0])
        return logits

    return runner.unroll([0], STEPS - 1, chain)


@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_step_equals_drafting_with_the_cache(variant: str, checkpointed: bool) -> None:
    made, text = (mtp if variant.startswith("mtp") else head)(**VARIANTS[variant]), tokens(14)
    cls = objective_for(kind_named(made.config.kind))
    objective = cls(made, FrozenTarget.of(model()), cls.Settings(steps=STEPS, gradient_checkpointing=checkpointed))
    steps = list(objective.unroll(batch_of([text], made.config.boundaries)))
    runner = SequentialRunner(made, TransformersTarget(model(), rows=1, slots=8), rows=1, slots=8)
    for index in (0, 3, 7):
        for unrolled, expected in zip(steps, drafted(made, text, index), strict=True):
            found = runner.logits(unrolled.output)[0, index]
            torch.testing.assert_close(found, expected, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("window", [None, 4])
def test_a_packed_document_is_unrolled_as_if_it_were_alone(window: int | None) -> None:
    made = head(sliding_window=window)
    objective = Eagle3Objective(made, FrozenTarget.of(model()), Eagle3Settings(steps=3))
    first, second = tokens(9, seed=4), tokens(11, seed=5)
    together = list(objective.unroll(batch_of([first, second], made.config.boundaries, padding=4)))
    for document, start in ((first, 0), (second, 9)):
        alone = list(objective.unroll(batch_of([document], made.config.boundaries)))
        for packed, single in zip(together, alone, strict=True):
            # The last entries read tokens behind the document's end, which differ; they do not count.
            inner = len(document) - 2 - packed.step
            torch.testing.assert_close(
                packed.output[:, start : start + inner], single.output[:, :inner], atol=2e-5, rtol=1e-4
            )
            assert torch.equal(packed.counted[:, start : start + len(document)], single.counted)
    assert not together[0].counted[:, 20:].any()


LENGTH = 17
"""Tokens of the text: beyond every window here."""
CASES: dict[str, dict[str, Any]] = {
    "none": {},
    "one": {"sliding_window": 1},
    "shorter than the chain": {"sliding_window": 3},
    "longer than the chain": {"sliding_window": 8},
    "first layer": {"num_hidden_layers": 2, "sliding_window": 3, "full_layers": (1,)},
    "EAGLE-1": {
        **{"generation": 1, "boundaries": (LAST_HIDDEN,), "own_lm_head": False, "draft_vocab_size": 40},
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
def drafted_tree(made: EagleHead, texts: Sequence[list[int]]) -> list[Tensor]:
    """(B, F, V') logits of the root and of each level of the tree."""
    runner = SequentialRunner(made, TransformersTarget(model(), rows=1, slots=64), rows=len(texts), slots=64)
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
    for level, expected in zip(drafted_tree(made, texts), paths(), strict=True):
        for row, text in enumerate(texts):
            for node, path in enumerate(expected):
                torch.testing.assert_close(level[row, node], naive(made, text, path), atol=2e-5, rtol=1e-4)


def test_a_prompt_in_pieces_equals_the_prompt_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = head(sliding_window=4)
    whole = drafted_tree(made, [tokens(LENGTH)])
    monkeypatch.setattr("forerun.heads.runner.PREFILL_CHUNK", 5)
    for one, other in zip(whole, drafted_tree(made, [tokens(LENGTH)]), strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


def test_a_recipe_can_ask_for_a_window() -> None:
    asked = {"num_hidden_layers": 2, "sliding_window": 8, "full_layers": [0]}
    made = EagleConfig.for_target("eagle3", model(), options=asked)
    assert [made.window(layer) for layer in range(2)] == [None, 8]
    assert EagleConfig.for_target("eagle3", model()).sliding_window is None
