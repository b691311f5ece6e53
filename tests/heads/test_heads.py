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
from training.ttt import batch_of, head, model, tokens

GREEDY = SamplingParams(temperature=0, max_tokens=12, detokenize=False)


def engine(made: Any, **options: Any) -> LLM:
    config = {"method": "eagle3", "model": made, "adaptive": False, **options}
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


def test_a_head_of_another_generation_is_refused_by_the_method_to_use() -> None:
    with pytest.raises(ArgumentError, match="'eagle3'"):
        LLM(model(), tokenizer=False, speculative_config={"method": "eagle", "model": head()}, self_check=False)


def test_without_a_head_the_error_says_where_to_get_one() -> None:
    with pytest.raises(ArgumentError, match="forerun train eagle3"):
        engine(None)


@pytest.mark.parametrize("length", [1, 2, 9])
def test_what_the_head_is_fed_is_the_targets_own_feature_of_every_token(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
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
