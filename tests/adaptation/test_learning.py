"""The loss and the expected acceptance written out by hand; candidates kept, discarded, rolled back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from adaptation.conftest import distribution_of, piece, pieces
from forerun import demo
from forerun.engine.adapting import AdaptConfig
from forerun.engine.adapting.learning import Learner, Trial, plain_twin
from forerun.errors import UnsupportedModelError
from forerun.model import Target

TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
CONFIG = AdaptConfig(learning_rate=3e-3, round_pieces=16, batch_pieces=2)


def never() -> bool:
    return False


def test_the_loss_is_the_divergence_over_the_kept_tokens_and_the_rest(
    target: LlamaForCausalLM, draft: LlamaForCausalLM
) -> None:
    one = piece(target, TEXT, [2, 5, 8], temperature=0.7, top_k=3)
    learner = Learner(draft, AdaptConfig(kept_weight=0.25))
    own = distribution_of(draft, TEXT, 0.7)
    expected, weight = 0.0, 0.0
    for row, place in enumerate([2, 5, 8]):
        wanted = one.probs[row].astype(float)
        wanted = np.append(wanted, 1 - wanted.sum())
        drafted = own[place][one.ids[row]].numpy().astype(float)
        drafted = np.append(drafted, 1 - drafted.sum())
        share = 1.0 if row % 2 == 0 else 0.25
        expected += share * float((wanted * np.log(wanted / drafted)).sum())
        weight += share
    assert learner.loss(one).item() == pytest.approx(expected / weight, abs=1e-5)
    learner.loss(one).backward()
    assert all(parameter.grad is not None for parameter in learner.twin.parameters())


def test_expected_acceptance_is_the_overlap_of_the_distributions(
    target: LlamaForCausalLM, draft: LlamaForCausalLM
) -> None:
    learner = Learner(draft, CONFIG)
    whole = piece(target, TEXT, [2, 5, 8], temperature=0.7, top_k=12)
    both = torch.minimum(distribution_of(target, TEXT, 0.7), distribution_of(draft, TEXT, 0.7))[[2, 5, 8]].sum(1).mean()
    assert learner.acceptance([whole], never) == pytest.approx(float(both), abs=2e-3)
    greedy = piece(target, TEXT, [2, 5, 8], temperature=0.0)
    agreed = (
        (distribution_of(target, TEXT).argmax(1) == distribution_of(draft, TEXT).argmax(1))[[2, 5, 8]].float().mean()
    )
    assert learner.acceptance([greedy], never) == pytest.approx(float(agreed))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_training_makes_held_back_acceptance_grow(
    temperature: float, target: LlamaForCausalLM, draft: LlamaForCausalLM
) -> None:
    learner = Learner(draft, CONFIG)
    train, held = pieces(target, 64, temperature=temperature), pieces(target, 16, temperature=temperature, seed=1)
    trials = []
    for _ in range(6):
        trial = learner.attempt(train, 64, held, never)
        assert trial is not None
        trials.append(trial)
        learner.keep() if trial.better else learner.discard()
    assert trials[-1].candidate > trials[0].served + 0.02
    assert learner.updates == 6 * 8


def test_discarded_and_rolled_back_weights_are_the_served_ones_to_the_bit(
    target: LlamaForCausalLM, draft: LlamaForCausalLM
) -> None:
    learner = Learner(draft, CONFIG)
    train, states = pieces(target, 16), [learner.state()]
    assert learner.attempt(train, 16, train[:2], never) is not None
    assert not same(learner.state(), states[0])
    learner.discard()
    assert same(learner.state(), states[0])
    learner.attempt(train, 16, train[:2], never)
    learner.keep()
    states.append(learner.state())
    assert not same(states[1], states[0])
    learner.attempt(train, 16, train[:2], never)
    learner.discard()
    assert same(learner.state(), states[1])
    learner.roll_back()
    assert same(learner.state(), states[0])


def test_a_candidate_that_is_not_a_number_is_not_better() -> None:
    assert not Trial(served=0.5, candidate=float("nan")).better
    assert not Trial(served=0.5, candidate=0.49).better and Trial(served=0.5, candidate=0.5).better


def test_it_gives_up_between_two_pieces(target: LlamaForCausalLM, draft: LlamaForCausalLM) -> None:
    learner, asked = Learner(draft, CONFIG), list[int]()

    def third() -> bool:
        asked.append(1)
        return len(asked) == 3

    assert learner.attempt(pieces(target, 8), 8, pieces(target, 2), third) is None
    assert len(asked) == 3 and learner.updates == 0


def test_new_pieces_are_trained_on_first(target: LlamaForCausalLM, draft: LlamaForCausalLM) -> None:
    learner, made = Learner(draft, AdaptConfig(round_pieces=6)), pieces(target, 20)
    assert len(learner._chosen(made[:10], 10)) == 6
    second = learner._chosen(made[:14], 14)
    assert {id(one) for one in made[10:14]} <= {id(one) for one in second} and len(second) == 6


def test_the_twin_of_a_packed_model_has_its_weights() -> None:
    served = Target.load(str(demo.resolve("demo-draft")), rows=1, slots=64)
    twin = plain_twin(served.model)
    with torch.no_grad():
        logits = twin(torch.tensor([TEXT])).logits
    expected = served.prefill([0], [TEXT], all_logits=True).logits
    assert torch.allclose(logits, expected.float(), atol=0.15)
    assert twin.lm_head.weight is twin.model.embed_tokens.weight
    assert all(parameter.dtype == torch.float32 for parameter in twin.parameters())


def test_quantised_weights_are_refused(draft: LlamaForCausalLM, tmp_path: Path) -> None:
    draft.is_quantized = True
    with pytest.raises(UnsupportedModelError, match="no plain weights"):
        Learner(draft, CONFIG)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())
