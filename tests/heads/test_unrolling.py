"""The head in training is the head in drafting: positions, masks, norms and shifts, step by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forerun.drafters.kinds import kind_named, objective_for
from forerun.heads.base import SequentialHead
from forerun.heads.eagle import Eagle3Objective, Eagle3Settings
from forerun.heads.layers import LatentConfig
from forerun.heads.mtp import ExpertsConfig
from forerun.heads.runner import SequentialRunner
from forerun.losses.objective import FrozenTarget
from forerun.model import Target
from forerun.types import LAST_HIDDEN
from training.ttt import FIRST, batch_of, features, head, model, mtp, tokens

LATENT: dict[str, Any] = {
    "num_key_value_heads": 2,
    "latent": LatentConfig(kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=12, q_lora_rank=20),
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
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
    "latent": LATENT,
    "latent-two-layers": {**LATENT, "num_hidden_layers": 2, "rope_scaling": YARN, "norm_output": True},
    "eagle-1": FIRST,
    "eagle-1-with-its-own": {**FIRST, "own_lm_head": True, "fc_bias": True},
}
STEPS = 4


def drafted(made: SequentialHead, text: list[int], index: int) -> list[torch.Tensor]:
    """Logits (V') of each step when drafting behind token `index` + 1, told the true tokens as it goes."""
    runner = SequentialRunner(made, Target(model(), rows=1, slots=64), rows=1, slots=64)
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
    runner = SequentialRunner(made, Target(model(), rows=1, slots=8), rows=1, slots=8)
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


def test_branches_of_a_tree_equal_separate_chains() -> None:
    made, text = head(), tokens(10)
    seen = features(text[:-1], made.config.boundaries)

    def last_level(*levels: tuple[list[int], list[int]]) -> torch.Tensor:
        """Logits of the last of these levels: its tokens, and the places of their parents."""
        runner = SequentialRunner(made, Target(model(), rows=1, slots=64), rows=1, slots=64)
        runner.ingest([0], [text[1:]], seen)

        def grow(_: torch.Tensor) -> torch.Tensor:
            return [runner.descend(torch.tensor([ids]), torch.tensor([above])) for ids, above in levels][-1]

        return runner.unroll([0], sum(len(ids) for ids, _ in levels), grow)

    logits = last_level(([3, 7, 9], [0, 0, 0]), ([1, 2, 5, 6], [2, 0, 0, 1]))
    for place, (above, token) in enumerate([(9, 1), (3, 2), (3, 5), (7, 6)]):
        alone = last_level(([above], [0]), ([token], [0]))
        torch.testing.assert_close(logits[0, place], alone[0, 0], atol=2e-5, rtol=1e-4)


def test_a_prompt_in_pieces_equals_the_prompt_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, text = head(), tokens(23)
    seen = features(text[:-1], made.config.boundaries)
    found = []
    for piece in (512, 5):
        monkeypatch.setattr("forerun.heads.runner.PREFILL_CHUNK", piece)
        runner = SequentialRunner(made, Target(model(), rows=1, slots=64), rows=1, slots=64)
        runner.ingest([0], [text[1:]], seen)
        found.append(runner.unroll([0], 0, lambda logits: logits))
    torch.testing.assert_close(found[0], found[1], atol=2e-5, rtol=1e-4)
