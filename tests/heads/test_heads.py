"""Drafters that run a draft head: what they refuse, what they need, and that the head sees what it was trained on."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.errors import ArgumentError, VocabularyMismatchError
from forerun.heads.drafting import HeadDrafter
from forerun.heads.eagle import Eagle3Objective, Eagle3Settings, EagleHead, default_boundaries
from forerun.losses.objective import FrozenTarget
from training.ttt import batch_of, dflash, head, hydra, medusa, mlp_speculator, model, tokens

GREEDY = SamplingParams(temperature=0, max_tokens=12, detokenize=False)


def engine(made: Any, method: str = "", **options: Any) -> LLM:
    config = {"method": method or made.config.kind, "model": made, "adaptive": False, **options}
    return LLM(model(), tokenizer=False, speculative_config=config, self_check=False, max_num_seqs=2)


def drafter_of(llm: LLM) -> HeadDrafter:
    (active,) = llm.engine.drafting._active.values()
    assert isinstance(active.drafter.drafter, HeadDrafter)
    return active.drafter.drafter


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"target_hidden_size": 48}, ArgumentError, "48"),
        ({"vocab_size": 41, "draft_vocab_size": 30}, VocabularyMismatchError, "41"),
        ({"boundaries": (1, 2, 9)}, ArgumentError, "boundary 9"),
    ],
)
def test_a_head_for_another_target_is_refused(options: dict[str, Any], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        engine(EagleHead(dataclasses.replace(head().config, **options)))


@pytest.mark.parametrize(
    ("made", "method", "words"),
    [
        (head(), "eagle", "'eagle3'"),
        (medusa(), "eagle3", "'medusa'; use that method"),
        (None, "eagle3", "forerun train eagle3"),
    ],
    ids=["another generation", "another method", "no head"],
)
def test_the_method_to_use_and_where_to_get_a_head_are_said(made: Any, method: str, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        engine(made, method)


@pytest.mark.parametrize(
    ("made", "depth"),
    [(medusa(), 3), (hydra(), 3), (mlp_speculator(), 3), (dflash(), 4), (dflash(sample_from_anchor=True), 5)],
    ids=["medusa", "hydra", "mlp_speculator", "dflash", "dflash from its anchor"],
)
def test_it_drafts_no_deeper_than_it_can(made: Any, depth: int) -> None:
    assert drafter_of(engine(made, num_speculative_tokens=9)).tree.depth == depth
    output = engine(made, shape=(1,) * depth).generate({"prompt_token_ids": [3, 4]}, GREEDY)[0].outputs[0]
    assert len(output.speculation.drafted_per_depth) == made.config.max_depth == depth
    with pytest.raises(ArgumentError, match=f"drafts {depth} tokens on one path, the shape asks for {depth + 1}"):
        engine(made, shape=(1,) * (depth + 1))


@pytest.mark.parametrize("length", [1, 2, 9])
def test_the_head_is_fed_the_targets_own_feature_of_every_token(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After some speculative steps the head's state at the root is that of a pass over the whole text."""
    made = head()
    llm = engine(made, num_speculative_tokens=3)
    prompt = tokens(length)
    answer = llm.generate({"prompt_token_ids": prompt}, GREEDY)[0].outputs[0].token_ids
    runner = drafter_of(llm).runner
    seen: list[torch.Tensor] = []
    unroll = runner.unroll

    def watched(rows: Sequence[int], run: int, grow: Any, **options: Any) -> Any:
        return unroll(rows, run, lambda logits: seen.append(logits[0, 0]) or grow(logits), **options)

    monkeypatch.setattr(runner, "unroll", watched)
    llm.generate({"prompt_token_ids": prompt}, GREEDY)
    text = [*prompt, *answer]
    objective = Eagle3Objective(made, FrozenTarget.of(model()), Eagle3Settings(steps=1))
    (step,) = objective.unroll(batch_of([text], made.config.boundaries))
    whole = runner.logits(step.output)[0].detach()
    assert len(seen) > 2
    for logits in seen:
        assert float((whole - logits).abs().amax(1).min()) < 1e-4, "the logits of no place of the whole text"


def test_default_boundaries_are_distinct_and_the_published_ones_for_real_targets() -> None:
    assert default_boundaries(32) == (2, 16, 29)
    assert default_boundaries(8) == (2, 4, 5)
    assert default_boundaries(3) == (1, 2, 3)
    with pytest.raises(ArgumentError, match="three"):
        default_boundaries(2)
